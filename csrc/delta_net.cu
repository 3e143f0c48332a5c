// Gated DeltaNet (delta.cuh) for decode rows, which have one token each, in two kernels. delta_conv computes the
// convolution of q, k and v and normalizes q and k to unit length. delta_step updates each value head's memory, reads
// it with q, and applies norm and gate. Activations are T, the memory and all sums float32. `tokens` [rows]: index of
// each row's token in the step; null: row i has token i. `lengths` [rows] are given in a CUDA graph: the first row
// whose length is not 1 and all rows after it are skipped.
#include "delta.cuh"

// mixed [T, channels] = silu(convolution), with q and k normalized to unit length and q divided by sqrt(KEY_DIM). The
// convolution's history, inputs [slots, TAPS - 1, channels], is shifted by one token; at position 0 it counts as zeros.
// One block for each head of q, k or v (blockIdx.x) and row (blockIdx.y), one thread for each channel.
extern "C" __global__ void delta_conv(const T* projected, T* inputs, const float* conv, const long long* slots,
                                      const long long* positions, OPTIONAL const long long* tokens,
                                      OPTIONAL const long long* lengths, float* mixed, int key_heads, int value_heads,
                                      int width) {
  start_successor();  // delta_step may load memories, which this kernel does not write
  __shared__ float scratch[32];
  int head = blockIdx.x, row = blockIdx.y, channels = num_channels(key_heads, value_heads);
  if (lengths != nullptr && lengths[row] != 1) {
    wait_for_predecessor();  // there may be no row of one token (common.cuh)
    return;
  }
  long long token = tokens == nullptr ? row : tokens[row];
  bool is_value = head >= 2 * key_heads;
  int first = is_value ? 2 * key_heads * KEY_DIM + (head - 2 * key_heads) * VALUE_DIM : head * KEY_DIM;
  bool here = threadIdx.x < (is_value ? VALUE_DIM : KEY_DIM);
  int channel = here ? first + threadIdx.x : first;
  T* history = inputs + slots[row] * (TAPS - 1) * channels + channel;
  bool fresh = positions[row] == 0;
  T before[TAPS];
  float weights[TAPS];
#pragma unroll
  for (int tap = 0; tap < TAPS - 1; ++tap) before[tap] = fresh ? from_float<T>(0.f) : history[tap * channels];
#pragma unroll
  for (int tap = 0; tap < TAPS; ++tap) weights[tap] = conv[tap * channels + channel];
  wait_for_predecessor();
  before[TAPS - 1] = projected[token * width + channel];
  float sum = 0.f;
#pragma unroll
  for (int tap = 0; tap < TAPS; ++tap) sum += weights[tap] * to_float(before[tap]);
  float value = here ? silu(sum) : 0.f;
  if (!is_value) {
    value *= rsqrtf(block_sum(value * value, scratch) + 1e-6f);
    if (head < key_heads) value *= rsqrtf((float)KEY_DIM);
  }
  if (!here) return;
#pragma unroll
  for (int tap = 0; tap < TAPS - 1; ++tap) history[tap * channels] = before[tap + 1];
  mixed[token * channels + channel] = value;
}

// Update a value head's memory S [KEY_DIM, VALUE_DIM] to decay S + k (beta (v - k' decay S))', and compute
// out [T, value_heads * VALUE_DIM] = norm(q' S) * weight * silu(z). The blocks of a value head (blockIdx.x) take the
// batch's rows in turn. A warp holds every WARPS-th row of S in registers, and each of its lanes four columns; sums
// over the rows of S are reduced through shared memory.
constexpr int WARPS = THREADS / 32, ROWS = KEY_DIM / WARPS;
static_assert(VALUE_DIM == 128 && ROWS * WARPS == KEY_DIM && THREADS >= VALUE_DIM, "a lane has four columns");

// Sum of part[..][column] over the warps. All of them must have stored their parts.
__device__ __forceinline__ float sum_of_warps(const float (*part)[VALUE_DIM], int column) {
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) sum += part[warp][column];
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) delta_step(
    const T* projected, const float* mixed, float* memory, const float* a_log, const float* dt_bias,
    const T* norm_weight, const long long* slots, const long long* positions, OPTIONAL const long long* tokens,
    OPTIONAL const long long* lengths, T* out, int rows, int key_heads, int value_heads, int width, float eps) {
  __shared__ alignas(16) float part[WARPS][VALUE_DIM], q[KEY_DIM], k[KEY_DIM], correction[VALUE_DIM];
  __shared__ float scratch[32];
  int head = blockIdx.x, thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  for (int row = blockIdx.y; row < rows && (lengths == nullptr || lengths[row] == 1); row += gridDim.y) {
    float* state = memory + (slots[row] * value_heads + head) * (KEY_DIM * VALUE_DIM) + warp * VALUE_DIM + lane * 4;
    long long token = tokens == nullptr ? row : tokens[row];
    bool fresh = positions[row] == 0;
    Vec<4, float> s[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (!fresh) s[i] = *(const Vec<4, float>*)(state + i * WARPS * VALUE_DIM);
      else s[i] = {};
    }
    float rate = expf(a_log[head]), bias = dt_bias[head];
    float weight = thread < VALUE_DIM ? to_float(norm_weight[thread]) : 0.f;
    start_successor();  // a product, which may load its weight
    wait_for_predecessor();

    int channels = num_channels(key_heads, value_heads), key_head = head / (value_heads / key_heads);
    const float* made = mixed + token * channels;
    for (int i = thread; i < KEY_DIM; i += THREADS) {
      q[i] = made[key_head * KEY_DIM + i];
      k[i] = made[(key_heads + key_head) * KEY_DIM + i];
    }
    const T* gates = projected + token * width + channels;
    float decay = expf(log_decay(gates[value_heads * (VALUE_DIM + 1) + head], bias, rate));
    float beta = sigmoid(gates[value_heads * VALUE_DIM + head]);
    __syncthreads();

    Vec<4, float> sum = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) sum.v[j] += k[warp + i * WARPS] * s[i].v[j];
    *(Vec<4, float>*)&part[warp][lane * 4] = sum;
    __syncthreads();
    if (thread < VALUE_DIM) {
      float v = made[2 * key_heads * KEY_DIM + head * VALUE_DIM + thread];
      correction[thread] = beta * (v - decay * sum_of_warps(part, thread));
    }
    __syncthreads();
    Vec<4, float> step = *(const Vec<4, float>*)&correction[lane * 4];
    sum = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s[i].v[j] = decay * s[i].v[j] + k[warp + i * WARPS] * step.v[j];
        sum.v[j] += q[warp + i * WARPS] * s[i].v[j];
      }
      *(Vec<4, float>*)(state + i * WARPS * VALUE_DIM) = s[i];
    }
    *(Vec<4, float>*)&part[warp][lane * 4] = sum;
    __syncthreads();
    float read = thread < VALUE_DIM ? sum_of_warps(part, thread) : 0.f;
    float scale = rsqrtf(block_sum(read * read, scratch) / VALUE_DIM + eps);
    if (thread < VALUE_DIM) {
      float z = to_float(gates[head * VALUE_DIM + thread]);
      out[(token * value_heads + head) * VALUE_DIM + thread] = from_float<T>(read * scale * weight * silu(z));
    }
    if (row + gridDim.y < rows) __syncthreads();  // before shared memory is written again
  }
  wait_for_predecessor();  // there may be no row of one token (common.cuh)
}

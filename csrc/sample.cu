// Sampling in two launches: logits are read once in chunks, then one chunk of each row again.
//
// The token is the inverse of the softmax's cumulative sum in vocabulary order at a uniform number that depends on
// nothing but (seed, position); at temperature 0 it is the first of the largest logits. See engine/sampler.py.
#include "common.cuh"

#define INF __int_as_float(0x7f800000)
constexpr int CHUNK = 4096;
constexpr int THREADS = 256;
constexpr int PER_THREAD = CHUNK / THREADS;

struct Partial {  // of one chunk of one row
  float max;      // of the logits
  float sum;      // of exp((logit - max) / temperature)
  int argmax;     // the first place of max
  int pad;
};

__device__ __forceinline__ unsigned long long mix(unsigned long long x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

__device__ __forceinline__ float uniform(long long seed, int position) {
  unsigned long long bits = mix(mix((unsigned long long)seed) + (position + 1ull) * 0x9E3779B97F4A7C15ull) >> 41;
  return ((float)bits + 0.5f) * 0x1p-23f;
}

// The larger value wins, then the smaller place.
__device__ __forceinline__ void take_larger(float& value, int& place, float other, int other_place) {
  if (other > value || (other == value && other_place < place)) value = other, place = other_place;
}

// A chunk's logits, PER_THREAD neighbours a thread; beyond the vocabulary they are -infinity.
__device__ __forceinline__ void load(const T* row, int start, int vocab, float* x) {
  if (start + PER_THREAD <= vocab && ((size_t)(row + start) % 16) == 0) {
#pragma unroll
    for (int i = 0; i < PER_THREAD; i += VEC) {
      Vec<VEC> v = *(const Vec<VEC>*)(row + start + i);
#pragma unroll
      for (int j = 0; j < VEC; ++j) x[i + j] = to_float(v.v[j]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) x[i] = start + i < vocab ? to_float(row[start + i]) : -INF;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) sample_partials(
    const T* logits, long long row_stride, const long long* slots, const float* temperature, Partial* partials, int vocab) {
  __shared__ float values[32];
  __shared__ int places[32];
  __shared__ float scratch[32];
  int row = blockIdx.y, chunk = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int start = chunk * CHUNK + threadIdx.x * PER_THREAD;
  float x[PER_THREAD];
  load(logits + row * row_stride, start, vocab, x);

  float best = x[0];
  int place = start;
#pragma unroll
  for (int i = 1; i < PER_THREAD; ++i) take_larger(best, place, x[i], start + i);
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1)
    take_larger(best, place, __shfl_xor_sync(0xffffffffu, best, offset), __shfl_xor_sync(0xffffffffu, place, offset));
  if (lane == 0) values[warp] = best, places[warp] = place;
  __syncthreads();
  best = values[0], place = places[0];
  for (int w = 1; w < THREADS / 32; ++w) take_larger(best, place, values[w], places[w]);

  float t = temperature[slots[row]], sum = 0.f;
  if (t > 0.f) {
    float inverse = 1.f / t;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) sum += __expf((x[i] - best) * inverse);
    sum = block_sum(sum, scratch);
  }
  if (threadIdx.x == 0) partials[row * gridDim.x + chunk] = {best, sum, place, 0};
}

// One block a row: choose, append the token to the slot's sequence and advance its length.
extern "C" __global__ void __launch_bounds__(THREADS) sample_choose(
    const T* logits, long long row_stride, const long long* slots, const float* temperature, const long long* seeds,
    const Partial* partials, int chunks, int vocab, int* tokens, long long tokens_stride, int* lengths, int scratch_slot,
    long long* sampled) {
  __shared__ float sums[THREADS];
  __shared__ int chosen_chunk;
  __shared__ float rest;  // of the target, inside the chosen chunk
  int row = blockIdx.x;
  long long slot = slots[row];
  int length = lengths[slot];
  const Partial* mine = partials + (long long)row * chunks;
  float t = temperature[slot];

  float best = -INF;
  int place = 0x7fffffff;
  for (int c = 0; c < chunks; ++c) take_larger(best, place, mine[c].max, mine[c].argmax);

  if (t > 0.f) {
    float inverse = 1.f / t;
    if (threadIdx.x == 0) {
      float total = 0.f;
      for (int c = 0; c < chunks; ++c) total += mine[c].sum * __expf((mine[c].max - best) * inverse);
      float target = uniform(seeds[slot], length) * total, before = 0.f;
      // The last chunk with any weight, should rounding leave the target beyond all sums.
      for (int c = 0; c < chunks; ++c) {
        float here = mine[c].sum * __expf((mine[c].max - best) * inverse);
        if (here <= 0.f) continue;
        chosen_chunk = c, rest = target - before;
        if (before + here > target) break;
        before += here;
      }
    }
    __syncthreads();
    int start = chosen_chunk * CHUNK + threadIdx.x * PER_THREAD;
    float x[PER_THREAD], sum = 0.f;
    load(logits + row * row_stride, start, vocab, x);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) sum += x[i] = __expf((x[i] - best) * inverse);
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      float before = 0.f;
      int thread = -1, last = 0;
      for (int i = 0; i < THREADS; ++i) {
        if (sums[i] > 0.f) last = i;
        if (before + sums[i] > rest) { thread = i; break; }
        before += sums[i];
      }
      chosen_chunk = thread >= 0 ? thread : last;  // now the thread that holds the token
      rest = thread >= 0 ? rest - before : INF;
    }
    __syncthreads();
    if (threadIdx.x == chosen_chunk) {
      float before = 0.f;
      place = start;
      for (int i = 0; i < PER_THREAD; ++i) {
        if (x[i] > 0.f) place = start + i;
        before += x[i];
        if (before > rest) break;
      }
      sums[0] = __int_as_float(place);
    }
    __syncthreads();
    place = __float_as_int(sums[0]);
  }
  if (threadIdx.x == 0) {
    sampled[row] = place;
    bool real = slot != scratch_slot;  // the scratch slot of padding rows never grows
    tokens[slot * tokens_stride + (real ? length : 0)] = place;
    if (real) lengths[slot] = length + 1;
  }
}

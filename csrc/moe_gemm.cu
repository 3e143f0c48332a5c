// Grouped GEMMs of a mixture of experts. A layer has two, gate-up and down, and one launch computes each for all
// experts. A block computes OUTPUTS columns of the output for one tile of at most BLOCK_M (token, expert) pairs of one
// expert (moe.cu makes the tiles). Activations and weights are T (bf16 or f16), sums are float32. K and N must be
// multiples of 8.
//
// The expert's weight is the left operand of `mma` or wgmma, so that a tile may have as few as 8 or 16 pairs, as in a
// decode step. Both operands stream through a ring of STAGES stages of BLOCK_K columns. A block has WARPS_N x WARPS_M
// warps. A warp has TILES times 8 pairs and PAIRS times two tiles of 16 rows of the weight; in the gated product these
// two are the gates and the ups of the same outputs.
//
// Example: lane 5 of warp 1 in the gated product, with PAIRS 1, WARPS_N 4, WARPS_M 1 and TILES 2, so that HALF is 64.
// The warp has outputs 16 to 31 of the block's 64. They come from rows 16 to 31 (gates) and 80 to 95 (ups) of the
// block's 128 rows of the weight. By the layout of `mma` (mma.cuh) the lane's acc[0][0][t] are the gates of outputs 17
// and 25 for the pairs 8t + 2 and 8t + 3, and acc[1][0][t] their ups.
//
// WARPGROUP: warpgroups multiply by Hopper's wgmma (sm_90a), directly from shared memory; then PAIRS is 1, WARPS_N a
// multiple of 4, WARPS_M 1 and TILES 16.
// ROUTE: for few tokens. Each pair is a tile, and each block routes its own token, so that no plan is needed.
// CLAMPED, GELU_TANH: the activation is gpt-oss's, with `alpha` and `limit`, or gelu; otherwise silu.
// SHARED (moe.cuh): `shared` is the weight of the shared expert, [2 * SHARED * N, K] if GATED, else [N, SHARED * K].
// Its intermediate values are divided among SHARED experts of the routed ones' size.
#include "mma.cuh"
#include "moe_tile.cuh"

constexpr int BLOCK_K = 64;      // values of K in a stage: rows of 128 bytes
constexpr int ROW_VECTORS = 8;   // 16-byte vectors of such a row
constexpr int THREADS = 32 * WARPS_N * WARPS_M;
constexpr int HALF = 16 * PAIRS * WARPS_N;
constexpr int BLOCK_N = 2 * HALF;
constexpr int BLOCK_M = 8 * TILES * WARPS_M;
constexpr int STAGE_BYTES = (BLOCK_N + BLOCK_M) * BLOCK_K * 2;
constexpr int ROW_STEP = THREADS / ROW_VECTORS;  // rows that the block's threads load at a time
constexpr int STAGES_AHEAD = STAGES - (WARPGROUP ? 2 : 1);  // stages in flight: wgmma reads two others, `mma` one

#if WARPGROUP
#define RIGHT_ROWS BLOCK_M
#include "shared_product.cuh"
#endif

// GATED: out[pair] = activation(gate, up) with weight [experts, 2 * N, K], bias [experts, 2 * N] and x row
// pair / divisor. Otherwise: out[pair] = (weight @ x[pair / divisor] + bias) * pair_weights[pair] with weight
// [experts, N, K], bias [experts, N].
template <bool GATED> __device__ __forceinline__ void grouped_product(
    const T* x, int divisor, const T* weight, const T* shared, const T* bias, float alpha, float limit,
    const L* router_logits, int weighting, int first_expert, int held, const float* expert_scale, const int* order,
    const Tile* tiles, const int* tile_count, const float* pair_weights, T* out, int N, int K) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ int pair_of[BLOCK_M];
  constexpr int OUTPUTS = GATED ? HALF : BLOCK_N;
  constexpr int A_LOADS = BLOCK_N / ROW_STEP, B_LOADS = (BLOCK_M + ROW_STEP - 1) / ROW_STEP;
  int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  int warp_row = warp % WARPS_N, warp_token = warp / WARPS_N;

  // The predecessor of the second product is the first product. It writes neither the plan nor the router's logits, so
  // the second product may read them, and begin to load weights, before it waits.
  if (GATED) wait_for_predecessor(), start_successor();
  Tile tile;
#if ROUTE
  __shared__ int experts[TAKEN];
  __shared__ float weights[TAKEN];
  const L* logits = router_logits + blockIdx.y / TAKEN * LOGITS;
  if (warp == 0) route(logits, weighting, first_expert, held, expert_scale, experts, weights);
  __syncthreads();
  tile = {experts[blockIdx.y % TAKEN], (int)blockIdx.y, 1, 0};
  if (tile.expert < 0) {
    if (!GATED) no_output<OUTPUTS>(out, N);
    return;
  }
#else
  int count = *tile_count;
  if (blockIdx.y >= count) {
    if (!GATED && count == 0) wait_for_predecessor();
    return;
  }
  tile = tiles[blockIdx.y];
#endif
  int first = blockIdx.x * OUTPUTS, row = thread / ROW_VECTORS, chunk = thread % ROW_VECTORS;
  const T* matrix = weight + (long long)tile.expert * (GATED ? 2 : 1) * N * K + chunk * 8;
  int ups = N, width = K;  // rows from a gate to its up; values of a row
#if SHARED
  if (tile.expert >= EXPERTS) {
    int part = tile.expert - EXPERTS;
    matrix = shared + (long long)part * (GATED ? N : 1) * K + chunk * 8;
    if (GATED) ups = SHARED * N;
    else width = SHARED * K;
  }
#endif
  const T* a[A_LOADS];
  bool a_real[A_LOADS];
#pragma unroll
  for (int i = 0; i < A_LOADS; ++i) {
    int r = row + i * ROW_STEP, output = first + (GATED ? r % HALF : r);
    a_real[i] = output < N;
    a[i] = matrix + (long long)(min(output, N - 1) + (GATED && r >= HALF ? ups : 0)) * width;
  }
  const T* b[B_LOADS];
  bool b_real[B_LOADS];
#pragma unroll
  for (int i = 0; i < B_LOADS; ++i) {
    int token = row + i * ROW_STEP;
    b_real[i] = token < tile.count;
    int place = tile.start + (b_real[i] ? token : 0), pair = ROUTE ? place : order[place];
    b[i] = x + (long long)(pair / divisor) * K + chunk * 8;
    if (chunk == 0 && token < BLOCK_M) pair_of[token] = pair;
  }

  unsigned base = shared_address(memory);
  int steps = (K + BLOCK_K - 1) / BLOCK_K;
  auto load_a = [&](int step) {
    unsigned to = base + step % STAGES * STAGE_BYTES;
    bool in = step * BLOCK_K + chunk * 8 < K;
#pragma unroll
    for (int i = 0; i < A_LOADS; ++i)
      copy_16(to + place(row + i * ROW_STEP, chunk), a[i] + (in ? step * BLOCK_K : 0), in && a_real[i]);
  };
  auto load_b = [&](int step) {
    unsigned to = base + step % STAGES * STAGE_BYTES + BLOCK_N * BLOCK_K * 2;
    bool in = step * BLOCK_K + chunk * 8 < K;
#pragma unroll
    for (int i = 0; i < B_LOADS; ++i)
      if (BLOCK_M % ROW_STEP == 0 || row + i * ROW_STEP < BLOCK_M)
        copy_16(to + place(row + i * ROW_STEP, chunk), b[i] + (in ? step * BLOCK_K : 0), in && b_real[i]);
  };

#pragma unroll
  for (int s = 0; s < STAGES_AHEAD; ++s)
    if (s < steps) load_a(s);
  if (!GATED) wait_for_predecessor(), start_successor();
#pragma unroll
  for (int s = 0; s < STAGES_AHEAD; ++s) {
    if (s < steps) load_b(s);
    commit_group();
  }

  float acc[2][PAIRS][TILES][4] = {};
#if WARPGROUP
  int group_row = warp_row / 4 * 64;
  for (int step = 0; step < steps; ++step) {
    wait_group<STAGES_AHEAD - 1>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    unsigned rows = base + step % STAGES * STAGE_BYTES, tokens = rows + BLOCK_N * BLOCK_K * 2;
    fence_products();
#pragma unroll
    for (int k = 0; k < BLOCK_K / 16; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        multiply_add<true>(
            acc[half][0], descriptor(rows + (half * HALF + group_row) * BLOCK_K * 2 + k * 32),
            descriptor(tokens + k * 32));
    commit_products();
    // The stage that is filled here was read two steps ago, and all warps have waited for that step's wgmma.
    if (step + STAGES_AHEAD < steps) load_a(step + STAGES_AHEAD), load_b(step + STAGES_AHEAD);
    commit_group();
    wait_products<1>();
  }
  wait_products<0>();
#else
  int a_row = lane & 15, a_chunk = lane >> 4;                      // row and chunk of this lane's address
  int b_row = (lane & 7) + (lane >> 4) * 8, b_chunk = lane >> 3 & 1;
  for (int step = 0; step < steps; ++step) {
    wait_group<STAGES_AHEAD - 1>();
    __syncthreads();
    if (step + STAGES_AHEAD < steps) load_a(step + STAGES_AHEAD), load_b(step + STAGES_AHEAD);
    commit_group();
    unsigned rows = base + step % STAGES * STAGE_BYTES, tokens = rows + BLOCK_N * BLOCK_K * 2;
#pragma unroll
    for (int k = 0; k < BLOCK_K / 16; ++k) {
      unsigned right[TILES / 2][4];
#pragma unroll
      for (int t = 0; t < TILES / 2; ++t)
        ldmatrix(right[t], tokens + place((warp_token * TILES / 2 + t) * 16 + b_row, k * 2 + b_chunk));
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
          unsigned left[4];
          ldmatrix(left, rows + place(half * HALF + (warp_row * PAIRS + p) * 16 + a_row, k * 2 + a_chunk));
#pragma unroll
          for (int t = 0; t < TILES; ++t)
            mma(acc[half][p][t], left[0], left[1], left[2], left[3], right[t / 2][t % 2 * 2],
                right[t / 2][t % 2 * 2 + 1]);
        }
    }
  }
#endif

  // The results are staged in shared memory, so that rows are written 16 bytes at a time.
  wait_group<0>();
  __syncthreads();
  constexpr int STRIDE = OUTPUTS + 8;
  T* result = (T*)memory;
  if (bias) bias += (long long)tile.expert * (GATED ? 2 : 1) * N;
#pragma unroll
  for (int p = 0; p < PAIRS; ++p) {
    float added[2][2] = {};  // biases of this thread's two outputs in each half
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int output = first + (warp_row * PAIRS + p) * 16 + (lane >> 2) + (i & 1) * 8 + (!GATED && i >= 2 ? HALF : 0);
      if (bias && output < N) added[i >> 1][i & 1] = to_float(bias[output + (GATED && i >= 2 ? N : 0)]);
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int token = (warp_token * TILES + t) * 8 + (lane & 3) * 2 + (i & 1);
        int output = (warp_row * PAIRS + p) * 16 + (lane >> 2) + (i >> 1) * 8;
        float low = acc[0][p][t][i] + added[0][i >> 1], high = acc[1][p][t][i] + added[1][i >> 1];
        if (GATED) {
          result[token * STRIDE + output] = from_float<T>(activated(rounded(low), rounded(high), alpha, limit));
        } else {
#if ROUTE
          float scale = weights[blockIdx.y % TAKEN];
#else
          float scale = token < tile.count ? pair_weights[pair_of[token]] : 0.f;
#endif
          result[token * STRIDE + output] = from_float<T>(low * scale);
          result[token * STRIDE + HALF + output] = from_float<T>(high * scale);
        }
      }
  }
  __syncthreads();
  for (int i = thread; i < tile.count * (OUTPUTS / 8); i += THREADS) {
    int token = i / (OUTPUTS / 8), column = i % (OUTPUTS / 8) * 8;
    if (first + column < N)
      *(uint4*)(out + (long long)pair_of[token] * N + first + column) =
          *(const uint4*)(result + token * STRIDE + column);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) moe_gated(
    const T* x, int divisor, const T* weight, OPTIONAL const T* shared, OPTIONAL const T* bias, float alpha,
    float limit, OPTIONAL const L* router_logits, int weighting, int first_expert, int held,
    OPTIONAL const float* expert_scale, OPTIONAL const int* order, OPTIONAL const Tile* tiles,
    OPTIONAL const int* tile_count, OPTIONAL const float* pair_weights, T* out, int N, int K) {
  grouped_product<true>(
      x, divisor, weight, shared, bias, alpha, limit, router_logits, weighting, first_expert, held, expert_scale,
      order, tiles, tile_count, pair_weights, out, N, K);
}

extern "C" __global__ void __launch_bounds__(THREADS) moe_weighted(
    const T* x, int divisor, const T* weight, OPTIONAL const T* shared, OPTIONAL const T* bias, float alpha,
    float limit, OPTIONAL const L* router_logits, int weighting, int first_expert, int held,
    OPTIONAL const float* expert_scale, OPTIONAL const int* order, OPTIONAL const Tile* tiles,
    OPTIONAL const int* tile_count, OPTIONAL const float* pair_weights, T* out, int N, int K) {
  grouped_product<false>(
      x, divisor, weight, shared, bias, alpha, limit, router_logits, weighting, first_expert, held, expert_scale,
      order, tiles, tile_count, pair_weights, out, N, K);
}

// The norm in front of a mixture of experts and the logits of its router, in float32, of a few tokens in one launch.
// A block has EXPERTS experts and TOKENS tokens; each of its threads has the same eight of every STEP values of all of them.
// It fetches the experts' weights before it waits for its predecessor. H is a multiple of eight.
#include "common.cuh"

constexpr int EXPERTS = 2;
constexpr int TOKENS = 4;
constexpr int THREADS = 256;
constexpr int LANE = 8;
constexpr int STEP = THREADS * LANE;

// Sums over the block of N values a thread, known to all. `scratch` is written once.
template <int N> __device__ __forceinline__ void block_sums(float (&x)[N], float (*scratch)[N]) {
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    x[n] = warp_sum(x[n]);
    if (lane == 0) scratch[warp][n] = x[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    x[n] = 0.f;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) x[n] += scratch[w][n];
  }
}

// normed = x / sqrt(mean(x^2) + eps) * norm, as rms_norm rounds it, both [tokens, H]; logits [tokens, experts] = normed @
// weight [experts, H]^T. Grid: experts / EXPERTS, tokens / TOKENS.
extern "C" __global__ void __launch_bounds__(THREADS) moe_router(
    const T* x, const W* norm, float eps, const float* weight, T* normed, float* logits, int tokens, int experts, int H) {
  __shared__ float squares[THREADS / 32][TOKENS], products[THREADS / 32][TOKENS * EXPERTS];
  int first = blockIdx.y * TOKENS, count = min(TOKENS, tokens - first), own = threadIdx.x * LANE;
  const float* row[EXPERTS];
  const T* from[TOKENS];
#pragma unroll
  for (int e = 0; e < EXPERTS; ++e) row[e] = weight + (long long)min(blockIdx.x * EXPERTS + e, experts - 1) * H;
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) from[t] = x + (long long)(first + min(t, count - 1)) * H;
  Vec<4, float> w[EXPERTS][2] = {};
  Vec<LANE, W> factor = {};
  auto fetch_weights = [&](int i) {
    factor = *(const Vec<LANE, W>*)(norm + i);
#pragma unroll
    for (int e = 0; e < EXPERTS; ++e)
#pragma unroll
      for (int half = 0; half < 2; ++half) w[e][half] = *(const Vec<4, float>*)(row[e] + i + half * 4);
  };
  if (own < H) fetch_weights(own);
  wait_for_predecessor();
  start_successor();
  Vec<LANE> v[TOKENS] = {};
  float scale[TOKENS] = {}, sum[TOKENS * EXPERTS] = {};
  for (int i = own; i < H; i += STEP)
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      Vec<LANE> part = *(const Vec<LANE>*)(from[t] + i);
      if (i == own) v[t] = part;
#pragma unroll
      for (int j = 0; j < LANE; ++j) scale[t] += to_float(part.v[j]) * to_float(part.v[j]);
    }
  block_sums(scale, squares);
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) scale[t] = rsqrtf(scale[t] / H + eps);
  for (int i = own; i < H; i += STEP) {
    if (i > own) fetch_weights(i);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      if (i > own) v[t] = *(const Vec<LANE>*)(from[t] + i);
#pragma unroll
      for (int j = 0; j < LANE; ++j) {
        v[t].v[j] = from_float<T>(times_norm(to_float(v[t].v[j]) * scale[t], factor.v[j]));
#pragma unroll
        for (int e = 0; e < EXPERTS; ++e) sum[t * EXPERTS + e] += to_float(v[t].v[j]) * w[e][j / 4].v[j % 4];
      }
      if (blockIdx.x == 0 && t < count) *(Vec<LANE>*)(normed + (long long)(first + t) * H + i) = v[t];
    }
  }
  block_sums(sum, products);
  int expert = blockIdx.x * EXPERTS + threadIdx.x % EXPERTS, t = threadIdx.x / EXPERTS;
#pragma unroll
  for (int n = 0; n < TOKENS * EXPERTS; ++n)
    if (n == threadIdx.x && t < count && expert < experts) logits[(long long)(first + t) * experts + expert] = sum[n];
}

// RMSNorm before a mixture of experts, and the logits of its router, for a few tokens, in one launch. A block computes
// EXPERTS experts' logits for TOKENS tokens. A thread has eight contiguous columns of every STEP, for all experts and
// tokens of the block. The block loads the experts' weights before it waits for its predecessor. H is a multiple of
// eight. -DLOGIT_SCALAR: type of the router's weight and logits. -DTHREADS, -DTOKENS: threads and tokens per block.
#include "common.cuh"

using L = LOGIT_SCALAR;
constexpr int EXPERTS = 2;
constexpr int LANE = 8;
constexpr int STEP = THREADS * LANE;

// Sum each of a thread's N values over the block, for all threads. `scratch` must not be in use.
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

// normed [tokens, H] = x / sqrt(mean(x^2) + eps) * norm, rounded like rms_norm, or x without a norm. logits
// [tokens, outputs] = normed @ weight^T + bias, with weight [experts, H]; then, if there is a `gate` [H] of a shared
// expert, its logit, which has no bias. Grid: (outputs / EXPERTS, tokens / TOKENS), rounded up.
extern "C" __global__ void __launch_bounds__(THREADS) moe_router(
    const T* x, OPTIONAL const W* norm, float eps, const L* weight, OPTIONAL const L* bias, OPTIONAL const L* gate,
    OPTIONAL T* normed, L* logits, int tokens, int experts, int H) {
  __shared__ float squares[THREADS / 32][TOKENS], products[THREADS / 32][TOKENS * EXPERTS];
  int first = blockIdx.y * TOKENS, count = min(TOKENS, tokens - first), own = threadIdx.x * LANE;
  int outputs = experts + (gate != nullptr);
  const L* row[EXPERTS];
  const T* from[TOKENS];
#pragma unroll
  for (int e = 0; e < EXPERTS; ++e) {
    int expert = min((int)blockIdx.x * EXPERTS + e, outputs - 1);
    row[e] = expert < experts ? weight + (long long)expert * H : gate;
  }
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) from[t] = x + (long long)(first + min(t, count - 1)) * H;
  Vec<4, L> w[EXPERTS][2] = {};
  Vec<4, W> factor[2] = {};
  auto fetch_weights = [&](int i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (norm) factor[half] = *(const Vec<4, W>*)(norm + i + half * 4);
#pragma unroll
      for (int e = 0; e < EXPERTS; ++e) w[e][half] = *(const Vec<4, L>*)(row[e] + i + half * 4);
    }
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
        if (norm) v[t].v[j] = from_float<T>(times_norm(to_float(v[t].v[j]) * scale[t], factor[j / 4].v[j % 4]));
#pragma unroll
        for (int e = 0; e < EXPERTS; ++e) sum[t * EXPERTS + e] += to_float(v[t].v[j]) * to_float(w[e][j / 4].v[j % 4]);
      }
      if (norm && blockIdx.x == 0 && t < count) *(Vec<LANE>*)(normed + (long long)(first + t) * H + i) = v[t];
    }
  }
  block_sums(sum, products);
  int expert = blockIdx.x * EXPERTS + threadIdx.x % EXPERTS, t = threadIdx.x / EXPERTS;
  float added = bias && expert < experts ? to_float(bias[expert]) : 0.f;
#pragma unroll
  for (int n = 0; n < TOKENS * EXPERTS; ++n)
    if (n == threadIdx.x && t < count && expert < outputs)
      logits[(long long)(first + t) * outputs + expert] = from_float<L>(sum[n] + added);
}

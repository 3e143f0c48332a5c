// The norm in front of a mixture of experts and the logits of its router, in float32, of a few tokens in one launch.
// A warp has an expert, whose weights it reads once for up to TOKENS tokens; it norms these itself. H is a multiple of
// 256: of each 256 values a lane has eight.
#include "common.cuh"

constexpr int TOKENS = 4;
constexpr int WARPS = 4;
constexpr int LANE = 8;

// normed = x / sqrt(mean(x^2) + eps) * norm, as rms_norm rounds it, both [tokens, H]; logits [tokens, experts] = normed @
// weight [experts, H]^T. Grid: experts / WARPS, tokens / TOKENS.
extern "C" __global__ void __launch_bounds__(32 * WARPS) moe_router(
    const T* x, const W* norm, float eps, const float* weight, T* normed, float* logits, int tokens, int experts, int H) {
  wait_for_predecessor();
  start_successor();
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, expert = blockIdx.x * WARPS + warp;
  int first = blockIdx.y * TOKENS, count = min(TOKENS, tokens - first);
  bool writes = blockIdx.x == 0 && warp == 0;
  if (expert >= experts) return;
  const float* row = weight + (long long)expert * H;
  const T* from[TOKENS];
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) from[t] = x + (long long)(first + min(t, count - 1)) * H;
  float scale[TOKENS] = {}, sum[TOKENS] = {};
  for (int i = lane * LANE; i < H; i += 32 * LANE)
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      Vec<LANE> v = *(const Vec<LANE>*)(from[t] + i);
#pragma unroll
      for (int j = 0; j < LANE; ++j) scale[t] += to_float(v.v[j]) * to_float(v.v[j]);
    }
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) scale[t] = rsqrtf(warp_sum(scale[t]) / H + eps);
#pragma unroll 2
  for (int i = lane * LANE; i < H; i += 32 * LANE) {
    Vec<LANE / 2, float> low = *(const Vec<LANE / 2, float>*)(row + i), high = *(const Vec<LANE / 2, float>*)(row + i + 4);
    Vec<LANE, W> factor = *(const Vec<LANE, W>*)(norm + i);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      Vec<LANE> v = *(const Vec<LANE>*)(from[t] + i);
#pragma unroll
      for (int j = 0; j < LANE; ++j) {
        v.v[j] = from_float<T>(times_norm(to_float(v.v[j]) * scale[t], factor.v[j]));
        sum[t] += to_float(v.v[j]) * (j < 4 ? low.v[j] : high.v[j - 4]);
      }
      if (writes && t < count) *(Vec<LANE>*)(normed + (long long)(first + t) * H + i) = v;
    }
  }
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    float total = warp_sum(sum[t]);
    if (lane == 0 && t < count) logits[(long long)(first + t) * experts + expert] = total;
  }
}

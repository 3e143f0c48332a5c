// RMSNorm of x [tokens, H], alone, and as the norm of a block's output followed by the residual addition (Gemma, OLMo,
// GLM-4). One thread block per token; H is a multiple of VEC.
#include "common.cuh"

// out = x / sqrt(mean(x^2) + eps) * weight; as in the reference, the quotient is rounded to W before it is multiplied.
// A thread keeps its first vector in registers; a row of up to 1024 vectors has only one per thread. The weight is
// loaded before waiting for the predecessor.
extern "C" __global__ void rms_norm(const T* x, const W* weight, T* out, int H, float eps) {
  start_successor();  // a product, which may load its weight
  __shared__ float scratch[32];
  int first = threadIdx.x * VEC, stride = blockDim.x * VEC;
  const T* row = x + (long long)blockIdx.x * H;
  Vec<VEC> v = {};
  Vec<VEC, W> w = {};
  if (first < H) w = *(const Vec<VEC, W>*)(weight + first);
  wait_for_predecessor();
  if (first < H) v = *(const Vec<VEC>*)(row + first);
  float squares = 0.f;
#pragma unroll
  for (int j = 0; j < VEC; ++j) squares += to_float(v.v[j]) * to_float(v.v[j]);
  for (int i = first + stride; i < H; i += stride) {
    Vec<VEC> more = *(const Vec<VEC>*)(row + i);
#pragma unroll
    for (int j = 0; j < VEC; ++j) squares += to_float(more.v[j]) * to_float(more.v[j]);
  }
  float scale = rsqrtf(block_sum(squares, scratch) / H + eps);
  for (int i = first; i < H; i += stride) {
    if (i > first) v = *(const Vec<VEC>*)(row + i), w = *(const Vec<VEC, W>*)(weight + i);
    Vec<VEC> y;
#pragma unroll
    for (int j = 0; j < VEC; ++j) y.v[j] = from_float<T>(times_norm(to_float(v.v[j]) * scale, w.v[j]));
    *(Vec<VEC>*)(out + (long long)blockIdx.x * H + i) = y;
  }
}

// sum = (residual + rms_norm(x)) * factor, and `normed` [up to 3, rows, H]: its norms by as many weights, with the same
// eps. Each is rounded as separate operations would. H is at most VEC times the block's threads; `sum` may be
// `residual`.
extern "C" __global__ void norm_add(
    const T* x, const W* weight, const T* residual, OPTIONAL const T* factor, OPTIONAL const W* next_weight,
    OPTIONAL const W* second_weight, OPTIONAL const W* third_weight, T* sum, OPTIONAL T* normed, int H, float eps) {
  start_successor();  // a product, which may load its weight
  __shared__ float scratch[2][32];
  int i = threadIdx.x * VEC;
  long long at = (long long)blockIdx.x * H + i;
  bool in = i < H;
  const W* weights[3] = {next_weight, second_weight, third_weight};
  Vec<VEC> v = {}, before = {};
  Vec<VEC, W> w = {}, next[3] = {};
  if (in) w = *(const Vec<VEC, W>*)(weight + i);
#pragma unroll
  for (int n = 0; n < 3; ++n)
    if (in && weights[n]) next[n] = *(const Vec<VEC, W>*)(weights[n] + i);
  float times = factor ? to_float(*factor) : 1.f, squares = 0.f;
  wait_for_predecessor();
  if (in) v = *(const Vec<VEC>*)(x + at), before = *(const Vec<VEC>*)(residual + at);
#pragma unroll
  for (int j = 0; j < VEC; ++j) squares += to_float(v.v[j]) * to_float(v.v[j]);
  float scale = rsqrtf(block_sum(squares, scratch[0]) / H + eps);
  squares = 0.f;
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    float y = rounded(times_norm(to_float(v.v[j]) * scale, w.v[j]));
    v.v[j] = from_float<T>(rounded(to_float(before.v[j]) + y) * times);
    squares += to_float(v.v[j]) * to_float(v.v[j]);
  }
  if (in) *(Vec<VEC>*)(sum + at) = v;
  if (!normed) return;
  scale = rsqrtf(block_sum(squares, scratch[1]) / H + eps);
#pragma unroll
  for (int n = 0; n < 3; ++n) {
    Vec<VEC> y;
#pragma unroll
    for (int j = 0; j < VEC; ++j) y.v[j] = from_float<T>(times_norm(to_float(v.v[j]) * scale, next[n].v[j]));
    if (in && weights[n]) *(Vec<VEC>*)(normed + (long long)n * gridDim.x * H + at) = y;
  }
}

// RMSNorm. One block a token; H is a multiple of VEC.
#include "common.cuh"

// out = x / sqrt(mean(x^2) + eps) * weight, rounded to W before the weight as the reference does. The first vector of a
// thread, which is all that it has of a row of up to 1024 vectors, stays in registers; the weight is read early.
extern "C" __global__ void rms_norm(const T* x, const W* weight, T* out, int H, float eps) {
  start_successor();  // which may fetch weights
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

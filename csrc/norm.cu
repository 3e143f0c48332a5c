// RMSNorm. One block a token; H is a multiple of VEC.
#include "common.cuh"

// out = x / sqrt(mean(x^2) + eps) * weight, rounded to T before the weight as the reference does.
__device__ __forceinline__ void scale_row(const T* row, const T* weight, T* out, int H, float scale) {
  for (int i = threadIdx.x * VEC; i < H; i += blockDim.x * VEC) {
    Vec<VEC> x = *(const Vec<VEC>*)(row + i), w = *(const Vec<VEC>*)(weight + i), y;
#pragma unroll
    for (int j = 0; j < VEC; ++j) y.v[j] = from_float<T>(rounded(to_float(x.v[j]) * scale) * to_float(w.v[j]));
    *(Vec<VEC>*)(out + i) = y;
  }
}

extern "C" __global__ void rms_norm(const T* x, const T* weight, T* out, int H, float eps) {
  start_successor();  // which may fetch weights
  wait_for_predecessor();
  __shared__ float scratch[32];
  const T* row = x + (long long)blockIdx.x * H;
  float squares = 0.f;
  for (int i = threadIdx.x * VEC; i < H; i += blockDim.x * VEC) {
    Vec<VEC> v = *(const Vec<VEC>*)(row + i);
#pragma unroll
    for (int j = 0; j < VEC; ++j) squares += to_float(v.v[j]) * to_float(v.v[j]);
  }
  float scale = rsqrtf(block_sum(squares, scratch) / H + eps);
  scale_row(row, weight, out + (long long)blockIdx.x * H, H, scale);
}

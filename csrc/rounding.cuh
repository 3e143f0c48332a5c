// Rounding of x to FP8 (e4m3) with one scale per group of values, chosen so that the largest magnitude becomes 448.
#pragma once
#include "fp8.cuh"

__device__ __forceinline__ float fp8_scale(float largest) { return fmaxf(largest, 1e-10f) / 448.f; }

// Compute x / scale, rounded as a division would be, from the scale's reciprocal: the product with the reciprocal is an
// estimate, which is corrected by its remainder (Markstein, "Computation of elementary functions on the IBM RISC
// System/6000 processor", 1990).
__device__ __forceinline__ float divide(float x, float scale, float reciprocal) {
  float y = x * reciprocal;
  return fmaf(fmaf(-y, scale, x), reciprocal, y);
}

// Store numbers of x divided by the scale and rounded to e4m3; numbers beyond 448 become 448.
template <int N>
__device__ __forceinline__ void store_rounded(e4m3* to, const Vec<N>& x, float scale, float reciprocal) {
  Vec<N / 2, unsigned short> y;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    float low = divide(to_float(x.v[2 * i]), scale, reciprocal);
    float high = divide(to_float(x.v[2 * i + 1]), scale, reciprocal);
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y.v[i]) : "f"(high), "f"(low));
  }
  *(Vec<N / 2, unsigned short>*)to = y;
}

// Largest magnitude of the values of LANES neighbouring lanes; `here`: mask of the warp's lanes that take part.
template <int LANES, int N>
__device__ __forceinline__ float largest_of(const Vec<N>& x, unsigned here = 0xffffffffu) {
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < N; ++i) largest = fmaxf(largest, fabsf(to_float(x.v[i])));
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset >>= 1)
    largest = fmaxf(largest, __shfl_xor_sync(here, largest, offset));
  return largest;
}

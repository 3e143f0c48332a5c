// Rounding of x to FP8: e4m3 times a scale by which the largest of some numbers becomes 448.
#pragma once
#include "fp8.cuh"

__device__ __forceinline__ float fp8_scale(float largest) { return fmaxf(largest, 1e-10f) / 448.f; }

// x / scale as division rounds it, with the scale's reciprocal (Markstein, "Computation of elementary functions on the
// IBM RISC System/6000 processor", 1990): an estimate and what it leaves.
__device__ __forceinline__ float divide(float x, float scale, float reciprocal) {
  float y = x * reciprocal;
  return fmaf(fmaf(-y, scale, x), reciprocal, y);
}

// Store eight numbers of x divided by the scale and rounded to e4m3; numbers beyond 448 become 448.
__device__ __forceinline__ void store_rounded(e4m3* to, const Vec<8>& x, float scale, float reciprocal) {
  Vec<4, unsigned short> y;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float low = divide(to_float(x.v[2 * i]), scale, reciprocal);
    float high = divide(to_float(x.v[2 * i + 1]), scale, reciprocal);
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y.v[i]) : "f"(high), "f"(low));
  }
  *(Vec<4, unsigned short>*)to = y;
}

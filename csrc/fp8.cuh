// 8-bit floats: e4m3, with 4 bits of exponent and 3 of mantissa, up to 448; from compute capability 8.9 on.
// -DCACHE=e4m3 stores K and V of the KV cache in them; without it they are stored in T.
#pragma once
#include "common.cuh"

#ifndef CACHE
#define CACHE SCALAR
#endif

struct e4m3 { unsigned char bits; };
using C = CACHE;

// Convert the lower or the upper two of four e4m3 values to two f16. f16 can represent every e4m3 value.
__device__ __forceinline__ unsigned upcast(unsigned four, bool upper) {
  unsigned two;
  if (upper)
    asm("{ .reg .b16 low, high;\n mov.b32 {low, high}, %1;\n cvt.rn.f16x2.e4m3x2 %0, high; }" : "=r"(two) : "r"(four));
  else
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"((unsigned short)four));
  return two;
}

__device__ __forceinline__ float to_float(e4m3 x) { return to_float(f16{(unsigned short)upcast(x.bits, false)}); }

// Round to the nearest e4m3 value; magnitudes above 448 saturate at 448.
template <> __device__ __forceinline__ e4m3 from_float<e4m3>(float x) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(x));
  return e4m3{(unsigned char)pair};
}

template <typename U, typename V> struct Same { static constexpr bool value = false; };
template <typename U> struct Same<U, U> { static constexpr bool value = true; };
template <bool first, typename U, typename V> struct Either { using type = U; };
template <typename U, typename V> struct Either<false, U, V> { using type = V; };
constexpr bool FP8 = Same<C, e4m3>::value;

// Store N values in the cache's type.
template <int N> __device__ __forceinline__ void store(C* to, Vec<N> x) {
  if constexpr (Same<C, T>::value) {
    *(Vec<N>*)to = x;
  } else {
    Vec<N, C> y;
#pragma unroll
    for (int i = 0; i < N; ++i) y.v[i] = from_float<C>(to_float(x.v[i]));
    *(Vec<N, C>*)to = y;
  }
}

// N values after the rounding of the cache's type.
template <int N> __device__ __forceinline__ Vec<N> as_stored(const Vec<N>& x) {
  if constexpr (Same<C, T>::value) {
    return x;
  } else {
    Vec<N> y;
#pragma unroll
    for (int i = 0; i < N; ++i) y.v[i] = from_float<T>(to_float(from_float<C>(to_float(x.v[i]))));
    return y;
  }
}

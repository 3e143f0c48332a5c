// Tensor-core and packed instructions for 16-bit T, and loads that bypass L1.
#pragma once
#include "common.cuh"

template <typename U> struct Is { static constexpr bool bf16 = false; };
template <> struct Is<struct bf16> { static constexpr bool bf16 = true; };

// c [16, 8] += a [16, 16] @ b [16, 8], by a whole warp; U: the type of a and b. The matrices are distributed over the
// registers of the lanes; a register has two contiguous values of a or b. With g = lane / 4 and p = lane % 4 a lane has
//
//   of a: row g, columns 2p, 2p + 1 (a0)        of b: column g, rows 2p, 2p + 1 (b0)
//         row g + 8, the same columns (a1)                      rows 2p + 8, 2p + 9 (b1)
//         row g, columns 2p + 8, 2p + 9 (a2)    of c: row g, columns 2p, 2p + 1 (c[0], c[1])
//         row g + 8, these columns (a3)               row g + 8, the same columns (c[2], c[3])
//
// For example, lane 5 (g = 1, p = 1) has a[1][2..3], a[9][2..3], a[1][10..11], a[9][10..11]; b[2..3][1], b[10..11][1];
// and gets c[1][2..3] and c[9][2..3]. The four lanes 4g to 4g + 3 together have rows g and g + 8 of c (see `quad_sum`),
// and the eight lanes with the same p have columns 2p and 2p + 1.
template <typename U = T> __device__ __forceinline__ void mma(
    float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  if constexpr (Is<U>::bf16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Product of two values of T with two others, each pair in a register.
__device__ __forceinline__ unsigned multiply(unsigned a, unsigned b) {
  unsigned c;
  if constexpr (Is<T>::bf16)  // a * b + (-0): bf16 has no plain product before sm_90
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(b), "r"(0x80008000u));
  else
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

// a * b + c, rounded once.
__device__ __forceinline__ unsigned multiply_and_add(unsigned a, unsigned b, unsigned c) {
  unsigned d;
  if constexpr (Is<T>::bf16)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ __forceinline__ float low_of(unsigned pair) { return to_float(T{(unsigned short)pair}); }
__device__ __forceinline__ float high_of(unsigned pair) { return to_float(T{(unsigned short)(pair >> 16)}); }

template <typename U = T> __device__ __forceinline__ unsigned pack(float low, float high) {
  return from_float<U>(low).bits | (unsigned)from_float<U>(high).bits << 16;
}

// Products of eight values of T.
__device__ __forceinline__ uint4 multiply(uint4 a, uint4 b) {
  return make_uint4(multiply(a.x, b.x), multiply(a.y, b.y), multiply(a.z, b.z), multiply(a.w, b.w));
}

__device__ __forceinline__ float sum_squares(unsigned pair) {
  return low_of(pair) * low_of(pair) + high_of(pair) * high_of(pair);
}

// Sum over the four lanes that share lane / 4.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Load 16 bytes without keeping them in L1, because no other warp of this SM reads them. L2 fetches the whole line of
// 128 bytes.
__device__ __forceinline__ uint4 load_once(const void* address) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// Load 8 bytes in the same way.
__device__ __forceinline__ uint2 load_once_8(const void* address) {
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
  return v;
}

// Tiles of 16-bit values in shared memory: asynchronous copies into them, and loads of 8 x 8 matrices, the operands of
// `mma`, out of them. Rows of a tile that are 16 bytes longer than a multiple of 128 lie in different banks.
#pragma once
#include "common.cuh"

__device__ __forceinline__ unsigned tile_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// Copy 16 bytes, or zeros unless they are `real`.
__device__ __forceinline__ void copy_16(void* to, const void* from, bool real = true) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               ::"r"(tile_address(to)), "l"(from), "r"(real ? 16 : 0) : "memory");
}
// `close_group` makes a group of this thread's copies since the last call; `wait_group` waits until all of its groups
// but the newest PENDING have arrived.
__device__ __forceinline__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Load four 8 x 8 matrices. Lanes 8i to 8i + 7 pass the addresses of the rows of matrix i; each lane gets two values of
// each matrix: row lane / 4, columns 2 (lane % 4) and the next one; transposed: column lane / 4, these two rows.
__device__ __forceinline__ uint4 ldmatrix(const void* row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(tile_address(row)) : "memory");
  return v;
}
__device__ __forceinline__ uint4 ldmatrix_transposed(const void* row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(tile_address(row)) : "memory");
  return v;
}

// Tiles of 16-bit values in shared memory: asynchronous copies into them (cp.async), and loads of 8 x 8 matrices from
// them as operands of `mma` (ldmatrix). An address in shared memory is a pointer or its `shared_address`. If a row has
// 16 bytes more than a multiple of 128, successive rows of the tile lie in different banks.
#pragma once
#include "common.cuh"

// Copy 16 bytes, or zeros unless they are `real`; L2 fetches their whole 128 bytes.
__device__ __forceinline__ void copy_16(unsigned to, const void* from, bool real = true) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_16(void* to, const void* from, bool real = true) {
  copy_16(shared_address(to), from, real);
}
// `commit_group` makes one group of this thread's copies since its last call; `wait_group` waits until all of the
// thread's groups but the newest PENDING have arrived.
__device__ __forceinline__ void commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Load four 8 x 8 matrices. Lanes 8i to 8i + 7 pass the addresses of the rows of matrix i; each lane gets two values of
// each matrix: row lane / 4, columns 2 (lane % 4) and the next one; transposed: column lane / 4, these two rows.
__device__ __forceinline__ void ldmatrix(unsigned (&m)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row) : "memory");
}
__device__ __forceinline__ uint4 ldmatrix(const void* row) {
  unsigned m[4];
  ldmatrix(m, shared_address(row));
  return make_uint4(m[0], m[1], m[2], m[3]);
}
__device__ __forceinline__ uint4 ldmatrix_transposed(const void* row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared_address(row)) : "memory");
  return v;
}

// Primitives of Hopper: asynchronous copies (TMA) into shared memory, also into that of other blocks of a cluster;
// mbarriers; and matrix descriptors and fences of wgmma, the matrix product of a warpgroup.
#pragma once
#include "cluster.cuh"

struct alignas(64) TensorMap { unsigned char opaque[128]; };
using Barrier = unsigned long long;

__device__ __forceinline__ void init(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void expect(Barrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrive at the barrier with this address if `here`, by a predicated instruction instead of a branch.
__device__ __forceinline__ void arrive(unsigned barrier, bool here) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0];}"
               ::"r"(barrier), "r"((int)here) : "memory");
}
// Wait until the barrier has completed the phase of this parity.
__device__ __forceinline__ void wait(unsigned barrier, int parity) {
  unsigned done = 0;
  while (!done)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
}
// True if the barrier has completed the phase of this parity; does not wait for it.
__device__ __forceinline__ bool completed(Barrier* barrier, int parity) {
  unsigned done;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  return done;
}
__device__ __forceinline__ void wait(Barrier* barrier, int parity) { wait(shared_address(barrier), parity); }

// Copy the box of a matrix that begins at this column and row; rows after the matrix's last one become zeros.
__device__ __forceinline__ void copy_box(void* to, const TensorMap& map, int column, int row, Barrier* barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(shared_address(to)), "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)) : "memory");
}

// Copy contiguous bytes, a multiple of 16, from global memory.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, int bytes, Barrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

// Copy contiguous bytes, a multiple of 16, to the shared memory of a block of the cluster, whose barrier counts them.
__device__ __forceinline__ void send(unsigned to, const void* from, int bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "r"(shared_address(from)), "r"(bytes), "r"(barrier) : "memory");
}

// Matrix descriptor of swizzled rows of 128 bytes; each group of eight rows has 1024 bytes.
__device__ __forceinline__ unsigned long long descriptor(unsigned address) {
  return (address & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// `fence_products` makes registers that were written before it visible to the wgmma after it. `commit_products` makes
// one group of all wgmma since its last call. `wait_products` waits until all groups but the newest PENDING have ended.
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Parts of a wgmma statement: TEN writes ten register numbers, FOUR and SIXTEEN name so many registers of the
// accumulators c[t], c[t + 1], ...
#define TEN(d) "%" #d "0,%" #d "1,%" #d "2,%" #d "3,%" #d "4,%" #d "5,%" #d "6,%" #d "7,%" #d "8,%" #d "9,"
#define FOUR(t) "+f"(c[t][0]), "+f"(c[t][1]), "+f"(c[t][2]), "+f"(c[t][3])
#define SIXTEEN(t) FOUR(t), FOUR(t + 1), FOUR(t + 2), FOUR(t + 3)
#define NAME(type) #type
#define TYPE(type) NAME(type)

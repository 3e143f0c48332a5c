// Primitives for the blocks of a cluster (Hopper and later): the cluster's barrier, and stores into one another's
// shared memory (distributed shared memory).
#pragma once
#include "common.cuh"

// Wait until all threads of the cluster have arrived. This orders no memory accesses, except the initialization of
// mbarriers, which has a fence of its own.
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Barrier of the cluster in two parts: what a thread stored before `arrive_at_cluster` is visible to all threads of the
// cluster after `wait_for_cluster`.
__device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Address of the variable at p in the shared memory of another block of the cluster.
__device__ __forceinline__ unsigned address_in(int block, const void* p) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(block));
  return there;
}

// Store to an address that `address_in` returned, aligned to the number of bytes stored.
__device__ __forceinline__ void store_at(unsigned to, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}
__device__ __forceinline__ void store_at(unsigned to, float a, float b) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ void store_at(unsigned to, const float (&v)[4]) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}
__device__ __forceinline__ void store_at(unsigned to, uint4 v) {
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

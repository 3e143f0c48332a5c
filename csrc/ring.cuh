// Ring of stages in shared memory: a pipeline through which a block of a GEMM streams its columns of the weight and x.
//
// A producer is a single thread that issues TMA copies. With PRODUCERS 32 (threads) one producer loads both operands;
// otherwise one loads the weight, and one in another warp loads x. The ring is filled with weights before the
// predecessor has ended. With PRODUCERS 64 this happens at a limited rate while the predecessor runs: if all weights
// were requested at once, the predecessor's own reads would queue after them. The mbarriers `full` and `empty` work as
// in small_batch_gemm.cu. The file that includes this one defines the contents of a stage: its `load_weight` and
// `load_x` issue the copies of one step.
#pragma once
#include "sums.cuh"

#ifndef READERS
#define READERS (MULTIPLIERS / 32)  // warps that read a stage
#endif

constexpr bool TWO_PRODUCERS = PRODUCERS > 32;
constexpr bool PACED = PRODUCERS == 64;
constexpr int AT_ONCE = PACED ? 1 : STAGES;  // stages requested when the block begins
constexpr int CYCLES_OF_KILOBYTE = 40;       // pace of later stages on a multiprocessor, faster than the memory's

struct Ring {
  Barrier full[STAGES], empty[STAGES];
  Barrier released;  // if PACED: completes when the predecessor has ended
};

__device__ __forceinline__ bool loads_weights() { return threadIdx.x == MULTIPLIERS; }
// True in the warp that loads weights at a limited rate; it does not wait for the predecessor with the other warps.
__device__ __forceinline__ bool fills_early() { return PACED && threadIdx.x / 32 == MULTIPLIERS / 32; }
__device__ __forceinline__ bool loads_x() { return threadIdx.x == MULTIPLIERS + (TWO_PRODUCERS ? 32 : 0); }

// Copy one step's columns of ROW_GROUPS tiles of a packed weight, 64 rows each, from tile `tile` on; the scales of
// their groups are copied after them.
template <int BYTES, int SCALES_BYTES>
__device__ __forceinline__ void copy_weight(
    unsigned char* to, const unsigned* weight, const unsigned* scales, int tile, int tiles, int steps, int begin,
    int step, Barrier* barrier) {
#pragma unroll
  for (int w = 0; w < ROW_GROUPS; ++w) {
    long long at = (long long)min(tile + w, tiles - 1) * steps + begin + step;  // after the weight's end: its last tile
    copy_bytes(to + w * BYTES, (const unsigned char*)weight + at * BYTES, BYTES, barrier);
    if (SCALES_BYTES)
      copy_bytes(
          to + ROW_GROUPS * BYTES + w * SCALES_BYTES, (const unsigned char*)scales + at * SCALES_BYTES, SCALES_BYTES,
          barrier);
  }
}

// Initialize the barriers and request the first stages of weights. All threads call it before they wait for the
// predecessor. That wait must be in the kernel's own file, because kernel/launch/compile.py looks for it there.
template <typename Load>
__device__ __forceinline__ void open(
    Ring& ring, Barrier& received, const TensorMap& x_map, int count, Load load_weight) {
  if (loads_weights()) {
    for (int s = 0; s < STAGES; ++s) init(&ring.full[s], TWO_PRODUCERS ? 2 : 1), init(&ring.empty[s], READERS);
    init(&ring.released, 1);
    init(&received, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int s = 0; s < min(AT_ONCE, count); ++s) load_weight(s, s);
    asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
    if (SPLIT > 1) expect(&received, SENT_BYTES);
  }
  __syncwarp();
  __syncthreads();
}

// Fill the ring up to the last step: the main loop of the producer warps. WEIGHT_BYTES: weight of a stage, if PACED.
template <int WEIGHT_BYTES = 0, typename Load, typename LoadX>
__device__ __forceinline__ void produce(Ring& ring, int count, Load load_weight, LoadX load_x) {
  give_registers();
  if (PACED && loads_weights()) {
    long long next = clock64();
    for (int s = AT_ONCE; s < min(STAGES, count); ++s) {
      next += (long long)CYCLES_OF_KILOBYTE * WEIGHT_BYTES * BLOCKS / 1024;
      while (clock64() < next && !completed(&ring.released, 0)) continue;
      load_weight(s, s);
    }
  }
  if (PACED && loads_x()) arrive(&ring.released);
  if (loads_x())
    for (int s = 0; s < min(STAGES, count); ++s) load_x(s, s);
  if (loads_weights() || loads_x())
    for (int step = STAGES, slot = 0, parity = 0; step < count; ++step) {
      wait(shared_address(ring.empty) + slot * 8, parity);
      if (loads_weights()) load_weight(step, slot);
      if (loads_x()) load_x(step, slot);
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }
  __syncwarp();
  if (SPLIT > 1) meet_cluster();
}

// Ring of stages in shared memory, through which blocks of a product get columns of the weight and of x.
//
// One or two producers, a thread each, ask for them: PRODUCERS 32, one for both; else one for the weight and one for x.
// The ring is filled with weights before the predecessor has ended, by PRODUCERS 64 little by little as long as it has
// not: what it still reads would wait behind all that is asked for at once. Its barriers are as in small_batch_gemm.cu.
// The file that uses it says what a stage is: `load_weight` and `load_x` ask for that of a step.
#pragma once
#include "sums.cuh"

#ifndef READERS
#define READERS (MULTIPLIERS / 32)  // warps that read a stage
#endif

constexpr bool TWO_PRODUCERS = PRODUCERS > 32;
constexpr bool PACED = PRODUCERS == 64;
constexpr int AT_ONCE = PACED ? 1 : STAGES;  // stages that are asked for when the block begins
constexpr int CYCLES_OF_KILOBYTE = 40;       // of a multiprocessor, between later stages: faster than the memory

struct Ring {
  Barrier full[STAGES], empty[STAGES];
  Barrier released;  // PACED: the predecessor has ended
};

__device__ __forceinline__ bool loads_weights() { return threadIdx.x == MULTIPLIERS; }
// The warp that only asks for weights, which it does not wait for the predecessor for.
__device__ __forceinline__ bool fills_early() { return PACED && threadIdx.x / 32 == MULTIPLIERS / 32; }
__device__ __forceinline__ bool loads_x() { return threadIdx.x == MULTIPLIERS + (TWO_PRODUCERS ? 32 : 0); }

// Ask for a step's columns of the block's rows of a packed weight, from tile `tile` of 64 rows on, and for the scales
// of their groups, behind them.
template <int BYTES, int SCALES_BYTES>
__device__ __forceinline__ void copy_weight(
    unsigned char* to, const unsigned* weight, const unsigned* scales, int tile, int tiles, int steps, int begin,
    int step, Barrier* barrier) {
#pragma unroll
  for (int w = 0; w < ROW_GROUPS; ++w) {
    long long at = (long long)min(tile + w, tiles - 1) * steps + begin + step;  // beyond the weight: any
    copy_bytes(to + w * BYTES, (const unsigned char*)weight + at * BYTES, BYTES, barrier);
    if (SCALES_BYTES)
      copy_bytes(
          to + ROW_GROUPS * BYTES + w * SCALES_BYTES, (const unsigned char*)scales + at * SCALES_BYTES, SCALES_BYTES,
          barrier);
  }
}

// Begin the kernel; all threads call it before they wait for the predecessor, which a kernel's own file does, since
// kernel/compile.py looks there.
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

// Fill the ring to the last step: the work of the warps that do not multiply. WEIGHT_BYTES: of a stage, if PACED.
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

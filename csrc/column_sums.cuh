// End of a product whose warpgroups have 64 rows of the weight each: the blocks of a cluster, which have multiplied
// parts of K, send their sums to one another, and each adds up those of its columns, in order. A block sends what another
// one adds up as one copy: thousands of small stores would take longer than the products.
//
// A lane's sums are as `mma` leaves them (mma.cuh): lane 5 of a warpgroup's warp 1 has sums[t] of y[8t + 2][17],
// y[8t + 3][17], y[8t + 2][25] and y[8t + 3][25], columns counted from the warpgroup's first.
// GATED: y [M, N / 2] = activation(gate) * up. Of each 16 rows of the weight the first 8 are gates, so that a lane has a
// gate and what it is for.
#pragma once
#include "hopper.cuh"

constexpr int CONSUMERS = WARPGROUPS * 128;
constexpr int WARPS = CONSUMERS / 32;
constexpr int THREADS = CONSUMERS + 32;
constexpr int BLOCK_N = WARPGROUPS * 64;
constexpr int TILES = M_MAX / 8;
constexpr int OUTPUTS = GATED ? BLOCK_N / 2 : BLOCK_N;
constexpr int OWN = OUTPUTS / SPLIT;               // columns of y that a block adds up
constexpr int SLOTS = BLOCK_N / SPLIT;             // rows of the weight that they come from
constexpr int STRIDE = M_MAX + 2;                  // of sums in shared memory, in floats
constexpr int TURNS = (M_MAX * OWN + CONSUMERS - 1) / CONSUMERS;
constexpr bool FETCHES = !GATED && TURNS <= 16;    // the residual before the sums are there

constexpr int PART = SLOTS * STRIDE;               // floats that a block sends to another one
constexpr int SENT_BYTES = SPLIT * PART * 4;       // that the barrier of a block waits for

__device__ __forceinline__ void meet_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// y of the rows of x from `first` on. `memory`: of the ring, which nobody needs any more here and where sums go to; the
// block's own lie there by [owner, row of the weight, row of x], and behind them (SPLIT > 1) those to be added up, by
// [split, row of the weight, row of x]. A column is multiplied by its scale, if there are some.
__device__ __forceinline__ void add_up(
    const float (*total)[4], float* memory, Barrier* received, int first, int rows, int N,
    const float* row_scales, const T* bias, const T* residual, T* out) {
  int split = blockIdx.x, thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  int width = GATED ? N / 2 : N, column = blockIdx.z * OUTPUTS + split * OWN;  // the first of this block's
  T fetched[FETCHES ? TURNS : 1] = {};
  if (FETCHES && residual)
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      int i = thread + turn * CONSUMERS, m = i / OWN, n = column + i % OWN;
      if (m < rows && n < width) fetched[turn] = residual[(long long)(first + m) * N + n];
    }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int output = (warp * 16 + (GATED ? 0 : h * 8)) / (GATED ? 2 : 1) + (lane >> 2), owner = output / OWN;
    int slot = GATED ? output % OWN * 2 + h : output % OWN;
    float* to = memory + owner * PART + slot * STRIDE + (lane & 3) * 2;
#pragma unroll
    for (int t = 0; t < TILES; ++t) *(Vec2*)(to + t * 8) = Vec2{total[t][h * 2], total[t][h * 2 + 1]};
  }
  if (SPLIT > 1) {
    float* here = memory + SPLIT * PART;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    meet_consumers();
    if (thread < SPLIT) send(address_in(thread, here + split * PART), memory + thread * PART, PART * 4, address_in(thread, received));
    wait(received, 0);
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    memory = here;
  } else {
    meet_consumers();
  }

#pragma unroll (FETCHES ? TURNS : 1)
  for (int turn = 0; turn < TURNS; ++turn) {
    int i = thread + turn * CONSUMERS, m = i / OWN, at = i % OWN, n = column + at;
    if (m >= rows || n >= width) continue;
    float y = 0.f, up = 0.f;
#pragma unroll
    for (int s = 0; s < SPLIT; ++s) {
      y += memory[s * PART + (GATED ? at * 2 : at) * STRIDE + m];
      if (GATED) up += memory[s * PART + (at * 2 + 1) * STRIDE + m];
    }
    if (row_scales) y *= row_scales[n];
    if (bias) y += to_float(bias[n]);
    if (GATED) {
      if (row_scales) up *= row_scales[n + width];
      if (bias) up += to_float(bias[n + width]);
      y = rounded(activation(rounded(y))) * rounded(up);
    }
    long long place = (long long)(first + m) * width + n;
    if (residual) y = rounded(y) + to_float(FETCHES ? fetched[turn] : residual[place]);
    out[place] = from_float<T>(y);
  }
  // The other blocks of the cluster read what this one sent: it stays until all of them are done.
  __syncwarp();
  if (SPLIT > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

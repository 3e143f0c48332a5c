// Split-K epilogue of the GEMMs whose warpgroups have 64 rows of the weight each. Each block of a cluster has
// multiplied a part of K. The blocks send their partial sums to one another through distributed shared memory. Then
// each block adds up the sums of some rows of x (`add_up_rows`), always in the order of the blocks. If x has fewer
// tiles of eight rows than the cluster has blocks, each block adds up some columns of y instead (`add_up_columns`). A
// block sends everything for another block in a single bulk copy, because thousands of small stores would take longer
// than the main loop.
//
// A lane's sums are laid out like the accumulators of `mma` (mma.cuh): lane 5 of a warpgroup's warp 1 has in sums[t]
// y[8t + 2][17], y[8t + 3][17], y[8t + 2][25] and y[8t + 3][25], columns counted from the warpgroup's first.
// GATED: y [M, N / 2] = activation(gate) * up. Of each 16 rows of the weight the first 8 are gates and the next 8 their
// ups, so that a lane has both.
// NORM: x is RMS-normed. The scale of a row is known only after the whole row has been read, so it is multiplied into
// the sums here.
#pragma once
#include "hopper.cuh"
#include "mma.cuh"

#ifndef NORM
#define NORM 0
#endif

constexpr int MULTIPLIERS = WARPGROUPS * 128;
constexpr int ROW_GROUPS = WARPGROUPS / K_PARTS;   // tiles of 64 rows of the weight; K_PARTS warpgroups share one
constexpr int CONSUMERS = ROW_GROUPS * 128;        // threads of the epilogue
constexpr int THREADS = MULTIPLIERS + PRODUCERS;
constexpr bool GIVES = PRODUCERS == 128;           // a producer warpgroup gives registers to the others
constexpr int BLOCK_N = ROW_GROUPS * 64;
constexpr int TILES = M_MAX / 8;
constexpr int OUTPUTS = GATED ? BLOCK_N / 2 : BLOCK_N;
constexpr bool BY_ROWS = TILES % SPLIT == 0;       // a block adds up rows of x, else columns of y

// Constants of add_up_rows.
constexpr int OWN_TILES = BY_ROWS ? TILES / SPLIT : 1;  // tiles of eight rows of x that a block adds up
constexpr int PITCH = OUTPUTS + 8;                 // values of a row of y in shared memory, without bank conflicts
constexpr int PIECES = OUTPUTS / 8;                // 16-byte pieces of a row of y
constexpr int COPIES = (OWN_TILES * 8 * PIECES + CONSUMERS - 1) / CONSUMERS;  // pieces that a thread copies

// Constants of add_up_columns.
constexpr int OWN_COLUMNS = OUTPUTS / SPLIT;       // columns of y that a block adds up
constexpr int SLOTS = BLOCK_N / SPLIT;             // rows of the weight that these columns come from
constexpr int STRIDE = M_MAX + 2;                  // floats of a row of the weight's sums in shared memory
constexpr int TURNS = (M_MAX * OWN_COLUMNS + CONSUMERS - 1) / CONSUMERS;

constexpr int SENT = BY_ROWS ? OWN_TILES * CONSUMERS * 4 : SLOTS * STRIDE;  // floats that a block sends to another one
constexpr int SENT_BYTES = SPLIT * (SENT + (NORM ? M_MAX : 0)) * 4;         // bytes that a block receives

__device__ __forceinline__ void meet_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// Scale of each row of x: that of the RMSNorm if NORM, else 1.
struct RowScale {
  float* squares;  // sums of squares by row in shared memory: [SPLIT, M_MAX] of the cluster's blocks, then the own ones
  int K;
  float eps;

  __device__ __forceinline__ float* own() const { return squares + (SPLIT > 1 ? SPLIT * M_MAX : 0); }
  __device__ __forceinline__ float operator()(int m) const {
    if (!NORM) return 1.f;
    float total = 0.f;
#pragma unroll
    for (int s = 0; s < SPLIT; ++s) total += squares[s * M_MAX + m];
    return rsqrtf(total / K + eps);
  }
};

// Send each block of the cluster its part of the sums in `memory`; wait until this block's parts have arrived `here`.
__device__ __forceinline__ void exchange(
    float* memory, float* here, Barrier* received, const RowScale& row_scale, int split, int thread) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  meet_consumers();
  if (thread < SPLIT)
    send(address_in(thread, here + split * SENT), memory + thread * SENT, SENT * 4, address_in(thread, received));
  if (NORM && thread < SPLIT)
    send(address_in(thread, row_scale.squares + split * M_MAX), row_scale.own(), M_MAX * 4,
         address_in(thread, received));
  wait(received, 0);
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Store one 8 x 8 matrix, or two, of which a lane has column lane / 4 in rows 2 (lane % 4) and the next one. Lanes 0 to
// 7 pass the addresses of the rows of the first matrix, lanes 8 to 15 those of the second.
__device__ __forceinline__ void store_transposed(void* row, unsigned a) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(shared_address(row)), "r"(a)
               : "memory");
}
__device__ __forceinline__ void store_transposed(void* row, unsigned a, unsigned b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)), "r"(a),
               "r"(b)
               : "memory");
}

__device__ __forceinline__ void give_registers() {
  if (GIVES) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(WARPGROUPS == 3 ? 32 : 24));
}
__device__ __forceinline__ void take_registers() {
  if (GIVES) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WARPGROUPS == 3 ? 160 : 240));
}

// Scale and bias of a lane's two rows of the weight. They are loaded early, since no predecessor writes them.
struct Factors {
  float scale[2], bias[2];
  __device__ __forceinline__ Factors(const float* row_scales, const T* biases, int N) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int lane = threadIdx.x & 31, first = blockIdx.z * BLOCK_N + (threadIdx.x >> 5) * 16;
      int n = min(GATED ? first / 2 + (lane >> 2) + h * (N / 2) : first + (lane >> 2) + h * 8, N - 1);
      scale[h] = row_scales ? row_scales[n] : 1.f, bias[h] = biases ? to_float(biases[n]) : 0.f;
    }
  }
  __device__ __forceinline__ float apply(float sum, int h) const { return sum * scale[h] + bias[h]; }
};

// Add up and write this block's share of y for the rows of x from `first` on. `memory`, where the ring was, is free now
// in all blocks. It is reused for the block's own sums [owner, tile of eight rows, thread]; if SPLIT > 1, the received
// sums [split, tile, thread] follow them.
__device__ __forceinline__ void add_up_rows(
    float (*sums)[4], float* memory, Barrier* received, int first, int M, int N, const Factors& factors,
    const RowScale& row_scale, const T* residual, T* out) {
  int split = blockIdx.x, thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  int width = GATED ? N / 2 : N, column = blockIdx.z * OUTPUTS;
  first += split * OWN_TILES * 8;
  // Row m and column n of this thread's i-th piece of y; false if there is none.
  auto place = [&](int i, int& m, int& n) {
    int piece = thread + i * CONSUMERS;
    m = piece / PIECES, n = piece % PIECES * 8;
    return m < OWN_TILES * 8 && first + m < M && column + n < width;
  };
  constexpr bool FETCHES = COPIES <= 4;  // the residual is loaded before the sums arrive: it fits registers
  Vec<8> fetched[FETCHES ? COPIES : 1];
  if (FETCHES && residual)
#pragma unroll
    for (int i = 0, m, n; i < COPIES; ++i)
      if (place(i, m, n))
        fetched[FETCHES ? i : 0] = *(const Vec<8>*)(residual + (long long)(first + m) * width + column + n);
  if (SPLIT > 1) {
#pragma unroll
    for (int t = 0; t < TILES; ++t) *(float4*)(memory + (t * CONSUMERS + thread) * 4) = *(const float4*)sums[t];
    float* here = memory + SPLIT * SENT;
    exchange(memory, here, received, row_scale, split, thread);
#pragma unroll
    for (int t = 0; t < OWN_TILES; ++t) {
      float4 v = {};
#pragma unroll
      for (int s = 0; s < SPLIT; ++s) {
        float4 part = *(const float4*)(here + s * SENT + (t * CONSUMERS + thread) * 4);
        v.x += part.x, v.y += part.y, v.z += part.z, v.w += part.w;
      }
      sums[t][0] = v.x, sums[t][1] = v.y, sums[t][2] = v.z, sums[t][3] = v.w;
    }
    memory = here;
  }
  meet_consumers();
  T* lines = (T*)memory;
  unsigned gated[OWN_TILES];
#pragma unroll
  for (int t = 0; t < OWN_TILES; ++t) {
    int m = (split * OWN_TILES + t) * 8 + (lane & 3) * 2;
    float even = row_scale(m), odd = row_scale(m + 1);
    float a = factors.apply(sums[t][0] * even, 0), b = factors.apply(sums[t][1] * odd, 0);
    float c = factors.apply(sums[t][2] * even, 1), d = factors.apply(sums[t][3] * odd, 1);
    if (GATED)
      gated[t] = pack(rounded(activation(rounded(a))) * rounded(c), rounded(activation(rounded(b))) * rounded(d));
    else
      store_transposed(lines + (t * 8 + (lane & 7)) * PITCH + warp * 16 + (lane & 8), pack(a, b), pack(c, d));
  }
  if (GATED)
#pragma unroll
    for (int t = 0; t < OWN_TILES; t += 2) {
      T* to = lines + (t * 8 + (lane & 15)) * PITCH + warp * 8;
      if (t + 1 < OWN_TILES) store_transposed(to, gated[t], gated[t + 1 < OWN_TILES ? t + 1 : t]);
      else store_transposed(to, gated[t]);
    }
  meet_consumers();
#pragma unroll
  for (int i = 0, m, n; i < COPIES; ++i) {
    if (!place(i, m, n)) continue;
    Vec<8> y = *(const Vec<8>*)(lines + m * PITCH + n);
    long long to = (long long)(first + m) * width + column + n;
    if (residual) {
      Vec<8> before = FETCHES ? fetched[FETCHES ? i : 0] : *(const Vec<8>*)(residual + to);
#pragma unroll
      for (int j = 0; j < 8; ++j) y.v[j] = from_float<T>(to_float(y.v[j]) + to_float(before.v[j]));
    }
    *(Vec<8>*)(out + to) = y;
  }
  // Bulk copies to other blocks read this block's memory: it stays until all blocks are done.
  __syncwarp();
  if (SPLIT > 1) wait_for_cluster();
}

// Add up and write this block's share of the columns of y, where add_up_rows takes a share of the rows. `memory` is
// used for the block's own sums [owner, row of the weight, row of x], followed by the received ones [split, row of the
// weight, row of x].
__device__ __forceinline__ void add_up_columns(
    const float (*total)[4], float* memory, Barrier* received, int first, int rows, int N,
    const float* row_scales, const T* bias, const RowScale& row_scale, const T* residual, T* out) {
  int split = blockIdx.x, thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  int width = GATED ? N / 2 : N, column = blockIdx.z * OUTPUTS + split * OWN_COLUMNS;  // the first of this block's
  constexpr bool FETCHES = !GATED && TURNS <= 16;  // the residual is loaded early, as in add_up_rows
  T fetched[FETCHES ? TURNS : 1] = {};
  if (FETCHES && residual)
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      int i = thread + turn * CONSUMERS, m = i / OWN_COLUMNS, n = column + i % OWN_COLUMNS;
      if (m < rows && n < width) fetched[turn] = residual[(long long)(first + m) * N + n];
    }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int output = (warp * 16 + (GATED ? 0 : h * 8)) / (GATED ? 2 : 1) + (lane >> 2), owner = output / OWN_COLUMNS;
    int slot = GATED ? output % OWN_COLUMNS * 2 + h : output % OWN_COLUMNS;
    float* to = memory + owner * SENT + slot * STRIDE + (lane & 3) * 2;
#pragma unroll
    for (int t = 0; t < TILES; ++t) *(Vec2*)(to + t * 8) = Vec2{total[t][h * 2], total[t][h * 2 + 1]};
  }
  float* here = memory + SPLIT * SENT;
  exchange(memory, here, received, row_scale, split, thread);
  memory = here;

#pragma unroll (FETCHES ? TURNS : 1)
  for (int turn = 0; turn < TURNS; ++turn) {
    int i = thread + turn * CONSUMERS, m = i / OWN_COLUMNS, at = i % OWN_COLUMNS, n = column + at;
    if (m >= rows || n >= width) continue;
    float y = 0.f, up = 0.f;
#pragma unroll
    for (int s = 0; s < SPLIT; ++s) {
      y += memory[s * SENT + (GATED ? at * 2 : at) * STRIDE + m];
      if (GATED) up += memory[s * SENT + (at * 2 + 1) * STRIDE + m];
    }
    float scale = row_scale(m);
    y *= scale, up *= scale;
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
  // Bulk copies to other blocks read this block's memory: it stays until all blocks are done.
  __syncwarp();
  wait_for_cluster();
}

// Add up the sums of the K_PARTS warpgroups that have the same rows of the weight; returns true in the warpgroup that
// gets the total.
__device__ __forceinline__ bool add_parts(float (*sums)[4], float* memory, int part) {
  int thread = threadIdx.x % CONSUMERS;
  asm volatile("bar.sync 2, %0;" ::"n"(MULTIPLIERS) : "memory");  // the ring is read
  if (part > 0)
#pragma unroll
    for (int t = 0; t < TILES; ++t)
      *(float4*)(memory + (((part - 1) * TILES + t) * CONSUMERS + thread) * 4) = *(const float4*)sums[t];
  asm volatile("bar.sync 2, %0;" ::"n"(MULTIPLIERS) : "memory");
  if (part == 0)
#pragma unroll
    for (int p = 0; p < K_PARTS - 1; ++p)
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        float4 v = *(const float4*)(memory + ((p * TILES + t) * CONSUMERS + thread) * 4);
        sums[t][0] += v.x, sums[t][1] += v.y, sums[t][2] += v.z, sums[t][3] += v.w;
      }
  return part == 0;
}

// Run the epilogue. `adds`: this thread has the sums over all columns that the block has multiplied; other threads
// return at once.
__device__ __forceinline__ void add_up(
    bool adds, float (*sums)[4], float* memory, Barrier* received, int first, int M, int N, const Factors& factors,
    const float* row_scales, const T* bias, const T* residual, T* out, const RowScale& row_scale = {}) {
  if (SPLIT > 1) meet_cluster();
  if (!adds) return;
  if constexpr (BY_ROWS)
    add_up_rows(sums, memory, received, first, M, N, factors, row_scale, residual, out);
  else
    add_up_columns(
        sums, memory, received, first, min(M - first, M_MAX), N, row_scales, bias, row_scale, residual, out);
}

// Persistent FP8 GEMM on Hopper: y [M, N] = x [M, K] @ weight [N, K]^T. x and the weight are e4m3 with float32 scales:
// x has a scale for each 128 columns of a row, the weight one for each block of 128 rows and columns. y is T.
//
// A tile of y has x_rows rows of x, at most BLOCK_M, and BLOCK_N rows of the weight. A stage of the ring holds one line
// of both operands: 128 columns of K. Each of the three consumer warpgroups multiplies 64 rows of x by wgmma. The
// tensor cores accumulate FP8 products with fewer bits than float32, so the sums of each line, times its scales, are
// added to float32 sums in registers. While one warpgroup does so, the tensor cores work for the others. x is the left
// operand, so the values of a lane belong to two rows of x, and it needs the scales of these two rows only. The fourth
// warpgroup is the producer; it gives its registers to the consumers.
//
// A cluster of two blocks computes a pair of tiles with the same rows of x; each block loads half of these rows into
// both blocks by multicast. In each wave every cluster computes one pair. The last wave may have fewer pairs than there
// are clusters. Its pairs, from index `whole` on, are then divided along K among `splits` clusters each (split-K),
// which exchange their sums through global memory.
//
// GATED: y [M, N / 2] = activation(gate) * up. A tile then has 64 rows of gates, followed by the 64 rows of their ups.
// N and K must be multiples of 128, K at most 32,768.
#include "mma.cuh"
#define RIGHT_ROWS 128
#include "fp8_product.cuh"

constexpr int WARPGROUPS = 3;                // warpgroups that multiply
constexpr int CONSUMERS = WARPGROUPS * 128;  // threads that multiply
constexpr int BLOCK_M = WARPGROUPS * 64;
constexpr int BLOCK_N = RIGHT_ROWS;
constexpr int CLUSTER = 2;                   // blocks per cluster

// A stage: x [BLOCK_M, LINE], the weight [BLOCK_N, LINE], the scales of x [BLOCK_M].
constexpr int W_AT = BLOCK_M * LINE, S_AT = W_AT + BLOCK_N * LINE;
constexpr int STAGE = (S_AT + BLOCK_M * 4 + 1023) / 1024 * 1024;
constexpr int MAX_LINES = (1 << 15) / LINE;  // most lines of K
constexpr int HALVES = GATED ? 2 : 1;        // parts of a tile's rows of the weight that have scales of their own

// A lane's sums of its warpgroup's 64 rows of x with the tile's rows of the weight, as wgmma lays them out. Each warp
// has 16 of the rows. With g = lane / 4 and p = lane % 4, sums[t] has columns 8t + 2p and 8t + 2p + 1 of row g, then of
// row g + 8.
constexpr int COLUMN_TILES = BLOCK_N / 8;
using Sums = float[COLUMN_TILES][4];

// A warp exchanges and stores its sums by quarters: 16 rows of x and 32 rows of the weight, WIDTH columns of y.
constexpr int QUARTERS = 4;
constexpr int WIDTH = GATED ? 16 : 32;
constexpr int COPIES = WIDTH / 16;           // copies of 16 bytes with which a lane stores its part of a quarter
constexpr int PITCH = WIDTH + 8;             // values of a quarter's row in shared memory, without bank conflicts

extern __shared__ __align__(1024) unsigned char memory[];  // the ring

// Index of the i-th column tile of a quarter; if GATED, two of gates, then the two of their ups.
__device__ __forceinline__ constexpr int column_tile(int quarter, int i) {
  return GATED ? i / 2 * 8 + quarter * 2 + i % 2 : quarter * 4 + i;
}

// Work of a block in one wave: a tile, or a part of a tile's lines.
struct Work {
  int x;          // the tile's first row of x
  int w;          // index of its BLOCK_N rows of the weight
  int line, end;  // lines to multiply
  bool divided;   // true: the tile's lines are divided among `splits` clusters
  int split;      // index of the block's cluster among these
  int slot;       // index of the tile among all divided tiles
};

struct Schedule {
  int x_rows, x_tiles, w_pairs, lines, whole, splits;

  __device__ __forceinline__ Schedule(int M, int x_rows, int N, int K, int whole, int splits)
      : x_rows(x_rows), x_tiles((M + x_rows - 1) / x_rows), w_pairs((N / BLOCK_N + CLUSTER - 1) / CLUSTER),
        lines(K / LINE), whole(whole), splits(splits) {}

  // Find this block's work of a wave; false if there is none.
  __device__ __forceinline__ bool find(int wave, Work& work) const {
    int clusters = gridDim.x / CLUSTER, pair = wave * clusters + blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
    work.divided = splits > 1 && pair >= whole;
    work.split = 0, work.slot = 0, work.line = 0, work.end = lines;
    if (work.divided) {
      int part = pair - whole;
      pair = whole + part / splits;
      work.split = part % splits;
      work.line = lines * work.split / splits, work.end = lines * (work.split + 1) / splits;
      work.slot = (pair - whole) * CLUSTER + rank;
    }
    work.x = pair % x_tiles * x_rows;
    work.w = pair / x_tiles * CLUSTER + rank;
    return pair < x_tiles * w_pairs;
  }
};

// Iterator over all lines that a block multiplies, wave after wave.
struct Lines {
  const Schedule& schedule;
  Work work;
  int wave = 0;
  bool any;

  __device__ __forceinline__ Lines(const Schedule& schedule) : schedule(schedule), any(schedule.find(0, work)) {}
  __device__ __forceinline__ void next() {
    if (++work.line == work.end) any = schedule.find(++wave, work);
  }
};

// Copy a box of a matrix to the same shared-memory address in both blocks of the cluster (multicast). In each block the
// mbarrier at the address of `barrier` counts the bytes.
__device__ __forceinline__ void copy_box_to_both(
    void* to, const TensorMap& map, int column, int row, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;"
      ::"r"(shared_address(to)), "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"((short)3)
      : "memory");
}

// Arrive at a barrier of any block of the cluster, by its address, in a lane that is `here`.
__device__ __forceinline__ void arrive_in_cluster(unsigned barrier, bool here) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared::cluster.b64 _, [%0];}"
               ::"r"(barrier), "r"((int)here) : "memory");
}

// Load a scale from shared memory, not later than where this stands: while wgmma works.
__device__ __forceinline__ float load_scale(unsigned from) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from) : "memory");
  return v;
}

// Load from L2, where other multiprocessors stored, past L1.
__device__ __forceinline__ float4 load_sums(const float4* from) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from)
               : "memory");
  return v;
}

// Store four 8 x 8 matrices, of each of which a lane has row lane / 4, columns 2 (lane % 4) and the next one; lanes 8i
// to 8i + 7 pass the addresses of the rows of the i-th.
__device__ __forceinline__ void store_matrices(void* row, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(shared_address(row)), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Sums of eight values of T with eight others.
__device__ __forceinline__ uint4 add(uint4 a, uint4 b) {
  auto sum = [](unsigned a, unsigned b) { return pack(low_of(a) + low_of(b), high_of(a) + high_of(b)); };
  return make_uint4(sum(a.x, b.x), sum(a.y, b.y), sum(a.z, b.z), sum(a.w, b.w));
}

// Barrier of the threads of a warpgroup.
__device__ __forceinline__ void meet_warpgroup() {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128) : "memory");
}

// Wait until this warpgroup has stored its sums in all clusters that divide a tile. These run at the same time, since
// there are no more clusters than multiprocessors hold. The last one to leave sets the counter to 0 again.
__device__ __forceinline__ void meet_splits(int* counter, int splits) {
  meet_warpgroup();
  if (threadIdx.x % 128 == 0) {
    __threadfence();
    atomicAdd(counter, 1);
    int seen = 0;
    while (seen < splits) asm volatile("ld.global.acquire.gpu.b32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    if (atomicAdd(counter, 1) == 2 * splits - 1) atomicExch(counter, 0);
    __threadfence();
  }
  meet_warpgroup();
}

// True if this block stores this quarter of its tile. Clusters that divide a tile among them take the quarters in turn.
__device__ __forceinline__ bool owns(const Work& work, int quarter, int splits) {
  return !work.divided || quarter % splits == work.split;
}

// Add up the sums of a divided tile: write the quarters that other clusters own to `partial`, and add what they wrote
// to this block's own quarters, always in the same order. `partial` is [slots, splits, QUARTERS, 4, CONSUMERS] float4.
__device__ __forceinline__ void exchange_sums(
    Sums& sums, const Work& work, int splits, float4* partial, int* counters) {
  partial += (long long)work.slot * splits * QUARTERS * 4 * CONSUMERS + threadIdx.x;
  auto place = [&](int split, int q, int i) { return partial + ((split * QUARTERS + q) * 4 + i) * CONSUMERS; };
#pragma unroll
  for (int q = 0; q < QUARTERS; ++q)
    if (!owns(work, q, splits))
#pragma unroll
      for (int i = 0; i < 4; ++i) *place(work.split, q, i) = *(const float4*)sums[column_tile(q, i)];
  meet_splits(counters + work.slot * WARPGROUPS + threadIdx.x / 128, splits);
#pragma unroll
  for (int q = 0; q < QUARTERS; ++q) {
    if (!owns(work, q, splits)) continue;
#pragma unroll 1
    for (int split = 0; split < splits; ++split) {
      if (split == work.split) continue;
      float4 others[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) others[i] = load_sums(place(split, q, i));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* sum = sums[column_tile(q, i)];
        sum[0] += others[i].x, sum[1] += others[i].y, sum[2] += others[i].z, sum[3] += others[i].w;
      }
    }
  }
}

// The epilogue of a warp's 16 rows of a tile, from `row` on.
struct Epilogue {
  const Work& work;
  int row, splits;
  const T* bias;
  const T* residual;
  T* out;
  int end, N;       // end of the tile's rows of y; columns of the product
  uint4 before[QUARTERS][COPIES];  // values of the residual

  // Find a lane's copy of a quarter in y and in the warp's staging memory; false if y has no such values.
  __device__ __forceinline__ bool place(int quarter, int copy, long long& in_y, int& in_staging) const {
    int piece = threadIdx.x % 32 + copy * 32, m = piece / (WIDTH / 8), n = piece % (WIDTH / 8) * 8;
    in_y = (long long)(work.x + row + m) * (N / HALVES) + work.w * (BLOCK_N / HALVES) + quarter * WIDTH + n;
    in_staging = m * PITCH + n;
    return owns(work, quarter, splits) && work.w * BLOCK_N < N && work.x + row + m < end;
  }

  __device__ __forceinline__ void load_residual() {
#pragma unroll
    for (int q = 0; q < QUARTERS; ++q)
#pragma unroll
      for (int copy = 0; copy < COPIES; ++copy) {
        long long in_y;
        int in_staging;
        if (residual && place(q, copy, in_y, in_staging)) before[q][copy] = *(const uint4*)(residual + in_y);
      }
  }

  __device__ __forceinline__ void store(const Sums& sums, T* staging) const {
    int lane = threadIdx.x % 32, column = work.w * (BLOCK_N / HALVES);
#pragma unroll
    for (int q = 0; q < QUARTERS; ++q) {
      if (!owns(work, q, splits)) continue;
      float v[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int t = column_tile(q, i), n = t * 8 + lane % 4 * 2;
        n = GATED && t >= COLUMN_TILES / 2 ? N / 2 + column + n - BLOCK_N / 2 : column + n;
        bool biased = bias && work.w * BLOCK_N < N;
        float even = biased ? to_float(bias[n]) : 0.f, odd = biased ? to_float(bias[n + 1]) : 0.f;
        v[i][0] = sums[t][0] + even, v[i][1] = sums[t][1] + odd;
        v[i][2] = sums[t][2] + even, v[i][3] = sums[t][3] + odd;
      }
      if (GATED)
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) v[i][j] = rounded(activation(rounded(v[i][j]))) * rounded(v[2 + i][j]);
#pragma unroll
      for (int i = 0; i < 2 * COPIES; i += 2)
        store_matrices(staging + lane % 16 * PITCH + i * 8 + lane / 16 * 8, pack(v[i][0], v[i][1]),
                       pack(v[i][2], v[i][3]), pack(v[i + 1][0], v[i + 1][1]), pack(v[i + 1][2], v[i + 1][3]));
      __syncwarp();
#pragma unroll
      for (int copy = 0; copy < COPIES; ++copy) {
        long long in_y;
        int in_staging;
        if (!place(q, copy, in_y, in_staging)) continue;
        uint4 y = *(const uint4*)(staging + in_staging);
        *(uint4*)(out + in_y) = residual ? add(y, before[q][copy]) : y;
      }
      __syncwarp();
    }
  }
};

// x_scales is [K / 128, x_stride], w_scales [N / 128, K / 128]; x_stride is a multiple of 4. partial is that of
// exchange_sums; counters are zeros, one for each slot and warpgroup.
extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) fp8_persistent_gemm(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* x_scales,
    int x_stride, const float* w_scales, OPTIONAL const T* bias, OPTIONAL const T* residual, T* out,
    OPTIONAL float* partial, int* counters, int M, int x_rows, int N, int K, int whole, int splits) {
  __shared__ Barrier full[STAGES], empty[STAGES];
  __shared__ float w_scale_of[WARPGROUPS][2][HALVES][MAX_LINES];  // scales of this wave's tile and the next one's
  __shared__ __align__(16) T staging[CONSUMERS / 32][16 * PITCH];
  int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, rank = blockIdx.x % CLUSTER;
  Schedule schedule(M, x_rows, N, K, whole, splits);
  auto scale_bytes = [&](const Work& work) { return min(x_rows, x_stride - work.x) * (int)sizeof(float); };

  auto load_weight = [&](const Work& work, int slot) {
    expect(&full[slot], (x_rows + BLOCK_N) * LINE + scale_bytes(work));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = GATED ? work.w * 64 + half * (N / 2) : work.w * 128 + half * 64;
      copy_box(memory + slot * STAGE + W_AT + half * 64 * LINE, w_map, work.line * LINE, row, &full[slot]);
    }
  };
  auto load_x = [&](const Work& work, int slot) {
    unsigned char* to = memory + slot * STAGE;
    int first = rank * (x_rows / CLUSTER);
    copy_box_to_both(to + first * LINE, x_map, work.line * LINE, work.x + first, &full[slot]);
    copy_bytes(to + S_AT, x_scales + (long long)work.line * x_stride + work.x, scale_bytes(work), &full[slot]);
  };

  if (thread == CONSUMERS) {
    for (int s = 0; s < STAGES; ++s) init(&full[s], 1), init(&empty[s], CLUSTER * CONSUMERS / 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    Lines lines(schedule);
    for (int s = 0; s < STAGES && lines.any; ++s, lines.next()) load_weight(lines.work, s);
  }
  __syncwarp();
  meet_cluster();
  wait_for_predecessor();
  start_successor();

  if (warp >= CONSUMERS / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (thread == CONSUMERS) {
      Lines lines(schedule);
      for (int s = 0; s < STAGES && lines.any; ++s, lines.next()) load_x(lines.work, s);
      for (int slot = 0, parity = 0; lines.any; lines.next()) {
        wait(&empty[slot], parity);
        load_weight(lines.work, slot);
        load_x(lines.work, slot);
        if (++slot == STAGES) slot = 0, parity ^= 1;
      }
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    int group = warp >> 2, row = warp * 16;  // row: the warp's first among the tile's rows of x
    // Copy the weight's scales of a wave to shared memory, one wave early, so that the main loop does not wait for
    // them.
    auto copy_scales = [&](const Work& work, int wave) {
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        int block = GATED ? (work.w * 64 + half * (N / 2)) / 128 : work.w;
        const float* from = w_scales + (long long)min(block, N / 128 - 1) * schedule.lines;
#pragma unroll 1
        for (int line = work.line + thread % 128; line < work.end; line += 128)
          asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                       ::"r"(shared_address(&w_scale_of[group][wave % 2][half][line - work.line])), "l"(from + line)
                       : "memory");
      }
    };
    // Addresses in the first stage of the ring; those in descriptors are uniform across the warp.
    unsigned x_scales_at = shared_address(memory) + S_AT + (row + lane / 4) * 4;
    unsigned w_scales_at = shared_address(w_scale_of[group]);
    unsigned fulls = shared_address(full), empties = address_in(lane % CLUSTER, empty);
    unsigned x = (unsigned)descriptor(shared_address(memory) + group * 64 * LINE);
    unsigned w = (unsigned)descriptor(shared_address(memory) + W_AT);
    x = __shfl_sync(~0u, x, 0), w = __shfl_sync(~0u, w, 0);
    constexpr unsigned long long HIGH = 1ull << 62 | 64ull << 32;  // half of a descriptor
    Work work, next;
    bool any = schedule.find(0, work);
    if (any) copy_scales(work, 0);
    for (int wave = 0, slot = 0, parity = 0; any; ++wave) {
      asm volatile("cp.async.wait_all;" ::: "memory");
      meet_warpgroup();
      any = schedule.find(wave + 1, next);
      if (any) copy_scales(next, wave + 1);
      unsigned w_scale_at = w_scales_at + wave % 2 * (int)sizeof(w_scale_of[0][0]);
      Sums total = {};
      for (int count = work.end - work.line; count > 0; --count, w_scale_at += 4) {
        wait(fulls + slot * 8, parity);
        unsigned long long a = HIGH | (x + slot * (STAGE / 16)), b = HIGH | (w + slot * (STAGE / 16));
        Sums acc;
        fence_products();
        multiply_add<false>(acc, a, b);
#pragma unroll
        for (int k = 32; k < LINE; k += 32) multiply_add<true>(acc, a + k / 16, b + k / 16);
        commit_products();
        float scale[HALVES][2];  // for the lane's two rows of x
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            scale[half][h] = load_scale(x_scales_at + slot * STAGE + h * 8 * 4)
                * load_scale(w_scale_at + half * MAX_LINES * 4);
        wait_products<0>();
        arrive_in_cluster(empties + slot * 8, lane < CLUSTER);
#pragma unroll
        for (int t = 0; t < COLUMN_TILES; ++t) {
          const float(&by)[2] = scale[t * HALVES / COLUMN_TILES];
          total[t][0] += by[0] * acc[t][0], total[t][1] += by[0] * acc[t][1];
          total[t][2] += by[1] * acc[t][2], total[t][3] += by[1] * acc[t][3];
        }
        if (++slot == STAGES) slot = 0, parity ^= 1;
      }
      Epilogue epilogue{work, row, splits, bias, residual, out, min(M, work.x + x_rows), N};
      epilogue.load_residual();
      if (work.divided) exchange_sums(total, work, splits, (float4*)partial, counters);
      epilogue.store(total, staging[warp]);
      work = next;
    }
    __syncwarp();
  }
  meet_cluster();  // the other block may still arrive at this one's barriers
}

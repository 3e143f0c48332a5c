// FP8 GEMM on Hopper: y [M, N] = x [M, K] @ weight [N, K]^T. x and the weight are e4m3 with float32 scales; y is T.
// GROUP 128: x has a scale for each 128 columns of a row, the weight one for each block of 128 rows and columns.
// GROUP 0: x and the weight have one scale per row.
//
// Blocks, clusters (split-K), warpgroups and the ring are as in quantized_gemm.cu. The weight is not converted: both
// operands of wgmma are FP8 matrices in the ring. A stage consists of lines, swizzled matrices of 128 columns. The
// tensor cores accumulate FP8 products with fewer bits than float32. Therefore the sums of each line are added to
// float32 sums in registers; with GROUP 128 they are multiplied by the line's scales first, with GROUP 0 the scales are
// applied once, after the main loop. A warpgroup waits for its own wgmma, while the other warpgroups keep the tensor
// cores busy.
//
// K must be a multiple of BLOCK_K and at most 32,768, and BLOCK_K a multiple of 128. GATED: see sums.cuh; N / 2 must
// then be a multiple of 64, so that the gates of a warpgroup's rows share one block of scales, and their ups another.
#include "ring.cuh"
#include "fp8_product.cuh"

constexpr int LINES = BLOCK_K / LINE;              // lines of a stage
constexpr int PART_LINES = LINES / K_PARTS;        // lines of a stage that a warpgroup multiplies: 1 or 2
// True if registers suffice to load the scales of x before waiting for the products.
constexpr bool AHEAD_OF_PRODUCTS = GROUP && PART_LINES * TILES <= 8;
constexpr int X_LINE = M_MAX * LINE;               // bytes
constexpr int W_LINE = BLOCK_N * LINE;
constexpr int S_LINE = GROUP ? M_MAX * 4 : 0;
constexpr int W_AT = LINES * X_LINE, S_AT = W_AT + LINES * W_LINE;  // bytes of x in a stage
constexpr int STAGE = (S_AT + LINES * S_LINE + 1023) / 1024 * 1024;

extern __shared__ __align__(1024) unsigned char memory[];  // the ring; then the sums

// Copy rows of a gated weight, viewed as [N / 16, 2, 8, K]: eight gates, then the eight ups that belong to them.
__device__ __forceinline__ void copy_groups(void* to, const TensorMap& map, int column, int group, Barrier* barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
               "[%1, {%2, %3, %3, %4}], [%5];"
               ::"r"(shared_address(to)), "l"(&map), "r"(column), "r"(0), "r"(group), "r"(shared_address(barrier))
               : "memory");
}

// Scales of the weight for all lines of a thread block: one per line for each 64 rows of the weight; a gated weight has
// one for the gates and one for the ups. They are copied before the predecessor ends, because loads from global memory
// in the main loop would stall it.
constexpr int MOST_LINES = (1 << 15) / LINE / SPLIT + LINES;
constexpr int HALVES = GATED ? 2 : 1;
struct BlockScales { float of[ROW_GROUPS][HALVES][MOST_LINES]; };

__device__ __forceinline__ void copy_scales(
    BlockScales& to, const float* w_scales, int first_line, int count, int lines, int N) {
  for (int line = threadIdx.x; line < count; line += MULTIPLIERS)
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; ++g)
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        int row = min(blockIdx.z * BLOCK_N + g * 64, N - 1);
        long long block = (GATED ? (row + half * N) / 2 : row) / 128;
        const float* from = w_scales + block * lines + first_line + line;
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(&to.of[g][half][line])), "l"(from)
                     : "memory");
      }
}

// With GROUP 128, x_scales is [K / 128, x_stride] and w_scales [N / 128, K / 128]. With GROUP 0 they are [x_stride] and
// [N]. x_stride is a multiple of M_MAX.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fp8_gemm(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* x_scales,
    int x_stride, const float* w_scales, OPTIONAL const T* bias, OPTIONAL const T* residual, T* out, int M, int x_rows,
    int N, int K) {
  __shared__ Ring ring;
  __shared__ Barrier received;
  __shared__ __align__(16) float row_scales[GROUP ? 4 : M_MAX];  // of x
  __shared__ BlockScales block_scales;
  int split = blockIdx.x, thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  int first = blockIdx.y * x_rows;  // first row of x
  M = min(M, first + x_rows);       // where the block's rows of x end
  int x_bytes = LINES * (x_rows * LINE + S_LINE);  // bytes of x in a stage
  int steps = K / BLOCK_K, begin = steps * split / SPLIT, count = steps * (split + 1) / SPLIT - begin;

  auto load_weight = [&](int step, int slot) {
    unsigned char* to = memory + slot * STAGE + W_AT;
    expect(&ring.full[slot], LINES * W_LINE + (TWO_PRODUCERS ? 0 : x_bytes));
#pragma unroll
    for (int l = 0; l < LINES; ++l) {
      int column = (begin + step) * BLOCK_K + l * LINE, row = blockIdx.z * BLOCK_N;
      if (GATED) copy_groups(to + l * W_LINE, w_map, column, row / 16, &ring.full[slot]);
      else copy_box(to + l * W_LINE, w_map, column, row, &ring.full[slot]);
    }
  };
  auto load_x = [&](int step, int slot) {
    unsigned char* to = memory + slot * STAGE;
    if (TWO_PRODUCERS) expect(&ring.full[slot], x_bytes);
#pragma unroll
    for (int l = 0; l < LINES; ++l) {
      int line = (begin + step) * LINES + l;
      copy_box(to + l * X_LINE, x_map, line * LINE, first, &ring.full[slot]);
      if (GROUP)
        copy_bytes(to + S_AT + l * S_LINE, x_scales + (long long)line * x_stride + first, S_LINE, &ring.full[slot]);
    }
  };

  if (GROUP && thread < MULTIPLIERS)
    copy_scales(block_scales, w_scales, begin * LINES, count * LINES, K / LINE, N);
  open(ring, received, x_map, count, load_weight);
  if (!fills_early()) {
    wait_for_predecessor();
    start_successor();
  }
  if (warp >= MULTIPLIERS / 32) {
    produce<LINES * W_LINE>(ring, count, load_weight, load_x);
    return;
  }
  take_registers();
  Factors factors(GROUP ? nullptr : w_scales, bias, N);
  if (!GROUP && thread < M_MAX) row_scales[thread] = x_scales[first + thread];

  int group = (warp >> 2) % ROW_GROUPS, part = (warp >> 2) / ROW_GROUPS;  // rows of the weight, lines of a stage
  const float* low = block_scales.of[group][0] + part * PART_LINES;
  const float* high = block_scales.of[group][HALVES - 1] + part * PART_LINES;
  // Addresses in the first stage of the ring; those of descriptors are uniform across the warp.
  const unsigned char* scales = memory + S_AT + part * PART_LINES * S_LINE + (lane & 3) * 8;
  unsigned fulls = shared_address(ring.full), empties = shared_address(ring.empty);
  unsigned x = (unsigned)descriptor(shared_address(memory) + part * PART_LINES * X_LINE);
  unsigned w = (unsigned)descriptor(shared_address(memory) + W_AT + part * PART_LINES * W_LINE + group * 64 * LINE);
  x = __shfl_sync(~0u, x, 0), w = __shfl_sync(~0u, w, 0);
  constexpr unsigned long long HIGH = 1ull << 62 | 64ull << 32;  // half of a descriptor
  float total[TILES][4] = {};
  if (GROUP) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    asm volatile("bar.sync 2, %0;" ::"n"(MULTIPLIERS) : "memory");
  }
  for (int step = 0, slot = 0, parity = 0; step < count; ++step) {
    wait(fulls + slot * 8, parity);
    unsigned long long a = HIGH | (w + slot * (STAGE / 16)), b = HIGH | (x + slot * (STAGE / 16));
    float acc[PART_LINES][TILES][4];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int l = 0; l < PART_LINES; ++l) {
      multiply_add<false>(acc[l], a + l * (W_LINE / 16), b + l * (X_LINE / 16));
#pragma unroll
      for (int k = 32; k < LINE; k += 32)
        multiply_add<true>(acc[l], a + (l * W_LINE + k) / 16, b + (l * X_LINE + k) / 16);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    }
#pragma unroll
    for (int l = 0; l < PART_LINES; ++l) {
      bool last = l + 1 == PART_LINES;
      float low_scale = GROUP ? low[step * LINES + l] : 1.f;
      float high_scale = GROUP && GATED ? high[step * LINES + l] : low_scale;
      auto scales_of = [&](int t) {
        return GROUP ? *(const Vec2*)(scales + slot * STAGE + l * S_LINE + t * 32) : Vec2{1.f, 1.f};
      };
      Vec2 fetched[AHEAD_OF_PRODUCTS ? TILES : 1];
      if (AHEAD_OF_PRODUCTS)
#pragma unroll
        for (int t = 0; t < TILES; ++t) fetched[AHEAD_OF_PRODUCTS ? t : 0] = scales_of(t);
      if (last) wait_products<0>();
      else wait_products<1>();
      if (last && (!GROUP || AHEAD_OF_PRODUCTS)) arrive(empties + slot * 8, lane == 0);
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        Vec2 of_x = AHEAD_OF_PRODUCTS ? fetched[AHEAD_OF_PRODUCTS ? t : 0] : scales_of(t);
        total[t][0] += of_x.x * low_scale * acc[l][t][0], total[t][1] += of_x.y * low_scale * acc[l][t][1];
        total[t][2] += of_x.x * high_scale * acc[l][t][2], total[t][3] += of_x.y * high_scale * acc[l][t][3];
      }
      if (last && GROUP && !AHEAD_OF_PRODUCTS) arrive(empties + slot * 8, lane == 0);
    }
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
  if (!GROUP) {
    asm volatile("bar.sync 2, %0;" ::"n"(MULTIPLIERS) : "memory");
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      Vec2 of_x = *(const Vec2*)(row_scales + t * 8 + (lane & 3) * 2);
      total[t][0] *= of_x.x, total[t][1] *= of_x.y, total[t][2] *= of_x.x, total[t][3] *= of_x.y;
    }
  }
  bool adds = K_PARTS == 1 || add_parts(total, (float*)memory, part);
  add_up(adds, total, (float*)memory, &received, first, M, N, factors,
         GROUP ? nullptr : w_scales, bias, residual, out);
}

// Products of FP8 with FP8 on Hopper: y [M, N] = x [M, K] @ weight [N, K]^T, both e4m3 with scales.
//
// It is divided as quantized_gemm.cu is, but the tensor cores multiply what is stored: both operands of wgmma lie in the
// ring, of whose stages each line of 128 columns is a matrix, swizzled. Their sums have fewer bits than float32, so those
// of a line are added to others in registers, multiplied by the scales of its columns: GROUP 128, of the weight's blocks
// of 128 rows and of x's rows; or GROUP 0, one scale for a row of each, at the end. A warpgroup waits for its products;
// others multiply meanwhile.
//
// K is a multiple of BLOCK_K, BLOCK_K of 128. GATED: see sums.cuh; half of N is a multiple of 64 then, and of a
// warpgroup's rows the gates lie in one block of scales, and so do the others.
#include "ring.cuh"

// multiply_add: a [64, 32] and b [M_MAX, 32] lie in shared memory.
using Left = unsigned long long;
#define LEFT(a0, a1, a2, a3) "%" a0
#define LEFT_INPUTS(a) "l"(a)
#define INSTRUCTION(n) "wgmma.mma_async.sync.aligned.m64n" n "k32.f32.e4m3.e4m3"
#define MODIFIERS "1, 1"
#include "multiply_add.cuh"

constexpr int LINES = BLOCK_K / LINE;              // of a stage
constexpr int PART_LINES = LINES / K_PARTS;        // that a warpgroup multiplies: 1 or 2
constexpr int X_LINE = M_MAX * LINE;               // bytes
constexpr int W_LINE = BLOCK_N * LINE;
constexpr int S_LINE = GROUP ? M_MAX * 4 : 0;
constexpr int W_AT = LINES * X_LINE, S_AT = W_AT + LINES * W_LINE;  // of a stage
constexpr int STAGE_BYTES = S_AT + LINES * S_LINE;
constexpr int STAGE = (STAGE_BYTES + 1023) / 1024 * 1024;

extern __shared__ __align__(1024) unsigned char memory[];  // the ring; then the sums

// Rows of a gated weight, seen as [N / 16, 2, 8, K]: eight gates, then the eight that they are for.
__device__ __forceinline__ void copy_groups(void* to, const TensorMap& map, int column, int group, Barrier* barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4}], [%5];"
               ::"r"(shared_address(to)), "l"(&map), "r"(column), "r"(0), "r"(group), "r"(shared_address(barrier)) : "memory");
}

// Scales of a row of the weight's blocks: a lane keeps one of 32 lines, and the next 32 are on their way.
struct BlockScales {
  const float* from;
  int lines;
  float kept, next;
  __device__ __forceinline__ void fetch(int line) { next = from[min(line + (int)(threadIdx.x & 31), lines - 1)]; }
  __device__ __forceinline__ void advance(int line) { kept = next, fetch(line + 32); }
  __device__ __forceinline__ float at(int line) const { return __shfl_sync(~0u, kept, line % 32); }
};

// GROUP: x_scales is [K / 128, x_stride], w_scales [N / 128, K / 128]. Else they are [x_stride] and [N]. x_stride is a
// multiple of M_MAX.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fp8_gemm(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* x_scales, int x_stride,
    const float* w_scales, OPTIONAL const T* bias, OPTIONAL const T* residual, T* out, int M, int N, int K) {
  __shared__ Ring ring;
  __shared__ Barrier received;
  __shared__ __align__(16) float row_scales[GROUP ? 4 : M_MAX];  // of x
  int split = blockIdx.x, thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  int first = blockIdx.y * M_MAX;  // of x
  int steps = K / BLOCK_K, begin = steps * split / SPLIT, count = steps * (split + 1) / SPLIT - begin;

  auto load_weight = [&](int step, int slot) {
    unsigned char* to = memory + slot * STAGE + W_AT;
    expect(&ring.full[slot], TWO_PRODUCERS ? LINES * W_LINE : STAGE_BYTES);
#pragma unroll
    for (int l = 0; l < LINES; ++l) {
      int column = (begin + step) * BLOCK_K + l * LINE, row = blockIdx.z * BLOCK_N;
      if (GATED) copy_groups(to + l * W_LINE, w_map, column, row / 16, &ring.full[slot]);
      else copy_box(to + l * W_LINE, w_map, column, row, &ring.full[slot]);
    }
  };
  auto load_x = [&](int step, int slot) {
    unsigned char* to = memory + slot * STAGE;
    if (TWO_PRODUCERS) expect(&ring.full[slot], STAGE_BYTES - LINES * W_LINE);
#pragma unroll
    for (int l = 0; l < LINES; ++l) {
      int line = (begin + step) * LINES + l;
      copy_box(to + l * X_LINE, x_map, line * LINE, first, &ring.full[slot]);
      if (GROUP) copy_bytes(to + S_AT + l * S_LINE, x_scales + (long long)line * x_stride + first, S_LINE, &ring.full[slot]);
    }
  };

  open(ring, received, x_map, count, load_weight);
  wait_for_predecessor();
  start_successor();
  if (warp >= MULTIPLIERS / 32) {
    produce(ring, count, load_weight, load_x);
    return;
  }
  take_registers();
  Factors factors(GROUP ? nullptr : w_scales, bias, N);
  if (!GROUP && thread < M_MAX) row_scales[thread] = x_scales[first + thread];

  int group = (warp >> 2) % ROW_GROUPS, part = (warp >> 2) / ROW_GROUPS;  // rows of the weight, lines of a stage
  int row = min(blockIdx.z * BLOCK_N + group * 64, N - 1), lines = K / LINE;
  BlockScales low{w_scales + (long long)((GATED ? row / 2 : row) / 128) * lines + begin * LINES, count * LINES};
  BlockScales high{w_scales + (long long)((row + N) / 2 / 128) * lines + begin * LINES, count * LINES};
  if (GROUP) low.fetch(0);
  if (GROUP && GATED) high.fetch(0);
  unsigned fulls = shared_address(ring.full), empties = shared_address(ring.empty);
  unsigned x = (unsigned)descriptor(shared_address(memory) + part * PART_LINES * X_LINE);
  unsigned w = (unsigned)descriptor(shared_address(memory) + W_AT + part * PART_LINES * W_LINE + group * 64 * LINE);
  constexpr unsigned long long HIGH = 1ull << 62 | 64ull << 32;  // half of a descriptor
  float total[TILES][4] = {};
  for (int step = 0, slot = 0, parity = 0; step < count; ++step) {
    wait(fulls + slot * 8, parity);
    if (GROUP && step * LINES % 32 == 0) {
      low.advance(step * LINES);
      if (GATED) high.advance(step * LINES);
    }
    unsigned at = slot * (STAGE / 16);
    unsigned long long a = HIGH | __shfl_sync(~0u, w + at, 0), b = HIGH | __shfl_sync(~0u, x + at, 0);
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
      int at = part * PART_LINES + l;
      float low_scale = GROUP ? low.at(step * LINES + at) : 1.f, high_scale = GROUP && GATED ? high.at(step * LINES + at) : low_scale;
      const float* scales = (const float*)(memory + slot * STAGE + S_AT + at * S_LINE) + (lane & 3) * 2;
      if (last) wait_products<0>();
      else wait_products<1>();
      if (!GROUP && last) arrive(empties + slot * 8, lane == 0);
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        Vec2 of_x = GROUP ? *(const Vec2*)(scales + t * 8) : Vec2{1.f, 1.f};
        total[t][0] += of_x.x * low_scale * acc[l][t][0], total[t][1] += of_x.y * low_scale * acc[l][t][1];
        total[t][2] += of_x.x * high_scale * acc[l][t][2], total[t][3] += of_x.y * high_scale * acc[l][t][3];
      }
      if (GROUP && last) arrive(empties + slot * 8, lane == 0);
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

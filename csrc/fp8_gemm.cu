// Products of FP8 with FP8 on Hopper, of few rows: y [M, N] = x [M, K] @ weight [N, K]^T, both e4m3 with scales.
//
// It is built as quantized_gemm.cu is, but the tensor cores multiply what is stored: both operands of wgmma lie in the
// ring. Their sums have fewer bits than float32, so those of 128 columns are added to others in registers, multiplied by
// the scales of these columns: GROUP 128, of the weight's blocks of 128 rows and of x's rows; or GROUP 0, one scale for a
// row of each. K is a multiple of 128. GATED: see sums.cuh.
#include "sums.cuh"

// multiply_add: a [64, 32] and b [M_MAX, 32] lie in shared memory.
using Left = unsigned long long;
#define LEFT(a0, a1, a2, a3) "%" a0
#define LEFT_INPUTS(a) "l"(a)
#define INSTRUCTION(n) "wgmma.mma_async.sync.aligned.m64n" n "k32.f32.e4m3.e4m3"
#define MODIFIERS "1, 1"
#include "multiply_add.cuh"

constexpr int X_STAGE = M_MAX * LINE;
constexpr int W_STAGE = BLOCK_N * LINE;
constexpr int S_STAGE = GROUP ? M_MAX * 4 : 0;
constexpr int STAGE_BYTES = X_STAGE + W_STAGE + S_STAGE;
constexpr int STAGE = (STAGE_BYTES + 1023) / 1024 * 1024;

extern __shared__ __align__(1024) unsigned char memory[];  // the ring; then the sums

// Rows of a gated weight, seen as [N / 16, 2, 8, K]: eight gates, then the eight that they are for.
__device__ __forceinline__ void copy_groups(void* to, const TensorMap& map, int column, int group, Barrier* barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4}], [%5];"
               ::"r"(shared_address(to)), "l"(&map), "r"(column), "r"(0), "r"(group), "r"(shared_address(barrier)) : "memory");
}

// GROUP: x_scales is [K / 128, x_stride], with room for M_MAX rows; w_scales [N / 8, K / 128]. Else they are [M] and [N].
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) fp8_gemm(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const float* x_scales, int x_stride,
    const float* w_scales, OPTIONAL const T* bias, OPTIONAL const T* residual, T* out, int M, int N, int K) {
  __shared__ Barrier full[STAGES], empty[STAGES], received;
  int split = blockIdx.x, thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  int first = blockIdx.y * M_MAX;  // of x
  int steps = K / LINE, begin = steps * split / SPLIT, count = steps * (split + 1) / SPLIT - begin;
  bool producer = thread == CONSUMERS;

  auto stage_of = [](int step) { return memory + step % STAGES * STAGE; };
  auto load_weight = [&](int step) {
    expect(&full[step % STAGES], STAGE_BYTES);
    unsigned char* to = stage_of(step) + X_STAGE;
    int column = (begin + step) * LINE, row = blockIdx.z * BLOCK_N;
    if (GATED) copy_groups(to, w_map, column, row / 16, &full[step % STAGES]);
    else copy_box(to, w_map, column, row, &full[step % STAGES]);
  };
  auto load_x = [&](int step) {
    copy_box(stage_of(step), x_map, (begin + step) * LINE, first, &full[step % STAGES]);
    if (GROUP)
      copy_bytes(stage_of(step) + X_STAGE + W_STAGE, x_scales + (long long)(begin + step) * x_stride + first, S_STAGE, &full[step % STAGES]);
  };

  if (producer) {
    for (int s = 0; s < STAGES; ++s) init(&full[s], 1), init(&empty[s], WARPS);
    init(&received, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int s = 0; s < min(STAGES, count); ++s) load_weight(s);
    asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
    if (SPLIT > 1) expect(&received, SENT_BYTES);
  }
  __syncwarp();
  __syncthreads();
  wait_for_predecessor();
  start_successor();

  if (producer) {
    for (int s = 0; s < min(STAGES, count); ++s) load_x(s);
    for (int step = STAGES; step < count; ++step) {
      wait(&empty[step % STAGES], (step / STAGES - 1) & 1);
      load_weight(step);
      load_x(step);
    }
  }
  __syncwarp();

  float total[TILES][4] = {};
  if (warp < WARPS) {
    int group = min(blockIdx.z * (BLOCK_N / 16) + warp, (N - 1) / 16);  // of 16 rows, half of which share scales
    const float* low = w_scales + (long long)(GATED ? group : group * 2) * steps + begin;
    const float* high = w_scales + (long long)(GATED ? group + N / 16 : min(group * 2 + 1, (N - 1) / 8)) * steps + begin;
    float low_scale = GROUP && count > 0 ? low[0] : 1.f, high_scale = GROUP && count > 0 ? high[0] : 1.f;
    for (int step = 0; step < count; ++step) {
      float acc[TILES][4];
      wait(&full[step % STAGES], step / STAGES & 1);
      unsigned char* stage = stage_of(step);
      unsigned x = shared_address(stage), w = shared_address(stage + X_STAGE + (warp >> 2) * 64 * LINE);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      multiply_add<false>(acc, descriptor(w), descriptor(x));
#pragma unroll
      for (int k = 32; k < LINE; k += 32) multiply_add<true>(acc, descriptor(w + k), descriptor(x + k));
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      float next_low = GROUP && step + 1 < count ? low[step + 1] : 1.f;
      float next_high = GROUP && step + 1 < count ? high[step + 1] : 1.f;
      Vec2 factors[GROUP ? TILES : 1];
      if (GROUP)
#pragma unroll
        for (int t = 0; t < (GROUP ? TILES : 1); ++t)
          factors[t] = *(const Vec2*)(stage + X_STAGE + W_STAGE + (t * 8 + (lane & 3) * 2) * 4);
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (step + STAGES < count && lane == 0) arrive(&empty[step % STAGES]);
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        float a = GROUP ? factors[GROUP ? t : 0].x : 1.f, b = GROUP ? factors[GROUP ? t : 0].y : 1.f;
        total[t][0] += a * low_scale * acc[t][0], total[t][1] += b * low_scale * acc[t][1];
        total[t][2] += a * high_scale * acc[t][2], total[t][3] += b * high_scale * acc[t][3];
      }
      low_scale = next_low, high_scale = next_high;
    }
    if (!GROUP)
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        int m = first + t * 8 + (lane & 3) * 2;
        float a = x_scales[min(m, M - 1)], b = x_scales[min(m + 1, M - 1)];
        total[t][0] *= a, total[t][1] *= b, total[t][2] *= a, total[t][3] *= b;
      }
  }
  if (SPLIT > 1) meet_cluster();
  if (warp >= WARPS) return;
  const float* row_scales = GROUP ? nullptr : w_scales;
  Factors factors(row_scales, bias, N);
  add_up(total, (float*)memory, &received, first, M, N, factors, row_scales, bias, residual, out);
}

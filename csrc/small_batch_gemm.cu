// GEMM for decode batches of some tens of rows, on Hopper: y [M, N] = x [M, K] @ weight [N, K]^T, with M up to X_ROWS,
// which is 32 or 64. x, the weight and y are T (bf16 or f16), sums are float32.
//
// A block computes BLOCK_N columns of y, which are rows of the weight. The SPLIT blocks of a cluster divide K
// (split-K). One thread of a block, the producer, issues TMA loads of stages into a swizzled ring in shared memory; a
// stage has 64 columns of the block's rows of the weight and of all rows of x. The consumer, one warpgroup, multiplies
// by wgmma directly from the ring: x is the left operand, with zeros after its M rows, and the weight the right one. In
// the epilogue the blocks of a cluster send their sums to one another. Each block adds up the sums of its part of x's
// rows, in the order of the blocks, so results are deterministic.
//
// wgmma leaves the sums in registers in the layout of `mma` (mma.cuh), with 16 rows of x per warp. For example, acc[t]
// of lane 5 of warp 1 has y[17][8t + 2], y[17][8t + 3], y[25][8t + 2] and y[25][8t + 3], where columns are counted from
// the block's first one.
//
// The weight does not depend on the preceding kernel, so the producer fills the ring with it before it waits for that
// kernel.
//
// There are three kinds of mbarriers: `full` of a stage completes when all bytes of the stage have arrived, `empty`
// when all warps have read it, and `received` when the sums of all blocks have arrived, in one bulk copy per block.
// They make a device-wide fence unnecessary. A cluster barrier with `release` compiles to such a fence, which costs
// most of a microsecond.
//
// GATED: the first half of the weight's rows are gates, the second half their ups: y [M, N / 2] = activation(gate) *
// up. K must be a multiple of 64, N of 8 (GATED: of 16).
#include "mma.cuh"
#define RIGHT_ROWS BLOCK_N
#include "shared_product.cuh"

constexpr int BLOCK_K = LINE / 2;          // columns of a stage
constexpr int CONSUMERS = 128;             // threads: a warpgroup
constexpr int WARPS = CONSUMERS / 32;
constexpr int THREADS = CONSUMERS + 32;
constexpr int W_STAGE = BLOCK_N * LINE;    // bytes
// Bytes of x in a stage. wgmma always reads 64 rows: if X_ROWS is 32, it reads the weight, which follows, as the other
// 32 rows, and their sums are not used.
constexpr int X_STAGE = X_ROWS * LINE;
constexpr int STAGE = X_STAGE + W_STAGE;
static_assert(STAGE >= 64 * LINE, "wgmma reads 64 rows");
constexpr int OUTPUTS = GATED ? BLOCK_N / 2 : BLOCK_N;
constexpr int STRIDE = BLOCK_N % 16 ? BLOCK_N : BLOCK_N + 8;  // floats of a row of sums, without bank conflicts
constexpr int OWN_ROWS = (X_ROWS + SPLIT - 1) / SPLIT;  // rows of x, at most, whose sums a block adds up
// Iterations in which the block's threads add up these sums; a thread adds four per iteration.
constexpr int TURNS = (OWN_ROWS * (OUTPUTS / 4) + CONSUMERS - 1) / CONSUMERS;
constexpr bool FETCHES = !GATED && TURNS <= 16;  // true: the residual fits in registers and is loaded early

extern __shared__ __align__(1024) unsigned char memory[];  // the ring; then the sums

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) small_batch_gemm(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, OPTIONAL const T* bias,
    OPTIONAL const T* residual, T* out, int M, int N, int K) {
  __shared__ Barrier full[STAGES], empty[STAGES], received;
  int split = blockIdx.x, tile = blockIdx.y, thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  int steps = K / BLOCK_K, begin = steps * split / SPLIT, count = steps * (split + 1) / SPLIT - begin;
  // This block adds up the sums of its own rows of x, at most `own`.
  int own = (M + SPLIT - 1) / SPLIT, own_rows = max(0, min(own, M - split * own));
  bool producer = thread == CONSUMERS;

  auto x_stage = [](int stage) { return memory + stage * STAGE; };
  auto w_stage = [](int stage) { return memory + stage * STAGE + X_STAGE; };
  auto load_weight = [&](int step, int stage) {
    int column = (begin + step) * BLOCK_K, row = tile * OUTPUTS;
    expect(&full[stage], W_STAGE + X_STAGE);
    copy_box(w_stage(stage), w_map, column, row, &full[stage]);
    if (GATED) copy_box(w_stage(stage) + W_STAGE / 2, w_map, column, row + N / 2, &full[stage]);
  };
  auto load_x = [&](int step, int stage) {
    copy_box(x_stage(stage), x_map, (begin + step) * BLOCK_K, 0, &full[stage]);
  };

  if (producer) {
    for (int s = 0; s < STAGES; ++s) init(&full[s], 1), init(&empty[s], WARPS);
    init(&received, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int s = 0; s < min(STAGES, count); ++s) load_weight(s, s);
    asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
    if (SPLIT > 1) expect(&received, SPLIT * own_rows * STRIDE * 4);
  }
  __syncwarp();
  __syncthreads();
  wait_for_predecessor();
  start_successor();

  if (producer) {
    for (int s = 0; s < min(STAGES, count); ++s) load_x(s, s);
    for (int step = STAGES; step < count; ++step) {
      int stage = step % STAGES;
      wait(&empty[stage], (step / STAGES - 1) & 1);
      load_weight(step, stage);
      load_x(step, stage);
    }
  }
  __syncwarp();
  float acc[BLOCK_N / 8][4] = {};
  if (warp < WARPS) {
    for (int step = 0; step < count; ++step) {
      int stage = step % STAGES;
      wait(&full[stage], step / STAGES & 1);
      unsigned x = shared_address(x_stage(stage)), w = shared_address(w_stage(stage));
      fence_products();
#pragma unroll
      for (int k = 0; k < BLOCK_K / 16; ++k) multiply_add<true>(acc, descriptor(x + k * 32), descriptor(w + k * 32));
      commit_products();
      wait_products<1>();
      // All wgmma of the previous step have ended, so the producer may refill its stage.
      if (step > 0 && step - 1 + STAGES < count && lane == 0) arrive(&empty[(step - 1) % STAGES]);
    }
    wait_products<0>();
  }

  // The ring is free now in all blocks of the cluster. Its memory is reused for the block's own sums [row of x, row of
  // the weight]; if SPLIT > 1, the received sums [split, row of x, row of the weight] follow them.
  if (SPLIT > 1) meet_cluster();
  else __syncthreads();
  if (warp == WARPS) return;
  Vec<4> fetched[FETCHES ? TURNS : 1] = {};
  if (FETCHES && residual)
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      int i = thread + turn * CONSUMERS, row = i / (OUTPUTS / 4), n = tile * OUTPUTS + i % (OUTPUTS / 4) * 4;
      if (row < own_rows && n < N) fetched[turn] = *(const Vec<4>*)(residual + (long long)(split * own + row) * N + n);
    }
  float* sums = (float*)memory;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int m = warp * 16 + (lane >> 2) + h * 8;
    float* to = sums + m * STRIDE + (lane & 3) * 2;
    if (m >= M) break;
#pragma unroll
    for (int t = 0; t < BLOCK_N / 8; ++t) *(Vec2*)(to + t * 8) = Vec2{acc[t][h * 2], acc[t][h * 2 + 1]};
  }
  if (SPLIT > 1) {
    float* here = sums + X_ROWS * STRIDE;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
    int rows = max(0, min(own, M - thread * own));  // rows of x that block `thread` adds up
    if (thread < SPLIT && rows)
      send(address_in(thread, here + split * own * STRIDE), sums + thread * own * STRIDE, rows * STRIDE * 4,
           address_in(thread, &received));
    wait(&received, 0);
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    sums = here;
  } else {
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
  }

  int width = GATED ? N / 2 : N;
#pragma unroll (FETCHES ? TURNS : 1)
  for (int turn = 0; turn < TURNS; ++turn) {
    int i = thread + turn * CONSUMERS, row = i / (OUTPUTS / 4), column = i % (OUTPUTS / 4) * 4;
    int m = split * own + row, n = tile * OUTPUTS + column;
    if (row >= own_rows || n >= width) continue;
    float y[4] = {}, up[4] = {};
#pragma unroll
    for (int s = 0; s < SPLIT; ++s) {
      const float* at = sums + (s * own + row) * STRIDE + column;
      float4 v = *(const float4*)at;
      y[0] += v.x, y[1] += v.y, y[2] += v.z, y[3] += v.w;
      if (GATED) v = *(const float4*)(at + OUTPUTS), up[0] += v.x, up[1] += v.y, up[2] += v.z, up[3] += v.w;
    }
    Vec<4> bias_y = {}, bias_up = {}, before = {}, result;
    if (bias) bias_y = *(const Vec<4>*)(bias + n);
    if (bias && GATED) bias_up = *(const Vec<4>*)(bias + width + n);
    if (FETCHES) before = fetched[turn];
    else if (residual) before = *(const Vec<4>*)(residual + (long long)m * N + n);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      y[j] += to_float(bias_y.v[j]);
      if (GATED) {
        float gate = rounded(y[j]), other = rounded(up[j] + to_float(bias_up.v[j]));
        y[j] = rounded(activation(gate)) * other;
      }
      if (residual) y[j] = rounded(y[j]) + to_float(before.v[j]);
      result.v[j] = from_float<T>(y[j]);
    }
    *(Vec<4>*)(out + (long long)m * width + n) = result;
  }
  // Bulk copies to other blocks read this block's shared memory, so the block must not exit before all blocks are done.
  __syncwarp();
  if (SPLIT > 1) wait_for_cluster();
}

// GEMM for the tens of rows of a batch's decode, on Hopper: y [M, N] = x [M, K] @ weight [N, K]^T, M up to X_ROWS,
// which is 32 or 64.
//
// A block computes BLOCK_N columns of y, which are rows of the weight; the SPLIT blocks of a cluster divide K
// (split-K). One thread of a block, the producer, loads stages of 64 columns of the weight's rows and of all of x by
// the tensor memory accelerator (TMA), which arrive swizzled in a ring in shared memory. The consumer, a warpgroup,
// multiplies x (the left operand, with zeros beyond its M rows) with the weight's rows (the right one) by wgmma,
// straight from the ring. In the epilogue the blocks of a cluster send their sums to one another, and each block adds
// up the sums of its part of x's rows, in the order of the blocks.
//
// wgmma leaves the sums in registers as `mma` does (mma.cuh), 16 rows of x for each warp: lane 5 of warp 1 has acc[t]
// of y[17][8t + 2], y[17][8t + 3], y[25][8t + 2] and y[25][8t + 3], columns counted from the block's first.
//
// Weights do not depend on the kernel before this one: the ring is filled with them before waiting for it.
//
// Barriers: `full` of a stage completes when all of its bytes have arrived, `empty` when all warps have read them, and
// `received` when the sums of all blocks have arrived, one bulk copy from each. So nothing needs a fence of the whole
// device (to which a cluster barrier with `release` compiles), which costs most of a microsecond.
//
// GATED: the weight's first half gates its second: y [M, N / 2] = activation(gate) * up.
// K is a multiple of 64, N of 8 (GATED: of 16). T is bf16 or f16.
#include "mma.cuh"
#define RIGHT_ROWS BLOCK_N
#include "shared_product.cuh"

constexpr int BLOCK_K = LINE / 2;          // columns of a stage
constexpr int CONSUMERS = 128;             // threads: a warpgroup
constexpr int WARPS = CONSUMERS / 32;
constexpr int THREADS = CONSUMERS + 32;
constexpr int W_STAGE = BLOCK_N * LINE;    // bytes
constexpr int X_STAGE = X_ROWS * LINE;     // of 32 rows, wgmma reads the weight as 32 more rows; their sums are unused
constexpr int STAGE = X_STAGE + W_STAGE;
static_assert(STAGE >= 64 * LINE, "wgmma reads 64 rows");
constexpr int OUTPUTS = GATED ? BLOCK_N / 2 : BLOCK_N;
constexpr int STRIDE = BLOCK_N % 16 ? BLOCK_N : BLOCK_N + 8;  // floats of a row of sums, without bank conflicts
constexpr int OWN_ROWS = (X_ROWS + SPLIT - 1) / SPLIT;  // rows of x, at most, whose sums a block adds up
// Iterations in which the block's threads add these up, four sums each.
constexpr int TURNS = (OWN_ROWS * (OUTPUTS / 4) + CONSUMERS - 1) / CONSUMERS;
constexpr bool FETCHES = !GATED && TURNS <= 16;  // the residual is loaded before the sums arrive: it fits registers

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
      // All wgmma of the step before have ended: its stage may be filled again.
      if (step > 0 && step - 1 + STAGES < count && lane == 0) arrive(&empty[(step - 1) % STAGES]);
    }
    wait_products<0>();
  }

  // The ring is free now in all blocks of the cluster. Its memory gets the block's own sums [row of x, row of the
  // weight] and behind them, if SPLIT > 1, the received ones [split, row of x, row of the weight].
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
  // Bulk copies to other blocks read this block's memory: it stays until all blocks are done.
  __syncwarp();
  if (SPLIT > 1) wait_for_cluster();
}

// Skinny GEMM for decode batches of a few rows: y [M, N] = x [M, K] @ weight [N, K]^T, with M up to M_MAX, which is 8
// or 16. x, the weight and y are T (bf16 or f16), sums are float32. It is bound by memory bandwidth: the weight is read
// once.
//
// A block computes BLOCK_N columns of y, which are rows of the weight. The CLUSTER blocks of a cluster divide K
// (split-K). The weight streams through a ring in shared memory by cp.async, 8 KB per stage, swizzled to avoid bank
// conflicts. The ring is filled before the kernel waits for its predecessor, so loads from memory continue across the
// boundary between kernels. Each warp multiplies 16 rows of the weight with all of x by `mma`; if BLOCK_N is 16, four
// warps divide the columns of a stage. In the epilogue the blocks of a cluster push their sums to one another, and each
// block adds up the sums of its own columns in a fixed order, so results are deterministic.
//
// The weight is the left operand of `mma` (mma.cuh), x the right one. Example: lane 5 of warp 1 (g = 1, p = 1) with
// M_MAX 8. With BLOCK_N 64 the warp has rows 16 to 31 of the block's 64, so the lane's sums acc[0] are y[2][17],
// y[3][17], y[2][25] and y[3][25], over its block's part of K. With BLOCK_N 16 the warp has rows 0 to 15 and columns 64
// to 127 of a stage's 256: the lane has y[2][1], y[3][1], y[2][9] and y[3][9], summed over these columns.
//
// BLOCK_N: 64 for large weights. For small weights it is 16, which gives enough blocks to fill all SMs without split-K.
// NORM: x is RMS-normed: y = scale(x) * ((x * norm) @ weight^T). The scale is applied in the epilogue, because it is
// known only after all of x has been read.
// GATED: the first half of the weight's rows are gates, the second half their ups: y [M, N / 2] = activation(gate) *
// up. K must be a multiple of COLUMNS, N of 8 (GATED: of 16).
// skinny_gemm_push: y is one rank's part of an all-reduce and is sent to the buffers of all -DRANKS GPUs (push.cuh).
#include "cluster.cuh"
#include "mma.cuh"
#include "tiles.cuh"
#if RANKS > 1
#include "push.cuh"
#endif

constexpr int BLOCK_THREADS = 128;
constexpr int COLUMNS = 4096 / BLOCK_N;      // columns of a stage
constexpr int LINE = COLUMNS * sizeof(T);    // bytes of a row of a stage
constexpr int ROW_VECTORS = LINE / 16;       // 16-byte vectors of such a row
constexpr int WARPS_N = BLOCK_N / 16;
constexpr int WARPS_K = BLOCK_THREADS / 32 / WARPS_N;  // warps with the same rows, 64 columns of a stage each
constexpr int W_STAGE = BLOCK_N * LINE;      // bytes
constexpr int X_STAGE = M_MAX * LINE;        // bytes
constexpr int STAGE = W_STAGE + X_STAGE + (NORM ? LINE : 0);
constexpr int STAGES_AHEAD = STAGES - 1;     // stages in flight
constexpr int OWN_WEIGHT_ROWS = BLOCK_N / CLUSTER;  // rows of the weight whose sums a block adds up
constexpr int OUTPUTS = GATED ? OWN_WEIGHT_ROWS / 2 : OWN_WEIGHT_ROWS;
constexpr int TILES = M_MAX / 8;

extern __shared__ __align__(1024) unsigned char memory[];

// Offset of 16 bytes of a line, swizzled by the line's number modulo 8.
__device__ __forceinline__ int swizzled(int line, int part) { return line * LINE + ((part ^ (line & 7)) << 4); }

// Copy 16 bytes. Unlike copy_16 it does not prefetch the rest of the 128-byte line into L2.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// Store to the variable `mine` of the block `rank` of the cluster.
__device__ __forceinline__ void push(float* mine, int rank, float a, float b) {
  if (CLUSTER == 1) mine[0] = a, mine[1] = b;
  else store_at(address_in(rank, mine), a, b);
}

__device__ __forceinline__ void push(float* mine, int rank, float a) {
  if (CLUSTER == 1) *mine = a;
  else store_at(address_in(rank, mine), a);
}

// Multiply a warp's 16 rows of a stage's weight with x: one `mma` for each 16 columns and 8 rows of x.
__device__ __forceinline__ void multiply_stage(
    const unsigned char* ws, float (&acc)[TILES][4], float (&square)[TILES], int row_warp, int sharer) {
  // A load of the weight reads 16 rows and two parts; one of x 16 rows and two parts, or 8 rows and four parts.
  int lane = threadIdx.x & 31, w_line = row_warp * 16 + (lane & 15), w_part = sharer * 8 + (lane >> 4);
  int x_line = M_MAX == 8 ? lane & 7 : (lane & 7) + (lane >> 4) * 8;
  int x_part = sharer * 8 + (M_MAX == 8 ? lane >> 3 : lane >> 3 & 1);
  const unsigned char* xs = ws + W_STAGE;
  const unsigned* scale = (const unsigned*)(xs + X_STAGE) + sharer * 32 + (lane & 3);
  unsigned b[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {  // 16 columns each
    unsigned a[4], low = NORM ? scale[k * 8] : 0, high = NORM ? scale[k * 8 + 4] : 0;
    ldmatrix(a, shared_address(ws + swizzled(w_line, k * 2 + w_part)));
    // b0 and b1: columns 2p, 2p + 1 and 2p + 8, 2p + 9 of row g of x. Warps with the same columns divide the squares.
    auto multiply_tile = [&](int t, unsigned b0, unsigned b1) {
      if (NORM) {
        if (k % WARPS_N == row_warp) square[t] += sum_squares(b0) + sum_squares(b1);
        b0 = multiply(b0, low), b1 = multiply(b1, high);
      }
      mma(acc[t], a[0], a[1], a[2], a[3], b0, b1);
    };
    if constexpr (M_MAX == 8) {
      if (k % 2 == 0) ldmatrix(b, shared_address(xs + swizzled(x_line, k * 2 + x_part)));
      multiply_tile(0, b[k % 2 * 2], b[k % 2 * 2 + 1]);
    } else {
#pragma unroll
      for (int t = 0; t < TILES; t += 2) {
        ldmatrix(b, shared_address(xs + swizzled(t * 8 + x_line, k * 2 + x_part)));
        multiply_tile(t, b[0], b[1]), multiply_tile(t + 1, b[2], b[3]);
      }
    }
  }
}

using Sums = float[CLUSTER * WARPS_K][OWN_WEIGHT_ROWS][M_MAX];
using Squares = float[CLUSTER * BLOCK_THREADS / 32][NORM ? M_MAX : 2];  // by warp of the cluster and row of x

// Multiply over this block's part of K (the main loop); then exchange the sums, and the sums of the squares of x, with
// the other blocks of the cluster.
__device__ __forceinline__ void multiply(
    Sums& sums, Squares& squares, const T* x, const T* norm, const T* weight, int M, int N, int K) {
  int rank = blockIdx.x, thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");  // this block has begun
  int stages = K / COLUMNS, begin = stages * rank / CLUSTER, count = stages * (rank + 1) / CLUSTER - begin;

  // A thread copies 16 bytes of four lines of a stage. GATED: the first half of the lines are gates.
  constexpr int LINES = BLOCK_THREADS / ROW_VECTORS;  // lines that the block copies at a time
  int part = thread % ROW_VECTORS, copied = thread / ROW_VECTORS, half = N / 2;
  const T* w_from[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    int line = copied + q * LINES;
    int row = GATED ? min(blockIdx.y * (BLOCK_N / 2) + line % (BLOCK_N / 2), half - 1) + (line < BLOCK_N / 2 ? 0 : half)
                    : min(blockIdx.y * BLOCK_N + line, N - 1);
    w_from[q] = weight + (long long)row * K + begin * COLUMNS + part * 8;
  }
  auto copy_weight = [&](int stage) {
    unsigned char* to = memory + stage % STAGES * STAGE;
#pragma unroll
    for (int q = 0; q < 4; ++q) copy_async(to + swizzled(copied + q * LINES, part), w_from[q] + stage * COLUMNS);
    if (NORM && thread < ROW_VECTORS)
      copy_async(to + W_STAGE + X_STAGE + part * 16, norm + (begin + stage) * COLUMNS + part * 8);
  };
  const T* x_from = x + begin * COLUMNS + part * 8;
  auto copy_x = [&](int stage) {
    unsigned char* to = memory + stage % STAGES * STAGE + W_STAGE;
    for (int line = copied; line < M; line += LINES)
      copy_async(to + swizzled(line, part), x_from + (long long)line * K + stage * COLUMNS);
  };

#pragma unroll
  for (int s = 0; s < STAGES_AHEAD; ++s) {
    if (s < count) copy_weight(s);
    commit_group();
  }
  wait_for_predecessor();
  start_successor();

#pragma unroll
  for (int s = 0; s < STAGES_AHEAD; ++s) {
    if (s < count) copy_x(s);
    commit_group();
  }

  float acc[TILES][4] = {}, square[TILES] = {};
  int row_warp = warp / WARPS_K, sharer = warp % WARPS_K;
  for (int i = 0; i < count; ++i) {
    wait_group<STAGES_AHEAD - 1>();
    __syncthreads();
    if (i + STAGES_AHEAD < count) copy_weight(i + STAGES_AHEAD), copy_x(i + STAGES_AHEAD);
    commit_group();
    multiply_stage(memory + i % STAGES * STAGE, acc, square, row_warp, sharer);
  }

  // A lane has the sums of rows g and g + 8 of its warp's 16 rows of the weight with rows 2p and 2p + 1 of each eight
  // rows of x.
  if (CLUSTER > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // all blocks have begun
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int row = row_warp * 16 + (lane >> 2) + h * 8, column = GATED ? row % (BLOCK_N / 2) : row;
    int owner = column / OUTPUTS, at = column % OUTPUTS + (row == column ? 0 : OUTPUTS);
    float* to = &sums[rank * WARPS_K + sharer][at][(lane & 3) * 2];
#pragma unroll
    for (int t = 0; t < TILES; ++t) push(to + t * 8, owner, acc[t][h * 2], acc[t][h * 2 + 1]);
  }
  if (NORM) {
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      float total = quad_sum(square[t]);
      if ((lane & 3) == 0)
        for (int r = 0; r < CLUSTER; ++r)
          push(&squares[rank * (BLOCK_THREADS / 32) + warp][t * 8 + (lane >> 2)], r, total);
    }
  }
  if (CLUSTER > 1)
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  else __syncthreads();

}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) skinny_gemm(
    const T* x, OPTIONAL const T* norm, float eps, const T* weight, OPTIONAL const T* bias, OPTIONAL const T* residual,
    T* out, int M, int N, int K) {
  __shared__ Sums sums;
  __shared__ Squares squares;
  multiply(sums, squares, x, norm, weight, M, N, K);
  int width = GATED ? N / 2 : N, thread = threadIdx.x, rank = blockIdx.x;
  for (int i = thread; i < M * OUTPUTS; i += BLOCK_THREADS) {
    int m = i / OUTPUTS, column = i % OUTPUTS,
        n = blockIdx.y * (GATED ? BLOCK_N / 2 : BLOCK_N) + rank * OUTPUTS + column;
    if (n >= width) continue;
    float y = 0.f, up = 0.f, total = 0.f;
#pragma unroll
    for (int r = 0; r < CLUSTER * WARPS_K; ++r) {
      y += sums[r][column][m];
      if (GATED) up += sums[r][column + OUTPUTS][m];
    }
    if (NORM)
#pragma unroll
      for (int w = 0; w < CLUSTER * BLOCK_THREADS / 32; ++w) total += squares[w][m];
    float factor = NORM ? rsqrtf(total / K + eps) : 1.f;
    y = y * factor + (bias ? to_float(bias[n]) : 0.f);
    if (GATED) {
      up = rounded(up * factor + (bias ? to_float(bias[width + n]) : 0.f));
      y = rounded(y), y = rounded(activation(y)) * up;
    }
    if (residual) y = rounded(y) + to_float(residual[(long long)m * N + n]);
    out[(long long)m * width + n] = from_float<T>(y);
  }
}

#if RANKS > 1
// Send y to all GPUs; the kernel `received` in all_reduce.cu adds up what they have sent. NORM and GATED must be 0.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) skinny_gemm_push(
    const T* x, const T* weight, const long long* addresses, int* control, int rank, long long buffer_bytes, int M,
    int N, int K) {
  __shared__ Sums sums;
  __shared__ Squares squares;
  multiply(sums, squares, x, nullptr, weight, M, N, K);
  Group group(addresses, control, nullptr, rank, buffer_bytes, 0);
  for (int begin = 0; begin < M * OUTPUTS; begin += BLOCK_THREADS) {
    int i = begin + threadIdx.x, m = min(i / OUTPUTS, M - 1), column = i % OUTPUTS;
    int n = blockIdx.y * BLOCK_N + blockIdx.x * OUTPUTS + column;
    float y = 0.f;
#pragma unroll
    for (int r = 0; r < CLUSTER * WARPS_K; ++r) y += sums[r][column][m];
    // The first of each eight lanes collects a vector of eight values.
    unsigned one = from_float<T>(y).bits, two = one | __shfl_down_sync(0xffffffffu, one, 1) << 16;
    Words words = {two, __shfl_down_sync(0xffffffffu, two, 2), __shfl_down_sync(0xffffffffu, two, 4),
                   __shfl_down_sync(0xffffffffu, two, 6)};
    if (threadIdx.x % VEC || i >= M * OUTPUTS || n >= N) continue;
    words = without_empty(words);
#pragma unroll
    for (int r = 0; r < RANKS; ++r) send(group.buffers[r] + (rank * (M * N / VEC) + (m * N + n) / VEC), words);
  }
}
#endif

// Matrix products of few rows (a decode's): y [M, N] = x [M, K] @ weight [N, K]^T, bound by reading the weight once.
//
// A block owns ROWS rows of the weight, and its warps share K. Weights stream from memory straight into the registers
// of tensor-core instructions, 16 bytes a thread: K is summed over, so its order within 32 values may be any, as long
// as it is the same for x. The first loads are issued before the kernel waits for its predecessor.
//
// NORM: x is RMS-normed: y = scale(x) * ((x * norm) @ weight^T), the scale known at the end of the pass over x.
// GATED: the weight's first half gates its second: y [M, N / 2] = silu(gate) * up.
// M is at most M_MAX (8 or 16), K a multiple of 32, N of 8 (GATED: of 16). T is bf16 or f16.
#include "common.cuh"
#include "mma.cuh"

constexpr bool HIGH = M_MAX > 8;  // rows 8 to 15 are in use
constexpr int THREADS = WARPS * 32;
constexpr int TILES = 2;         // of 8 rows of the weight
constexpr int ROWS = TILES * 8;  // of a block
constexpr int STAGES = 8;        // chunks of 32 values of K on their way

// Where the block's tile `t` of 8 weight rows begins.
__device__ __forceinline__ int tile_row(int t, int N) {
  if (!GATED) return min(blockIdx.x * ROWS + t * 8, N - 8);
  int half = N / 2, first = blockIdx.x * (ROWS / 2) + (t % (TILES / 2)) * 8;
  return min(first, half - 8) + (t >= TILES / 2 ? half : 0);
}

extern "C" __global__ void __launch_bounds__(THREADS) few_rows_linear(
    const T* x, const T* norm, float eps, const T* weight, const T* bias, const T* residual, T* out, int M, int N, int K) {
  __shared__ float partial[WARPS][M_MAX][ROWS + 1];
  __shared__ float squares[WARPS][M_MAX];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, part = (lane & 3) * 8;
  int chunks = K / 32, begin = chunks * warp / WARPS, count = chunks * (warp + 1) / WARPS - begin;

  const T* w[TILES];
#pragma unroll
  for (int t = 0; t < TILES; ++t) w[t] = weight + (long long)(tile_row(t, N) + row) * K + begin * 32 + part;
  const T* scale = norm + begin * 32 + part;

  uint4 wq[STAGES][TILES], nq[STAGES];
#pragma unroll
  for (int s = 0; s < STAGES; ++s) {
    if (s < count) {
#pragma unroll
      for (int t = 0; t < TILES; ++t) wq[s][t] = load_once(w[t] + s * 32);
      if (NORM) nq[s] = *(const uint4*)(scale + s * 32);
    }
  }
  wait_for_predecessor();
  start_successor();

  bool low_in = row < M, high_in = HIGH && row + 8 < M;
  const T* x_low = x + (long long)row * K + begin * 32 + part;
  const T* x_high = x_low + 8ll * K;
  uint4 none = make_uint4(0, 0, 0, 0), xl[STAGES], xh[STAGES];
#pragma unroll
  for (int s = 0; s < STAGES; ++s) {
    xl[s] = s < count && low_in ? *(const uint4*)(x_low + s * 32) : none;
    xh[s] = HIGH && s < count && high_in ? *(const uint4*)(x_high + s * 32) : none;
  }

  float acc[TILES][4] = {}, low_squares = 0.f, high_squares = 0.f;
  for (int base = 0; base < count; base += STAGES) {
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
      if (base + s >= count) break;
      uint4 a = xl[s], b = xh[s];
      if (NORM) {
        low_squares += sum_squares(a), a = multiply(a, nq[s]);
        if (HIGH) high_squares += sum_squares(b), b = multiply(b, nq[s]);
      }
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        mma(acc[t], a.x, b.x, a.y, b.y, wq[s][t].x, wq[s][t].y);
        mma(acc[t], a.z, b.z, a.w, b.w, wq[s][t].z, wq[s][t].w);
      }
      int next = base + s + STAGES;
      if (next < count) {
#pragma unroll
        for (int t = 0; t < TILES; ++t) wq[s][t] = load_once(w[t] + next * 32);
        if (NORM) nq[s] = *(const uint4*)(scale + next * 32);
        if (low_in) xl[s] = *(const uint4*)(x_low + next * 32);
        if (HIGH && high_in) xh[s] = *(const uint4*)(x_high + next * 32);
      }
    }
  }

  // A thread has columns 2 * (lane % 4) + {0, 1} of each tile, for x's rows `row` and `row + 8`.
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    int column = t * 8 + (lane & 3) * 2;
    partial[warp][row][column] = acc[t][0], partial[warp][row][column + 1] = acc[t][1];
    if (HIGH) partial[warp][row + 8][column] = acc[t][2], partial[warp][row + 8][column + 1] = acc[t][3];
  }
  if (NORM) {
    low_squares = quad_sum(low_squares), high_squares = quad_sum(high_squares);
    if ((lane & 3) == 0) {
      squares[warp][row] = low_squares;
      if (HIGH) squares[warp][row + 8] = high_squares;
    }
  }
  __syncthreads();

  constexpr int COLUMNS = GATED ? ROWS / 2 : ROWS;
  int width = GATED ? N / 2 : N;
  for (int i = threadIdx.x; i < M * COLUMNS; i += THREADS) {
    int m = i / COLUMNS, column = i % COLUMNS, n = blockIdx.x * COLUMNS + column;
    if (n >= width) continue;
    float y = 0.f, up = 0.f, factor = 1.f;
#pragma unroll
    for (int k = 0; k < WARPS; ++k) {
      y += partial[k][m][column];
      if (GATED) up += partial[k][m][column + COLUMNS];
    }
    if (NORM) {
      float sum = 0.f;
#pragma unroll
      for (int k = 0; k < WARPS; ++k) sum += squares[k][m];
      factor = rsqrtf(sum / K + eps);
    }
    y = y * factor + (bias ? to_float(bias[n]) : 0.f);
    if (GATED) {
      up = rounded(up * factor + (bias ? to_float(bias[width + n]) : 0.f));
      y = rounded(y), y = rounded(y / (1.f + __expf(-y))) * up;
    }
    if (residual) y = rounded(y) + to_float(residual[(long long)m * N + n]);
    out[(long long)m * width + n] = from_float<T>(y);
  }
}

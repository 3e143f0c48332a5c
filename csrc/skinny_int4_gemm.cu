// Skinny GEMM with a 4-bit weight on Hopper, for decode batches of a few rows: y [M, N] = x [M, K] @ weight [N, K]^T,
// with M up to 16. x and y are T (bf16 or f16), the weight is packed (quantized.cuh), sums are float32.
//
// Blocks, clusters (split-K) and the ring are as in quantized_gemm.cu, but each stage has a single warp as its
// consumer. This warp multiplies all BLOCK_N rows of the weight with all columns of the stage by `mma` (mma.cuh), so
// that x is read from shared memory only once. The warps take stages in turn and add up their sums after the main loop,
// so no warp waits for another one or for its own products.
//
// Most instructions decode the weight, so levels are not converted by arithmetic: one shift and one LOP3 turn two
// levels into values of T. In bf16 a level q becomes 128 + q, and the zero point z and 128 are subtracted from a
// group's sums: sum((q - z) * x) = sum((128 + q) * x) - (128 + z) * sum(x). In f16 it becomes the subnormal number q /
// 2^24, because 1024 + q would leave too few bits to the sums if the mean of x is not 0. A product with a left operand
// of ones gives the sum of x. All products are exact; the sums of a group are multiplied by its scale in float32.
//
// NORM: x is RMS-normed (sums.cuh): it is multiplied by the norm's weight as it is loaded, and by the scales of its
// rows in the epilogue. The sums of squares come from a product of x with itself.
//
// STAGES is a multiple of the number of warps, or at least the number of steps of a block. A stage is then always used
// by the same warp, so that one parity bit tells the warp which phase of the mbarrier to wait for. K must be a multiple
// of BLOCK_K.
#define READERS 1
#include "ring.cuh"
#include "quantized.cuh"

constexpr int WARPS_K = MULTIPLIERS / 32;         // warps that take stages in turn
constexpr int WEIGHT_TILES = BLOCK_N / 16;        // tiles of 16 rows of the weight
constexpr int LINE = 128;                         // bytes of a row of x in a box
constexpr int CHUNKS = BLOCK_K / CHUNK_K;
constexpr int BOX = M_MAX * LINE;                 // bytes of 64 columns of x
constexpr int X_STAGE = CHUNKS * BOX;
constexpr int W_TILE = CHUNKS * CHUNK;            // bytes of 64 rows
constexpr int GROUPS = BLOCK_K / GROUP;
constexpr int S_TILE = GROUPS * 64 * 4;
constexpr int WEIGHTS = ROW_GROUPS * (W_TILE + S_TILE);  // bytes of a stage's weight and scales
constexpr int NORM_STAGE = BLOCK_K * 2;  // bytes of the norm's weight
constexpr int STAGE = (X_STAGE + WEIGHTS + NORM_STAGE + 1023) / 1024 * 1024;
constexpr unsigned ONE = Is<T>::bf16 ? 0x3f803f80 : 0x3c003c00;  // 1, twice
static_assert(WEIGHT == INT4 && CHUNK_K == 64 && GROUP >= 32);

extern __shared__ __align__(1024) unsigned char memory[];  // the ring; then the sums

// Load the right operands of eight rows and 64 columns of x: b[2s] and b[2s + 1] are the operand of step s.
__device__ __forceinline__ void load_right(unsigned (&b)[8], unsigned box) {
  int lane = threadIdx.x & 31, row = lane & 7;
  unsigned line = box + row * LINE;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b[half * 4]), "=r"(b[half * 4 + 1]), "=r"(b[half * 4 + 2]), "=r"(b[half * 4 + 3])
                 : "r"(line + ((half * 4 + (lane >> 3) ^ row) << 4)));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) skinny_int4_gemm(
    const __grid_constant__ TensorMap x_map, const unsigned* weight, const unsigned* scales,
    OPTIONAL const T* norm, float eps, OPTIONAL const T* bias, OPTIONAL const T* residual, T* out, int M, int x_rows,
    int N, int K) {
  __shared__ Ring ring;
  __shared__ Barrier received;
  __shared__ alignas(16) float squares[(SPLIT + 1) * M_MAX];
  __shared__ float squares_of_warps[NORM ? WARPS_K : 1][M_MAX];
  int split = blockIdx.x, thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  int first = blockIdx.y * x_rows;  // first row of x
  M = min(M, first + x_rows);       // where the block's rows of x end
  int steps = K / BLOCK_K, begin = steps * split / SPLIT, count = steps * (split + 1) / SPLIT - begin;
  int tile = blockIdx.z * ROW_GROUPS, tiles = (N + 63) / 64;

  auto load_weight = [&](int step, int slot) {
    unsigned char* to = memory + slot * STAGE + X_STAGE;
    Barrier* barrier = &ring.full[slot];
    expect(barrier, CHUNKS * x_rows * LINE + WEIGHTS + (NORM ? NORM_STAGE : 0));
    copy_weight<W_TILE, S_TILE>(to, weight, scales, tile, tiles, steps, begin, step, barrier);
    if (NORM) copy_bytes(to + WEIGHTS, norm + (begin + step) * BLOCK_K, NORM_STAGE, barrier);
  };
  auto load_x = [&](int step, int slot) {
#pragma unroll
    for (int box = 0; box < CHUNKS; ++box)
      copy_box(memory + slot * STAGE + box * BOX, x_map, (begin + step) * BLOCK_K + box * 64, first, &ring.full[slot]);
  };

  open(ring, received, x_map, count, load_weight);
  wait_for_predecessor();
  start_successor();
  if (warp >= WARPS_K) {
    produce(ring, count, load_weight, load_x);
    return;
  }
  Factors factors(nullptr, bias, N);

  float total[WEIGHT_TILES][TILES][4] = {}, square[TILES][4] = {};
  for (int step = warp; step < count; step += WARPS_K) {
    int slot = step % STAGES;
    const unsigned char* stage = memory + slot * STAGE;
    const unsigned char* words = stage + X_STAGE + lane * 16;
    const unsigned* scales_of = (const unsigned*)(stage + X_STAGE + ROW_GROUPS * W_TILE) + (lane >> 2);
    const unsigned* norms = (const unsigned*)(stage + X_STAGE + WEIGHTS) + (lane & 3);
    wait(&ring.full[slot], step / STAGES & 1);
    float sums[WEIGHT_TILES][TILES][4], x_sums[TILES][4];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      unsigned b[TILES][8];
#pragma unroll
      for (int t = 0; t < TILES; ++t) load_right(b[t], shared_address(stage) + c * BOX + t * 8 * LINE);
      if (NORM) {
#pragma unroll
        for (int t = 0; t < TILES; ++t)  // x @ x^T has the sums of squares on its diagonal
#pragma unroll
          for (int s = 0; s < STEPS; ++s) {
            unsigned x0 = b[t][s * 2], x1 = b[t][s * 2 + 1];
            mma(square[t], x0, 0, x1, 0, x0, x1);
          }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          unsigned two = norms[c * (CHUNK_K / 2) + i * 4];
#pragma unroll
          for (int t = 0; t < TILES; ++t) b[t][i] = multiply(b[t][i], two);
        }
      }
      uint4 chunk[WEIGHT_TILES];
#pragma unroll
      for (int w = 0; w < WEIGHT_TILES; ++w)
        chunk[w] = *(const uint4*)(words + w / 4 * W_TILE + c * CHUNK + w % 4 * 512);
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        int k = c * CHUNK_K + s * 16;
        if (k % GROUP == 0) {
#pragma unroll
          for (int i = 0; i < TILES * 4; ++i) x_sums[i / 4][i % 4] = 0.f;
#pragma unroll
          for (int i = 0; i < WEIGHT_TILES * TILES * 4; ++i) sums[i / (TILES * 4)][i / 4 % TILES][i % 4] = 0.f;
        }
#pragma unroll
        for (int t = 0; t < TILES; ++t) mma(x_sums[t], ONE, ONE, ONE, ONE, b[t][s * 2], b[t][s * 2 + 1]);
#pragma unroll
        for (int w = 0; w < WEIGHT_TILES; ++w) {
          unsigned a[4];
          lift_step(a, chunk[w], s);
#pragma unroll
          for (int t = 0; t < TILES; ++t) mma(sums[w][t], a[0], a[1], a[2], a[3], b[t][s * 2], b[t][s * 2 + 1]);
        }
        if ((k + 16) % GROUP) continue;
#pragma unroll
        for (int w = 0; w < WEIGHT_TILES; ++w)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            Scale scale{scales_of[w / 4 * (S_TILE / 4) + k / GROUP * 64 + w % 4 * 16 + h * 8]};
            float factor = scale.of_levels(), of_x = scale.of_x(factor, LIFT);
            factor *= LEVEL;
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                float& y = total[w][t][h * 2 + i];
                y += factor * sums[w][t][h * 2 + i], y += of_x * x_sums[t][i];
              }
          }
      }
    }
    __syncwarp();
    arrive(shared_address(&ring.empty[slot]), lane == 0);
  }

  // Add up the sums of the warps; each thread gets those that the epilogue of sums.cuh expects.
  float4* parts = (float4*)memory;
  asm volatile("bar.sync 2, %0;" ::"n"(MULTIPLIERS) : "memory");  // all warps have read the ring
#pragma unroll
  for (int w = 0; w < WEIGHT_TILES; ++w)
#pragma unroll
    for (int t = 0; t < TILES; ++t)
      parts[((warp * TILES + t) * WEIGHT_TILES + w) * 32 + lane] = *(const float4*)total[w][t];
  if (NORM && (lane & 3) == lane >> 3)
#pragma unroll
    for (int t = 0; t < TILES; ++t)
      squares_of_warps[warp][t * 8 + (lane >> 2)] = lane & 4 ? square[t][1] : square[t][0];
  asm volatile("bar.sync 2, %0;" ::"n"(MULTIPLIERS) : "memory");
  RowScale row_scale{squares, K, eps};
  if (NORM && thread < M_MAX) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS_K; ++w) sum += squares_of_warps[w][thread];
    row_scale.own()[thread] = sum;
  }
  float sums[TILES][4] = {};
  if (thread < CONSUMERS)
#pragma unroll
    for (int p = 0; p < WARPS_K; ++p)
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        float4 v = parts[(p * TILES + t) * CONSUMERS + thread];
        sums[t][0] += v.x, sums[t][1] += v.y, sums[t][2] += v.z, sums[t][3] += v.w;
      }
  add_up(
      thread < CONSUMERS, sums, (float*)memory, &received, first, M, N, factors, nullptr, bias, residual, out,
      row_scale);
}

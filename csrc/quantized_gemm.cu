// Products with quantized weights on Hopper: y [M, N] = x [M, K] @ weight [N, K]^T, multiplied in T.
//
// A block computes BLOCK_N columns of y, which are rows of the weight, for M_MAX rows of x; in a cluster of SPLIT blocks
// each takes a part of K. A thread, the producer, asks for stages of BLOCK_K columns: of the packed weight
// (quantized.cuh), of its scales, and by the tensor memory accelerator of x, which arrives swizzled. A warpgroup turns
// 64 rows of the weight into T in registers, which are the left operand of wgmma; x in the ring is the right one.
// column_sums.cuh has the end.
//
// The ring is filled with weights before the kernel waits for its predecessor; its barriers are as in
// small_batch_gemm.cu. While wgmma works on one chunk of 16 bytes a lane, the next one is decoded.
//
// K is a multiple of BLOCK_K. T is bf16 or f16.
#include "column_sums.cuh"
#include "left_product.cuh"
#include "quantized.cuh"

constexpr int CHUNKS = BLOCK_K / CHUNK_K;
constexpr int BOX = M_MAX * LINE;                  // bytes of 64 columns of x
constexpr int X_STAGE = BLOCK_K / 64 * BOX;
constexpr int W_TILE = CHUNKS * CHUNK;             // of a warpgroup
constexpr bool SCALES = GROUP && !OFFSETS;         // sums of groups
constexpr int UNIT = GROUP ? GROUP : BLOCK_K;
constexpr int GROUPS = GROUP ? BLOCK_K / GROUP : 0;
constexpr bool DEFERS = SCALES && GROUPS > 1 && TILES <= 4;  // a group's sums are scaled while the next ones are multiplied
constexpr int S_TILE = GROUPS * 64 * 4;
constexpr int STAGE_BYTES = X_STAGE + WARPGROUPS * (W_TILE + S_TILE);
constexpr int STAGE = (STAGE_BYTES + 1023) / 1024 * 1024;

extern __shared__ __align__(1024) unsigned char memory[];  // the ring; then the sums

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) quantized_gemm(
    const __grid_constant__ TensorMap x_map, const unsigned* weight, const unsigned* scales,
    OPTIONAL const float* row_scales, OPTIONAL const T* bias, OPTIONAL const T* residual, T* out, int M, int N, int K) {
  __shared__ Barrier full[STAGES], empty[STAGES], received;
  int split = blockIdx.x, thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  int first = blockIdx.y * M_MAX, rows = min(M - first, M_MAX);  // of x
  int steps = K / BLOCK_K, begin = steps * split / SPLIT, count = steps * (split + 1) / SPLIT - begin;
  int tile = blockIdx.z * WARPGROUPS, tiles = (N + 63) / 64;
  bool producer = thread == CONSUMERS;

  auto stage_of = [](int step) { return memory + step % STAGES * STAGE; };
  auto load_weight = [&](int step) {
    unsigned char* to = stage_of(step) + X_STAGE;
    Barrier* barrier = &full[step % STAGES];
    expect(barrier, STAGE_BYTES);
#pragma unroll
    for (int w = 0; w < WARPGROUPS; ++w) {
      long long at = (long long)min(tile + w, tiles - 1) * steps + begin + step;  // beyond the weight: any
      copy_bytes(to + w * W_TILE, (const unsigned char*)weight + at * W_TILE, W_TILE, barrier);
      if (GROUP) copy_bytes(to + WARPGROUPS * W_TILE + w * S_TILE, (const unsigned char*)scales + at * S_TILE, S_TILE, barrier);
    }
  };
  auto load_x = [&](int step) {
#pragma unroll
    for (int box = 0; box < BLOCK_K / 64; ++box)
      copy_box(stage_of(step) + box * BOX, x_map, (begin + step) * BLOCK_K + box * 64, first, &full[step % STAGES]);
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

  float acc[DEFERS ? 2 : 1][TILES][4] = {}, total[SCALES ? TILES : 1][4] = {};
  int group = warp >> 2, row = (warp & 3) * 16 + (lane >> 2);  // of the warpgroup's 64
  if (warp < WARPS) {
    for (int step = 0; step < count; ++step) {
      wait(&full[step % STAGES], step / STAGES & 1);
      const unsigned char* stage = stage_of(step);
      unsigned x = shared_address(stage);
      const uint4* chunks = (const uint4*)(stage + X_STAGE + group * W_TILE) + (thread & 127);
      const Scale* scales_of = (const Scale*)(stage + X_STAGE + WARPGROUPS * W_TILE + group * S_TILE) + row;
      auto finish_group = [&](int g) {
        float low = scales_of[g * 64].factor(), high = scales_of[g * 64 + 8].factor();
        float(*sums)[4] = acc[DEFERS ? g & 1 : 0];
#pragma unroll
        for (int t = 0; t < (SCALES ? TILES : 0); ++t) {
          total[t][0] += low * sums[t][0], total[t][1] += low * sums[t][1];
          total[t][2] += high * sums[t][2], total[t][3] += high * sums[t][3];
        }
      };
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        uint4 chunk = chunks[c * (CHUNK / 16)];
        unsigned a[STEPS][4];
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
          unsigned low = ONES + 0x00080008, high = low;
          if (GROUP && WEIGHT == INT4) {
            const Scale* here = scales_of + (c * CHUNK_K + s * 16) / UNIT * 64;
            low = here[0].zero(), high = here[8].zero();
          }
          decode_step(a[s], chunk, s, low, high);
        }
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
          int k = c * CHUNK_K + s * 16, g = k / UNIT;  // of the stage
          unsigned long long b = descriptor(x + k / 64 * BOX + k % 64 * 2);
          float(*sums)[4] = acc[DEFERS ? g & 1 : 0];
          if (SCALES && k % UNIT == 0) multiply_add<false>(sums, a[s], b);
          else multiply_add<true>(sums, a[s], b);
          if (SCALES && (k + 16) % UNIT == 0) {
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (!DEFERS) wait_products<0>(), finish_group(g);
            else if (g > 0) wait_products<1>(), finish_group(g - 1);
            if (s + 1 < STEPS) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
          }
        }
        if (!SCALES || (c + 1) * CHUNK_K % UNIT) asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        // Registers of the chunk before are free. At a stage's end none may be under way: ptxas would order all others.
        if (c + 1 < CHUNKS) wait_products<1>();
        else wait_products<0>();
      }
      if (DEFERS) finish_group(GROUPS - 1);
      if (step + STAGES < count && lane == 0) arrive(&empty[step % STAGES]);
    }
  }
  if (SPLIT > 1) meet_cluster();
  else __syncthreads();
  if (warp >= WARPS) return;
  add_up(SCALES ? total : acc[0], (float*)memory, &received, first, rows, N, GROUP ? nullptr : row_scales, bias, residual, out);
}

// Products with quantized weights on Hopper: y [M, N] = x [M, K] @ weight [N, K]^T, multiplied in T.
//
// A block computes BLOCK_N columns of y, which are rows of the weight, for M_MAX rows of x; in a cluster of SPLIT blocks
// each takes a part of K. A stage of the ring (ring.cuh) has BLOCK_K columns: of the packed weight (quantized.cuh), of its
// scales, and of x, which arrives swizzled. A warpgroup turns 64 rows of the weight into T in registers, which are the
// left operand of wgmma; x in the ring is the right one. K_PARTS warpgroups divide the columns of a stage and add up
// their sums at the end: a lone warpgroup would wait for its own products. sums.cuh has the end.
//
// A phase is two products, or four. While wgmma works on one, the next one is decoded, also across stages; its words are
// loaded a phase earlier. Next to wgmma every instruction of the loop counts: addresses are kept, not computed.
//
// K is a multiple of BLOCK_K. T is bf16 or f16.
#include "ring.cuh"
#include "left_product.cuh"
#include "quantized.cuh"

constexpr int CHUNKS = BLOCK_K / CHUNK_K;
constexpr int PART_K = BLOCK_K / K_PARTS;          // columns of a stage that a warpgroup multiplies
constexpr int BOX = M_MAX * LINE;                  // bytes of 64 columns of x
constexpr int X_STAGE = BLOCK_K / 64 * BOX;
constexpr int W_TILE = CHUNKS * CHUNK;             // of a warpgroup
constexpr bool SCALES = GROUP && !OFFSETS;         // sums of groups
constexpr int UNIT = GROUP ? GROUP : BLOCK_K;
// Of a phase. Four fill a chunk of 4 bits; more rows have no registers for them.
constexpr int PRODUCTS = WEIGHT_BITS == 4 && M_MAX <= 16 && PART_K >= 128 && (!SCALES || UNIT >= 64) ? 4 : 2;
constexpr int PHASE_K = PRODUCTS * 16;
constexpr int PHASES = PART_K / PHASE_K;
constexpr int GROUPS = GROUP ? BLOCK_K / GROUP : 0;
constexpr bool DEFERS = SCALES && GROUPS / K_PARTS > 1 && TILES <= 4;  // a group's sums are scaled while the next ones are multiplied
constexpr int S_TILE = GROUPS * 64 * 4;
constexpr int STAGE_BYTES = X_STAGE + ROW_GROUPS * (W_TILE + S_TILE);
constexpr int STAGE = (STAGE_BYTES + 1023) / 1024 * 1024;

extern __shared__ __align__(1024) unsigned char memory[];  // the ring; then the sums

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) quantized_gemm(
    const __grid_constant__ TensorMap x_map, const unsigned* weight, const unsigned* scales,
    OPTIONAL const float* row_scales, OPTIONAL const T* bias, OPTIONAL const T* residual, T* out, int M, int N, int K) {
  __shared__ Ring ring;
  __shared__ Barrier received;
  int split = blockIdx.x, thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  int first = blockIdx.y * M_MAX;  // of x
  int steps = K / BLOCK_K, begin = steps * split / SPLIT, count = steps * (split + 1) / SPLIT - begin;
  int tile = blockIdx.z * ROW_GROUPS, tiles = (N + 63) / 64;

  auto load_weight = [&](int step, int slot) {
    unsigned char* to = memory + slot * STAGE + X_STAGE;
    Barrier* barrier = &ring.full[slot];
    expect(barrier, TWO_PRODUCERS ? STAGE_BYTES - X_STAGE : STAGE_BYTES);
#pragma unroll
    for (int w = 0; w < ROW_GROUPS; ++w) {
      long long at = (long long)min(tile + w, tiles - 1) * steps + begin + step;  // beyond the weight: any
      copy_bytes(to + w * W_TILE, (const unsigned char*)weight + at * W_TILE, W_TILE, barrier);
      if (GROUP) copy_bytes(to + ROW_GROUPS * W_TILE + w * S_TILE, (const unsigned char*)scales + at * S_TILE, S_TILE, barrier);
    }
  };
  auto load_x = [&](int step, int slot) {
    if (TWO_PRODUCERS) expect(&ring.full[slot], X_STAGE);
#pragma unroll
    for (int box = 0; box < BLOCK_K / 64; ++box)
      copy_box(memory + slot * STAGE + box * BOX, x_map, (begin + step) * BLOCK_K + box * 64, first, &ring.full[slot]);
  };

  open(ring, received, x_map, count, load_weight);
  wait_for_predecessor();
  start_successor();
  if (warp >= MULTIPLIERS / 32) {
    produce(ring, count, load_weight, load_x);
    return;
  }
  take_registers();
  Factors factors(GROUP ? nullptr : row_scales, bias, N);

  float acc[DEFERS ? 2 : 1][TILES][4] = {}, total[SCALES ? TILES : 1][4] = {};
  int group = (warp >> 2) % ROW_GROUPS, part = (warp >> 2) / ROW_GROUPS;  // rows of the weight, columns of a stage
  int row = (warp & 3) * 16 + (lane >> 2);  // of the warpgroup's 64
  unsigned a[2][PRODUCTS][4];  // left operands of two phases
  uint4 chunk;
  const unsigned char* weights = memory + X_STAGE + group * W_TILE + part * (W_TILE / K_PARTS) + (thread & 127) * 16;  // of the ring's first stage
  const unsigned char* scales_of = memory + X_STAGE + ROW_GROUPS * W_TILE + group * S_TILE + row * 4 + part * (GROUPS / K_PARTS) * 256;
  unsigned fulls = shared_address(ring.full), empties = shared_address(ring.empty);
  // Decode the left operands of a phase of a stage that has arrived.
  auto decode_phase = [&](int at, int phase) {
#pragma unroll
    for (int s = 0; s < PRODUCTS; ++s) {
      unsigned low = ONES + 0x00080008, high = low;
      if (GROUP && WEIGHT == INT4) {
        const Scale* here = (const Scale*)(scales_of + at) + (phase * PHASE_K + s * 16) / UNIT * 64;
        low = here[0].zero(), high = here[8].zero();
      }
      decode_step(a[phase & 1][s], chunk, phase * PRODUCTS % STEPS + s, low, high);
    }
  };
  auto load_chunk = [&](int at, int phase) {
    if (phase * PRODUCTS % STEPS == 0) chunk = *(const uint4*)(weights + at + phase * PRODUCTS / STEPS * CHUNK);
  };
  wait(fulls, 0);
  load_chunk(0, 0);
  decode_phase(0, 0);
  load_chunk(0, 1);
  int slot = 0, parity = 0;  // of the ring
  for (int left = count; left > 0; --left) {
    int at = slot * STAGE;
    // After the last stage: the same again, for nothing.
    int next = left == 1 ? slot : slot + 1 == STAGES ? 0 : slot + 1, next_at = next * STAGE;
    unsigned x = __shfl_sync(~0u, (unsigned)descriptor(shared_address(memory) + at + part * (PART_K / 64 * BOX)), 0);
    auto finish_group = [&](int g, float low, float high) {
      float(*sums)[4] = acc[DEFERS ? g & 1 : 0];
#pragma unroll
      for (int t = 0; t < (SCALES ? TILES : 0); ++t) {
        total[t][0] += low * sums[t][0], total[t][1] += low * sums[t][1];
        total[t][2] += high * sums[t][2], total[t][3] += high * sums[t][3];
      }
    };
    auto factor = [&](int g, int half) { return ((const Scale*)(scales_of + at))[g * 64 + half * 8].factor(); };
#pragma unroll
    for (int phase = 0; phase < PHASES; ++phase) {
      int g = phase * PHASE_K / UNIT;
      float(*sums)[4] = acc[DEFERS ? g & 1 : 0];
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int s = 0; s < PRODUCTS; ++s) {
        int k = phase * PHASE_K + s * 16;  // of the stage
        unsigned long long b = descriptor(0) >> 32 << 32 | (x + (k / 64 * BOX + k % 64 * 2) / 16);
        if (SCALES && k % UNIT == 0) multiply_add<false>(sums, a[phase & 1][s], b);
        else multiply_add<true>(sums, a[phase & 1][s], b);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      bool last = phase + 1 == PHASES;
      bool ends = SCALES && (phase + 1) * PHASE_K % UNIT == 0 && (!DEFERS || last);
      float low = ends ? factor(g, 0) : 0.f, high = ends ? factor(g, 1) : 0.f;
      wait_products<1>();
      if (phase == 0 && left < count) arrive(empties + (slot == 0 ? STAGES - 1 : slot - 1) * 8, lane == 0);
      if (DEFERS && phase > 0 && phase * PHASE_K % UNIT == 0) finish_group(g - 1, factor(g - 1, 0), factor(g - 1, 1));
      decode_phase(last ? next_at : at, (phase + 1) % PHASES);
      if (phase + 2 == PHASES) wait(fulls + next * 8, next > slot || left == 1 ? parity : parity ^ 1);
      load_chunk(phase + 2 < PHASES ? at : next_at, (phase + 2) % PHASES);
      if (ends) wait_products<0>(), finish_group(g, low, high);
    }
    if (next < slot) parity ^= 1;
    slot = next;
  }
  wait_products<0>();
  auto sums = SCALES ? total : acc[0];
  bool adds = K_PARTS == 1 || add_parts(sums, (float*)memory, part);
  add_up(adds, sums, (float*)memory, &received, first, M, N, factors,
         GROUP ? nullptr : row_scales, bias, residual, out);
}

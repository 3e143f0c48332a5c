// GEMM with a quantized weight on Hopper: y [M, N] = x [M, K] @ weight [N, K]^T. x and y are T (bf16 or f16), the
// weight is packed (quantized.cuh) and dequantized to T in registers, sums are float32.
//
// A block computes BLOCK_N columns of y, which are rows of the weight, for x_rows rows of x, at most M_MAX. The SPLIT
// blocks of a cluster divide K (split-K). A stage of the ring (ring.cuh) has BLOCK_K columns of the packed weight, of
// its scales and of x; TMA swizzles x. A consumer warpgroup decodes 64 rows of the weight and applies the scales of
// groups, if there are any. The decoded rows are the left operand of wgmma, in registers; x in the ring is the right
// operand. K_PARTS warpgroups share the same 64 rows: each takes a part of a stage's columns, and their sums are added
// after the main loop. With one warpgroup alone, decoding would have to wait for that warpgroup's own wgmma. The
// epilogue is in sums.cuh.
//
// The main loop is software-pipelined in phases of one or two wgmma. While wgmma works on one phase, the warpgroup
// decodes the next one, across stages too, from words that were loaded one phase earlier. Decoding competes with wgmma
// for issue slots, so every instruction of the loop counts. Slot indices and descriptors are computed only from values
// that the compiler knows to be uniform across the warp. It then keeps them in constants or uniform registers, which
// costs one instruction per wgmma. A branch that it cannot prove uniform would prevent this.
//
// K must be a multiple of BLOCK_K, and BLOCK_K a multiple of GROUP.
#include "ring.cuh"
#include "left_product.cuh"
#include "quantized.cuh"

constexpr int CHUNKS = BLOCK_K / CHUNK_K;
constexpr int PART_K = BLOCK_K / K_PARTS;          // columns of a stage that a warpgroup multiplies
constexpr int BOX = M_MAX * LINE;                  // bytes of 64 columns of x
constexpr int X_STAGE = BLOCK_K / 64 * BOX;
constexpr int W_TILE = CHUNKS * CHUNK;             // bytes of the weight of a warpgroup
constexpr int PRODUCTS = WEIGHT_BITS == 4 ? 1 : 2;  // wgmma of a phase
constexpr int PHASE_K = PRODUCTS * 16;
constexpr int PHASES = PART_K / PHASE_K;
// Stages per iteration of the main loop. With 4-bit weights the kernel is bound by instruction issue. If the whole ring
// has few columns, the loop over its stages is unrolled completely, so that all addresses are constants.
constexpr int UNROLL = WEIGHT_BITS == 4 && STAGES * PART_K <= 1024 ? STAGES : 1;
constexpr int UNIT = GROUP ? GROUP : BLOCK_K;
static_assert(UNIT % PHASE_K == 0 && PHASES % 2 == 0);
constexpr int S_TILE = GROUP ? BLOCK_K / UNIT * 64 * 4 : 0;
constexpr int W_STAGE = ROW_GROUPS * (W_TILE + S_TILE);
constexpr int STAGE = (X_STAGE + W_STAGE + 1023) / 1024 * 1024;

extern __shared__ __align__(1024) unsigned char memory[];  // the ring; then the sums

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) quantized_gemm(
    const __grid_constant__ TensorMap x_map, const unsigned* weight, const unsigned* scales,
    OPTIONAL const float* row_scales, OPTIONAL const T* bias, OPTIONAL const T* residual, T* out, int M, int x_rows,
    int N, int K) {
  __shared__ Ring ring;
  __shared__ Barrier received;
  int split = blockIdx.x, thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  int first = blockIdx.y * x_rows;  // first row of x
  M = min(M, first + x_rows);       // where the block's rows of x end
  int x_bytes = BLOCK_K / 64 * x_rows * LINE;  // bytes of x in a stage
  int steps = K / BLOCK_K, begin = steps * split / SPLIT, count = steps * (split + 1) / SPLIT - begin;
  int tile = blockIdx.z * ROW_GROUPS, tiles = (N + 63) / 64;

  auto load_weight = [&](int step, int slot) {
    unsigned char* to = memory + slot * STAGE + X_STAGE;
    Barrier* barrier = &ring.full[slot];
    expect(barrier, W_STAGE + (TWO_PRODUCERS ? 0 : x_bytes));
    copy_weight<W_TILE, S_TILE>(to, weight, scales, tile, tiles, steps, begin, step, barrier);
  };
  auto load_x = [&](int step, int slot) {
    if (TWO_PRODUCERS) expect(&ring.full[slot], x_bytes);
#pragma unroll
    for (int box = 0; box < BLOCK_K / 64; ++box)
      copy_box(memory + slot * STAGE + box * BOX, x_map, (begin + step) * BLOCK_K + box * 64, first, &ring.full[slot]);
  };

  open(ring, received, x_map, count, load_weight);
  if (!fills_early()) {
    wait_for_predecessor();
    start_successor();
  }
  if (warp >= MULTIPLIERS / 32) {
    produce<W_STAGE>(ring, count, load_weight, load_x);
    return;
  }
  Factors factors(GROUP ? nullptr : row_scales, bias, N);

  float sums[TILES][4] = {};
  int group = (warp >> 2) % ROW_GROUPS, part = (warp >> 2) / ROW_GROUPS;  // rows of the weight, columns of a stage
  unsigned a[2][PRODUCTS][4];  // left operands of two phases
  uint4 chunk;
  unsigned words[2];  // scales of a phase's group for the lane's two rows
  Scaling low, high;
  // Addresses of this thread's words and scales in the first stage of the ring.
  const unsigned char* weights = memory + X_STAGE + group * W_TILE + part * (W_TILE / K_PARTS) + (thread & 127) * 16;
  const unsigned char* scales_of = memory + X_STAGE + ROW_GROUPS * W_TILE + group * S_TILE +
                                   part * PART_K / UNIT * 256 + ((warp & 3) * 16 + (lane >> 2)) * 4;
  unsigned fulls = shared_address(ring.full), empties = shared_address(ring.empty);
  auto begins_group = [&](int phase) { return GROUP && phase * PHASE_K % UNIT == 0; };
  // Load the words and scales that a phase decodes. Its stage, at offset `at`, must have arrived.
  auto load_phase = [&](int at, int phase) {
    if (phase * PRODUCTS % STEPS == 0) chunk = *(const uint4*)(weights + at + phase * PRODUCTS / STEPS * CHUNK);
    if (begins_group(phase)) {
      const unsigned* here = (const unsigned*)(scales_of + at) + phase * PHASE_K / UNIT * 64;
      words[0] = here[0], words[1] = here[8];
    }
  };
  // Decode the words that were loaded for a phase into its left operands.
  auto decode_phase = [&](int phase) {
    if (begins_group(phase)) low = scaling({words[0]}), high = scaling({words[1]});
#pragma unroll
    for (int s = 0; s < PRODUCTS; ++s) {
      int step = phase * PRODUCTS % STEPS + s;
      if (GROUP) decode_step(a[phase & 1][s], chunk, step, low, high);
      else decode_step(a[phase & 1][s], chunk, step, 0u, 0u);
    }
  };
  // Low half of the descriptor of x in the first stage of the ring; uniform across the warp.
  unsigned first_x = __shfl_sync(~0u, (unsigned)descriptor(shared_address(memory) + part * (PART_K / 64 * BOX)), 0);
  wait(fulls, 0);
  load_phase(0, 0);
  decode_phase(0);
  load_phase(0, 1);
  int left = count, parity = 0;  // stages to multiply, and parity of the ring's barriers
  for (int start = 0; left > 0; start = start + UNROLL == STAGES ? 0 : start + UNROLL)
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      int slot = UNROLL == STAGES ? u : start;
      int next = slot + 1 == STAGES ? 0 : slot + 1, before = (slot == 0 ? STAGES : slot) - 1;
      int at = slot * STAGE, next_at = next * STAGE;
      unsigned long long x = descriptor(0) >> 32 << 32 | (first_x + slot * (STAGE / 16));
#pragma unroll
      for (int phase = 0; phase < PHASES; ++phase) {
        fence_products();
#pragma unroll
        for (int s = 0; s < PRODUCTS; ++s) {
          int k = phase * PHASE_K + s * 16;  // of the stage
          multiply_add<true>(sums, a[phase & 1][s], x + (k / 64 * BOX + k % 64 * 2) / 16);
        }
        commit_products();
        wait_products<1>();
        // All wgmma that read the previous stage have ended, so the producer may refill its slot.
        if (phase == 0) arrive(empties + before * 8, lane == 0 && left < count);
        decode_phase((phase + 1) % PHASES);
        // After the last stage the loads below read stale words from a slot. This is harmless: the words are not used.
        if (phase + 2 == PHASES && left > 1) wait(fulls + next * 8, parity ^ (next == 0));
        load_phase(phase + 2 < PHASES ? at : next_at, (phase + 2) % PHASES);
      }
      parity ^= next == 0;
      if (--left == 0) break;
    }
  wait_products<0>();
  bool adds = K_PARTS == 1 || add_parts(sums, (float*)memory, part);
  add_up(adds, sums, (float*)memory, &received, first, M, N, factors,
         GROUP ? nullptr : row_scales, bias, residual, out);
}

// Grouped GEMMs of a mixture of experts with quantized weights on Hopper; a layer has two, gate-up and down, as in
// moe_gemm.cu. A block multiplies BLOCK_N rows of an expert's packed weight (quantized.cuh) with one tile of at most
// M_MAX (token, expert) pairs (see moe.cu). x and the outputs are T (bf16 or f16), sums are float32.
//
// The weight is decoded to T in registers, where it is the left operand. The right operand is the pairs' rows of x,
// gathered into shared memory. Both stream through a ring of STAGES stages of BLOCK_K columns. One thread issues bulk
// copies of the weight, one per 64 rows; all threads issue the copies of x. Tiles of few pairs are multiplied by `mma`,
// because decoding takes most of their time. Tiles of many pairs are multiplied by wgmma (-DWGMMA=1), which works on
// one chunk while the next one is decoded. A warpgroup has HEIGHT times 64 rows of the weight, for which `mma` reads x
// only once. If M_MAX is 16 and a tile has at most 8 pairs, its second half is neither loaded nor multiplied.
//
// x counts as zero after its K columns, so K need only be a multiple of 8; the weight has `chunks` whole chunks in K.
// In a gated weight, the first 8 of each 16 rows are gates and the next 8 their ups, so that a lane's sums have both.
// For example, sums[t] of lane 5 of warp 1 has the gate of output 9 for pairs 8t + 2 and 8t + 3, and then the up of
// output 9 for the same pairs.
// ROUTE, CLAMPED, GELU_TANH: as in moe_gemm.cu. With ROUTE, the second product's blocks for the same outputs of a
// token's TAKEN experts form a cluster, which adds up their outputs, so that no launch of moe_combine is needed.
#include "left_product.cuh"
#include "moe_tile.cuh"
#include "quantized.cuh"

constexpr int THREADS = WARPGROUPS * 128;
constexpr int W_TILES = WARPGROUPS * HEIGHT;       // tiles of 64 rows of the weight
constexpr int BLOCK_N = W_TILES * 64;
constexpr int TILES = M_MAX / 8;
constexpr int CHUNKS = BLOCK_K / CHUNK_K;
constexpr int X_HEIGHT = ROUTE ? 1 : M_MAX;        // rows of x in shared memory; `mma` reads a single row eight times
constexpr int BOX = X_HEIGHT * LINE;               // bytes of 64 columns of x
constexpr int BOXES = BLOCK_K / 64;
constexpr int X_STAGE = BOXES * BOX;
constexpr int W_TILE = CHUNKS * CHUNK;             // bytes of 64 rows
constexpr int UNIT = GROUP ? GROUP : BLOCK_K;
constexpr int S_UNIT = WEIGHT == E2M1 ? 128 : 256;  // bytes of the scales of a chunk, or of a group, of 64 rows
constexpr int S_UNITS = WEIGHT == E2M1 ? CHUNKS : GROUP ? BLOCK_K / UNIT : 0;
constexpr int S_TILE = S_UNITS * S_UNIT;
constexpr int STAGE = (X_STAGE + W_TILES * (W_TILE + S_TILE) + 1023) / 1024 * 1024;
constexpr bool ROW_SCALES = GROUP == 0 && WEIGHT != E2M1;  // a row has one scale, for the epilogue
constexpr int STAGES_AHEAD = STAGES - 1;           // stages in flight
constexpr int ROW_STEP = THREADS / 8;              // rows of 128 bytes that the block's threads load at a time
constexpr int X_LOADS = (X_HEIGHT * BOXES + ROW_STEP - 1) / ROW_STEP;
constexpr int X_ROWS = ROW_STEP < X_HEIGHT ? X_HEIGHT / ROW_STEP : 1;  // rows of x of which a thread loads a part
constexpr int X_BOXES = ROW_STEP < X_HEIGHT ? 1 : ROW_STEP / X_HEIGHT;  // boxes that are loaded at a time
static_assert(ROW_STEP % X_HEIGHT == 0 || X_HEIGHT % ROW_STEP == 0);
static_assert(!ROUTE || M_MAX == 8);
static_assert(BLOCK_K % 64 == 0 && BLOCK_K % UNIT == 0);
static_assert(!WGMMA || HEIGHT == 1 || GROUP <= CHUNK_K);  // `multiply_many` has registers for one group's sums

extern __shared__ __align__(1024) unsigned char memory[];  // the ring; then the results

// Addresses of a thread's part of a stage's weight: 16 bytes of each chunk, and the scales of its rows.
struct Share {
  const uint4* words;
  const Scale* scales;

  // Addresses for the rows that are 64 * r rows further down.
  __device__ __forceinline__ Share below(int r) const {
    return {words + r * (W_TILE / 16), scales + r * (S_TILE / 4)};
  }

  // Decode the left operands of chunk c.
  __device__ __forceinline__ void decode(unsigned (&a)[STEPS][4], int c) const {
    uint4 packed = words[c * (CHUNK / 16)];
    unsigned exponents = WEIGHT == E2M1 ? scales[c * 32].word : 0;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      unsigned low = ONES + 0x00080008, high = low;
      if (WEIGHT == E2M1) {
        powers(exponents, s / 2, low, high);
      } else if (GROUP && WEIGHT == INT4) {
        const Scale* here = scales + (c * CHUNK_K + s * 16) / UNIT * 64;
        low = here[0].zero(), high = here[8].zero();
      }
      decode_step(a[s], packed, s, low, high);
    }
  }

  // Add the sums of a group, multiplied by its scales.
  __device__ __forceinline__ void add(float (*total)[4], const float (*sums)[4], int group) const {
    float low = scales[group * 64].factor(), high = scales[group * 64 + 8].factor();
#pragma unroll
    for (int t = 0; t < (GROUP ? TILES : 0); ++t) {
      total[t][0] += low * sums[t][0], total[t][1] += low * sums[t][1];
      total[t][2] += high * sums[t][2], total[t][3] += high * sums[t][3];
    }
  }
};

// Addresses in the ring's first stage, which begins at `stage`, that a lane passes to ldmatrix for the right
// operands of 64 columns: each load has 8 rows and 32 columns of x for 8 PAIRS, or 16 rows and 16 columns for more.
template <int PAIRS> __device__ __forceinline__ void x_addresses(unsigned (&at)[4], unsigned stage) {
  int lane = threadIdx.x & 31;
  int row = ROUTE ? 0 : PAIRS == 8 ? lane & 7 : (lane & 7) + (lane >> 4) * 8;
  int chunk = PAIRS == 8 ? lane >> 3 : lane >> 3 & 1;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    at[i] = stage + place(row, (i * 2 & (PAIRS == 8 ? 4 : 6)) + chunk);
    asm volatile("" : "+r"(at[i]));  // keeps the compiler from computing it again in each stage
  }
}

// total += a stage's products with PAIRS pairs, by `mma`. `at`: the addresses of x in the ring's first stage.
template <int PAIRS> __device__ __forceinline__ void multiply(
    float (&total)[HEIGHT][TILES][4], const Share& share, const unsigned (&at)[4], unsigned stage) {
  float sums[HEIGHT][TILES][4] = {};
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    unsigned a[HEIGHT][STEPS][4], b[PAIRS / 8][4];
#pragma unroll
    for (int r = 0; r < HEIGHT; ++r) share.below(r).decode(a[r], c);
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      int k = c * CHUNK_K + s * 16;
      unsigned from = at[k % 64 / 16] + stage + k / 64 * BOX;
      if (PAIRS == 8) {
        if (s % 2 == 0) ldmatrix(b[0], from);
      } else {
#pragma unroll
        for (int t = 0; t < PAIRS / 16; ++t) ldmatrix(b[t], from + t * 16 * LINE);
      }
#pragma unroll
      for (int r = 0; r < HEIGHT; ++r)
#pragma unroll
        for (int t = 0; t < PAIRS / 8; ++t) {
          int i = (PAIRS == 8 ? s : t) % 2 * 2;
          const unsigned(&left)[4] = a[r][s];
          mma(GROUP ? sums[r][t] : total[r][t], left[0], left[1], left[2], left[3], b[t / 2][i], b[t / 2][i + 1]);
        }
      if (GROUP && (k + 16) % UNIT == 0)
#pragma unroll
        for (int r = 0; r < HEIGHT; ++r) {
          share.below(r).add(total[r], sums[r], k / UNIT);
#pragma unroll
          for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[r][t][i] = 0.f;
        }
    }
  }
}

// total += a stage's products, by wgmma. All wgmma have ended when it returns, so that the stage may be refilled.
__device__ __forceinline__ void multiply_many(float (&total)[HEIGHT][TILES][4], const Share& share, unsigned right) {
  unsigned long long b = descriptor(right);
  float sums[GROUP ? TILES : 1][4];
#pragma unroll
  for (int n = 0; n < CHUNKS * HEIGHT; ++n) {
    int c = n / HEIGHT, r = n % HEIGHT;
    unsigned a[STEPS][4];
    share.below(r).decode(a, c);
    fence_products();
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      int k = c * CHUNK_K + s * 16;
      unsigned long long here = b + ((k / 64 * BOX + k % 64 * 2) >> 4);
      if (GROUP && k % UNIT == 0) multiply_add<false>(sums, a[s], here);
      else multiply_add<true>(GROUP ? sums : total[r], a[s], here);
      if (GROUP && (k + 16) % UNIT == 0) {
        commit_products();
        wait_products<0>();
        if (GROUP) share.below(r).add(total[r], sums, k / UNIT);
        if (s + 1 < STEPS) fence_products();
      }
    }
    if (!GROUP || (c + 1) * CHUNK_K % UNIT) commit_products();
    if (n + 1 < CHUNKS * HEIGHT) wait_products<1>();
    else wait_products<0>();
  }
}

// A token's out [N] = residual [N] + the sum over the cluster's blocks of their `outputs` [BLOCK_N] in shared memory;
// these are the columns from `first` on. The blocks divide the columns in pieces of eight. For example, with 64 outputs
// and eight blocks, all blocks store their piece 3 to the shared memory of block 3, which adds them up.
__device__ __forceinline__ void add_up(const uint4* outputs, int first, const T* residual, T* out, int N) {
  constexpr int PIECES = BLOCK_N / 8, OWN_PIECES = (PIECES + TAKEN - 1) / TAKEN;
  __shared__ uint4 parts[TAKEN][OWN_PIECES];  // outputs of the cluster's blocks
  int thread = threadIdx.x, rank = blockIdx.x % TAKEN;
  wait_for_cluster();  // all blocks have begun
  if (thread < PIECES) store_at(address_in(thread % TAKEN, &parts[rank][thread / TAKEN]), outputs[thread]);
  __syncwarp();
  arrive_at_cluster(), wait_for_cluster();
  int piece = thread * TAKEN + rank, column = first + piece * 8;
  if (thread >= OWN_PIECES || piece >= PIECES || column >= N) return;
  Vec<8> result = {};
  if (residual) result = *(const Vec<8>*)(residual + column);
  float sum[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) sum[j] = to_float(result.v[j]);
#pragma unroll
  for (int k = 0; k < TAKEN; ++k) {
    Vec<8> part = *(const Vec<8>*)&parts[k][thread];
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] += to_float(part.v[j]);
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) result.v[j] = from_float<T>(sum[j]);
  *(Vec<8>*)(out + column) = result;
}

// GATED: out[pair] = activation(gate, up) with the rows of x at pair / divisor, N outputs and a bias [experts, 2 * N].
// Otherwise: out[pair] = (weight @ x[pair / divisor] + bias) * pair_weights[pair] with a bias [experts, N].
// row_scales are [experts, rows of the weight], gates before ups. With ROUTE out is [tokens, N], a token's pairs are
// summed, and the residual is added: clusters are along the grid's first axis, tokens along its second.
template <bool GATED> __device__ __forceinline__ void grouped_product(
    const T* x, int divisor, const unsigned* weight, const unsigned* scales, const float* row_scales, const T* bias,
    float alpha, float limit, const L* router_logits, int weighting, int first_expert, int held,
    const float* expert_scale, const int* order, const Tile* tiles, const int* tile_count, const float* pair_weights,
    const T* residual, T* out, int N, int K, int chunks) {
  __shared__ Barrier full[STAGES];  // for the weight; each thread waits for its own copies of x
  __shared__ int pair_of[M_MAX];
  constexpr int OUTPUTS = GATED ? BLOCK_N / 2 : BLOCK_N;
  constexpr bool SUMS = ROUTE && !GATED;
  int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, group = warp >> 2;
  int column_block = SUMS ? blockIdx.x / TAKEN : blockIdx.x;
  int tile_index = SUMS ? blockIdx.y * TAKEN + blockIdx.x % TAKEN : blockIdx.y;

  if (thread == 0) {
    for (int s = 0; s < STAGES; ++s) init(&full[s], 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // The predecessor of the second product is the first product. It writes neither the plan nor the router's logits, so
  // the second product may read them, and begin to load weights, before it waits.
  if (GATED) wait_for_predecessor(), start_successor();
  if (SUMS) __syncwarp(), arrive_at_cluster();
#if ROUTE
  __shared__ int experts[TAKEN];
  __shared__ float weights[TAKEN];
  const L* logits = router_logits + tile_index / TAKEN * LOGITS;
  if (thread < 32) route(logits, weighting, first_expert, held, expert_scale, experts, weights);
  __syncthreads();
  bool here = experts[tile_index % TAKEN] >= 0;  // false: another rank holds the expert, and zeros are added
  if (GATED && !here) return;
  Tile tile = {max(experts[tile_index % TAKEN], 0), tile_index, 1, 0};
#else
  constexpr bool here = true;
  int count = *tile_count;
  if (tile_index >= count) {
    if (!GATED && count == 0) wait_for_predecessor();
    return;
  }
  Tile tile = tiles[tile_index];
#endif

  int row_tiles = ((GATED ? 2 : 1) * N + 63) / 64, steps = here ? (chunks + CHUNKS - 1) / CHUNKS : 0;
  int units = WEIGHT == E2M1 ? chunks : chunks * CHUNK_K / UNIT;  // units that have scales
  auto stage_of = [](int step) { return memory + step % STAGES * STAGE; };
  auto load_weight = [&](int step) {
    int first_chunk = step * CHUNKS, first_unit = step * S_UNITS;
    int bytes = min(CHUNKS, chunks - first_chunk) * CHUNK, scale_bytes = min(S_UNITS, units - first_unit) * S_UNIT;
    Barrier* barrier = &full[step % STAGES];
    expect(barrier, W_TILES * (bytes + (S_UNITS ? scale_bytes : 0)));
    unsigned char* to = stage_of(step) + X_STAGE;
#pragma unroll
    for (int w = 0; w < W_TILES; ++w) {  // tiles after the weight's last one load any valid tile
      long long at = (long long)tile.expert * row_tiles + min(column_block * W_TILES + w, row_tiles - 1);
      copy_bytes(to + w * W_TILE, (const unsigned char*)weight + (at * chunks + first_chunk) * CHUNK, bytes, barrier);
      if (S_UNITS)
        copy_bytes(
            to + W_TILES * W_TILE + w * S_TILE, (const unsigned char*)scales + (at * units + first_unit) * S_UNIT,
            scale_bytes, barrier);
    }
  };

  // Behind the last columns of the weight a stage has zeros, or values of an earlier step. x is zero there, so they
  // only need to be finite.
  if (here && chunks % CHUNKS && steps <= STAGES) {
    for (int i = thread; i < STAGE / 16; i += THREADS) ((uint4*)stage_of(steps - 1))[i] = make_uint4(0, 0, 0, 0);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (thread == 0)
    for (int s = 0; s < min(STAGES_AHEAD, steps); ++s) load_weight(s);

  int chunk = thread & 7, first_row = thread / 8;  // within a stage's rows of 128 bytes of x
  bool few = M_MAX == 16 && tile.count <= 8;
  const unsigned char* rows[X_ROWS];
  int bytes[X_ROWS];  // bytes of the row from this thread's chunk on
#pragma unroll
  for (int i = 0; i < X_ROWS; ++i) {
    int row = (first_row + i * ROW_STEP) % X_HEIGHT;
    bool real = row < tile.count;
    int place = tile.start + (real ? row : 0), pair = ROUTE ? place : order[place];
    rows[i] = (const unsigned char*)(x + (long long)(pair / divisor) * K + chunk * 8);
    bytes[i] = real ? (K - chunk * 8) * 2 : 0;
    if (chunk == 0) pair_of[row] = pair;
  }
  unsigned base = shared_address(memory);
  unsigned x_at = base + (X_HEIGHT == 1 ? first_row * LINE + chunk * 16 : place(first_row, chunk));
  auto load_x = [&](int step) {
    if (few && first_row % X_HEIGHT >= 8) return;
    unsigned to = x_at + step % STAGES * STAGE;
    int first = step * BLOCK_K * 2 + first_row / X_HEIGHT * LINE;
#pragma unroll
    for (int i = 0; i < X_LOADS; ++i) {
      int r = i % X_ROWS, at = first + i / X_ROWS * X_BOXES * LINE;
      if (X_HEIGHT * BOXES % ROW_STEP == 0 || first_row + i * ROW_STEP < X_HEIGHT * BOXES)
        copy_16(to + i * ROW_STEP * LINE, rows[r] + at, at < bytes[r]);
    }
  };
  if (!GATED) wait_for_predecessor(), start_successor();
#pragma unroll
  for (int s = 0; s < STAGES_AHEAD; ++s) {
    if (s < steps) load_x(s);
    commit_group();
  }

  float sums[HEIGHT][TILES][4] = {};
  const uint4* words = (const uint4*)(memory + X_STAGE + group * HEIGHT * W_TILE) + (thread & 127);
  const Scale* scales_at = (const Scale*)(memory + X_STAGE + W_TILES * W_TILE + group * HEIGHT * S_TILE);
  scales_at += (warp & 3) * (WEIGHT == E2M1 ? 8 : 16) + (lane >> 2);
  // Scales and biases of the rows g and g + 8 of each 16, for the epilogue; they are loaded before the products.
  auto sixteen = [&](int r) { return (group * HEIGHT + r) * 4 + (warp & 3); };
  int first = column_block * OUTPUTS;
  float factor[HEIGHT][2];
  T added[HEIGHT][2] = {};
#pragma unroll
  for (int r = 0; r < HEIGHT; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int output = first + sixteen(r) * (GATED ? 8 : 16) + (lane >> 2) + (GATED ? 0 : h * 8);
      long long at = (long long)tile.expert * (GATED ? 2 : 1) * N + output + (GATED && h ? N : 0);
      factor[r][h] = ROW_SCALES && row_scales && output < N ? row_scales[at] : 1.f;
      if (bias && output < N) added[r][h] = bias[at];
    }
  unsigned at[4], at_few[4];
  x_addresses<M_MAX>(at, base);
  x_addresses<8>(at_few, base);
  for (int step = 0; step < steps; ++step) {
    int slot = step % STAGES;
    wait_group<STAGES_AHEAD - 1>();
    if (WGMMA) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (step + STAGES_AHEAD < steps) {
      if (thread == 0) load_weight(step + STAGES_AHEAD);
      __syncwarp();
      load_x(step + STAGES_AHEAD);
    }
    commit_group();
    wait(&full[slot], step / STAGES & 1);
    Share share{words + slot * (STAGE / 16), scales_at + slot * (STAGE / 4)};
    if constexpr (WGMMA) multiply_many(sums, share, base + slot * STAGE);
    else if (few) multiply<8>(sums, share, at_few, slot * STAGE);
    else multiply<M_MAX>(sums, share, at, slot * STAGE);
  }

  wait_group<0>();
  __syncthreads();
  // The results go through shared memory, so that rows are written 16 bytes at a time.
  constexpr int STRIDE = OUTPUTS + 8;
  T* result = (T*)memory;
#pragma unroll
  for (int r = 0; r < HEIGHT; ++r) {
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      if (t * 8 >= tile.count) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int token = t * 8 + (lane & 3) * 2 + i;
        float low = sums[r][t][i] * factor[r][0] + to_float(added[r][0]);
        float high = sums[r][t][i + 2] * factor[r][1] + to_float(added[r][1]);
        T* to = result + token * STRIDE + sixteen(r) * (GATED ? 8 : 16) + (lane >> 2);
        if (GATED) {
          to[0] = from_float<T>(activated(rounded(low), rounded(high), alpha, limit));
        } else {
#if ROUTE
          float scale = here ? weights[tile_index % TAKEN] : 0.f;
#else
          float scale = token < tile.count ? pair_weights[pair_of[token]] : 0.f;
#endif
          to[0] = from_float<T>(low * scale), to[8] = from_float<T>(high * scale);
        }
      }
    }
  }
  __syncthreads();
  if constexpr (SUMS) {
    add_up((const uint4*)result, first, residual, out + (long long)blockIdx.y * N, N);
  } else {
    for (int i = thread; i < tile.count * (OUTPUTS / 8); i += THREADS) {
      int token = i / (OUTPUTS / 8), column = i % (OUTPUTS / 8) * 8;
      T* to = out + (long long)pair_of[token] * N + first + column;
      if (first + column < N) *(uint4*)to = *(const uint4*)(result + token * STRIDE + column);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) quantized_moe_gated(
    const T* x, int divisor, const unsigned* weight, const unsigned* scales, OPTIONAL const float* row_scales,
    OPTIONAL const T* bias, float alpha, float limit, OPTIONAL const L* router_logits, int weighting, int first_expert,
    int held, OPTIONAL const float* expert_scale, OPTIONAL const int* order, OPTIONAL const Tile* tiles,
    OPTIONAL const int* tile_count, OPTIONAL const float* pair_weights, T* out, int N, int K, int chunks) {
  grouped_product<true>(
      x, divisor, weight, scales, row_scales, bias, alpha, limit, router_logits, weighting, first_expert, held,
      expert_scale, order, tiles, tile_count, pair_weights, nullptr, out, N, K, chunks);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) quantized_moe_weighted(
    const T* x, int divisor, const unsigned* weight, const unsigned* scales, OPTIONAL const float* row_scales,
    OPTIONAL const T* bias, float alpha, float limit, OPTIONAL const L* router_logits, int weighting, int first_expert,
    int held, OPTIONAL const float* expert_scale, OPTIONAL const int* order, OPTIONAL const Tile* tiles,
    OPTIONAL const int* tile_count, OPTIONAL const float* pair_weights, OPTIONAL const T* residual,
    T* out, int N, int K, int chunks) {
  grouped_product<false>(
      x, divisor, weight, scales, row_scales, bias, alpha, limit, router_logits, weighting, first_expert, held,
      expert_scale, order, tiles, tile_count, pair_weights, residual, out, N, K, chunks);
}

// Grouped products of a mixture of experts with quantized weights on Hopper, two in a layer as in moe_gemm.cu, multiplied
// in T: a block takes WARPGROUPS times 64 rows of an expert's packed weight (quantized.cuh) for one tile of at most M_MAX
// (token, expert) pairs (see moe.cu).
//
// The weight is decoded in registers, which are the left operand of wgmma; the pairs' rows of x, which are gathered into
// shared memory, are the right one. Both stream through shared memory in STAGES of BLOCK_K columns, of the weight 16
// bytes for each thread and chunk, which nobody else reads. While wgmma works on one chunk, the next one is decoded.
// Columns beyond K are zeros, so K need be a multiple of 8 alone, and `chunks` is how many chunks the weight has.
//
// In a gated weight 8 of each 16 rows are gates, the next 8 are the ups: a lane's sums have both. For example lane 5 of
// warp 1 has in total[t] the gate of output 9 for the pairs 8t + 2 and 8t + 3, then the up of output 9 for them.
// ROUTE, CLAMPED: as in moe_gemm.cu.
#include "left_product.cuh"
#include "moe_tile.cuh"
#include "quantized.cuh"

constexpr int THREADS = WARPGROUPS * 128;
constexpr int BLOCK_N = WARPGROUPS * 64;
constexpr int TILES = M_MAX / 8;
constexpr int CHUNKS = BLOCK_K / CHUNK_K;
constexpr int BOX = M_MAX * LINE;                  // 64 columns of x
constexpr int BOXES = BLOCK_K / 64;
constexpr int X_STAGE = BOXES * BOX;
constexpr int W_TILE = CHUNKS * CHUNK;             // of a warpgroup
constexpr int UNIT = GROUP ? GROUP : BLOCK_K;
constexpr int GROUPS = GROUP ? BLOCK_K / GROUP : 0;
constexpr bool DEFERS = GROUPS > 1 && TILES <= 4;  // a group's sums are scaled while the next ones are multiplied
constexpr int S_UNIT = WEIGHT == E2M1 ? 128 : 256;  // bytes of the scales of a chunk, or of a group, of 64 rows
constexpr int S_UNITS = WEIGHT == E2M1 ? CHUNKS : GROUPS;
constexpr int S_TILE = S_UNITS * S_UNIT;
constexpr int STAGE = (X_STAGE + WARPGROUPS * (W_TILE + S_TILE) + 1023) / 1024 * 1024;
constexpr int AHEAD = STAGES - 1;
constexpr int ROW_STEP = THREADS / 8;              // rows of 128 bytes that the block's threads load at a time
constexpr int X_LOADS = (M_MAX * BOXES + ROW_STEP - 1) / ROW_STEP;
constexpr int X_ROWS = (M_MAX + ROW_STEP - 1) / ROW_STEP;  // different ones of a thread

extern __shared__ __align__(1024) unsigned char memory[];  // the ring; then the results

// GATED: out[pair] = activation(gate, up) with the rows of x at pair / divisor, N outputs and a bias [experts, 2 * N].
// Otherwise: out[pair] = (weight @ x[pair / divisor] + bias) * pair_weights[pair] with a bias [experts, N].
// row_scales are [experts, rows of the weight], gates before ups.
template <bool GATED> __device__ __forceinline__ void grouped_product(
    const T* x, int divisor, const unsigned* weight, const unsigned* scales, const float* row_scales, const T* bias,
    float alpha, float limit, const T* router_logits, int weighting, const int* order, const Tile* tiles,
    const int* tile_count, const float* pair_weights, T* out, int N, int K, int chunks) {
  __shared__ int pair_of[M_MAX];
  constexpr int OUTPUTS = GATED ? BLOCK_N / 2 : BLOCK_N;
  int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, group = warp >> 2;

  // The plan, and the router's logits, are older than the predecessor of the second product, which so begins to load
  // weights before it waits.
  if (GATED) wait_for_predecessor(), start_successor();
  Tile tile;
#if ROUTE
  __shared__ int experts[TOP_K];
  __shared__ float weights[TOP_K];
  if (warp == 0) route(router_logits + blockIdx.y / TOP_K * EXPERTS, weighting, experts, weights);
  __syncthreads();
  tile = {experts[blockIdx.y % TOP_K], (int)blockIdx.y, 1, 0};
#else
  if (blockIdx.y >= *tile_count) return;
  tile = tiles[blockIdx.y];
#endif

  int row_tiles = ((GATED ? 2 : 1) * N + 63) / 64, steps = (chunks + CHUNKS - 1) / CHUNKS;
  int units = WEIGHT == E2M1 ? chunks : chunks * CHUNK_K / UNIT;  // of scales
  // Beyond the weight's rows: any.
  long long tile_at = (long long)tile.expert * row_tiles + min((int)blockIdx.x * WARPGROUPS + group, row_tiles - 1);
  const unsigned char* words = (const unsigned char*)weight + tile_at * chunks * CHUNK + (thread & 127) * 16;
  const unsigned char* scale_words = (const unsigned char*)scales + tile_at * units * S_UNIT + (thread & 127) * 16;
  int chunk = thread & 7;
  const T* rows[X_ROWS];
  bool real[X_ROWS];
#pragma unroll
  for (int i = 0; i < X_ROWS; ++i) {
    int row = (thread / 8 + i * ROW_STEP) % M_MAX;
    real[i] = row < tile.count;
    int place = tile.start + (real[i] ? row : 0), pair = ROUTE ? place : order[place];
    rows[i] = x + (long long)(pair / divisor) * K + chunk * 8;
    if (chunk == 0) pair_of[row] = pair;
  }

  unsigned base = shared_address(memory);
  auto weight_at = [&](int step) { return step % STAGES * STAGE + X_STAGE + group * W_TILE; };
  auto scales_at = [&](int step) { return step % STAGES * STAGE + X_STAGE + WARPGROUPS * W_TILE + group * S_TILE; };
  auto load_weight = [&](int step) {
    unsigned to = base + weight_at(step) + (thread & 127) * 16;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      int at = step * CHUNKS + c;
      copy_async(to + c * CHUNK, words + (long long)min(at, chunks - 1) * CHUNK, at < chunks);
    }
    to = base + scales_at(step) + (thread & 127) * 16;
#pragma unroll
    for (int at = 0; at < S_TILE; at += 2048) {
      long long from = (long long)step * S_TILE + at;
      bool in = (thread & 127) * 16 + from < (long long)units * S_UNIT;
      if (at + (thread & 127) * 16 < S_TILE) copy_async(to + at, in ? scale_words + from : (const unsigned char*)scales, in);
    }
  };
  auto load_x = [&](int step) {
    unsigned to = base + step % STAGES * STAGE;
#pragma unroll
    for (int i = 0; i < X_LOADS; ++i) {
      int at = thread / 8 + i * ROW_STEP, column = step * BLOCK_K + at / M_MAX * 64;
      bool in = column + chunk * 8 < K && real[i % X_ROWS];
      if (M_MAX * BOXES % ROW_STEP == 0 || at < M_MAX * BOXES)
        copy_async(to + at / M_MAX * BOX + place(at % M_MAX, chunk), rows[i % X_ROWS] + (in ? column : 0), in);
    }
  };
  auto commit = [] { asm volatile("cp.async.commit_group;" ::: "memory"); };

#pragma unroll
  for (int s = 0; s < AHEAD; ++s)
    if (s < steps) load_weight(s);
  if (!GATED) wait_for_predecessor(), start_successor();
#pragma unroll
  for (int s = 0; s < AHEAD; ++s) {
    if (s < steps) load_x(s);
    commit();
  }

  float acc[DEFERS ? 2 : 1][TILES][4] = {}, total[GROUP ? TILES : 1][4] = {};
  int row = (warp & 3) * 16 + (lane >> 2);  // of the warpgroup's 64
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (step + AHEAD < steps) load_weight(step + AHEAD), load_x(step + AHEAD);
    commit();
    unsigned right = base + step % STAGES * STAGE;
    const uint4* left = (const uint4*)(memory + weight_at(step)) + (thread & 127);
    const Scale* scales_of = (const Scale*)(memory + scales_at(step)) + (WEIGHT == E2M1 ? (warp & 3) * 8 + (lane >> 2) : row);
    auto finish_group = [&](int g) {
      float low = scales_of[g * 64].factor(), high = scales_of[g * 64 + 8].factor();
      float(*sums)[4] = acc[DEFERS ? g & 1 : 0];
#pragma unroll
      for (int t = 0; t < (GROUP ? TILES : 0); ++t) {
        total[t][0] += low * sums[t][0], total[t][1] += low * sums[t][1];
        total[t][2] += high * sums[t][2], total[t][3] += high * sums[t][3];
      }
    };
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      uint4 packed = left[c * (CHUNK / 16)];
      unsigned powers = WEIGHT == E2M1 ? scales_of[c * 32].word : 0;
      unsigned a[STEPS][4];
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        unsigned low = ONES + 0x00080008, high = low;
        if (WEIGHT == E2M1) {
          low = power(powers, s / 2 * 2), high = power(powers, s / 2 * 2 + 1);
        } else if (GROUP && WEIGHT == INT4) {
          const Scale* here = scales_of + (c * CHUNK_K + s * 16) / UNIT * 64;
          low = here[0].zero(), high = here[8].zero();
        }
        decode_step(a[s], packed, s, low, high);
      }
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        int k = c * CHUNK_K + s * 16, g = k / UNIT;  // of the stage
        unsigned long long b = descriptor(right + k / 64 * BOX + k % 64 * 2);
        float(*sums)[4] = acc[DEFERS ? g & 1 : 0];
        if (GROUP && k % UNIT == 0) multiply_add<false>(sums, a[s], b);
        else multiply_add<true>(sums, a[s], b);
        if (GROUP && (k + 16) % UNIT == 0) {
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
          if (!DEFERS) wait_products<0>(), finish_group(g);
          else if (g > 0) wait_products<1>(), finish_group(g - 1);
          if (s + 1 < STEPS) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        }
      }
      if (!GROUP || (c + 1) * CHUNK_K % UNIT) asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      // As in quantized_gemm.cu: at a stage's end none may be under way.
      if (c + 1 < CHUNKS) wait_products<1>();
      else wait_products<0>();
    }
    if (DEFERS) finish_group(GROUPS - 1);
  }

  // Through shared memory, so that rows are written 16 bytes at a time.
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  constexpr int STRIDE = OUTPUTS + 8;
  T* result = (T*)memory;
  int first = blockIdx.x * OUTPUTS;
  float(*sums)[4] = GROUP ? total : acc[0];
#pragma unroll
  for (int h = 0; h < 2; ++h) {  // the rows g and g + 8
    int output = first + (GATED ? warp * 8 + (lane >> 2) : warp * 16 + (lane >> 2) + h * 8);
    long long at = (long long)tile.expert * (GATED ? 2 : 1) * N + output + (GATED && h ? N : 0);
    float factor = row_scales && output < N ? row_scales[at] : 1.f;
    float added = bias && output < N ? to_float(bias[at]) : 0.f;
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i) sums[t][h * 2 + i] = sums[t][h * 2 + i] * factor + added;
  }
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int token = t * 8 + (lane & 3) * 2 + i;
      T* to = result + token * STRIDE;
      if (GATED) {
        to[warp * 8 + (lane >> 2)] = from_float<T>(activated(rounded(sums[t][i]), rounded(sums[t][i + 2]), alpha, limit));
      } else {
#if ROUTE
        float scale = weights[blockIdx.y % TOP_K];
#else
        float scale = token < tile.count ? pair_weights[pair_of[token]] : 0.f;
#endif
        to[warp * 16 + (lane >> 2)] = from_float<T>(sums[t][i] * scale);
        to[warp * 16 + (lane >> 2) + 8] = from_float<T>(sums[t][i + 2] * scale);
      }
    }
  __syncthreads();
  for (int i = thread; i < tile.count * (OUTPUTS / 8); i += THREADS) {
    int token = i / (OUTPUTS / 8), column = i % (OUTPUTS / 8) * 8;
    if (first + column < N)
      *(uint4*)(out + (long long)pair_of[token] * N + first + column) = *(const uint4*)(result + token * STRIDE + column);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) quantized_moe_gated(
    const T* x, int divisor, const unsigned* weight, const unsigned* scales, OPTIONAL const float* row_scales,
    OPTIONAL const T* bias, float alpha, float limit, const T* router_logits, int weighting, OPTIONAL const int* order,
    OPTIONAL const Tile* tiles, OPTIONAL const int* tile_count, OPTIONAL const float* pair_weights, T* out, int N, int K,
    int chunks) {
  grouped_product<true>(
      x, divisor, weight, scales, row_scales, bias, alpha, limit, router_logits, weighting, order, tiles, tile_count,
      pair_weights, out, N, K, chunks);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) quantized_moe_weighted(
    const T* x, int divisor, const unsigned* weight, const unsigned* scales, OPTIONAL const float* row_scales,
    OPTIONAL const T* bias, float alpha, float limit, const T* router_logits, int weighting, OPTIONAL const int* order,
    OPTIONAL const Tile* tiles, OPTIONAL const int* tile_count, OPTIONAL const float* pair_weights, T* out, int N, int K,
    int chunks) {
  grouped_product<false>(
      x, divisor, weight, scales, row_scales, bias, alpha, limit, router_logits, weighting, order, tiles, tile_count,
      pair_weights, out, N, K, chunks);
}

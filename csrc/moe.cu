// Kernels before and after the grouped GEMMs of a mixture of experts (moe_gemm.cu). moe_route chooses each token's
// experts and their weights from the router's logits. moe_sort sorts the (token, expert) pairs by expert and cuts each
// expert's pairs into tiles. moe_plan does both in one launch, for few tokens. moe_combine adds up each token's
// weighted outputs. The host never reads the number of tiles back: it launches the GEMMs for the largest possible
// number.
#include "moe.cuh"

constexpr int MAX_THREADS = 1024;
constexpr int PLAN_TOKENS = 128;  // most tokens that one block routes and sorts
constexpr int PER_LANE = (ALL_EXPERTS + 31) / 32;
constexpr unsigned ALL = 0xffffffffu;

// Sort the pairs by expert into `order` [pairs], a counting sort by one block, and make a tile of every `tile_rows`
// pairs of an expert. Pairs of other ranks' experts are left out.
__device__ __forceinline__ void sort(
    int pairs, int tile_rows, const int* experts, int* order, Tile* tiles, int* tile_count) {
  __shared__ int count[ALL_EXPERTS], start[ALL_EXPERTS];
  int thread = threadIdx.x, lane = thread & 31, threads = blockDim.x;
  for (int e = thread; e < ALL_EXPERTS; e += threads) count[e] = 0;
  __syncthreads();
#pragma unroll 4
  for (int pair = thread; pair < pairs; pair += threads)
    if (experts[pair] >= 0) atomicAdd(&count[experts[pair]], 1);
  __syncthreads();
  if (thread < 32) {  // a lane has PER_LANE consecutive experts
    int own[PER_LANE], upto = 0, tiles_upto = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      int expert = lane * PER_LANE + i;
      own[i] = expert < ALL_EXPERTS ? count[expert] : 0;
      upto += own[i], tiles_upto += (own[i] + tile_rows - 1) / tile_rows;
    }
    int first = -upto, tile = -tiles_upto;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      int other = __shfl_up_sync(ALL, upto, offset), other_tiles = __shfl_up_sync(ALL, tiles_upto, offset);
      if (lane >= offset) upto += other, tiles_upto += other_tiles;
    }
    if (lane == 31) *tile_count = tiles_upto;
    first += upto, tile += tiles_upto;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      int expert = lane * PER_LANE + i;
      if (expert < ALL_EXPERTS) start[expert] = first;
      for (int done = 0; done < own[i]; done += tile_rows)
        tiles[tile++] = {expert, first + done, min(tile_rows, own[i] - done), 0};
      first += own[i];
    }
  }
  __syncthreads();
#pragma unroll 4
  for (int pair = thread; pair < pairs; pair += threads)
    if (experts[pair] >= 0) order[atomicAdd(&start[experts[pair]], 1)] = pair;
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) moe_route(
    const L* router_logits, int tokens, int weighting, int first_expert, int held, OPTIONAL const float* expert_scale,
    int* experts, float* weights) {
  wait_for_predecessor();
  start_successor();
  int token = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  if (token >= tokens) return;
  const L* logits = router_logits + (long long)token * LOGITS;
  route(logits, weighting, first_expert, held, expert_scale, experts + token * TAKEN, weights + token * TAKEN);
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) moe_sort(
    int tokens, int tile_rows, const int* experts, int* order, Tile* tiles, int* tile_count) {
  wait_for_predecessor();
  start_successor();
  sort(tokens * TAKEN, tile_rows, experts, order, tiles, tile_count);
}

// Route and sort in one block, for few tokens.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) moe_plan(
    const L* router_logits, int tokens, int weighting, int first_expert, int held, OPTIONAL const float* expert_scale,
    int tile_rows, float* weights, int* order, Tile* tiles, int* tile_count) {
  __shared__ int experts[PLAN_TOKENS * TAKEN];
  wait_for_predecessor();
  start_successor();
  for (int token = threadIdx.x >> 5; token < tokens; token += blockDim.x >> 5) {
    int first = token * TAKEN;
    route(
        router_logits + token * LOGITS, weighting, first_expert, held, expert_scale, experts + first, weights + first);
  }
  __syncthreads();
  sort(tokens * TAKEN, tile_rows, experts, order, tiles, tile_count);
}

// out [tokens, H] = residual + the sum over each token's pairs of y [pairs, H], one block per token. H is a multiple of
// VEC. `pair_weights` are given if other ranks hold some experts: y is undefined for pairs whose weight is ELSEWHERE,
// and these pairs are skipped.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) moe_combine(
    const T* y, OPTIONAL const float* pair_weights, OPTIONAL const T* residual, T* out, int H) {
  constexpr int TOGETHER = 8;  // pairs that are loaded before the first one is added
  wait_for_predecessor();
  start_successor();
  long long token = blockIdx.x;
#pragma unroll 1
  for (int i = threadIdx.x * VEC; i < H; i += blockDim.x * VEC) {
    Vec<VEC> part[TOGETHER], result = {};
    float sum[VEC];
    if (residual) result = *(const Vec<VEC>*)(residual + token * H + i);
#pragma unroll
    for (int j = 0; j < VEC; ++j) sum[j] = to_float(result.v[j]);
    auto load = [&](int k) { part[k % TOGETHER] = *(const Vec<VEC>*)(y + (token * TAKEN + k) * H + i); };
    auto add = [&](int k) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) sum[j] += to_float(part[k % TOGETHER].v[j]);
    };
    if (pair_weights) {
#pragma unroll
      for (int k = 0; k < TAKEN; ++k)
        if (pair_weights[token * TAKEN + k] != ELSEWHERE) load(k), add(k);
    } else {
#pragma unroll
      for (int first = 0; first < TAKEN; first += TOGETHER) {
#pragma unroll
        for (int k = first; k < TAKEN && k < first + TOGETHER; ++k) load(k);
#pragma unroll
        for (int k = first; k < TAKEN && k < first + TOGETHER; ++k) add(k);
      }
    }
#pragma unroll
    for (int j = 0; j < VEC; ++j) result.v[j] = from_float<T>(sum[j]);
    *(Vec<VEC>*)(out + token * H + i) = result;
  }
}

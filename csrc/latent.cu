// Operations of latent attention (MLA) between the projections and attention, in one launch: RMSNorm of each token's
// latent [RANK], rotary embedding of its key [ROPE] and of each head's query [ROPE], and the store of latent and key as
// one row of the paged cache. One block processes one token. For few tokens, latent_query also computes the absorbed
// queries in the same launch.
//
// -DRANK: dimensions of a latent. -DROPE: dimensions that are rotated. -DCACHE: see fp8.cuh. -DNOPE, a multiple of 32,
// adds latent_query; RANK must then be a multiple of 64.
#include "fp8.cuh"

constexpr int ROW = RANK + ROPE;
constexpr int HALF = ROPE / 2;

// Rotate the pair (i, i + HALF) of x.
__device__ __forceinline__ void rotate(const T* x, const float* angle, int i, float& low, float& high) {
  float a = to_float(x[i]), b = to_float(x[i + HALF]), c = angle[i], s = angle[i + HALF];
  low = a * c - b * s, high = b * c + a * s;
}

// Process one token by one block: norm and rotate row [tokens, ROW], whose tokens are row_stride elements apart, into
// the token's row of the cache, and rotate q_rope [tokens, num_heads, ROPE] into `rotated`, whose tokens and heads are
// token_stride and head_stride elements apart.
__device__ __forceinline__ void finish(
    long long token, const T* q_rope, long long q_stride, const T* row, long long row_stride, const W* norm,
    const float* cos_sin, const long long* positions, const long long* out_cache_loc, C* cache, T* rotated,
    long long token_stride, int head_stride, int num_heads, float eps) {
  __shared__ float scratch[32];
  const float* angle = cos_sin + positions[token] * ROPE;
  row += token * row_stride, cache += out_cache_loc[token] * ROW;
  float squares = 0.f;
  for (int i = threadIdx.x; i < RANK; i += blockDim.x) squares += to_float(row[i]) * to_float(row[i]);
  float scale = rsqrtf(block_sum(squares, scratch) / RANK + eps);
  Vec<1> one;
  for (int i = threadIdx.x; i < RANK; i += blockDim.x) {
    one.v[0] = from_float<T>(times_norm(to_float(row[i]) * scale, norm[i]));
    store(cache + i, one);
  }
  for (int i = threadIdx.x; i < HALF * (num_heads + 1); i += blockDim.x) {
    int head = i / HALF, pair = i % HALF;
    float low, high;
    if (head < num_heads) {
      rotate(q_rope + token * q_stride + head * ROPE, angle, pair, low, high);
      T* out = rotated + token * token_stride + head * head_stride + pair;
      out[0] = from_float<T>(low), out[HALF] = from_float<T>(high);
    } else {
      rotate(row + RANK, angle, pair, low, high);
      one.v[0] = from_float<T>(low), store(cache + RANK + pair, one);
      one.v[0] = from_float<T>(high), store(cache + RANK + HALF + pair, one);
    }
  }
}

// Tokens of q_rope are q_stride elements apart; `rotated` may be q_rope. Grid: tokens.
extern "C" __global__ void norm_rope_store_latent(
    const T* q_rope, long long q_stride, const T* row, long long row_stride, const W* norm, const float* cos_sin,
    const long long* positions, const long long* out_cache_loc, C* cache, T* rotated, long long token_stride,
    int head_stride, int num_heads, float eps) {
  wait_for_predecessor();
  start_successor();
  finish(
      blockIdx.x, q_rope, q_stride, row, row_stride, norm, cos_sin, positions, out_cache_loc, cache, rotated,
      token_stride, head_stride, num_heads, eps);
}

#ifdef NOPE
constexpr int TOKENS = 8;
constexpr int THREADS = 256;
constexpr int COLUMNS = 64;  // per block that absorbs: 8 threads have 8 columns each, 32 such groups divide NOPE
constexpr int SLICES = RANK / COLUMNS;

// query [tokens, num_heads, ROW], of at most TOKENS tokens: q_nope [tokens, num_heads, NOPE] times keys [NOPE, RANK] of
// each head, whose matrices are keys_stride elements apart, then q_rope rotated. Tokens of q_nope and of q_rope are
// q_stride elements apart. Grid: num_heads * SLICES blocks that absorb, which load the heads' matrices before they wait
// for their predecessor; then one block for each token.
extern "C" __global__ void __launch_bounds__(THREADS) latent_query(
    const T* q_nope, const T* q_rope, long long q_stride, const T* keys, long long keys_stride, const T* row,
    long long row_stride, const W* norm, const float* cos_sin, const long long* positions,
    const long long* out_cache_loc, C* cache, T* query, int tokens, int num_heads, float eps) {
  int block = blockIdx.x - num_heads * SLICES;
  if (block >= 0) {
    wait_for_predecessor();
    start_successor();
    finish(
        block, q_rope, q_stride, row, row_stride, norm, cos_sin, positions, out_cache_loc, cache, query + RANK,
        num_heads * ROW, ROW, num_heads, eps);
    return;
  }
  __shared__ float sums[THREADS / 32][TOKENS][COLUMNS];
  int head = blockIdx.x / SLICES, column = blockIdx.x % SLICES * COLUMNS, thread = threadIdx.x;
  int warp = thread >> 5, lane = thread & 31, sharer = thread / 8, own = thread % 8 * 8;
  Vec<8> weight[NOPE / 32];
#pragma unroll
  for (int i = 0; i < NOPE / 32; ++i)
    weight[i] = *(const Vec<8>*)(keys + head * keys_stride + (sharer + i * 32) * RANK + column + own);
  wait_for_predecessor();
  start_successor();
  const T* q = q_nope + head * NOPE + sharer;
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    if (t >= tokens) break;
    float sum[8] = {};
#pragma unroll
    for (int i = 0; i < NOPE / 32; ++i) {
      float x = to_float(q[t * q_stride + i * 32]);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += x * to_float(weight[i].v[j]);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], 8);
      sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], 16);
      if (lane < 8) sums[warp][t][own + j] = sum[j];
    }
  }
  __syncthreads();
  for (int i = thread; i < tokens * COLUMNS; i += THREADS) {
    int t = i / COLUMNS, at = i % COLUMNS;
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) total += sums[w][t][at];
    query[((long long)t * num_heads + head) * ROW + column + at] = from_float<T>(total);
  }
}
#endif

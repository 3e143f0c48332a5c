// Latent attention (MLA) between its products and attention, in one launch: norm of a token's latent, rotary positions
// of its key and of each head's query, and the store of latent and key as one row of the paged cache. -DRANK is the size
// of a latent, -DROPE of what is rotated; -DCACHE: fp8.cuh. A block has a token.
#include "fp8.cuh"

constexpr int ROW = RANK + ROPE;
constexpr int HALF = ROPE / 2;

// Pair i of a rotation: elements i and i + HALF of x, of which out gets the turned ones.
__device__ __forceinline__ void rotate(const T* x, const float* angle, int i, float& low, float& high) {
  float a = to_float(x[i]), b = to_float(x[i + HALF]), c = angle[i], s = angle[i + HALF];
  low = a * c - b * s, high = b * c + a * s;
}

// q_rope [tokens, num_heads, ROPE] and row [tokens, ROW], whose tokens are q_stride and row_stride elements apart, go to
// rotated, whose tokens and heads are token_stride and head_stride apart, and to the cache's rows [ROW]. May be in place.
extern "C" __global__ void norm_rope_store_latent(
    const T* q_rope, long long q_stride, const T* row, long long row_stride, const W* norm, const float* cos_sin,
    const long long* positions, const long long* out_cache_loc, C* cache, T* rotated, long long token_stride,
    int head_stride, int num_heads, float eps) {
  __shared__ float scratch[32];
  wait_for_predecessor();
  start_successor();
  long long token = blockIdx.x;
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

// Operations between the QKV product and attention, in one launch: RMSNorm of each q and k head (Qwen3), rotary
// embedding, and the store of k and v into the paged cache. A warp processes as many heads of one token as two loads of
// 16 bytes per lane can read, so that it reads the token's angles once for all of them. -DHEAD_DIM is 64, 128 or 256,
// and with 16-bit T also 512; -DCACHE: see fp8.cuh. Example: with HEAD_DIM 128 and 16-bit T a warp has 4 heads of a
// token and 8 lanes per head. If there are more than four heads, lane 5 of warp 1 of block 0 has head 4 of token 0:
// dimensions 40 to 47, and dimensions 104 to 111, which are rotated with them.
#include "fp8.cuh"

constexpr int HALF = HEAD_DIM / 2;
constexpr int LANES = HALF / VEC;  // lanes of a head; each has VEC pairs (i, i + HALF)
constexpr int HEADS = 32 / LANES;  // heads of a warp

// Null q_norm or k_norm: no norm. Heads are in the order q, k, v; without KV heads nothing is stored. `v_eps`: each
// head of v is divided by its root mean square with this eps; negative: it is not.
extern "C" __global__ void norm_rope_store(
    const T* qkv, const long long* positions, const float* cos_sin, const long long* out_cache_loc, T* q_out,
    C* k_cache, C* v_cache, OPTIONAL const W* q_norm, OPTIONAL const W* k_norm, long long tokens, int num_heads,
    int num_kv_heads, float eps, float v_eps) {
  wait_for_predecessor();
  start_successor();
  int heads = num_heads + 2 * num_kv_heads, groups = (heads + HEADS - 1) / HEADS;
  unsigned unit = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), token = unit / groups;
  if (token >= tokens) return;
  int lane = threadIdx.x & 31, head = unit % groups * HEADS + lane / LANES, at = lane % LANES * VEC;
  bool exists = head < heads, is_q = head < num_heads, is_v = head >= num_heads + num_kv_heads;
  const T* in = qkv + ((long long)token * heads + head) * HEAD_DIM + at;
  using Part = Vec<VEC>;
  Part low = {}, high = {};
  if (exists) low = *(const Part*)in, high = *(const Part*)(in + HALF);

  float a[VEC], b[VEC], squares = 0.f;
#pragma unroll
  for (int j = 0; j < VEC; ++j)
    a[j] = to_float(low.v[j]), b[j] = to_float(high.v[j]), squares += a[j] * a[j] + b[j] * b[j];
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
  if (!exists) return;
  if (is_v && v_eps >= 0.f) {
    float scale = rsqrtf(squares / HEAD_DIM + v_eps);
#pragma unroll
    for (int j = 0; j < VEC; ++j) low.v[j] = from_float<T>(a[j] * scale), high.v[j] = from_float<T>(b[j] * scale);
  }
  if (!is_v) {
    const W* weight = is_q ? q_norm : k_norm;
    if (weight) {
      float scale = rsqrtf(squares / HEAD_DIM + eps);
      Vec<VEC, W> wa = *(const Vec<VEC, W>*)(weight + at), wb = *(const Vec<VEC, W>*)(weight + HALF + at);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        a[j] = rounded(times_norm(a[j] * scale, wa.v[j]));
        b[j] = rounded(times_norm(b[j] * scale, wb.v[j]));
      }
    }
    const float* angle = cos_sin + positions[token] * HEAD_DIM + at;
    Vec<VEC, float> c = *(const Vec<VEC, float>*)angle, s = *(const Vec<VEC, float>*)(angle + HALF);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      low.v[j] = from_float<T>(a[j] * c.v[j] - b[j] * s.v[j]);
      high.v[j] = from_float<T>(b[j] * c.v[j] + a[j] * s.v[j]);
    }
  }
  if (is_q) {
    T* out = q_out + ((long long)token * num_heads + head) * HEAD_DIM + at;
    *(Part*)out = low, *(Part*)(out + HALF) = high;
  } else {
    int kv_head = head - num_heads - (is_v ? num_kv_heads : 0);
    C* out = (is_v ? v_cache : k_cache) + (out_cache_loc[token] * num_kv_heads + kv_head) * HEAD_DIM + at;
    store(out, low), store(out + HALF, high);
  }
}

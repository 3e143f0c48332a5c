// Between the QKV product and attention, in one launch: norm of each q and k head (Qwen3), rotary positions, and the
// store of k and v into the paged cache. One warp a head of a token; -DHEAD_DIM is a multiple of 64; -DCACHE: fp8.cuh.
#include "fp8.cuh"

constexpr int HALF = HEAD_DIM / 2;
constexpr int PAIRS = HALF / 32;  // of (i, i + HALF), a lane's share

// Null q_weight or k_weight: no norm. Heads are in the order q, k, v.
extern "C" __global__ void norm_rope_store(
    const T* qkv, const long long* positions, const float* cos_sin, const long long* kv_slots, T* q_out, C* k_cache,
    C* v_cache, const T* q_weight, const T* k_weight, long long tokens, int num_heads, int num_kv_heads, float eps) {
  wait_for_predecessor();
  start_successor();
  int heads = num_heads + 2 * num_kv_heads;
  long long unit = blockIdx.x * (long long)(blockDim.x >> 5) + (threadIdx.x >> 5);
  if (unit >= tokens * heads) return;
  long long token = unit / heads;
  int head = (int)(unit % heads), lane = threadIdx.x & 31;
  const T* in = qkv + unit * HEAD_DIM;
  using Part = Vec<PAIRS>;
  Part low = *(const Part*)(in + lane * PAIRS), high = *(const Part*)(in + HALF + lane * PAIRS);

  bool is_q = head < num_heads, is_v = head >= num_heads + num_kv_heads;
  if (!is_v) {
    float a[PAIRS], b[PAIRS];
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) a[j] = to_float(low.v[j]), b[j] = to_float(high.v[j]);
    const T* weight = is_q ? q_weight : k_weight;
    if (weight) {
      float squares = 0.f;
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) squares += a[j] * a[j] + b[j] * b[j];
      float scale = rsqrtf(warp_sum(squares) / HEAD_DIM + eps);
      Part wa = *(const Part*)(weight + lane * PAIRS), wb = *(const Part*)(weight + HALF + lane * PAIRS);
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) {
        a[j] = rounded(rounded(a[j] * scale) * to_float(wa.v[j]));
        b[j] = rounded(rounded(b[j] * scale) * to_float(wb.v[j]));
      }
    }
    const float* angle = cos_sin + positions[token] * HEAD_DIM + lane * PAIRS;
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      float c = angle[j], s = angle[HALF + j];
      low.v[j] = from_float<T>(a[j] * c - b[j] * s);
      high.v[j] = from_float<T>(b[j] * c + a[j] * s);
    }
  }
  if (is_q) {
    T* out = q_out + (token * num_heads + head) * HEAD_DIM + lane * PAIRS;
    *(Part*)out = low, *(Part*)(out + HALF) = high;
  } else {
    int kv_head = head - num_heads - (is_v ? num_kv_heads : 0);
    C* out = (is_v ? v_cache : k_cache) + (kv_slots[token] * num_kv_heads + kv_head) * HEAD_DIM + lane * PAIRS;
    store(out, low), store(out + HALF, high);
  }
}

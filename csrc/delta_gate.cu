// RMSNorm and gate of the values that a Gated DeltaNet has read from its memory (delta.cuh), after delta_scan.cu.
#include "delta.cuh"

// out [T, value_heads * VALUE_DIM] = norm(reads) * weight * silu(z) for n tokens, one warp for each head of a token.
extern "C" __global__ void delta_gate(const T* projected, const float* reads, const T* norm_weight,
                                      const long long* chunk_tokens, T* out, int n, int key_heads, int value_heads,
                                      int width, float eps) {
  int unit = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), at = (threadIdx.x & 31) * 4;
  wait_for_predecessor();
  start_successor();
  if (unit >= n * value_heads) return;
  int head = unit % value_heads;
  long long token = chunk_tokens[unit / value_heads], place = (token * value_heads + head) * VALUE_DIM + at;
  Vec<4> weight = *(const Vec<4>*)(norm_weight + at);
  Vec<4> z = *(const Vec<4>*)(projected + token * width + num_channels(key_heads, value_heads) + head * VALUE_DIM + at);
  Vec<4, float> x = *(const Vec<4, float>*)(reads + place);
  float square = x.v[0] * x.v[0] + x.v[1] * x.v[1] + x.v[2] * x.v[2] + x.v[3] * x.v[3];
  float scale = rsqrtf(warp_sum(square) / VALUE_DIM + eps);
  Vec<4> y;
#pragma unroll
  for (int i = 0; i < 4; ++i) y.v[i] = from_float<T>(x.v[i] * scale * to_float(weight.v[i]) * silu(to_float(z.v[i])));
  *(Vec<4>*)(out + place) = y;
}

// Expansion of the latents that absorbed latent attention (MLA) returns to values, for a few tokens: each head's latent
// [RANK] is multiplied with the head's matrix [VALUE, RANK]. The matrices are loaded before the kernel waits for its
// predecessor. -DRANK: dimensions of a latent, a multiple of 128. -DVALUE: dimensions of a value, a multiple of 16.
#include "common.cuh"

constexpr int TOKENS = 8;
constexpr int THREADS = 256;
constexpr int VALUES = 16;  // values of a block; 16 threads divide RANK for each

// out [tokens, num_heads, VALUE], of at most TOKENS tokens: values [VALUE, RANK] of each head, whose matrices are
// values_stride elements apart, times latents [tokens, num_heads, RANK]. Grid: num_heads * VALUE / VALUES.
extern "C" __global__ void __launch_bounds__(THREADS) latent_values(
    const T* latents, const T* values, long long values_stride, T* out, int tokens, int num_heads) {
  int head = blockIdx.x / (VALUE / VALUES), value = blockIdx.x % (VALUE / VALUES) * VALUES + threadIdx.x / 16;
  int own = threadIdx.x % 16 * 8;
  Vec<8> weight[RANK / 128];
#pragma unroll
  for (int i = 0; i < RANK / 128; ++i)
    weight[i] = *(const Vec<8>*)(values + head * values_stride + (long long)value * RANK + i * 128 + own);
  wait_for_predecessor();
  start_successor();
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    if (t >= tokens) break;
    const T* latent = latents + ((long long)t * num_heads + head) * RANK + own;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < RANK / 128; ++i) {
      Vec<8> x = *(const Vec<8>*)(latent + i * 128);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += to_float(x.v[j]) * to_float(weight[i].v[j]);
    }
#pragma unroll
    for (int offset = 8; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (own == 0) out[((long long)t * num_heads + head) * VALUE + value] = from_float<T>(sum);
  }
}

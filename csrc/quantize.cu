// Rounding of rows of x to FP8 (e4m3) with one scale per row, or per group of 128 columns of a row (GROUP). The scale
// is such that the largest magnitude becomes 448. Without GROUP, the scale `fixed` is used for all rows if it is not 0.
//
// A block of at most THREADS threads rounds one row; a thread has 8 columns in each of TURNS iterations, so that 16
// neighbouring threads have a group. NORMED: the row is RMS-normed first, as by norm.cu. Scales are float32: [M], or
// with GROUP [K / 128, stride], where neighbours belong to neighbouring rows.
#include "rounding.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) quantize(
    const T* x, OPTIONAL const W* norm, float eps, e4m3* codes, float* scales, float fixed, int stride, int K) {
  __shared__ float scratch[32], sums[32];
  int row = blockIdx.x;
  start_successor();  // which may load its weights already
  Vec<8, W> weights[TURNS] = {};
  if (NORMED)
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      int at = (threadIdx.x + turn * blockDim.x) * 8;
      if (at < K) weights[turn] = *(const Vec<8, W>*)(norm + at);
    }
  wait_for_predecessor();
  const T* from = x + (long long)row * K;
  Vec<8> kept[TURNS];
  float square = 0.f, largest = 0.f;
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    int at = (threadIdx.x + turn * blockDim.x) * 8;
    kept[turn] = {};
    if (at < K) kept[turn] = *(const Vec<8>*)(from + at);
    if (NORMED)
#pragma unroll
      for (int i = 0; i < 8; ++i) square += to_float(kept[turn].v[i]) * to_float(kept[turn].v[i]);
  }
  float factor = NORMED ? rsqrtf(block_sum(square, sums) / K + eps) : 1.f;
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    int at = (threadIdx.x + turn * blockDim.x) * 8;
    if (NORMED)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        kept[turn].v[i] = from_float<T>(times_norm(to_float(kept[turn].v[i]) * factor, weights[turn].v[i]));
    float most = largest_of<GROUP ? 16 : 1>(kept[turn]);
    if (GROUP) {
      float scale = fp8_scale(most);
      if (at < K && (threadIdx.x & 15) == 0) scales[(long long)(at / 128) * stride + row] = scale;
      if (at < K) {
        store_rounded(codes + (long long)row * K + at, kept[turn], scale, __frcp_rn(scale));
      }
    }
    largest = fmaxf(largest, most);
  }
  if (GROUP) return;
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = largest;
  __syncthreads();
  largest = (threadIdx.x & 31) < blockDim.x / 32 ? scratch[threadIdx.x & 31] : 0.f;
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  float scale = fixed > 0.f ? fixed : fp8_scale(largest);
  float reciprocal = __frcp_rn(scale);
  if (threadIdx.x == 0) scales[row] = scale;
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    int at = (threadIdx.x + turn * blockDim.x) * 8;
    if (at >= K) break;
    store_rounded(codes + (long long)row * K + at, kept[turn], scale, reciprocal);
  }
}

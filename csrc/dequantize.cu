// Dequantization of a packed weight (quantized.cuh) to a matrix [N, K] of T, for GEMMs of many rows.
//
// A block has 64 rows and COLUMNS columns. Every thread decodes its words of some chunks, as in a GEMM, and stores the
// values to shared memory, from which whole rows are written. Values are multiplied by their scales in float32. GATED:
// rows are interleaved as in sums.cuh.
#include "quantized.cuh"

constexpr int CHUNKS = 4;
constexpr int COLUMNS = CHUNKS * CHUNK_K;
constexpr int LINE = COLUMNS + 8;  // values of a row in shared memory, without bank conflicts

extern "C" __global__ void __launch_bounds__(128) dequantize(
    const uint4* weight, const unsigned* scales, OPTIONAL const float* row_scales, T* out, int N, int K) {
  __shared__ alignas(16) T lines[64 * LINE];
  int thread = threadIdx.x, lane = thread & 31, row = (thread >> 5) * 16 + (lane >> 2), p = lane & 3;
  int tile = blockIdx.y, chunks = K / CHUNK_K, first = blockIdx.x * CHUNKS, count = min(CHUNKS, chunks - first);
  auto row_of = [&](int r) {  // row of the matrix; N: none
    int packed = tile * 64 + r;
    if (!GATED) return min(packed, N);
    int n = packed / 16 * 8 + packed % 8;
    return n < N / 2 ? n + (packed & 8 ? N / 2 : 0) : N;
  };
  wait_for_predecessor();
  const uint4* from = weight + ((long long)tile * chunks + first) * (CHUNK / 16) + thread;
  uint4 words[CHUNKS];
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
    if (c < count) words[c] = load_once(from + c * (CHUNK / 16));
  float low = 0.f, high = 0.f;
  if (!GROUP) low = row_scales[min(row_of(row), N - 1)], high = row_scales[min(row_of(row + 8), N - 1)];
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    if (c >= count) break;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      int k = c * CHUNK_K + s * 16;
      Scale a{8}, b{8};
      if (GROUP) {
        const unsigned* here =
            scales + ((long long)tile * (K / (GROUP ? GROUP : 1)) + (first * CHUNK_K + k) / (GROUP ? GROUP : 1)) * 64 +
            row;
        a.word = here[0], b.word = here[8], low = a.factor(), high = b.factor();
      }
      unsigned values[4];
      decode_step(values, words[c], s, a.zero(), b.zero());
      unsigned* to = (unsigned*)(lines + row * LINE + k + p * 2);
      to[0] = pack(low_of(values[0]) * low, high_of(values[0]) * low);
      to[4] = pack(low_of(values[2]) * low, high_of(values[2]) * low);
      to += 8 * LINE / 2;
      to[0] = pack(low_of(values[1]) * high, high_of(values[1]) * high);
      to[4] = pack(low_of(values[3]) * high, high_of(values[3]) * high);
    }
  }
  __syncthreads();
  constexpr int ROW_VECTORS = COLUMNS / 8;  // 16-byte vectors of a row
#pragma unroll 4
  for (int i = thread; i < 64 * ROW_VECTORS; i += 128) {
    int n = row_of(i / ROW_VECTORS), part = i % ROW_VECTORS;
    if (n < N && part * 8 < count * CHUNK_K)
      *(uint4*)(out + (long long)n * K + first * CHUNK_K + part * 8) =
          *(const uint4*)(lines + i / ROW_VECTORS * LINE + part * 8);
  }
}

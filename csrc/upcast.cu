// Upcast of K and V from FP8 to T, for attention backends that read only 16-bit types. Only the pages that a step reads
// are upcast. T can represent every e4m3 value, so nothing is lost.
#include "fp8.cuh"

struct alignas(16) Eight { T v[8]; };

__device__ __forceinline__ Eight upcast_eight(unsigned low, unsigned high) {
  Eight y;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unsigned two = upcast(i < 2 ? low : high, i & 1);
    y.v[2 * i] = from_float<T>(to_float(f16{(unsigned short)two}));
    y.v[2 * i + 1] = from_float<T>(to_float(f16{(unsigned short)(two >> 16)}));
  }
  return y;
}

// Upcast pages[0 .. *count), of 16 * `vectors` values each; pages that rows share occur several times.
extern "C" __global__ void upcast_pages(
    const C* k, const C* v, T* upcast_k, T* upcast_v, const int* pages, const int* count, int vectors) {
  wait_for_predecessor();
  start_successor();
  // Page and index in it are advanced separately, since rows that share long prefixes may have more than 2^32 vectors.
  int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  int page = first / vectors, i = first % vectors, end = *count;
  while (page < end) {
    long long at = (long long)pages[page] * vectors + i;
    uint4 a = ((const uint4*)k)[at], b = ((const uint4*)v)[at];
    Eight *to_k = (Eight*)upcast_k + 2 * at, *to_v = (Eight*)upcast_v + 2 * at;
    to_k[0] = upcast_eight(a.x, a.y), to_k[1] = upcast_eight(a.z, a.w);
    to_v[0] = upcast_eight(b.x, b.y), to_v[1] = upcast_eight(b.z, b.w);
    page += step / vectors, i += step % vectors;
    if (i >= vectors) i -= vectors, ++page;
  }
}

// activation(gate) * up over rows of I values, which is a multiple of VEC; `parts` blocks work on a row.
#include "common.cuh"

extern "C" __global__ void activate_and_mul(
    const T* gate, const T* up, long long gate_stride, long long up_stride, T* out, int I, int parts) {
  wait_for_predecessor();
  start_successor();
  unsigned token = blockIdx.x / parts, i = (blockIdx.x % parts * blockDim.x + threadIdx.x) * VEC;
  if (i >= I) return;
  Vec<VEC> g = *(const Vec<VEC>*)(gate + token * gate_stride + i), u = *(const Vec<VEC>*)(up + token * up_stride + i), y;
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    float x = to_float(g.v[j]);
    y.v[j] = from_float<T>(rounded(activation(x)) * to_float(u.v[j]));
  }
  *(Vec<VEC>*)(out + (long long)token * I + i) = y;
}

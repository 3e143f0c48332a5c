// out = activation(gate) * up, element by element over rows of I values, all T. I is a multiple of VEC; `parts` blocks
// share a row. -DSIGMOID=1: the activation is a sigmoid.
#include "common.cuh"

extern "C" __global__ void activate_and_mul(
    const T* gate, const T* up, long long gate_stride, long long up_stride, T* out, int I, int parts) {
  start_successor();  // a product, which may fetch weights
  wait_for_predecessor();
  unsigned token = blockIdx.x / parts, i = (blockIdx.x % parts * blockDim.x + threadIdx.x) * VEC;
  if (i >= I) return;
  Vec<VEC> g = *(const Vec<VEC>*)(gate + token * gate_stride + i), u = *(const Vec<VEC>*)(up + token * up_stride + i),
           y;
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    float x = to_float(g.v[j]);
    y.v[j] = from_float<T>(rounded(SIGMOID ? __fdividef(1.f, 1.f + __expf(-x)) : activation(x)) * to_float(u.v[j]));
  }
  *(Vec<VEC>*)(out + (long long)token * I + i) = y;
}

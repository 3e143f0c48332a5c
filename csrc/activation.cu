// activation(gate) * up over rows of 2 * I values, the gate first. I is a multiple of VEC; `parts` blocks work on a row.
#include "common.cuh"

extern "C" __global__ void activate_and_mul(const T* gate_up, T* out, int I, int parts) {
  wait_for_predecessor();
  start_successor();
  unsigned token = blockIdx.x / parts, i = (blockIdx.x % parts * blockDim.x + threadIdx.x) * VEC;
  if (i >= I) return;
  const T* row = gate_up + token * 2ll * I;
  Vec<VEC> g = *(const Vec<VEC>*)(row + i), u = *(const Vec<VEC>*)(row + I + i), y;
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    float x = to_float(g.v[j]);
    y.v[j] = from_float<T>(rounded(activation(x)) * to_float(u.v[j]));
  }
  *(Vec<VEC>*)(out + (long long)token * I + i) = y;
}

// silu(gate) * up over rows of 2 * I values, the gate first. I is a multiple of VEC.
#include "common.cuh"

extern "C" __global__ void silu_and_mul(const T* gate_up, T* out, long long tokens, int I) {
  wait_for_predecessor();
  start_successor();
  long long vectors = tokens * (I / VEC);
  for (long long n = blockIdx.x * (long long)blockDim.x + threadIdx.x; n < vectors; n += (long long)gridDim.x * blockDim.x) {
    long long token = n / (I / VEC);
    int i = (int)(n % (I / VEC)) * VEC;
    Vec<VEC> g = *(const Vec<VEC>*)(gate_up + token * 2 * I + i), u = *(const Vec<VEC>*)(gate_up + token * 2 * I + I + i), y;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      float x = to_float(g.v[j]);
      y.v[j] = from_float<T>(rounded(x / (1.f + __expf(-x))) * to_float(u.v[j]));
    }
    *(Vec<VEC>*)(out + token * I + i) = y;
  }
}

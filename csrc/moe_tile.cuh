// Common parts of the grouped GEMMs (moe_gemm.cu, quantized_moe.cu): the swizzle of a tile's operands, and the
// activation. With the macro CLAMPED the activation is gpt-oss's, with `alpha` and `limit`; otherwise it is silu or
// gelu (common.cuh).
#pragma once
#include "moe.cuh"
#include "tiles.cuh"

// Offset of 16 bytes, a chunk, in swizzled rows of 128 bytes, so that the same chunk of eight rows lies in different
// banks. It is also the 128-byte swizzle of Hopper's matrix descriptors.
__device__ __forceinline__ unsigned place(int row, int chunk) { return (row * 8 + (chunk ^ row & 7)) * 16; }

// Write zeros to this block's OUTPUTS columns of the N outputs of pair blockIdx.y, because its expert is on another
// rank.
template <int OUTPUTS> __device__ __forceinline__ void no_output(T* out, int N) {
  wait_for_predecessor();
  start_successor();
  int first = blockIdx.x * OUTPUTS;
  T* row = out + (long long)blockIdx.y * N;
  for (int i = first + threadIdx.x * 8; i < min(first + OUTPUTS, N); i += blockDim.x * 8)
    *(uint4*)(row + i) = make_uint4(0, 0, 0, 0);
}

// Compute activation(gate) * up; both inputs are already rounded to T.
__device__ __forceinline__ float activated(float gate, float up, float alpha, float limit) {
  if (!CLAMPED) return rounded(GELU_TANH ? activation(gate) : gate / (1.f + __expf(-gate))) * up;
  gate = fminf(gate, limit), up = fminf(fmaxf(up, -limit), limit);
  return gate / (1.f + __expf(-alpha * gate)) * (up + 1.f);
}

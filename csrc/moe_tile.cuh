// Common parts of the grouped products (moe_gemm.cu, quantized_moe.cu): the swizzle of a tile's operands and the
// activation.
// CLAMPED is a macro: the activation is gpt-oss's, with `alpha` and `limit`; otherwise silu, or gelu (common.cuh).
#pragma once
#include "moe.cuh"
#include "tiles.cuh"

// Offset of 16 bytes, a chunk, in swizzled rows of 128 bytes, so that the same chunk of eight rows lies in different
// banks. It is also the 128-byte swizzle of Hopper's matrix descriptors.
__device__ __forceinline__ unsigned place(int row, int chunk) { return (row * 8 + (chunk ^ row & 7)) * 16; }

// Write zeros as a block's OUTPUTS of the N outputs of pair blockIdx.y, whose expert another rank holds.
template <int OUTPUTS> __device__ __forceinline__ void no_output(T* out, int N) {
  wait_for_predecessor();
  start_successor();
  int first = blockIdx.x * OUTPUTS;
  T* row = out + (long long)blockIdx.y * N;
  for (int i = first + threadIdx.x * 8; i < min(first + OUTPUTS, N); i += blockDim.x * 8)
    *(uint4*)(row + i) = make_uint4(0, 0, 0, 0);
}

// The activation of a gate and its up, both of which are rounded to T already.
__device__ __forceinline__ float activated(float gate, float up, float alpha, float limit) {
  if (!CLAMPED) return rounded(GELU_TANH ? activation(gate) : gate / (1.f + __expf(-gate))) * up;
  gate = fminf(gate, limit), up = fminf(fmaxf(up, -limit), limit);
  return gate / (1.f + __expf(-alpha * gate)) * (up + 1.f);
}

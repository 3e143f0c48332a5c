// Common parts of the kernels of a Gated DeltaNet (Yang et al., "Gated Delta Networks", 2024). A row of the projection
// [T, width] has, in this order: q and k of all key heads and v of all value heads, which together are the channels of
// the convolution; the gate z of all value heads; and for each value head a logit b of the step size and a logit a of
// the decay. -DKEY_DIM and -DVALUE_DIM are dimensions of heads, -DTAPS is the width of the convolution in kernels that
// compute it or read its history.
#pragma once
#include "common.cuh"

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// Number of channels of q, k and v in a row of the projection.
__device__ __forceinline__ int num_channels(int key_heads, int value_heads) {
  return 2 * key_heads * KEY_DIM + value_heads * VALUE_DIM;
}

// Logarithm of a head's decay, from its logit; `rate` is exp(a_log).
__device__ __forceinline__ float log_decay(T logit, float bias, float rate) {
  float x = to_float(logit) + bias;
  return -rate * (x > 20.f ? x : log1pf(expf(x)));
}

__device__ __forceinline__ float sigmoid(T logit) { return __fdividef(1.f, 1.f + __expf(-to_float(logit))); }

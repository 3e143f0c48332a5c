// Terms used in all kernels. A *thread* has registers. A *warp* is 32 threads that run in step; they are its *lanes* 0
// to 31, with lane = threadIdx.x % 32 and warp = threadIdx.x / 32. A *warpgroup* is four consecutive warps. The warps
// of a *block* (CTA) run on one multiprocessor (SM), share memory there, and synchronize by __syncthreads(). On Hopper
// up to 8 blocks form a *cluster*: they run at the same time and can write into one another's shared memory. A *tile*
// is the part of a matrix, or of a row's tokens, that a warp or block processes at a time. A *stage* is a buffer in
// shared memory for one tile; the stages together are a circular buffer, the *ring*. A *producer* fills stages, and
// *consumers* compute on them. The *epilogue* of a GEMM is the work after its main loop: bias, activation, residual,
// store. If the blocks of a cluster divide K (*split-K*), the epilogue first adds up their partial sums. A *wave* is a
// set of blocks that run at the same time.
//
// This file has the types and small helpers of all kernels. It includes no header, so NVRTC needs no CUDA toolkit: the
// 16-bit floats are structs of bits, converted by one instruction each. -DSCALAR=... is the type T of activations and
// weights, -DNORM_SCALAR=... the type W of the weights of norms. -DGELU_TANH=1 selects that activation instead of silu.
#pragma once

#ifndef NORM_SCALAR
#define NORM_SCALAR SCALAR
#endif
#ifndef GELU_TANH
#define GELU_TANH 0
#endif
#define OPTIONAL  // marks a kernel's pointer that may be null for kernel/launch/signature.py; the compiler sees nothing

struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };
using f32 = float;
using T = SCALAR;
using W = NORM_SCALAR;

__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ __forceinline__ float to_float(f32 x) { return x; }
__device__ __forceinline__ float to_float(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

template <typename U> __device__ __forceinline__ U from_float(float x);
template <> __device__ __forceinline__ f32 from_float<f32>(float x) { return x; }
template <> __device__ __forceinline__ f16 from_float<f16>(float x) {
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

// Round x to T. Fused kernels round wherever separate operations would have stored a result in T.
__device__ __forceinline__ float rounded(float x) { return to_float(from_float<T>(x)); }

// Multiply x, a value already divided by the root mean square, by the RMSNorm's weight. x is rounded to the weight's
// type first.
__device__ __forceinline__ float times_norm(float x, W weight) { return to_float(from_float<W>(x)) * to_float(weight); }

// silu(x) = x * sigmoid(x), or gelu's tanh approximation, which is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 *
// x^3)).
__device__ __forceinline__ float activation(float x) {
  return __fdividef(x, 1.f + __expf(GELU_TANH ? -1.5957691216f * (x + 0.044715f * x * x * x) : -x));
}

template <int N, typename U = T> struct alignas(N * sizeof(U)) Vec { U v[N]; };
struct alignas(8) Vec2 { float x, y; };
constexpr int VEC = 16 / sizeof(T);  // elements of one 16-byte access

__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// Sum over a block of at most 1024 threads; all threads get the result. `scratch` has 32 floats.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  x = lane < (blockDim.x + 31) >> 5 ? scratch[lane] : 0.f;
  return warp_sum(x);
}

// Programmatic dependent launch (Hopper): a kernel begins while the previous kernel, its predecessor, still runs.
// Before `wait_for_predecessor` a kernel may read everything that its predecessor does not write. Writes of earlier
// kernels are complete by then, because a kernel calls `start_successor` only after its own wait. A few kernels call it
// before their wait: kernels followed by a GEMM, such as rms_norm, and decode_attention with few short rows, because
// their successor reads only weights before it waits; and delta_conv, because delta_step reads only data of the
// previous step. A kernel without any work must wait too. Its end tells its successor, and a CUDA graph, that all
// earlier kernels have ended; a grid whose blocks all return without waiting could end before them. On GPUs before
// Hopper, kernels run one after another as usual.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void start_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

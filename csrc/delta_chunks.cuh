// Gated DeltaNet (delta.cuh) for rows of several tokens, in chunks of 64 tokens, by the WY form of the paper's section
// 3.3. For a chunk, let g be the prefix sum of the decays' logarithms, S the memory [KEY_DIM, VALUE_DIM] after the
// previous chunk, and D [i, j] = exp(g_i - g_j) for j <= i. The corrections U of the chunk's tokens solve a triangular
// system,
//
//   (I + strictly lower part of diag(beta) (D * K K')) U = diag(beta) (V - diag(exp g) K S)
//
// and the values read from the memory, O, and the next memory are
//
//   O = diag(exp g) Q S + (D * Q K') U        S := exp(g_last) S + K' diag(exp(g_last - g)) U
//
// delta_prepare computes, for all chunks in parallel, q, k and v, the inverse of the system ("solve") and D * Q K'
// ("scores"). delta_scan processes the chunks of each row in order; each warp has 16 columns of a memory in registers
// and does not depend on other warps. delta_gate applies norm and gate to O.
//
// Operands of the tensor cores are bf16. Operands that affect the memory are split into a high and a low bf16 part, and
// all products of parts are added except low times low. This keeps some 16 bits of the float32 values. Operands that
// affect only the output are split only if T has more mantissa bits than bf16.
#pragma once
#include "delta.cuh"
#include "mma.cuh"
#include "tiles.cuh"

constexpr int CHUNK = 64;
constexpr int HEAD = 128;
constexpr int STRIDE = HEAD + 8;     // values of a row of a tile in shared memory, without bank conflicts
constexpr int TOKEN_STRIDE = CHUNK + 8;  // padded row of a chunk's matrix over its tokens, without bank conflicts
constexpr bool FINE = !Is<T>::bf16;
constexpr int PARTS = FINE ? 2 : 1;  // bf16 parts of operands that only the output depends on
static_assert(KEY_DIM == HEAD && VALUE_DIM == HEAD, "a lane has four columns");

// Two values in one register, rounded to bf16 by one instruction, which is faster than one for each value.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Split two values into a bf16 part and the remainder, also in bf16.
__device__ __forceinline__ void split(float x, float y, unsigned& high, unsigned& low) {
  high = pack_bf16(x, y);
  low = pack_bf16(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
}

// Left operand [16, 16] of a product, in two parts.
struct Operand {
  unsigned high[4], low[4];
};

// Two neighbouring accumulators [16, 8] as a left operand: their registers are already laid out like one.
__device__ __forceinline__ Operand as_operand(const float (&left)[4], const float (&right)[4]) {
  Operand a;
  split(left[0], left[1], a.high[0], a.low[0]);
  split(left[2], left[3], a.high[1], a.low[1]);
  split(right[0], right[1], a.high[2], a.low[2]);
  split(right[2], right[3], a.high[3], a.low[3]);
  return a;
}

// Right operand [16, 64] in blocks [16, 16].
struct Blocks {
  uint4 high[4], low[4];
};
// c [16, 64] += a @ b, for blocks of b from `first` to `end`. An `mma` waits for the previous one with the same
// accumulator, so `mma` with other accumulators are issued in between.
template <bool SPLIT>
__device__ __forceinline__ void add_product(
    float (*c)[4], const Operand& a, const Blocks& b, int first = 0, int end = 4) {
  auto add = [&](const unsigned(&left)[4], const uint4(&right)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < first || i >= end) continue;
      mma<bf16>(c[2 * i], left[0], left[1], left[2], left[3], right[i].x, right[i].y);
      mma<bf16>(c[2 * i + 1], left[0], left[1], left[2], left[3], right[i].z, right[i].w);
    }
  };
  if (SPLIT) add(a.low, b.high), add(a.high, b.low);
  add(a.high, b.high);
}

// Load parts [16, 16] of a tile: a left operand; two right operands from a tile whose rows are the product's columns
// (right_of); or from a tile whose columns are the product's columns (right_transposed_of).
template <int N> __device__ __forceinline__ uint4 left_of(const bf16 (*tile)[N], int row, int column) {
  int lane = threadIdx.x & 31;
  return ldmatrix(&tile[row + (lane & 15)][column + (lane >> 4) * 8]);
}
template <int N> __device__ __forceinline__ uint4 right_of(const bf16 (*tile)[N], int row, int column) {
  int lane = threadIdx.x & 31;
  return ldmatrix(&tile[row + (lane & 7) + (lane >> 4) * 8][column + (lane >> 3 & 1) * 8]);
}
template <int N> __device__ __forceinline__ uint4 right_transposed_of(const bf16 (*tile)[N], int row, int column) {
  int lane = threadIdx.x & 31;
  return ldmatrix_transposed(&tile[row + (lane & 15)][column + (lane >> 4) * 8]);
}

// Load the right operand [16, 64] from 64 rows and 16 columns of a tile, from block `first` on.
template <bool SPLIT, int N>
__device__ __forceinline__ Blocks rows_of(const bf16 (*high)[N], const bf16 (*low)[N], int column, int first = 0) {
  Blocks b;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < first) continue;
    b.high[i] = right_of(high, i * 16, column);
    if (SPLIT) b.low[i] = right_of(low, i * 16, column);
  }
  return b;
}
// Load the right operand [16, 64] from 16 rows and 64 columns of a tile, up to block `end`.
template <int N>
__device__ __forceinline__ Blocks
columns_of(const bf16 (*high)[N], const bf16 (*low)[N], int row, int column, int end = 4) {
  Blocks b;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= end) continue;
    b.high[i] = right_transposed_of(high, row, column + i * 16);
    b.low[i] = right_transposed_of(low, row, column + i * 16);
  }
  return b;
}

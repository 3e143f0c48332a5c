// Rows of several tokens through a Gated DeltaNet (delta.cuh), in chunks of 64, by the WY form of the paper's section
// 3.3. In a chunk let g be the running sum of the decays' logarithms, S the memory [KEY_DIM, VALUE_DIM] behind the
// chunk before, and D [i, j] = exp(g_i - g_j) for j <= i. The corrections U of the chunk's tokens solve a triangular
// system,
//
//   (I + strictly lower part of diag(beta) (D * K K')) U = diag(beta) (V - diag(exp g) K S)
//
// and the reads and the next memory are
//
//   O = diag(exp g) Q S + (D * Q K') U        S := exp(g_last) S + K' diag(exp(g_last - g)) U
//
// delta_prepare makes, for all chunks at once, q, k and v, the inverse of the system ("solve") and D * Q K' ("scores").
// delta_scan passes over each row's chunks with 16 columns of a memory in the registers of each warp, which needs no
// other warp. delta_gate norms and gates what was read.
//
// Operands of the tensor cores are bf16. What the memory is made of is split into a high and a low part, whose products
// but the smallest are added: so it keeps some 16 bits, as float32 states deserve. What only the output sees is split
// too if T is finer than bf16.
#pragma once
#include "delta.cuh"
#include "mma.cuh"
#include "tiles.cuh"

constexpr int CHUNK = 64;
constexpr int HEAD = 128;
constexpr int STRIDE = HEAD + 8;     // of a row of a tile, in shared memory
constexpr int TOKENS = CHUNK + 8;    // of a row of a chunk's matrix
constexpr bool FINE = !Is<T>::bf16;
constexpr int PARTS = FINE ? 2 : 1;  // of what only the output sees
static_assert(KEY_DIM == HEAD && VALUE_DIM == HEAD, "a lane has four columns");

// Two values as pairs of bf16: rounded, and what that left. One instruction a pair converts faster than one a value.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ void split(float x, float y, unsigned& high, unsigned& low) {
  high = pack_bf16(x, y);
  low = pack_bf16(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
}

// Left operand [16, 16] of a product, in two parts.
struct Operand {
  unsigned high[4], low[4];
};

// The operand that two neighbouring accumulators [16, 8] are: their registers lie as it needs them.
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
// c [16, 64] += a @ b, for blocks of b from `first` to `end`. A product of the tensor cores waits for the one before it
// with the same sum, so those of different sums stand between them.
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

// Parts [16, 16] of a tile as operands: a left one; two right ones of a tile whose rows are the product's columns; two
// of a tile whose columns they are.
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

// The right operand [16, 64] that 64 rows of 16 columns are, from block `first` on.
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
// The one that 16 rows of 64 columns are, up to block `end`.
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

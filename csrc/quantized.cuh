// Quantized weights as the products read them: packed by quantization/gpu_layout.py, decoded in registers.
//
// Tiles of 64 rows and CHUNK_K columns lie one after another, those of 64 rows in a line. In a tile a thread of a
// warpgroup finds its 16 bytes at 16 * its number: the values that `mma` (mma.cuh) wants of it as a left operand, of
// row g and row g + 8 of its warp's 16. For example lane 5 of warp 2 has rows 33 and 41 of the tile (g = 1, p = 1). In
// 8 bits its words are: columns 2, 3, 10, 11 of row 33, then of row 41; columns 18, 19, 26, 27 of row 33, of row 41.
// In 4 bits a word has 8 values of a row: columns 2, 3, 10, 11, 18, 19, 26, 27, then of row 41; then 32 columns later.
//
// Macros: WEIGHT is E4M3, INT8, INT4 or E2M1. GROUP columns have a scale for each row, which is multiplied into float32
// sums or, in quantized_gemm.cu, into values of T; 0: all columns, so that it is left to the end. OFFSETS: a group has
// an offset beside its scale, both in T, and values of T are (level - 8) * scale + offset. The bits of two values of
// e4m3 lie in 16 such that one `and` finds the first pair of a word in T's place; two shifts bring the second. Those of
// four values of e2m1 lie so too, where the fewest operations bring them (9 for all eight of a word): the bits of the
// first at 15 and 8 to 6, of the second 4 lower, of the third at 5 of the other half and 14 to 12, of the last at 9,
// 10, 1 and 0.
//
// E2M1 is MXFP4: 32 columns of a row have a power of two, with which the values are multiplied as they are decoded, in
// bf16. In a chunk it is a byte for each of a thread's words, the same for the four threads of a row (GROUP is 0).
#pragma once
#include "mma.cuh"

#define E4M3 0
#define INT8 1
#define INT4 2
#define E2M1 3
#ifndef OFFSETS
#define OFFSETS 0
#endif

constexpr int WEIGHT_BITS = WEIGHT == INT4 || WEIGHT == E2M1 ? 4 : 8;
constexpr int CHUNK_K = 256 / WEIGHT_BITS;  // columns that 16 bytes of each lane have
constexpr int CHUNK = 2048;                 // bytes of 64 rows
constexpr int STEPS = CHUNK_K / 16;         // products that a chunk is the left operand of
constexpr unsigned ONES = Is<T>::bf16 ? 0x43004300 : 0x64006400;  // 128 or 1024, twice: integers lie behind it

// word & mask | bits, which the compiler would make two instructions of: one has room for one constant.
__device__ __forceinline__ unsigned and_or(unsigned word, unsigned mask, unsigned bits) {
  unsigned c;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(c) : "r"(word), "r"(mask), "r"(bits));
  return c;
}

__device__ __forceinline__ unsigned subtract(unsigned a, unsigned b) {
  unsigned c;
  if constexpr (Is<T>::bf16)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(c) : "r"(b), "r"(0xbf80bf80u), "r"(a));
  else
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

// A group's scale and zero point: 24 bits of a float32, and 8 of an integer. OFFSETS: two values of T, scale and
// offset.
struct Scale {
  unsigned word;
  // A group's sums are multiplied by it.
  __device__ __forceinline__ float factor() const {
    return OFFSETS ? 1.f : __uint_as_float(WEIGHT == E4M3 ? word : word & 0xffffff00u);
  }
  // Argument of `decode`: the zero point as it is subtracted, or the word itself.
  __device__ __forceinline__ unsigned zero() const { return OFFSETS ? word : ONES + (word & 0xff) * 0x10001; }
  // `lift_step` leaves levels undecoded. These return what a group's sums of them are scaled by, and what the sum of
  // its x is.
  __device__ __forceinline__ float of_levels() const { return OFFSETS ? low_of(word) : factor(); }
  __device__ __forceinline__ float of_x(float scale, float lift) const {
    if (OFFSETS) return high_of(word) - scale * (lift + 8);
    return scale * (0x1p23f - lift - __uint_as_float(and_or(word, 0xff, 0x4b000000)));  // 2^23 + the zero point
  }
};

// Integers of 8 bits, less 128, at the low ends of two halves. As bits of bf16 they are small numbers, 2^-133 times as
// large: times 2^127, less 128 * 2^-6, and times 2^6 they are exact.
__device__ __forceinline__ unsigned decode_int8(unsigned pair) {
  if constexpr (Is<T>::bf16) return multiply(multiply_and_add(pair, 0x7f007f00, 0xc000c000), 0x42804280);
  else return subtract(pair | ONES, ONES + 0x00800080);
}

// Two halves that are the low, or the high, half of a word. Written so it is a part of the instruction that reads them.
__device__ __forceinline__ unsigned low_twice(unsigned word) {
  unsigned pair;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(pair) : "r"(word));
  return pair;
}
__device__ __forceinline__ unsigned high_twice(unsigned word) {
  unsigned pair;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(pair) : "r"(word));
  return pair;
}

// Powers of two, twice in bf16, of the rows g and g + 8 for a group of 32 columns of E2M1: the first two bytes of the
// word of a chunk's scales, or the last. With them `decode` makes the values: those of e2m1 in bf16's place are too
// small by 2^126, which the bytes have in them.
__device__ __forceinline__ void powers(unsigned scales, int group, unsigned& low, unsigned& high) {
  unsigned even = scales << 7 & 0x7f807f80, odd = scales >> 1 & 0x7f807f80;
  low = group == 0 ? low_twice(even) : high_twice(even), high = group == 0 ? low_twice(odd) : high_twice(odd);
}

// The k-th two levels of a word of 4 bits, behind these bits.
__device__ __forceinline__ unsigned levels(unsigned word, int k, unsigned bits) {
  return and_or(word >> (4 * k), 0x000f000f, bits);
}

// Two values of e4m3 in the bits of T, which has room for more exponents: too small by a power of two.
__device__ __forceinline__ unsigned place_e4m3(unsigned word, int k) {
  if constexpr (Is<T>::bf16)
    return k == 0 ? word & 0x87f087f0 : ((word << 4) & 0x80f080f0) | ((word >> 4) & 0x07000700);
  else
    return k == 0 ? word & 0xbf80bf80 : ((word << 7) & 0x3f803f80) | ((word << 1) & 0x80008000);
}

// Value k of T, k = 0, 1, ...: of the two halves of a word of 8-bit values, of the four of one of 4-bit values.
// `zero`: the zero point of integers; of E2M1 the scale.
__device__ __forceinline__ unsigned decode(unsigned word, int k, unsigned zero) {
  if constexpr (WEIGHT == E4M3) {
    return multiply(place_e4m3(word, k), Is<T>::bf16 ? 0x7b807b80 : 0x5c005c00);
  } else if constexpr (WEIGHT == E2M1) {
    if (k == 3) return multiply((word << 6 & 0x80c080c0) | (word >> 2 & 0x01000100), zero);
    unsigned moved = k == 0 ? word : k == 1 ? word << 4 : __funnelshift_r(word, word, 6);
    return multiply(moved & 0x81c081c0, zero);
  } else if constexpr (WEIGHT == INT8) {
    return decode_int8(word >> (8 * k) & 0x00ff00ff);
  } else {
    unsigned level = levels(word, k, ONES);
    if constexpr (!OFFSETS) return subtract(level, zero);
    unsigned scale = __byte_perm(zero, 0, 0x1010), offset = __byte_perm(zero, 0, 0x3232);
    return multiply_and_add(subtract(level, ONES + 0x00080008), scale, offset);
  }
}

// Numbers that decode a row's values in a group, in T and twice: value = level * scale + offset, rounded once, where
// the level comes with its zero point subtracted, exact, and too small by LEVEL_UNIT, or by E4M3_UNIT.
struct Scaling { unsigned zero, scale, offset; };

// The lowest eight bits of T alone are an integer times T's smallest number, so levels need no bits behind which they
// lie, and those at bits 4 to 7 no shift: a multiplication by a power of two brings both to LEVEL_UNIT.
constexpr float LEVEL_UNIT = Is<T>::bf16 ? 0x1p-6f : 0x1p-9f;
constexpr float E4M3_UNIT = Is<T>::bf16 ? 0x1p-120f : 0x1p-8f;

__device__ __forceinline__ Scaling scaling(Scale scale) {
  if constexpr (OFFSETS) {
    unsigned word = multiply(scale.word, pack(1 / LEVEL_UNIT, 1.f));
    return {pack(-8 * LEVEL_UNIT, -8 * LEVEL_UNIT), __byte_perm(word, 0, 0x1010), __byte_perm(word, 0, 0x3232)};
  } else if constexpr (WEIGHT == INT4) {
    float factor = scale.factor() * (1 / LEVEL_UNIT);
    return {multiply((scale.word & 0xff) * 0x10001, Is<T>::bf16 ? 0xff00ff00 : 0xf800f800), pack(factor, factor), 0};
  } else {
    float factor = scale.factor() * (1 / E4M3_UNIT);
    return {0, pack(factor, factor), 0};
  }
}

// Value k of T, likewise, but scaled by group.
__device__ __forceinline__ unsigned decode(unsigned word, int k, const Scaling& by) {
  if constexpr (WEIGHT == INT4) {
    unsigned bits = (k < 2 ? word : word >> 8) & (k % 2 == 0 ? 0x000f000f : 0x00f000f0);
    constexpr unsigned LOW = Is<T>::bf16 ? 0x7f007f00 : 0x78007800, HIGH = Is<T>::bf16 ? 0x7d007d00 : 0x68006800;
    unsigned level = multiply_and_add(bits, k % 2 == 0 ? LOW : HIGH, by.zero);
    return OFFSETS ? multiply_and_add(level, by.scale, by.offset) : multiply(level, by.scale);
  } else {
    return multiply(place_e4m3(word, k), by.scale);
  }
}

// Left operand of step s of a chunk. `low` and `high`, of the rows g and g + 8: what `decode` wants of them.
template <typename By>
__device__ __forceinline__ void decode_step(
    unsigned (&a)[4], const uint4& chunk, int s, const By& low, const By& high) {
  constexpr int STEPS_OF_WORD = STEPS / 2;
  bool later = s >= STEPS_OF_WORD;
  unsigned row = later ? chunk.z : chunk.x, other = later ? chunk.w : chunk.y;
  int k = s % STEPS_OF_WORD * 2;
  a[0] = decode(row, k, low), a[1] = decode(other, k, high);
  a[2] = decode(row, k + 1, low), a[3] = decode(other, k + 1, high);
}

// Levels of INT4 as left operands that are not decoded: in bf16 behind ONES, so greater by LIFT; in f16 as its smallest
// numbers, so divided by LEVEL.
constexpr float LIFT = Is<T>::bf16 ? 128.f : 0.f, LEVEL = Is<T>::bf16 ? 1.f : 0x1p24f;

// Left operand of step s of a chunk.
__device__ __forceinline__ void lift_step(unsigned (&a)[4], const uint4& chunk, int s) {
  constexpr unsigned BITS = Is<T>::bf16 ? ONES : 0;
  unsigned row = s < 2 ? chunk.x : chunk.z, other = s < 2 ? chunk.y : chunk.w;
  int k = s % 2 * 2;
  a[0] = levels(row, k, BITS), a[1] = levels(other, k, BITS);
  a[2] = levels(row, k + 1, BITS), a[3] = levels(other, k + 1, BITS);
}

// Packed quantized weights: their layout in memory, which quantization/gpu_layout.py writes, and their decoding in
// registers into left operands of `mma` and wgmma.
//
// A weight is stored in chunks of 64 rows and CHUNK_K columns; all chunks of the first 64 rows come first. A chunk has
// 2,048 bytes. Thread i of a warpgroup reads the 16 bytes at 16 * i. They are the thread's values of the left operands
// of `mma` (mma.cuh): values of rows g and g + 8 of its warp's 16 rows. For example, lane 5 of warp 2 (g = 1, p = 1)
// has rows 33 and 41 of the chunk. With 8 bits its four words are: columns 2, 3, 10, 11 of row 33; the same columns of
// row 41; columns 18, 19, 26, 27 of row 33; the same columns of row 41. With 4 bits a word has eight values: columns 2,
// 3, 10, 11, 18, 19, 26, 27 of row 33; the same columns of row 41; then the columns 32 higher of row 33, and of row 41.
//
// Macros: WEIGHT is E4M3, INT8, INT4 or E2M1. GROUP: number of columns of a row that share a scale; 0: a row has one
// scale, which the epilogue applies. quantized_gemm.cu multiplies the scales of groups into the decoded values of T,
// the other kernels multiply them into float32 sums. OFFSETS: each group has a scale and an offset, both in T, and a
// value is (level - 8) * scale + offset.
//
// The bits are permuted so that few instructions decode them. Two values of e4m3 share 16 bits, such that one `and`
// moves the first pair of a word to the position where T has these bits, and two shifts the second pair. Four values of
// e2m1 share 16 bits. The first value has its sign in bit 15 and its magnitude in bits 8 to 6, the second one 4 bits
// lower each; the third has bit 5 of the other half and bits 14 to 12, the fourth bits 9, 10, 1 and 0. Decoding all
// eight values of a word takes 9 operations.
//
// E2M1 is MXFP4: 32 columns of a row share a scale that is a power of two, by which values are multiplied in bf16 as
// they are decoded. A chunk has one byte of scales for each of a thread's words, the same for the four threads of a
// row; GROUP is 0.
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
constexpr int CHUNK_K = 256 / WEIGHT_BITS;  // columns of a chunk
constexpr int CHUNK = 2048;                 // bytes of a chunk
constexpr int STEPS = CHUNK_K / 16;         // left operands [64, 16] of a chunk
// Two values of T, 128 or 1024. An integer in their lowest mantissa bits is added to them.
constexpr unsigned ONES = Is<T>::bf16 ? 0x43004300 : 0x64006400;

// word & mask | bits in one instruction. The compiler would use two, since one takes a single constant.
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

// Scale and zero point of a row's group, in one word: the upper 24 bits of a float32, and an integer of 8 bits. With
// OFFSETS two values of T, scale and offset; with E4M3 a float32.
struct Scale {
  unsigned word;
  // Factor of a group's sums.
  __device__ __forceinline__ float factor() const {
    return OFFSETS ? 1.f : __uint_as_float(WEIGHT == E4M3 ? word : word & 0xffffff00u);
  }
  // Argument of `decode`: the zero point as it is subtracted, or the word itself.
  __device__ __forceinline__ unsigned zero() const { return OFFSETS ? word : ONES + (word & 0xff) * 0x10001; }
  // `lift_step` leaves levels undecoded. These are the factors of a group's sum of their products with x, and of its
  // sum of x, whose total is what decoded values would give.
  __device__ __forceinline__ float of_levels() const { return OFFSETS ? low_of(word) : factor(); }
  __device__ __forceinline__ float of_x(float scale, float lift) const {
    if (OFFSETS) return high_of(word) - scale * (lift + 8);
    return scale * (0x1p23f - lift - __uint_as_float(and_or(word, 0xff, 0x4b000000)));  // 2^23 + the zero point
  }
};

// Two values of T from two integers of 8 bits, which stand for themselves less 128, in the low bytes of both halves.
// Their bits are those of subnormal bf16, 2^-133 times as large: times 2^127, less 128 * 2^-6, and times 2^6 is exact.
__device__ __forceinline__ unsigned decode_int8(unsigned pair) {
  if constexpr (Is<T>::bf16) return multiply(multiply_and_add(pair, 0x7f007f00, 0xc000c000), 0x42804280);
  else return subtract(pair | ONES, ONES + 0x00800080);
}

// Duplicate the low, or the high, half of a word. Written like this it costs no instruction: the compiler makes it an
// operand modifier of the instruction that reads it.
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

// Scales of E2M1 for the rows g and g + 8 and group 0 or 1 of a chunk (32 columns each), twice in bf16: the first two
// bytes of the word of a chunk's scales, or the last two. They include a factor of 2^126, by which the bits of e2m1,
// read as bf16, are too small.
__device__ __forceinline__ void powers(unsigned scales, int group, unsigned& low, unsigned& high) {
  unsigned even = scales << 7 & 0x7f807f80, odd = scales >> 1 & 0x7f807f80;
  low = group == 0 ? low_twice(even) : high_twice(even), high = group == 0 ? low_twice(odd) : high_twice(odd);
}

// The k-th two levels of a word of 4-bit values, in the lowest bits of the halves of `bits`.
__device__ __forceinline__ unsigned levels(unsigned word, int k, unsigned bits) {
  return and_or(word >> (4 * k), 0x000f000f, bits);
}

// The k-th two values of a word of e4m3 in the bits of T: too small by a power of two, since T has more exponent bits.
__device__ __forceinline__ unsigned place_e4m3(unsigned word, int k) {
  if constexpr (Is<T>::bf16)
    return k == 0 ? word & 0x87f087f0 : ((word << 4) & 0x80f080f0) | ((word >> 4) & 0x07000700);
  else
    return k == 0 ? word & 0xbf80bf80 : ((word << 7) & 0x3f803f80) | ((word << 1) & 0x80008000);
}

// The k-th two values of a word, decoded to T: k is 0 or 1 for 8-bit values, 0 to 3 for 4-bit ones. `zero`: the zero
// point of integers, or the scale of E2M1.
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

// Numbers that decode a row's values of a group, each twice in T: value = level * scale + offset, rounded once. The
// level has its zero point subtracted, which is exact, and is too small by LEVEL_UNIT (integers) or E4M3_UNIT.
struct Scaling { unsigned zero, scale, offset; };

// The lowest eight bits of T alone are subnormal: an integer times T's smallest number. So levels need no ONES and,
// at bits 4 to 7, no shift: multiplying by a power of two turns both into multiples of LEVEL_UNIT.
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

// The k-th two values of a word, decoded to T and multiplied by the scale of their group.
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

// Left operand of step s of a chunk, columns 16s to 16s + 15. `low` and `high`: argument of `decode` for rows g, g + 8.
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

// Levels of INT4 can be left operands without being decoded: in bf16 in the low bits of ONES, so greater by LIFT; in
// f16 as subnormal numbers, so divided by LEVEL.
constexpr float LIFT = Is<T>::bf16 ? 128.f : 0.f, LEVEL = Is<T>::bf16 ? 1.f : 0x1p24f;

// Make the left operand of step s of a chunk from undecoded levels.
__device__ __forceinline__ void lift_step(unsigned (&a)[4], const uint4& chunk, int s) {
  constexpr unsigned BITS = Is<T>::bf16 ? ONES : 0;
  unsigned row = s < 2 ? chunk.x : chunk.z, other = s < 2 ? chunk.y : chunk.w;
  int k = s % 2 * 2;
  a[0] = levels(row, k, BITS), a[1] = levels(other, k, BITS);
  a[2] = levels(row, k + 1, BITS), a[3] = levels(other, k + 1, BITS);
}

// GEMM of up to four rows with a 4-bit weight on a CPU with AVX512-BF16: y = x @ weight^T, including norm, gate and
// residual. x and y are bfloat16, sums are float32.
//
// A weight is cut into tiles of 16 outputs, one per SIMD lane, and a tile into groups of 32 columns. A group has a
// scale and an offset for each output: value = (code - 8) * scale + offset. A group's codes are four vectors of 32
// words. In vector v, nibble n of the words 2 j and 2 j + 1 are the codes of output j in columns 2 (4 v + n) and 2 (4 v
// + n) + 1. One instruction multiplies such a pair with two values of x and adds the products in float32.
// `kernel/cpu/int4.py` packs the codes.

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <vector>

namespace {

using bfloat16 = uint16_t;  // its bits

constexpr int kOutputs = 16;  // outputs per tile
constexpr int kGroup = 32;    // columns of a scale
constexpr int kTileBytes = kOutputs * kGroup / 2;
constexpr int kAhead = 4096;  // bytes: prefetch distance of codes, longer than the CPU's own prefetcher's

struct Weight {
  const uint8_t* codes;     // [tiles, groups, 4, 64]
  const bfloat16* scales;   // [tiles, groups, 16]
  const bfloat16* offsets;  // [tiles, groups, 16]
  int outputs, groups;
};

__m512 widen(const bfloat16* x) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

void store(bfloat16* y, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}

// exp(x) = 2^(x log2(e)): a power of two times a polynomial of the remaining exponent, which is between -1/2 and 1/2.
__m512 exponential(__m512 x) {
  const __m512 power = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
  const __m512 whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(power, whole);
  __m512 y = _mm512_set1_ps(1.54035304e-4f);
  for (const float factor : {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f})
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(factor));
  return _mm512_scalef_ps(y, whole);
}

__m512 silu(__m512 x) {
  const __m512 minus = exponential(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), minus));
}

// Rows of x in the layout of the products: two values per word, and the sum of each group.
struct Rows {
  std::vector<uint32_t> pairs;  // [rows, groups, 16]
  std::vector<float> sums;      // [rows, groups]

  Rows(const bfloat16* x, const bfloat16* norm, float eps, int rows, int groups)
      : pairs(size_t(rows) * groups * 16), sums(size_t(rows) * groups) {
    const int width = groups * kGroup;
    for (int row = 0; row < rows; ++row) {
      const bfloat16* in = x + size_t(row) * width;
      bfloat16* out = reinterpret_cast<bfloat16*>(pairs.data() + size_t(row) * groups * 16);
      __m512 scale = _mm512_set1_ps(1.0f);
      if (norm) {
        __m512 squares = _mm512_setzero_ps();
        for (int i = 0; i < width; i += 16) squares = _mm512_fmadd_ps(widen(in + i), widen(in + i), squares);
        scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / width + eps));
      }
      for (int group = 0; group < groups; ++group) {
        __m512 sum = _mm512_setzero_ps();
        for (int i = group * kGroup; i < (group + 1) * kGroup; i += 16) {
          __m512 values = widen(in + i);
          if (norm) values = _mm512_mul_ps(_mm512_mul_ps(values, scale), widen(norm + i));
          store(out + i, values);
          sum = _mm512_add_ps(sum, widen(out + i));
        }
        sums[size_t(row) * groups + group] = _mm512_reduce_add_ps(sum);
      }
    }
  }
};

// Products of a tile's 16 outputs with all rows.
template <int kRows>
void multiply(const Weight& weight, int tile, const Rows& x, __m512 (&y)[kRows]) {
  // The 16 values of a code, twice: the instruction reads five bits, of which the fifth is the next code's.
  const __m512i values = _mm512_broadcast_i64x4(_mm256_setr_epi16(
      short(0xC100), short(0xC0E0), short(0xC0C0), short(0xC0A0), short(0xC080), short(0xC040), short(0xC000),
      short(0xBF80), 0, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0));
  for (__m512& sum : y) sum = _mm512_setzero_ps();
  const size_t first = size_t(tile) * weight.groups;
  for (int group = 0; group < weight.groups; ++group) {
    const uint8_t* codes = weight.codes + (first + group) * kTileBytes;
    for (int line = 0; line < kTileBytes; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(codes + kAhead + line), _MM_HINT_T0);
    const uint32_t* pairs = x.pairs.data() + size_t(group) * 16;
    __m512 even[kRows], odd[kRows];
    for (int row = 0; row < kRows; ++row) even[row] = odd[row] = _mm512_setzero_ps();
    for (int vector = 0; vector < 4; ++vector) {
      const __m512i words = _mm512_loadu_si512(codes + vector * 64);
      const __m512i nibbles[4] = {words, _mm512_srli_epi16(words, 4), _mm512_srli_epi16(words, 8),
                                  _mm512_srli_epi16(words, 12)};
      for (int nibble = 0; nibble < 4; ++nibble) {
        const auto decoded = reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(nibbles[nibble], values));
        for (int row = 0; row < kRows; ++row) {
          const uint32_t pair = pairs[size_t(row) * weight.groups * 16 + vector * 4 + nibble];
          __m512& sum = nibble % 2 ? odd[row] : even[row];
          sum = _mm512_dpbf16_ps(sum, decoded, reinterpret_cast<__m512bh>(_mm512_set1_epi32(int(pair))));
        }
      }
    }
    const __m512 scale = widen(weight.scales + (first + group) * kOutputs);
    const __m512 offset = widen(weight.offsets + (first + group) * kOutputs);
    for (int row = 0; row < kRows; ++row) {
      y[row] = _mm512_fmadd_ps(_mm512_add_ps(even[row], odd[row]), scale, y[row]);
      y[row] = _mm512_fmadd_ps(offset, _mm512_set1_ps(x.sums[size_t(row) * weight.groups + group]), y[row]);
    }
  }
}

template <int kRows>
void run(const Weight& weight, const Rows& x, const bfloat16* bias, const bfloat16* residual, bfloat16* y, bool gated) {
  const int tiles = weight.outputs / kOutputs / (gated ? 2 : 1), width = tiles * kOutputs;
#pragma omp parallel for schedule(static)
  for (int tile = 0; tile < tiles; ++tile) {
    __m512 sums[kRows], ups[kRows];
    multiply<kRows>(weight, tile, x, sums);
    if (gated) multiply<kRows>(weight, tile + tiles, x, ups);
    for (int row = 0; row < kRows; ++row) {
      const size_t at = size_t(row) * width + tile * kOutputs;
      __m512 sum = sums[row];
      if (bias) sum = _mm512_add_ps(sum, widen(bias + tile * kOutputs));
      if (gated) {
        if (bias) ups[row] = _mm512_add_ps(ups[row], widen(bias + width + tile * kOutputs));
        sum = _mm512_mul_ps(silu(sum), ups[row]);
      }
      if (residual) sum = _mm512_add_ps(sum, widen(residual + at));
      store(y + at, sum);
    }
  }
}

}  // namespace

// y [rows, outputs] = norm(x) @ weight.T + bias + residual, or gated [rows, outputs / 2] = silu(gate) * up of the first
// and the second half of the outputs. `norm`, `bias` and `residual` may be null.
extern "C" void int4_linear(const uint8_t* codes, const bfloat16* scales, const bfloat16* offsets, int outputs,
                            int width, const bfloat16* x, int rows, const bfloat16* norm, float eps,
                            const bfloat16* bias, const bfloat16* residual, bfloat16* y, int gated) {
  const Weight weight{codes, scales, offsets, outputs, width / kGroup};
  const Rows input(x, norm, eps, rows, weight.groups);
  constexpr decltype(&run<1>) kernels[] = {run<1>, run<2>, run<3>, run<4>};
  kernels[rows - 1](weight, input, bias, residual, y, gated);
}

#include "linear_paths.hpp"

#if defined(__AVX2__)
#include <immintrin.h>

// Only intrinsics and plain loops here, see linear_paths.hpp.
namespace tersor::paths {
namespace {

constexpr int kLanes = 8;  // 32-bit numbers in a register; a block of 16 outputs is two registers

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

inline __m256i broadcast4(const std::int8_t* p) {
  std::int32_t four;
  __builtin_memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}

inline std::int32_t largest_lane(__m256i v) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1));
  return _mm_cvtsi128_si32(m);
}

// Largest |x| as bits, in the order of integers: NaN > infinity > numbers.
inline std::int32_t largest_magnitude(const float* x, std::int64_t k) {
  const __m256i no_sign = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i a = _mm256_setzero_si256();
  __m256i b = a;
  std::int64_t j = 0;
  for (; j + 16 <= k; j += 16) {
    a = _mm256_max_epi32(a, _mm256_and_si256(load(x + j), no_sign));
    b = _mm256_max_epi32(b, _mm256_and_si256(load(x + j + 8), no_sign));
  }
  std::int32_t largest = largest_lane(_mm256_max_epi32(a, b));
  for (; j < k; ++j) {
    std::int32_t bits;
    __builtin_memcpy(&bits, x + j, 4);
    bits &= 0x7FFFFFFF;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// 8 codes as 32-bit numbers, not yet clamped to int8. The outer clamp keeps the conversion in range.
inline __m256i code8(__m256 x, __m256 scale, __m256i zero_point) {
  const __m256 limit = _mm256_set1_ps(1024.0F);
  __m256 q = _mm256_div_ps(x, scale);
  q = _mm256_min_ps(_mm256_max_ps(q, _mm256_sub_ps(_mm256_setzero_ps(), limit)), limit);
  q = _mm256_round_ps(q, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm256_add_epi32(_mm256_cvttps_epi32(q), zero_point);
}

// Codes and magnitudes of a row without NaN, clamped to [lowest, 127].
void codes_of_row(const float* x, std::int64_t k, std::int64_t stride, float scale, std::int32_t zero_point,
                  std::int8_t lowest, std::int8_t* codes) {
  const __m256 s = _mm256_set1_ps(scale);
  const __m256i z = _mm256_set1_epi32(zero_point);
  const __m256i low = _mm256_set1_epi8(lowest);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  std::int64_t j = 0;
  for (; j + 32 <= k; j += 32) {
    const __m256i a = _mm256_packs_epi32(code8(_mm256_loadu_ps(x + j), s, z), code8(_mm256_loadu_ps(x + j + 8), s, z));
    const __m256i b =
        _mm256_packs_epi32(code8(_mm256_loadu_ps(x + j + 16), s, z), code8(_mm256_loadu_ps(x + j + 24), s, z));
    __m256i q = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order);
    q = _mm256_max_epi8(q, low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + j), q);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + stride + j), _mm256_abs_epi8(q));
  }
  for (; j < stride; j += 8) {
    float tail[8] = {};
    const std::int64_t left = k - j < 8 ? k - j : 8;
    __builtin_memcpy(tail, x + j, static_cast<unsigned long>(left) * sizeof(float));
    const __m256i wide = code8(_mm256_loadu_ps(tail), s, z);
    __m128i q = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    q = _mm_max_epi8(_mm_packs_epi16(q, q), _mm256_castsi256_si128(low));
    // Behind the k-th element stands code 0, not zero_point.
    const std::uint64_t keep = left == 8 ? ~std::uint64_t{0} : (std::uint64_t{1} << (8 * left)) - 1;
    q = _mm_and_si128(q, _mm_set_epi64x(0, static_cast<long long>(keep)));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + j), q);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + stride + j), _mm_abs_epi8(q));
  }
}

void undefined_row(std::int64_t stride, std::int8_t* codes, float* scale) {
  *scale = __builtin_nanf("");
  __builtin_memset(codes, 0, static_cast<unsigned long>(2 * stride));
}

constexpr std::int32_t kInfinityBits = 0x7F800000;

void per_token(const float* x, std::int64_t k, std::int64_t stride, std::int8_t* codes, float* scale) {
  const std::int32_t largest = largest_magnitude(x, k);
  if (largest >= kInfinityBits) return undefined_row(stride, codes, scale);
  float absmax;
  __builtin_memcpy(&absmax, &largest, 4);
  float s = absmax / 127.0F;
  if (s < __FLT_MIN__) s = __FLT_MIN__;
  *scale = s;
  codes_of_row(x, k, stride, s, 0, -127, codes);
}

void per_tensor(const float* x, std::int64_t k, std::int64_t stride, float scale, std::int32_t zero_point,
                std::int8_t* codes, float* row_scale) {
  if (largest_magnitude(x, k) > kInfinityBits) return undefined_row(stride, codes, row_scale);
  *row_scale = scale;
  codes_of_row(x, k, stride, scale, zero_point, -128, codes);
}

inline void store_valid(float* y, __m256 v, std::int64_t valid) {
  if (valid >= kLanes) {
    _mm256_storeu_ps(y, v);
  } else if (valid > 0) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm256_maskstore_ps(y, _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<std::int32_t>(valid)), lane), v);
  }
}

// max(0, y) in this operand order keeps NaN and -0.0, as the scalar path does.
inline __m256 relu_of(__m256 y) { return _mm256_max_ps(_mm256_setzero_ps(), y); }

inline void finish_int8(const Int8Call& c, std::int64_t m, std::int64_t first, __m256i acc) {
  const std::int64_t valid = c.n - first;
  if (c.sums != nullptr) {
    store_valid(reinterpret_cast<float*>(c.sums + m * c.n + first), _mm256_castsi256_ps(acc), valid);
    return;
  }
  const __m256i shift = _mm256_mullo_epi32(_mm256_set1_epi32(c.zero_point), load(c.sum + first));
  const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(c.x_scale[m]), _mm256_loadu_ps(c.scale + first));
  __m256 y = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(acc, shift)), scale);
  y = _mm256_add_ps(y, _mm256_loadu_ps(c.bias + first));
  if (c.relu) y = relu_of(y);
  store_valid(c.y + m * c.n + first, y, valid);
}

// `Rows` rows times `Blocks` blocks of outputs.
//
// vpmaddubsw multiplies unsigned by signed bytes and saturates sums of two products at 16 bits. |x| <= 128 as unsigned
// and w with the sign of x moved onto it, |w| <= 127, give at most 2 * 128 * 127 < 32768. A weight of -128 does not
// survive the change of sign: `Widen` splits bytes into 16-bit halves instead.
template <int Rows, int Blocks, bool Widen>
void tile_int8(const Int8Call& c, std::int64_t m, std::int64_t b) {
  constexpr int kRegs = 2 * Blocks;
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i acc[Rows][kRegs];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < kRegs; ++i) acc[r][i] = _mm256_setzero_si256();
  const std::int8_t* w = c.w + b * c.w_block;
  const std::int8_t* x = c.x + m * 2 * c.stride;
  for (std::int64_t j = 0; j < c.k; j += 4) {
    __m256i weights[kRegs];
#pragma GCC unroll 8
    for (int i = 0; i < kRegs; ++i) weights[i] = load(w + (i / 2) * c.w_block + j * 16 + (i % 2) * 32);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const __m256i signed_x = broadcast4(x + r * 2 * c.stride + j);
      if constexpr (Widen) {
        const __m256i even_x = _mm256_srai_epi16(_mm256_slli_epi16(signed_x, 8), 8);
        const __m256i odd_x = _mm256_srai_epi16(signed_x, 8);
#pragma GCC unroll 8
        for (int i = 0; i < kRegs; ++i) {
          const __m256i even = _mm256_madd_epi16(_mm256_srai_epi16(_mm256_slli_epi16(weights[i], 8), 8), even_x);
          const __m256i odd = _mm256_madd_epi16(_mm256_srai_epi16(weights[i], 8), odd_x);
          acc[r][i] = _mm256_add_epi32(acc[r][i], _mm256_add_epi32(even, odd));
        }
      } else {
        const __m256i size_x = broadcast4(x + (r * 2 + 1) * c.stride + j);
#pragma GCC unroll 8
        for (int i = 0; i < kRegs; ++i) {
          const __m256i pairs = _mm256_maddubs_epi16(size_x, _mm256_sign_epi8(weights[i], signed_x));
          acc[r][i] = _mm256_add_epi32(acc[r][i], _mm256_madd_epi16(pairs, ones));
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < kRegs; ++i) finish_int8(c, m + r, b * 16 + i * kLanes, acc[r][i]);
}

template <int Rows, bool Widen>
void strip_int8(const Int8Call& c, std::int64_t m) {
  std::int64_t b = c.begin;
  // Few rows leave registers for a second block, which then shares the broadcasts.
  if constexpr (Rows <= 2)
    for (; b + 2 <= c.end; b += 2) tile_int8<Rows, 2, Widen>(c, m, b);
  for (; b < c.end; ++b) tile_int8<Rows, 1, Widen>(c, m, b);
}

template <bool Widen>
void rows_int8(const Int8Call& c) {
  std::int64_t m = 0;
  for (; m + 4 <= c.rows; m += 4) strip_int8<4, Widen>(c, m);
  switch (c.rows - m) {
    case 3:
      return strip_int8<3, Widen>(c, m);
    case 2:
      return strip_int8<2, Widen>(c, m);
    case 1:
      return strip_int8<1, Widen>(c, m);
  }
}

void int8(const Int8Call& c) { c.widen ? rows_int8<true>(c) : rows_int8<false>(c); }

// Nibbles are unsigned, so vpmaddubsw takes them as they are; 32 inputs, 8 steps of two products of at most 15 * 128,
// stay below 32768 in 16 bits.
template <int Rows>
void tile_int4(const Int4Call& c, std::int64_t m, std::int64_t b) {
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256i nibble = _mm256_set1_epi8(15);
  const std::int8_t* x = c.x + m * 2 * c.stride;
  const std::uint8_t* w = c.w + b * c.w_block;
  __m256 total[Rows][2];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) total[r][0] = total[r][1] = _mm256_setzero_ps();
  for (std::int64_t g = 0; g < c.groups; ++g) {
    const std::int64_t end = c.k - g * c.group_size < c.group_size ? c.k : (g + 1) * c.group_size;
    __m256i acc[Rows][2];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
    for (std::int64_t from = g * c.group_size; from < end; from += 32) {
      const std::int64_t to = end - from < 32 ? end : from + 32;
      __m256i pairs[Rows][2];
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) pairs[r][0] = pairs[r][1] = _mm256_setzero_si256();
      for (std::int64_t j = from; j < to; j += 8) {
        __m256i low[2];
        __m256i high[2];
#pragma GCC unroll 8
        for (int i = 0; i < 2; ++i) {
          const __m256i both = load(w + j * 8 + i * 32);
          low[i] = _mm256_and_si256(both, nibble);
          high[i] = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
          const __m256i x_low = broadcast4(x + r * 2 * c.stride + j);
          const __m256i x_high = broadcast4(x + r * 2 * c.stride + j + 4);
#pragma GCC unroll 8
          for (int i = 0; i < 2; ++i) {
            const __m256i two =
                _mm256_add_epi16(_mm256_maddubs_epi16(low[i], x_low), _mm256_maddubs_epi16(high[i], x_high));
            pairs[r][i] = _mm256_add_epi16(pairs[r][i], two);
          }
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int i = 0; i < 2; ++i) acc[r][i] = _mm256_add_epi32(acc[r][i], _mm256_madd_epi16(pairs[r][i], ones));
    }
#pragma GCC unroll 8
    for (int i = 0; i < 2; ++i) {
      const std::int64_t at = (b * c.groups + g) * 16 + i * kLanes;
      const __m256i offset = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(c.offset + at)));
      const __m256i shift = _mm256_mullo_epi32(_mm256_set1_epi32(c.zero_point), load(c.sum + at));
      const __m256 scale = _mm256_loadu_ps(c.scale + at);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        const __m256i x_sum = _mm256_set1_epi32(c.x_sum[(m + r) * c.groups + g]);
        const __m256i sum = _mm256_sub_epi32(_mm256_sub_epi32(acc[r][i], _mm256_mullo_epi32(offset, x_sum)), shift);
        total[r][i] = _mm256_add_ps(total[r][i], _mm256_mul_ps(_mm256_cvtepi32_ps(sum), scale));
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < 2; ++i) {
    const std::int64_t first = b * 16 + i * kLanes;
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      __m256 y = _mm256_mul_ps(total[r][i], _mm256_set1_ps(c.x_scale[m + r]));
      y = _mm256_add_ps(y, _mm256_loadu_ps(c.bias + first));
      if (c.relu) y = relu_of(y);
      store_valid(c.y + (m + r) * c.n + first, y, c.n - first);
    }
  }
}

template <int Rows>
void strip_int4(const Int4Call& c, std::int64_t m) {
  for (std::int64_t b = c.begin; b < c.end; ++b) tile_int4<Rows>(c, m, b);
}

void int4(const Int4Call& c) {
  std::int64_t m = 0;
  for (; m + 4 <= c.rows; m += 4) strip_int4<4>(c, m);
  switch (c.rows - m) {
    case 3:
      return strip_int4<3>(c, m);
    case 2:
      return strip_int4<2>(c, m);
    case 1:
      return strip_int4<1>(c, m);
  }
}

}  // namespace

const Table avx2{per_token, per_tensor, int8, int4};

}  // namespace tersor::paths
#endif

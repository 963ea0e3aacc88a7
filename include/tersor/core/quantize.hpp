#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

#include "tersor/core/error.hpp"
#include "tersor/core/quantization.hpp"

namespace tersor {

/// Nearest integer, ties to the even one, for |x| <= 2^22 in the default rounding mode; vectorises on any CPU.
inline float round_half_even_small(float x) {
  constexpr float magic = 12582912.0F;  // 1.5 * 2^23: one unit in the last place is 1
  return (x + magic) - magic;
}

/// The floating-point type in which scales are stored.
enum class ScaleType { float32, float16, bfloat16 };

constexpr std::string_view name(ScaleType type) {
  return type == ScaleType::float32 ? "float32" : type == ScaleType::float16 ? "float16" : "bfloat16";
}

constexpr float smallest_normal(ScaleType type) {
  return type == ScaleType::float16 ? 0x1p-14F : std::numeric_limits<float>::min();
}

/// A finite `x`, at least the smallest normal of `type`, rounded to the nearest value of `type` (ties to even);
/// infinity when it is too large for it.
inline float round_to(ScaleType type, float x) {
  if (type == ScaleType::float32) return x;
  const int dropped = type == ScaleType::float16 ? 13 : 16;  // bits of a float32 mantissa that the type lacks
  std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  bits += (std::uint32_t{1} << (dropped - 1)) - 1 + ((bits >> dropped) & 1);
  bits &= ~((std::uint32_t{1} << dropped) - 1);
  const float rounded = std::bit_cast<float>(bits);
  return type == ScaleType::float16 && rounded > 65504.0F ? std::numeric_limits<float>::infinity() : rounded;
}

/// What turns a real number into a code and back: `code = clamp(round(x / scale) + zero_point)`.
struct QuantParams {
  float scale = 1.0F;
  int zero_point = 0;

  friend constexpr bool operator==(const QuantParams&, const QuantParams&) = default;
};

/// A scale as it may be stored: rounded to `type`, never below its smallest normal (an all-zero row has range 0).
/// Throws UnsupportedDtype when it is too large for `type`.
inline float stored_scale(float scale, ScaleType type) {
  const float rounded = round_to(type, std::max(scale, smallest_normal(type)));
  check(std::isfinite(rounded), ErrorCode::UnsupportedDtype,
        "a scale of {} does not fit into {}; store scales as bfloat16 or float32", scale, name(type));
  return rounded;
}

/// Symmetric: scale = absmax / qmax. `absmax` is finite and not negative.
inline QuantParams choose_symmetric(float absmax, const QuantScheme& scheme, ScaleType type = ScaleType::float32) {
  return {stored_scale(absmax / static_cast<float>(scheme.qmax()), type), 0};
}

/// Affine: scale = (max - min) / (2^bits - 1) with [min, max] widened to contain 0, so that 0.0 has a code of its own.
inline QuantParams choose_affine(float min, float max, const QuantScheme& scheme, ScaleType type = ScaleType::float32) {
  min = std::min(min, 0.0F);
  max = std::max(max, 0.0F);
  const auto levels = static_cast<float>(scheme.qmax() - scheme.qmin());
  float scale = (max - min) / levels;
  if (!std::isfinite(scale)) scale = max / levels - min / levels;
  scale = stored_scale(scale, type);
  const float zero = static_cast<float>(scheme.qmin()) - min / scale;
  return {scale, std::clamp(static_cast<int>(round_half_even_small(zero)), scheme.qmin(), scheme.qmax())};
}

/// Smallest and largest element; {0, 0} of nothing. Elements are finite.
struct MinMax {
  float min = 0.0F;
  float max = 0.0F;
};
inline MinMax min_max(std::span<const float> x) {
  if (x.empty()) return {};
  MinMax range{x[0], x[0]};
  for (const float v : x) {
    range.min = std::min(range.min, v);
    range.max = std::max(range.max, v);
  }
  return range;
}

/// The parameters of one row or group of a weight.
inline QuantParams choose_params(std::span<const float> x, const QuantScheme& scheme,
                                 ScaleType type = ScaleType::float32) {
  const MinMax range = min_max(x);
  return scheme.symmetric ? choose_symmetric(std::max(-range.min, range.max), scheme, type)
                          : choose_affine(range.min, range.max, scheme, type);
}

/// clamp(round_half_even(x / scale) + zero_point, qmin, qmax); division in float32. `x` is not NaN.
inline std::int8_t quantize_value(float x, QuantParams params, int qmin, int qmax) {
  // Far outside every code, and small enough for round_half_even_small and the conversion to int.
  const float limit = 1024.0F;
  const float steps = round_half_even_small(std::clamp(x / params.scale, -limit, limit));
  return static_cast<std::int8_t>(std::clamp(static_cast<int>(steps) + params.zero_point, qmin, qmax));
}

/// Codes of a row or group; `codes` is as long as `x`.
inline void quantize_values(std::span<const float> x, QuantParams params, const QuantScheme& scheme,
                            std::int8_t* codes) {
  const int qmin = scheme.qmin();
  const int qmax = scheme.qmax();
  for (std::size_t i = 0; i < x.size(); ++i) codes[i] = quantize_value(x[i], params, qmin, qmax);
}

/// (code - zero_point) * scale in float32.
inline float dequantize(std::int8_t code, QuantParams params) {
  return static_cast<float>(code - params.zero_point) * params.scale;
}

inline void dequantize(std::span<const std::int8_t> codes, QuantParams params, float* x) {
  for (std::size_t i = 0; i < codes.size(); ++i) x[i] = dequantize(codes[i], params);
}

}  // namespace tersor

#pragma once

#include <cstdint>
#include <string>

namespace tersor {

enum class Granularity { per_tensor, per_channel, per_group };

/// How real numbers become small integers. `q = clamp(round(x / scale) + zero_point)`, rounding half to even.
///
/// Symmetric schemes use [-(2^(bits-1) - 1), 2^(bits-1) - 1] and `zero_point` 0; affine ones all of
/// [-2^(bits-1), 2^(bits-1) - 1] and a `zero_point` inside it, chosen so that 0.0 has a code of its own.
struct QuantScheme {
  int bits = 8;
  bool symmetric = true;
  Granularity granularity = Granularity::per_channel;
  std::int64_t group_size = 0;  ///< elements of one output channel that share a scale; per_group only

  constexpr int qmin() const { return symmetric ? -((1 << (bits - 1)) - 1) : -(1 << (bits - 1)); }
  constexpr int qmax() const { return (1 << (bits - 1)) - 1; }

  friend constexpr bool operator==(const QuantScheme&, const QuantScheme&) = default;
};

/// What happens to the input of a layer with quantized weights.
enum class ActivationMode {
  none,       ///< stays float: weight-only
  per_token,  ///< quantized at run time, one symmetric scale per row (token)
  per_tensor  ///< quantized with a calibrated scale and zero_point
};

/// Input quantization of one layer. `scale` and `zero_point` (a code in [-128, 127]) count for per_tensor only.
struct ActivationQuant {
  ActivationMode mode = ActivationMode::none;
  float scale = 1.0F;
  int zero_point = 0;

  friend constexpr bool operator==(const ActivationQuant&, const ActivationQuant&) = default;
};

}  // namespace tersor

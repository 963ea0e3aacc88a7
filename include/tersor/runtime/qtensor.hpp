#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tersor/core/quantization.hpp"

namespace tersor {

/// A quantized weight: integer codes and the numbers that give them their values.
///
/// The weight is seen as a matrix [rows, columns]: rows are output channels (dimension 0 of a Linear or Conv
/// weight), columns all its other dimensions flattened in C order; groups run along the columns and the last one of
/// a row may be shorter.
struct QTensor {
  at::Tensor codes;       ///< bits 8: int8, `shape`. bits 4: uint8 [rows, ceil(columns / 2)], column 2j in the low
                          ///< nibble of byte j, stored as code + 8; a missing last column is stored as 8 (code 0)
  at::Tensor scale;       ///< [rows, groups] ([1, 1] per tensor), dtype of the original weight; positive, finite
  at::Tensor zero_point;  ///< int8, like scale, a code; undefined when symmetric
  QuantScheme scheme;
  std::vector<std::int64_t> shape;    ///< of the original weight
  at::ScalarType dtype = at::kFloat;  ///< of the original weight

  std::int64_t rows() const;
  std::int64_t columns() const;
  std::int64_t groups() const;  ///< per row
  std::int64_t nbytes() const;  ///< codes + scale + zero_point
};

/// Round-to-nearest quantization of `weight` (float, half or bfloat16; at least 1 dimension).
///
/// Scales are computed in float32, rounded to the weight's dtype, then used: symmetric max|w| / qmax, affine
/// (max - min) / (2^bits - 1) with 0 inside [min, max]. An all-zero row or group gets the smallest normal scale.
/// Throws NonFiniteWeight (with how many, and the first index) and UnsupportedDtype.
/// (`tersor::quantize` is the namespace of the passes.)
QTensor quantize_weight(const at::Tensor& weight, const QuantScheme& scheme);

/// (codes - zero_point) * scale, in float32, in the original shape and dtype.
at::Tensor dequantize(const QTensor& q);

/// One int8 code per element, in the original shape, whatever the bits.
at::Tensor unpacked_codes(const QTensor& q);

/// The inverse: builds `codes` of `q.scheme` from one int8 code per element.
at::Tensor packed_codes(const at::Tensor& codes, const QuantScheme& scheme);

/// What replaces the weight of a layer.
struct LayerQuantization {
  QTensor weight;
  ActivationQuant activation;
};

}  // namespace tersor

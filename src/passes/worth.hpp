#pragma once

#include <cstdint>

#include "tersor/kernels/linear.hpp"

namespace tersor {

/// Whether a Linear with quantized inputs runs on a kernel that is faster than float; `group_size` 0: per channel.
inline bool has_fast_kernel(std::int64_t bits, std::int64_t group_size, std::int64_t columns) {
  const std::int64_t group = group_size == 0 ? columns : group_size;
  return bits == 4 ? Int4Weights::supports(columns, group) : group >= columns;
}

/// From how many weights on it pays to quantize the inputs of a Linear too, where there is a fast kernel.
///
/// Decided for AVX2, whatever machine compresses: another one may run the file, and equal input shall give equal bytes.
/// Measured on Zen 3 with one thread, least of many runs; microseconds for LibTorch's float Linear / int8 per channel /
/// int4 in groups of 32 / int4 in groups of 50, which has no fast kernel:
///
///                  batch 1                batch 4                 batch 16
///     64 x 64      4.1 / 1.3 / 1.4 / 4.8  6.4 / 2.3 / 2.4 / 16    9.3 / 5.9 / 6.2 / 62
///     512 x 512    32 / 15 / 17 / 198     134 / 57 / 57 / 788     304 / 228 / 230 / 3379
///
/// Smaller layers win no more than 4 microseconds and a few kilobytes, and are often the classifier, whose accuracy is
/// worth more. A CPU that has only the scalar kernels is slower with all of them: 166, 674 and 2715 for int8 at 512 x
/// 512.
inline constexpr std::int64_t least_weights = 4096;

}  // namespace tersor

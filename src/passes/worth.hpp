#pragma once

#include <array>
#include <cstdint>
#include <limits>

#include "tersor/kernels/cpu.hpp"
#include "tersor/kernels/linear.hpp"

namespace tersor {

/// Which implementation a Linear with quantized inputs gets.
enum class LinearKernel { int8, int4, grouped };

inline LinearKernel linear_kernel(std::int64_t bits, std::int64_t group_size, std::int64_t columns) {
  const std::int64_t group = group_size == 0 ? columns : group_size;
  if (bits == 4 && Int4Weights::supports(columns, group)) return LinearKernel::int4;
  return bits == 8 && group >= columns ? LinearKernel::int8 : LinearKernel::grouped;
}

/// One row of the table: from how many weights on a Linear with quantized inputs is faster than in float.
struct WorthRow {
  Isa isa;
  LinearKernel kernel;
  std::int64_t least_weights;
};

inline constexpr std::int64_t never_worth = std::numeric_limits<std::int64_t>::max();

/// Measured with one thread and batches of 1 to 16 against LibTorch's float Linear. What is kept out by it may still be
/// quantized on request (`targets`); passes that keep inputs in float do not look here.
inline constexpr std::array<WorthRow, 6> worth_table{{
    {Isa::scalar, LinearKernel::int8, 4096},
    {Isa::scalar, LinearKernel::int4, 4096},
    {Isa::scalar, LinearKernel::grouped, never_worth},
    {Isa::avx2, LinearKernel::int8, 4096},
    {Isa::avx2, LinearKernel::int4, 4096},
    {Isa::avx2, LinearKernel::grouped, never_worth},
}};

inline bool worth_quantizing(Isa isa, LinearKernel kernel, std::int64_t weights) {
  for (const WorthRow& row : worth_table)
    if (row.isa == isa && row.kernel == kernel) return weights >= row.least_weights;
  return true;
}

}  // namespace tersor

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tersor/kernels/aligned.hpp"
#include "tersor/kernels/cpu.hpp"

/// Products of quantized activations with quantized weights, y = x w^T.
///
/// All entries run on the caller's thread. For given codes every instruction set computes the same integers, and the
/// float stage behind them is the same sequence of operations, so outputs are equal to the last bit.
namespace tersor {

/// Outputs stand in blocks of this many in every packed layout.
inline constexpr std::int64_t kBlock = 16;

/// Rows of activations as int8 codes, in the form that the kernels read.
///
/// Row m starts at byte `m * 2 * stride`: `stride` codes (0 behind the k-th), then as many magnitudes |code| as
/// unsigned bytes. Buffers only grow, so that one object serves call after call.
struct QuantizedRows {
  std::int64_t rows = 0;
  std::int64_t k = 0;
  std::int64_t stride = 0;  ///< k rounded up to a multiple of 8
  int zero_point = 0;       ///< of all rows
  AlignedVector<std::int8_t> codes;
  AlignedVector<float> scale;             ///< [rows]
  AlignedVector<std::int32_t> group_sum;  ///< [rows, groups], after sum_groups: sums of codes

  const std::int8_t* row(std::int64_t m) const { return codes.data() + m * 2 * stride; }
};

/// One symmetric scale per row: scale = max|x| / 127, at least the smallest normal float; codes in [-127, 127].
/// A row with NaN or an infinity gets scale NaN and codes 0: its outputs are NaN. Row m of x starts at `m * k`.
void quantize_per_token(Isa isa, const float* x, std::int64_t rows, std::int64_t k, QuantizedRows& out);

/// clamp(round_half_even(x / scale) + zero_point, -128, 127). Infinities become the outermost codes; a row with NaN
/// gets scale NaN. `zero_point` lies in [-128, 127].
void quantize_per_tensor(Isa isa, const float* x, std::int64_t rows, std::int64_t k, float scale, int zero_point,
                         QuantizedRows& out);

/// Fills `group_sum`; the last group may be shorter.
void sum_groups(QuantizedRows& x, std::int64_t group_size);

/// Int8 weights [n, k] with one scale per output, and the bias, packed.
///
/// Code (i, j) is byte `(i / 16) * padded_k * 16 + (j / 4) * 64 + (i % 16) * 4 + j % 4`: blocks of 16 outputs, in them
/// steps of 4 consecutive inputs, the order of dot-product instructions. Both dimensions are padded with code 0,
/// k to a multiple of 4. A kernel broadcasts 4 activations and never adds across lanes.
class Int8Weights {
 public:
  /// `codes` [n, k] row-major, `scale` [n], `bias` [n] or empty.
  Int8Weights(std::span<const std::int8_t> codes, std::int64_t n, std::int64_t k, std::span<const float> scale,
              std::span<const float> bias);

  static std::size_t packed_size(std::int64_t n, std::int64_t k);
  static std::size_t packed_index(std::int64_t k, std::int64_t i, std::int64_t j);

  std::int64_t n = 0;
  std::int64_t k = 0;
  bool has_minus_128 = false;  ///< such weights take a path that widens to 16 bits first
  AlignedVector<std::int8_t> codes;
  AlignedVector<float> scale;       ///< [blocks * 16], 0 behind n
  AlignedVector<float> bias;        ///< [blocks * 16], 0 behind n
  AlignedVector<std::int32_t> sum;  ///< [blocks * 16], of the codes of one output

  std::int64_t blocks() const { return (n + kBlock - 1) / kBlock; }
};

/// Int4 weights [n, k] with one scale and, when affine, one zero point per group of inputs, and the bias, packed.
///
/// Blocks of 16 outputs, in them steps of 8 consecutive inputs of 64 bytes: byte `(i % 16) * 4 + j % 4` holds input
/// j % 8 < 4 in its low nibble and input j + 4 in its high one, as code + 8. k is padded to a multiple of 8 (the
/// activations there are 0). Per block and group stand 16 scales, 16 offsets (8 + zero_point) and 16 sums.
class Int4Weights {
 public:
  /// `codes` [n, k] row-major in [-8, 7], `scale` [n, groups], `zero_point` the same or empty, `bias` [n] or empty.
  /// The last group may be shorter. `supports` must hold.
  Int4Weights(std::span<const std::int8_t> codes, std::int64_t n, std::int64_t k, std::int64_t group_size,
              std::span<const float> scale, std::span<const std::int8_t> zero_point, std::span<const float> bias);

  /// Whole steps in every group, and sums that int32 holds.
  static bool supports(std::int64_t k, std::int64_t group_size) {
    return (group_size % 8 == 0 || group_size >= k) && k <= (1 << 18);
  }
  static std::size_t packed_size(std::int64_t n, std::int64_t k);

  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int64_t group_size = 0;
  std::int64_t groups = 0;
  AlignedVector<std::uint8_t> codes;
  AlignedVector<float> scale;         ///< [blocks, groups, 16]
  AlignedVector<std::int8_t> offset;  ///< [blocks, groups, 16]
  AlignedVector<std::int32_t> sum;    ///< [blocks, groups, 16], of code - zero_point over the group
  AlignedVector<float> bias;          ///< [blocks * 16]

  std::int64_t blocks() const { return (n + kBlock - 1) / kBlock; }
};

/// A range of blocks of outputs, for splitting one product over threads.
struct BlockRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// y[m, i] = float(sum_j (x[m, j] - zero_point) * w[i, j]) * (x.scale[m] * w.scale[i]) + bias[i], then max(0, y) if
/// `relu`. The sum is exact, whatever k. y is [rows, n] row-major; only the columns of `range` are written.
void linear(Isa isa, const QuantizedRows& x, const Int8Weights& w, bool relu, float* y, BlockRange range);

/// The sums of products alone, without zero_point: y[m, i] = sum_j x[m, j] * w[i, j]. Throws BadUsage when k is so
/// large that int32 could overflow (k > 131071).
void linear_sums(Isa isa, const QuantizedRows& x, const Int8Weights& w, std::int32_t* y);

/// y[m, i] = (sum over groups, in order, of float(sum_j (x - x.zero_point) * (w - w.zero_point)) * scale[i, group])
/// * x.scale[m] + bias[i]. `x.group_sum` is filled. Each group's sum is exact.
void linear(Isa isa, const QuantizedRows& x, const Int4Weights& w, bool relu, float* y, BlockRange range);

/// The same for int8 codes and groups of any size: one implementation for every instruction set, for what has no fast
/// path. `codes` [n, k], `scale` and `zero_point` (may be empty) [n, groups], `bias` [n] or empty.
struct GroupedWeights {
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int64_t group_size = 0;
  std::span<const std::int8_t> codes;
  std::span<const float> scale;
  std::span<const std::int8_t> zero_point;
  std::span<const float> bias;
};
void linear(const QuantizedRows& x, const GroupedWeights& w, bool relu, float* y, BlockRange outputs);

}  // namespace tersor

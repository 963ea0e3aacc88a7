#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tersor/io/dataset.hpp"
#include "tersor/io/file.hpp"

namespace tersor::cli {

/// Samples of a data file that serve as example: enough that no size of 1 hides the batch dimension.
inline constexpr std::int64_t example_samples = 2;

/// One model input as `--input-shape` writes it.
struct InputSpec {
  std::vector<std::int64_t> shape;
  at::ScalarType dtype = at::kFloat;
};

/// `1,3,32,32`, `1,16:i64`; several separated by `;`. BadUsage says which part is wrong.
std::vector<InputSpec> parse_input_shape(std::string_view text);

/// Made-up values, the same on every call: floats uniform in [-1, 1), integers 0, 1, 0, 1 … (small enough to be
/// ids of any vocabulary), booleans true.
std::vector<at::Tensor> make_inputs(const std::vector<InputSpec>& specs);

/// Samples `0, 1, …` of `data`, again from the start when there are too few, until there are `count`.
std::vector<at::Tensor> repeat_samples(const Dataset& data, std::int64_t count);

/// How a file is written that must be none of those that are read.
AtomicWriteOptions output_options(bool overwrite, const std::filesystem::path& source = {});

/// `sha256-head:<digest>:<bytes>` of the first MiB and the size, or `sha256:<digest>` of all of it.
std::string source_identity(const std::filesystem::path& path, bool contents);

}  // namespace tersor::cli

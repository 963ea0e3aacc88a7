#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tersor {

/// Samples to calibrate, train or evaluate on. Every tensor has its samples in dimension 0.
struct Dataset {
  std::vector<at::Tensor> inputs;  ///< one per model input
  std::optional<at::Tensor> labels;

  std::int64_t size() const { return inputs.empty() ? 0 : inputs.front().size(0); }
  /// Samples [begin, min(begin + count, size)), labels included.
  Dataset slice(std::int64_t begin, std::int64_t count) const;
};

/// Reads `input0`, `input1`, … and optionally `label` from a safetensors file. BadData says what is missing or uneven.
Dataset read_dataset(const std::filesystem::path& path);
void write_dataset(const std::filesystem::path& path, const Dataset& data);

}  // namespace tersor

#pragma once

#include <filesystem>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tersor::cli {

/// A TorchScript file as a program that uses it runs it: loaded, in eval mode, frozen.
class Script {
 public:
  explicit Script(const std::filesystem::path& path);
  Script(Script&&) noexcept;
  ~Script();

  /// One call of `forward` without gradients; the outputs are dropped.
  void run(const std::vector<at::Tensor>& inputs) const;
  /// Seconds of each of `calls` calls in a row.
  std::vector<double> time(const std::vector<at::Tensor>& inputs, int calls) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tersor::cli

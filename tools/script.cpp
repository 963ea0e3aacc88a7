#include "script.hpp"

#include <chrono>

#include <c10/core/InferenceMode.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

namespace tersor::cli {

struct Script::Impl {
  mutable torch::jit::Module module;
};

Script::Script(const std::filesystem::path& path) : impl_(std::make_unique<Impl>()) {
  torch::jit::Module module = torch::jit::load(path.string());
  module.eval();
  impl_->module = torch::jit::freeze(module);
}

Script::Script(Script&&) noexcept = default;
Script::~Script() = default;

void Script::run(const std::vector<at::Tensor>& inputs) const { time(inputs, 1); }

std::vector<double> Script::time(const std::vector<at::Tensor>& inputs, int calls) const {
  using Clock = std::chrono::steady_clock;
  const c10::InferenceMode guard;
  // Copies: an operator that works in place must not change what the next file is measured on.
  std::vector<c10::IValue> arguments;
  for (const at::Tensor& input : inputs) arguments.emplace_back(input.clone());
  std::vector<double> seconds;
  seconds.reserve(static_cast<std::size_t>(calls));
  for (int i = 0; i < calls; ++i) {
    const Clock::time_point start = Clock::now();
    const c10::IValue output = impl_->module.forward(arguments);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  return seconds;
}

}  // namespace tersor::cli

#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include "tersor/model/wrap.hpp"

namespace tersor {

/// What is made while this lives are ordinary tensors without gradients, within the caller's InferenceMode too: a
/// parameter that takes the data of an inference tensor can never be trained again.
struct OrdinaryTensors {
  const c10::InferenceMode normal{false};
  const at::NoGradGuard no_grad;
};

/// A parameter or buffer of a module: the handle that the module's registry holds.
struct Slot {
  std::string name;  ///< full, `block.1.weight`
  std::shared_ptr<torch::nn::Module> owner;
  std::string own_name;  ///< `weight`
  at::Tensor tensor;
  bool is_parameter = true;

  /// The path of `owner`, `block.1`; empty for the module itself.
  std::string layer() const { return name.substr(0, name.size() - std::min(name.size(), own_name.size() + 1)); }
};

/// Every defined parameter and buffer; a submodule that is reached twice shows its tensors under each of its names.
std::vector<Slot> slots(const std::shared_ptr<torch::nn::Module>& module);

/// The training flag of every submodule, by path.
std::map<std::string, bool> training_flags(const std::shared_ptr<torch::nn::Module>& module);

/// Everything in eval mode; afterwards every submodule's flag is what it was.
class EvalMode {
 public:
  explicit EvalMode(std::shared_ptr<torch::nn::Module> module);
  ~EvalMode();
  EvalMode(const EvalMode&) = delete;
  EvalMode& operator=(const EvalMode&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> flags_;  // parents first
};

// --- what is known of the layer types of torch::nn (eager_layers.cpp) ---

/// The options say what the tensors' shapes say: in_features, out_channels, normalized_shape, …
void sync_options(torch::nn::Module& layer);
/// A convolution's groups or a GroupNorm's.
void set_groups(torch::nn::Module& layer, std::int64_t groups);
bool is_batch_norm(const torch::nn::Module& layer);
/// Mean 0, bias 0, weight sqrt(var + eps): in eval mode a BatchNorm then hands its input on, up to rounding.
void become_identity(torch::nn::Module& batch_norm);
/// The same for a fresh BatchNorm, of this width.
void become_identity(torch::nn::Module& batch_norm, std::int64_t width);
/// Whether the layer's own forward reads `weight` through operators that take codes, for a layer of this kind.
bool takes_codes(const torch::nn::Module& layer, LayerKind kind);
bool takes_bias(const torch::nn::Module& layer);
/// The tensor that the layer's forward reads as `weight`, where that is known and not the registered one.
at::Tensor unregistered_weight(const torch::nn::Module& layer);
/// Replaces the handle of `weight` or `bias`, as member and in the registry. An undefined tensor: no bias.
void replace_parameter(torch::nn::Module& layer, const std::string& own_name, const at::Tensor& tensor);

}  // namespace tersor

#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "eager.hpp"
#include "script.hpp"
#include "tersor/model/masks.hpp"
#include "tersor/model/optimizer_state.hpp"

namespace tersor {

/// A module of the user's own program, edited in place, and beside it the capture: a TorchScript network that holds the
/// same tensors. Passes read the capture; every edit is made to both, and `refresh` compares what they compute.
///
/// A clone has no module, only the capture with copied tensors, and what it takes to put the module back.
class ModuleModel final : public ScriptModel {
 public:
  ModuleModel(Script capture, EagerNetwork eager);

  Backend backend() const override { return Backend::module; }
  std::shared_ptr<Impl> clone() const override;
  void assign(Impl&& other) override;

  std::vector<Layer> layers() const override;
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs) const override;
  void observe(const std::vector<at::Tensor>& inputs, const Observer& see) const override;

  void rewrite(const std::string& tensor, const at::Tensor& values) override;
  void set_argument(NodeId node, std::size_t index, const c10::IValue& value) override;
  void fold_into(const Layer& batch_norm, const Layer& producer, const at::Tensor& weight,
                 const at::Tensor& bias) override;
  void refresh() override;
  std::vector<std::string> keep(const std::string& tensor, std::int64_t dim, const at::Tensor& indices) override;
  void mask(const std::string& tensor, const at::Tensor& keep) override;
  void release_masks() override;
  Masks masks() const override { return masks_; }
  void follow(torch::optim::Optimizer& optimizer) override;
  void quantize_layer(const Layer& layer, const LayerQuantization& quantization) override;
  void dequantize_layers() override;

  void save(const std::filesystem::path& path, const SaveOptions& options,
            const std::map<std::string, std::string>& metadata) const override;

  /// Of a module that was quantized before it was wrapped: `quantized` are its codes, in whose places float values
  /// stand while it is captured. The capture takes the codes; the floats become what `dequantize_layers` fills.
  void adopt_codes(const std::vector<Slot>& quantized);
  /// The module as it is now is the one that this model edits.
  void remember_module();

 private:
  class Edit;
  struct Cut {
    std::string tensor;
    std::int64_t dim;
    at::Tensor indices;
  };

  void check_unchanged() const;
  std::optional<EvalMode> eval_mode() const;
  void check_assignable(const ModuleModel& theirs) const;
  void assign_tensors(ModuleModel& theirs);
  std::vector<std::string> keep_in_clone(const std::string& tensor, std::int64_t dim, const at::Tensor& indices);
  bool is_identity_behind(const std::string& slot, const std::string& tensor) const;
  void install_codes(const std::string& weight, const at::Tensor& codes);
  void restore_plain(const Slot& slot, const at::Tensor& values);
  void hold_module_tensors();
  void update_biases();
  void sync_options() const;

  std::shared_ptr<const EagerNetwork> eager_;  // none in a clone
  std::map<std::string, Slot> known_;          // of the module, as this model left it
  std::map<std::string, std::vector<std::int64_t>> known_shapes_;
  std::map<std::string, at::Tensor> plain_;  // handles of weights that are codes now, emptied
  Masks masks_;
  std::vector<torch::optim::Optimizer*> optimizers_;

  // Of a clone: what the capture does not hold.
  std::map<std::string, at::Tensor> rest_;   // parameters and buffers of no use to forward, by the first name
  std::map<std::string, at::Tensor> codes_;  // weights as the module held them
  std::map<std::string, at::Tensor> grads_;  // handles
  std::map<std::string, at::Tensor> mask_values_;
  std::vector<OptimizerSnapshot> states_;
  std::vector<Cut> cuts_;  // made since
};

}  // namespace tersor

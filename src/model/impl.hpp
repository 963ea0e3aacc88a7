#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tersor/model/model.hpp"

namespace torch::optim {
class Optimizer;
}

namespace tersor {

using Observer = std::function<void(const Layer&, const at::Tensor& input, const at::Tensor& output)>;

/// A backend. The facade (model.cpp) checks arguments before it calls: tensor and layer names exist, indices ascend and
/// are in range, shapes of new values fit, and runs everything without gradients. It also keeps what all backends
/// share: kept indices, masks, the example and the metadata.
class Model::Impl {
 public:
  Impl() = default;
  virtual ~Impl() = default;

  virtual Backend backend() const = 0;
  /// A network of its own: no tensor is shared with this one.
  virtual std::shared_ptr<Impl> clone() const = 0;
  /// Becomes `other`, which is of the same class: `*this = std::move(dynamic_cast<Own&>(other))`.
  virtual void assign(Impl&& other) = 0;

  virtual std::vector<Layer> layers() const = 0;
  virtual std::vector<std::string> tensor_names() const = 0;  ///< sorted; the weight of a quantized layer among them
  virtual std::optional<at::Tensor> find_tensor(const std::string& name) const = 0;
  virtual std::int64_t nbytes() const = 0;

  // Only backends that can run override these; the facade refuses them by `runnable()`.
  virtual bool runnable() const { return false; }
  virtual std::vector<at::Tensor> forward(const std::vector<at::Tensor>&) const { return {}; }
  virtual void observe(const std::vector<at::Tensor>&, const Observer&) const {}
  /// Of a clone that is used for nothing else; gradients are on.
  virtual std::map<std::string, at::Tensor> gradients(const std::vector<at::Tensor>&, const at::Tensor& /*labels*/,
                                                      const std::vector<std::string>& /*parameters*/) {
    return {};
  }
  virtual Graph build_graph() const { return {}; }  ///< for `example`; called again after edits
  virtual void set_argument(NodeId, std::size_t, const c10::IValue&) {}
  virtual void fold_into(const Layer& /*batch_norm*/, const Layer& /*producer*/, const at::Tensor& /*weight*/,
                         const at::Tensor& /*bias*/) {}
  virtual void refresh() {}

  // Only a module of the user's own program is trained on.
  virtual void mask(const std::string& /*tensor*/, const at::Tensor& /*keep*/) {}  ///< `rewrite` has set the zeros
  virtual void release_masks() {}
  virtual Masks masks() const { return {}; }
  virtual void follow(torch::optim::Optimizer&) {}

  /// Returns every name under which the tensor is known; all of them were cut.
  virtual std::vector<std::string> keep(const std::string& tensor, std::int64_t dim, const at::Tensor& indices) = 0;
  virtual void rewrite(const std::string& tensor, const at::Tensor& values) = 0;
  virtual void quantize_layer(const Layer& layer, const LayerQuantization& quantization) = 0;
  virtual void dequantize_layers() = 0;

  /// `metadata` is complete: what this model says of itself, `tersor.layers` and `tersor.kept` included.
  virtual void save(const std::filesystem::path& path, const SaveOptions& options,
                    const std::map<std::string, std::string>& metadata) const = 0;

  std::map<std::string, std::string> metadata;  ///< as loaded; keys start with `tersor.`, others are carried along
  std::map<std::string, std::vector<std::int64_t>> kept;
  std::vector<std::string> masked;            ///< tensors, sorted
  std::map<std::string, std::string> folded;  ///< BatchNorm layers that became the identity: into which layer
  std::vector<at::Tensor> example;

  // Filled on demand by the facade, dropped by every edit.
  mutable std::optional<std::vector<Layer>> known_layers;
  mutable std::map<std::string, std::size_t, std::less<>> layer_places;  ///< in known_layers
  mutable std::optional<Graph> known_graph;

 protected:
  Impl(const Impl&) = default;
  Impl& operator=(const Impl&) = default;
  Impl& operator=(Impl&&) = default;
};

/// A TorchScript file (script.cpp). Fills `metadata` from the extra files `tersor.*`.
std::shared_ptr<Model::Impl> load_script(const std::filesystem::path& path, const LoadOptions& options);
/// A safetensors file (checkpoint.cpp). Fills `metadata` from `__metadata__`.
std::shared_ptr<Model::Impl> load_checkpoint(const std::filesystem::path& path, const LoadOptions& options);
std::shared_ptr<Model::Impl> make_checkpoint(std::map<std::string, at::Tensor> tensors,
                                             std::map<std::string, std::string> metadata);

}  // namespace tersor

#pragma once

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tersor/model/graph.hpp"
#include "tersor/model/masks.hpp"
#include "tersor/runtime/qtensor.hpp"

namespace torch::optim {
class Optimizer;
}

namespace tersor {

/// What a layer with weights is, in the words of torch::nn.
enum class LayerKind {
  linear,
  conv1d,
  conv2d,
  conv3d,
  conv_transpose,
  batch_norm,
  layer_norm,
  group_norm,
  embedding,
  recurrent,
  other
};

std::string_view class_name(LayerKind kind);  ///< `Linear`, `Conv2d`, `BatchNorm`, …; `targets` may name it

/// One submodule that owns a weight. Names are submodule paths, the same in every backend.
struct Layer {
  std::string name;
  LayerKind kind = LayerKind::other;
  std::string weight;               ///< full parameter name, `name + ".weight"` as a rule
  std::string bias;                 ///< empty without one
  std::vector<std::int64_t> shape;  ///< of the weight
  at::ScalarType dtype = at::kFloat;
  std::int64_t groups = 1;  ///< of convolutions and GroupNorm
  bool is_head = false;     ///< `lm_head`, tied to an Embedding or as wide as its vocabulary: skipped by default
  std::string float_only;   ///< why its weight cannot become codes here; empty when it can
  std::optional<LayerQuantization> quantized;  ///< set once the weight has become codes
};

enum class Backend { script, checkpoint, module };

/// How quantized layers are written. `tersor`: our operators (load libtersor_ops first); `aten`: stock operators only.
enum class Lowering { tersor, aten };

struct LoadOptions {
  bool follow_symlinks = true;
};

struct SaveOptions {
  Lowering lowering = Lowering::tersor;
  bool overwrite = false;
  std::filesystem::path source = {};  ///< refused as output, also through links; empty: not checked
  /// Sees the written file before it takes its place; what it throws leaves no file.
  std::function<void(const std::filesystem::path&)> examine = {};
};

struct EagerNetwork;  // wrap.hpp
class Example;

/// How a module of the user's own program is captured.
struct WrapOptions {
  /// Per input the dimension that counts samples, -1 for none. Empty: dimension 0 of every input.
  std::vector<std::int64_t> batch_dims = {};
  /// Inputs of other sizes, in place of a batch one larger: every dimension that differs may vary later.
  std::vector<at::Tensor> other_example = {};
  /// Masks that shall hold on this module, by name: those of the network it was cloned from, or what load_into gave.
  Masks masks = {};
};

/// One handle over a network, whatever it came from. Copies share the network; `clone` copies it.
///
/// Passes read `layers`, `tensor` and `graph` and speak back through the edit verbs, which every backend implements.
class Model {
 public:
  /// A TorchScript file (`script`) or a safetensors file (`checkpoint`), told apart by content.
  static Model load(const std::filesystem::path& path, const LoadOptions& options = {});
  /// A checkpoint made of named tensors.
  static Model from_tensors(std::map<std::string, at::Tensor> tensors,
                            std::map<std::string, std::string> metadata = {});

  /// A module of the user's own program, edited in place; include tersor/model/wrap.hpp.
  ///
  /// `module` is a std::shared_ptr or a TORCH_MODULE holder whose forward takes and gives tensors; `call(M&, inputs…)`
  /// stands for another method. The module runs in eval mode while it is captured, twice with different batch sizes;
  /// what follows them becomes computed. UnsupportedModel names the place of what cannot (a float that follows the
  /// batch, a branch), and a capture that gives other values than the module is refused.
  template <typename M>
  static Model wrap(const M& module, const Example& example, const WrapOptions& options = {});
  template <typename M, typename Call>
  requires(!std::convertible_to<Call, Example>) static Model
      wrap(const M& module, Call call, const Example& example, const WrapOptions& options = {});
  static Model wrap_network(EagerNetwork network, std::vector<at::Tensor> example, const WrapOptions& options);

  class Impl;
  explicit Model(std::shared_ptr<Impl> impl);
  Model(const Model&);
  Model& operator=(const Model&);
  ~Model();

  Backend backend() const;
  Model clone() const;
  /// Makes this model what `other` is now (for rolling back); both must come from the same load.
  void assign(const Model& other);

  // --- reading ---
  std::vector<Layer> layers() const;
  const Layer& layer(std::string_view name) const;  ///< valid until the next edit; NoSuchTarget with near misses
  std::vector<std::string> tensor_names() const;    ///< parameters and buffers, sorted
  bool has_tensor(std::string_view name) const;
  at::Tensor tensor(std::string_view name) const;  ///< float values; of a quantized weight: dequantized
  std::int64_t nbytes() const;                     ///< of all tensors as stored

  bool runnable() const;  ///< false for weights only
  void set_example(std::vector<at::Tensor> inputs);
  const std::vector<at::Tensor>& example() const;  ///< empty when none was set
  /// Runs in eval mode without gradients; outputs flattened like Graph::outputs.
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs) const;
  /// Runs once and shows every layer's input and output, layer by layer, in the order they ran. What `see` writes into
  /// an output is what the network goes on with.
  void observe(const std::vector<at::Tensor>& inputs,
               const std::function<void(const Layer&, const at::Tensor& input, const at::Tensor& output)>& see) const;
  /// Gradients of the cross-entropy between the first output [N, classes] (or [N, classes, …]) and `labels` (int64)
  /// with respect to these parameters, in eval mode. The model is left alone. UnsupportedModel when the output fits no
  /// labels or no gradient arrives.
  std::map<std::string, at::Tensor> gradients(const std::vector<at::Tensor>& inputs, const at::Tensor& labels,
                                              const std::vector<std::string>& parameters) const;
  /// The flat view for the example. MissingData without one; UnsupportedGraph with the place.
  const Graph& graph() const;

  // --- edit verbs ---
  /// Keeps these indices (ascending) of one dimension of a parameter or buffer. Shapes elsewhere are the caller's care.
  void keep(std::string_view tensor, std::int64_t dim, const std::vector<std::int64_t>& indices);
  /// Sets a literal of an operator (a view's sizes, a group count): argument `index` of `graph().nodes[node]`.
  /// Only what differs from today's value is replaced; a value that the code computes is left to compute itself.
  void set_argument(NodeId node, std::size_t index, const c10::IValue& value);
  /// New values, same shape.
  void rewrite(std::string_view tensor, const at::Tensor& values);
  /// values * mask, +0.0 where the mask is false; the tensor is remembered as masked.
  void mask(std::string_view tensor, const at::Tensor& keep);
  /// The layer's weight becomes codes.
  void quantize_layer(std::string_view layer, const LayerQuantization& quantization);
  /// BatchNorm after folding: the layer hands its input on. `bias_of` gains a bias named `bias_of + ".bias"` if it had
  /// none.
  void fold_into(std::string_view batch_norm, std::string_view producer, const at::Tensor& weight,
                 const at::Tensor& bias);
  /// Quantized weights become float again, with the values of their codes; those of a wrapped module in its old
  /// handles.
  friend void dequantize(Model& model);
  /// Runs the example again and rebuilds the graph after edits. Throws UnsupportedGraph when it does not run any more.
  void refresh();

  // --- training a wrapped module ---
  /// The masks of `prune_l1`, live: for prune::Masked. Gradients of masked weights are masked already.
  Masks masks() const;
  /// Masks end; the zeros stay as they are, and training may change them.
  void permanent();
  /// When channels are removed, what this optimizer remembers of the parameters (momentum, moments) is cut with them.
  /// It must live as long as the model is edited. SGD, Adam, AdamW, RMSprop, Adagrad, LBFGS, or derived from them.
  void follow(torch::optim::Optimizer& optimizer);

  // --- the artifact ---
  /// What the file says of itself: `tersor.version`, `tersor.recipe`, `tersor.source`, `tersor.layers`, `tersor.kept`.
  std::map<std::string, std::string>& metadata();
  const std::map<std::string, std::string>& metadata() const;
  /// Kept indices in the numbering of the first original: `conv.weight:0` → list.
  const std::map<std::string, std::vector<std::int64_t>>& kept() const;

  /// Writes the file whole or not at all (temporary file, fsync, rename), re-opens it and compares.
  void save(const std::filesystem::path& path, const SaveOptions& options = {}) const;

 private:
  std::shared_ptr<Impl> impl_;
};

void dequantize(Model& model);

}  // namespace tersor

#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/ir.h>

#include "impl.hpp"

namespace tersor {

namespace jit = torch::jit;

/// A network as TorchScript: a tree of submodules whose every class is its own, attributes only, and one `forward`
/// without calls. Two instances of one class share code in an ordinary file and could not be edited apart.
struct Script {
  jit::Module root;                              ///< in eval mode
  std::shared_ptr<jit::Graph> graph;             ///< of forward; its first input is `root`
  std::vector<c10::Argument> arguments;          ///< of forward, without self: names, types, defaults
  std::map<std::string, bool> training;          ///< flag of every submodule as it was in the file, by path
  std::shared_ptr<jit::CompilationUnit> origin;  ///< the call stacks of the graph's nodes point into it
};

/// The same network with classes of its own. Values are shared unless `copy_values`.
Script rebuild(const Script& script, bool copy_values);
/// The module that runs and is written: the tree of a rebuilt script with its forward as a method.
jit::Module assemble(const Script& script);

/// A tensor attribute of the tree: parameter, buffer or plain attribute.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};
/// Every tensor attribute, in the order of the attributes; a submodule that is reached twice counts once.
std::vector<NamedTensor> named_tensors(const jit::Module& root);
/// A quantized weight, which is an attribute `<weight>_packed` that holds PackedLinear or PackedConv.
struct PackedWeight {
  std::string weight;  ///< full name of what it replaced
  std::string bias;    ///< likewise; empty without one
  c10::IValue packed;
  LayerQuantization quantization;
  std::optional<at::Tensor> bias_values;
};
std::vector<PackedWeight> packed_weights(const jit::Module& root);
std::optional<PackedWeight> as_packed(const std::string& attribute, const c10::IValue& value);
/// The name that the bias of a packed weight goes by: `weight` → `bias`, `in_proj_weight` → `in_proj_bias`, `w` →
/// `w_bias`.
std::string bias_beside(const std::string& weight);

/// Full name of the attribute that `value` reads, `a.b.weight`; nothing when it is no chain of attribute reads from
/// self.
std::optional<std::string> attribute_path(const jit::Value* value);
/// What the tree holds under a full name.
c10::IValue attribute_at(const jit::Module& root, std::string_view path);
std::optional<c10::IValue> find_attribute(const jit::Module& root, std::string_view path);
/// The submodule and the attribute's own name.
std::pair<jit::Module, std::string> owner_of(const jit::Module& root, std::string_view path);

/// One use of a layer's weight.
struct LayerCall {
  LayerKind kind = LayerKind::other;
  jit::Node* node = nullptr;  ///< the operator that reads the weight
  std::size_t input_index = 0;
  jit::Value* weight =
      nullptr;  ///< as the attribute is read, before any transposition; the packed object of a quantized layer
  jit::Value* bias = nullptr;    ///< nullptr without one
  jit::Value* output = nullptr;  ///< bias included
  jit::Value* groups = nullptr;  ///< convolutions
  std::string weight_name;       ///< full name of the attribute that is read
  std::string weight_key;        ///< the first of the tensor's names
  std::string bias_name;         ///< full name; empty without one
  std::string bias_key;
  std::optional<LayerQuantization> quantization;

  jit::Value* input() const { return node->input(input_index); }
};

/// The network as it is edited.
class ScriptModel : public Model::Impl {
 public:
  explicit ScriptModel(Script script) : script_(std::move(script)) {}

  Backend backend() const override { return Backend::script; }
  std::shared_ptr<Impl> clone() const override;
  void assign(Impl&& other) override { *this = std::move(dynamic_cast<ScriptModel&>(other)); }

  const Script& script() const { return script_; }

  std::vector<Layer> layers() const override;
  std::vector<std::string> tensor_names() const override;
  std::optional<at::Tensor> find_tensor(const std::string& name) const override;
  std::int64_t nbytes() const override;

  bool runnable() const override { return true; }
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs) const override;
  void observe(const std::vector<at::Tensor>& inputs, const Observer& see) const override;
  std::map<std::string, at::Tensor> gradients(const std::vector<at::Tensor>& inputs, const at::Tensor& labels,
                                              const std::vector<std::string>& parameters) override;
  Graph build_graph() const override;

  void set_argument(NodeId node, std::size_t index, const c10::IValue& value) override;
  void fold_into(const Layer& batch_norm, const Layer& producer, const at::Tensor& weight,
                 const at::Tensor& bias) override;
  void refresh() override;
  std::vector<std::string> keep(const std::string& tensor, std::int64_t dim, const at::Tensor& indices) override;
  void rewrite(const std::string& tensor, const at::Tensor& values) override;
  void quantize_layer(const Layer& layer, const LayerQuantization& quantization) override;
  void dequantize_layers() override;

  void save(const std::filesystem::path& path, const SaveOptions& options,
            const std::map<std::string, std::string>& metadata) const override;

 protected:
  at::Tensor attribute(const std::string& name) const;
  void graph_changed();
  void become_copy();  ///< of its own tensors, after `*this` was copied

  Script script_;

 private:
  /// A layer and the operators that use its weight.
  struct LayerUse {
    Layer layer;
    std::vector<LayerCall> calls;
  };
  const std::vector<LayerUse>& uses() const;
  std::vector<LayerUse> find_uses() const;
  std::vector<LayerCall> calls_of(const Layer& layer) const;
  void now_quantized(const Layer& layer, const std::vector<jit::Node*>& calls);
  std::optional<c10::IValue> literal(const jit::Value* value) const;
  bool has_no_bias(const LayerCall& call) const;
  std::string why_float(const Layer& layer, const std::vector<LayerCall>& calls) const;
  std::optional<std::array<c10::IValue, 3>> convolution_geometry(const Layer& layer, const LayerCall& call,
                                                                 std::string& why) const;
  jit::Value* read_attribute(std::string_view path);
  void drop_bookkeeping(const std::string& module, const jit::Value* input);
  void drop_unread(const std::vector<std::string>& attributes);

  /// A literal that was set, to be found again when the example has run.
  struct Wish {
    jit::Node* node;
    std::size_t index;
    c10::IValue value;
    std::string place;
  };

  std::vector<Wish> wishes_;
  mutable std::vector<jit::Node*> origins_;            // of the known graph's nodes
  mutable std::optional<jit::Module> runner_;          // assembled on demand
  mutable std::optional<std::vector<LayerUse>> uses_;  // found on demand, dropped by every edit of the graph
};

/// Values of forward's arguments from a flat list of tensors.
std::vector<c10::IValue> bind_inputs(const std::vector<c10::Argument>& arguments,
                                     const std::vector<at::Tensor>& inputs);
/// Clones: a network that works in place must not change the caller's samples.
std::vector<at::Tensor> copies(const std::vector<at::Tensor>& inputs);
/// Tensors inside a value: tuples, lists and dictionaries spread out, dictionaries in order of their keys.
void flatten(const c10::IValue& value, std::vector<at::Tensor>& tensors);

/// Called after every operator; `value` looks up what a value holds now.
using ValueLookup = std::function<const c10::IValue&(const jit::Value*)>;
using NodeHook = std::function<void(jit::Node*, const ValueLookup& value)>;

/// Runs the graph node by node. Returns the outputs.
void interpret(const Script& script, const std::vector<at::Tensor>& inputs, const NodeHook& after);
/// The same, recorded: origins[i] is the node that nodes[i] of the graph came from.
Graph record(const Script& script, const std::vector<at::Tensor>& inputs, std::vector<jit::Node*>& origins);

/// Every node of a graph, blocks included, in order.
std::vector<jit::Node*> all_nodes(jit::Block* block);
/// Tersor operators and classes in stock operators: Lowering::aten. With an example, VerificationFailed when a layer
/// does not compute the same there.
void lower_to_aten(Script& script, const std::vector<at::Tensor>& example);
/// For messages.
std::string value_text(const c10::IValue& value);
/// First line of an exception's text.
std::string first_line(const std::exception& error);

}  // namespace tersor

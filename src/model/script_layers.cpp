#include <algorithm>
#include <array>
#include <set>

#include <torch/csrc/jit/ir/constants.h>

#include "script.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor {
namespace {

/// Where an operator that owns a weight keeps its parts; -1 where it has none.
struct LayerRule {
  std::string_view op;
  LayerKind kind;  ///< `other`: by the dimensions of the weight
  int input, weight, bias, groups;
};

constexpr std::array<LayerRule, 24> layer_rules{{{"aten::linear", LayerKind::linear, 0, 1, 2, -1},
                                                 {"aten::addmm", LayerKind::linear, 1, 2, 0, -1},
                                                 {"aten::matmul", LayerKind::linear, 0, 1, -1, -1},
                                                 {"aten::mm", LayerKind::linear, 0, 1, -1, -1},
                                                 {"aten::conv1d", LayerKind::conv1d, 0, 1, 2, 6},
                                                 {"aten::conv2d", LayerKind::conv2d, 0, 1, 2, 6},
                                                 {"aten::conv3d", LayerKind::conv3d, 0, 1, 2, 6},
                                                 {"aten::_convolution", LayerKind::other, 0, 1, 2, 8},
                                                 {"aten::convolution", LayerKind::other, 0, 1, 2, 8},
                                                 {"aten::conv_transpose1d", LayerKind::conv_transpose, 0, 1, 2, 6},
                                                 {"aten::conv_transpose2d", LayerKind::conv_transpose, 0, 1, 2, 6},
                                                 {"aten::conv_transpose3d", LayerKind::conv_transpose, 0, 1, 2, 6},
                                                 {"aten::batch_norm", LayerKind::batch_norm, 0, 1, 2, -1},
                                                 {"aten::layer_norm", LayerKind::layer_norm, 0, 2, 3, -1},
                                                 {"aten::group_norm", LayerKind::group_norm, 0, 2, 3, 1},
                                                 {"aten::embedding", LayerKind::embedding, 1, 0, -1, -1},
                                                 {"aten::lstm", LayerKind::recurrent, 0, 2, -1, -1},
                                                 {"aten::gru", LayerKind::recurrent, 0, 2, -1, -1},
                                                 {"aten::rnn_tanh", LayerKind::recurrent, 0, 2, -1, -1},
                                                 {"aten::rnn_relu", LayerKind::recurrent, 0, 2, -1, -1},
                                                 {"tersor::linear", LayerKind::linear, 0, 1, -1, -1},
                                                 {"tersor::linear_relu", LayerKind::linear, 0, 1, -1, -1},
                                                 {"tersor::conv", LayerKind::other, 0, 1, -1, 5},
                                                 {"tersor::embedding", LayerKind::embedding, 0, 1, -1, -1}}};

bool is_int(const jit::Value* value, std::int64_t a, std::int64_t b) {
  const auto constant = jit::toIValue(value);
  return constant && constant->isInt() && (constant->toInt() == a || constant->toInt() == b);
}

/// The matrix that `value` is the transpose of; nullptr when it is none.
jit::Value* transposed(jit::Value* value) {
  jit::Node* node = value->node();
  const std::string op = node->kind().toQualString();
  if (op == "aten::t" || op == "aten::numpy_T" || op == "aten::mT") return node->input(0);
  if (op == "aten::transpose" && ((is_int(node->input(1), 0, -2) && is_int(node->input(2), 1, -1)) ||
                                  (is_int(node->input(1), 1, -1) && is_int(node->input(2), 0, -2))))
    return node->input(0);
  return nullptr;
}

bool is_one(const jit::Value* value) {
  const auto constant = jit::toIValue(value);
  return constant && constant->isScalar() && constant->toScalar().equal(1);
}

/// The addition that gives a product its bias, as older versions write a Linear: the only reader of `product`.
jit::Node* bias_addition(jit::Value* product) {
  if (product->uses().size() != 1) return nullptr;
  jit::Node* node = product->uses().front().user;
  const std::string op = node->kind().toQualString();
  const bool adds =
      (op == "aten::add" || op == "aten::add_") && node->inputs().size() == 3 && node->input(0) == product;
  return adds && is_one(node->input(2)) ? node : nullptr;
}

/// What tensors are called.
struct Names {
  std::unordered_map<const c10::TensorImpl*, std::string> first;  ///< of the aliases of a tensor
  std::set<std::string> all;
  std::map<std::string, std::vector<std::string>> aliases;  ///< all names by the first
};

Names tensor_names_of(const jit::Module& root) {
  Names names;
  for (const NamedTensor& tensor : named_tensors(root)) {
    const auto first = names.first.try_emplace(tensor.tensor.unsafeGetTensorImpl(), tensor.name).first;
    names.aliases[first->second].push_back(tensor.name);
    names.all.insert(tensor.name);
  }
  return names;
}

/// A tensor that a value reads: the name it is read by, and the first of its names, which tells it from others.
struct Parameter {
  std::string name, first;
};

/// Of the first tensor where the value is a list of them (the weights of recurrent layers).
std::optional<Parameter> parameter(const jit::Module& root, const Names& names, const jit::Value* value) {
  if (value->node()->kind() == c10::prim::ListConstruct && !value->node()->inputs().empty())
    value = value->node()->input(0);
  const auto path = attribute_path(value);
  if (!path) return std::nullopt;
  c10::IValue held = attribute_at(root, *path);
  if (held.isTensorList() && !held.toTensorList().empty()) held = held.toTensorList().get(0);
  if (!held.isTensor()) return std::nullopt;
  const auto found = names.first.find(held.toTensor().unsafeGetTensorImpl());
  if (found == names.first.end()) return std::nullopt;
  return Parameter{names.all.contains(*path) ? *path : found->second, found->second};
}

LayerKind convolution_kind(std::int64_t dims) {
  return dims == 3   ? LayerKind::conv1d
         : dims == 4 ? LayerKind::conv2d
         : dims == 5 ? LayerKind::conv3d
                     : LayerKind::other;
}

std::optional<LayerCall> layer_call(const jit::Module& root, const Names& names, jit::Node* node) {
  const std::string op = node->kind().toQualString();
  const auto rule =
      std::find_if(layer_rules.begin(), layer_rules.end(), [&](const LayerRule& r) { return r.op == op; });
  if (rule == layer_rules.end()) return std::nullopt;
  const auto input = [&](int index) { return node->input(static_cast<std::size_t>(index)); };

  LayerCall call;
  call.kind = rule->kind;
  call.node = node;
  call.input_index = static_cast<std::size_t>(rule->input);
  call.weight = input(rule->weight);
  call.output = node->output(0);
  if (rule->groups >= 0) call.groups = input(rule->groups);
  if (rule->bias >= 0) call.bias = input(rule->bias);

  if (op.starts_with("tersor::")) {
    const auto path = attribute_path(call.weight);
    if (!path) return std::nullopt;
    const auto packed = as_packed(*path, attribute_at(root, *path));
    if (!packed) return std::nullopt;
    call.weight_name = call.weight_key = packed->weight;
    call.bias_name = packed->bias;
    call.quantization = packed->quantization;
    if (call.kind == LayerKind::other)
      call.kind = convolution_kind(static_cast<std::int64_t>(packed->quantization.weight.shape.size()));
    return call;
  }
  if (op == "aten::addmm" || op == "aten::matmul" || op == "aten::mm") {
    call.weight = transposed(call.weight);
    if (!call.weight) return std::nullopt;
    if (op == "aten::addmm" && !(is_one(node->input(3)) && is_one(node->input(4)))) return std::nullopt;
  }
  const auto weight = parameter(root, names, call.weight);
  if (!weight) return std::nullopt;
  call.weight_name = weight->name;
  call.weight_key = weight->first;
  if (op == "aten::matmul" || op == "aten::mm") {
    // What is added is a bias only as one number for each output.
    jit::Node* addition = bias_addition(call.output);
    if (const auto bias = addition ? parameter(root, names, addition->input(1)) : std::nullopt) {
      const std::int64_t outputs = attribute_at(root, call.weight_key).toTensor().size(0);
      if (attribute_at(root, bias->first).toTensor().sizes() == at::IntArrayRef(outputs)) {
        call.bias = addition->input(1);
        call.output = addition->output();
      }
    }
  }
  if (call.bias)
    if (const auto bias = parameter(root, names, call.bias)) {
      call.bias_name = bias->name;
      call.bias_key = bias->first;
    }
  if (call.kind == LayerKind::other) {
    const auto is_transposed = jit::toIValue(node->input(6));
    if (!is_transposed || !is_transposed->isBool()) return std::nullopt;
    call.kind = is_transposed->toBool() ? LayerKind::conv_transpose
                                        : convolution_kind(attribute_at(root, call.weight_key).toTensor().dim());
  }
  return call;
}

/// `block.1.weight` → `block.1`; a bare parameter keeps its whole name.
std::string layer_name(const std::string& weight, LayerKind kind) {
  const std::size_t dot = weight.rfind('.');
  if (dot == std::string::npos) return weight;
  const bool usual = weight.substr(dot + 1) == "weight" || kind == LayerKind::recurrent;
  return usual ? weight.substr(0, dot) : weight;
}

}  // namespace

namespace {

void collect(jit::Block* block, std::vector<jit::Node*>& nodes) {
  for (jit::Node* node : block->nodes()) {
    nodes.push_back(node);
    for (jit::Block* inner : node->blocks()) collect(inner, nodes);
  }
}

}  // namespace

std::vector<jit::Node*> all_nodes(jit::Block* block) {
  std::vector<jit::Node*> nodes;
  collect(block, nodes);
  return nodes;
}

const std::vector<ScriptModel::LayerUse>& ScriptModel::uses() const {
  if (!uses_) uses_ = find_uses();
  return *uses_;
}

std::vector<ScriptModel::LayerUse> ScriptModel::find_uses() const {
  const Names names = tensor_names_of(script_.root);
  std::vector<LayerCall> calls;
  std::set<std::string> embeddings;
  std::set<std::int64_t> vocabularies;
  for (jit::Node* node : all_nodes(script_.graph->block())) {
    auto call = layer_call(script_.root, names, node);
    if (!call) continue;
    if (call->kind == LayerKind::embedding) {
      embeddings.insert(call->weight_key);
      vocabularies.insert(call->quantization ? call->quantization->weight.rows()
                                             : attribute(call->weight_name).size(0));
    }
    calls.push_back(std::move(*call));
  }

  std::vector<LayerUse> uses;
  std::map<std::pair<std::string, LayerKind>, std::size_t> places;  // by the weight's key
  std::set<std::string> taken;
  for (LayerCall& call : calls) {
    const auto [place, first_call] = places.try_emplace({call.weight_key, call.kind}, uses.size());
    if (first_call) {
      Layer layer;
      layer.kind = call.kind;
      layer.weight = call.weight_name;
      layer.bias = call.bias_name;
      layer.name = layer_name(call.weight_name, call.kind);
      // A trace reads a tied weight by one name only; the other layer is still there under its own.
      if (const auto aliases = names.aliases.find(call.weight_key); aliases != names.aliases.end())
        for (const std::string& alias : aliases->second)
          if (taken.contains(layer.name) && !taken.contains(layer_name(alias, call.kind))) {
            layer.weight = alias;
            layer.name = layer_name(alias, call.kind);
          }
      if (taken.contains(layer.name)) layer.name += fmt::format(":{}", class_name(layer.kind));
      layer.quantized = call.quantization;
      if (layer.quantized) {
        layer.shape = layer.quantized->weight.shape;
        layer.dtype = layer.quantized->weight.dtype;
      } else {
        const at::Tensor weight = attribute(call.weight_name);
        layer.shape = weight.sizes().vec();
        layer.dtype = weight.scalar_type();
      }
      if (call.groups)
        if (const auto groups = literal(call.groups); groups && groups->isInt()) layer.groups = groups->toInt();
      if (call.kind == LayerKind::linear) {
        const std::string_view name = layer.name;
        layer.is_head = name == "lm_head" || name.ends_with(".lm_head") || embeddings.contains(call.weight_key) ||
                        vocabularies.contains(layer.shape.front());
      }
      taken.insert(layer.name);
      uses.push_back({std::move(layer), {}});
    }
    uses[place->second].calls.push_back(std::move(call));
  }
  for (LayerUse& use : uses) use.layer.float_only = why_float(use.layer, use.calls);
  return uses;
}

std::vector<LayerCall> ScriptModel::calls_of(const Layer& layer) const {
  for (const LayerUse& use : uses())
    if (use.layer.name == layer.name) return use.calls;
  throw fail(ErrorCode::NoSuchTarget, "the model has no layer '{}'", escaped(layer.name));
}

/// The layer's calls have become these; those of others are as they were, so that all need not be found anew.
void ScriptModel::now_quantized(const Layer& layer, const std::vector<jit::Node*>& calls) {
  for (LayerUse& use : *uses_) {
    if (use.layer.name != layer.name) continue;
    use.calls.clear();
    for (jit::Node* call : calls) use.calls.push_back(layer_call(script_.root, {}, call).value());
    const LayerCall& first = use.calls.front();
    use.layer.bias = first.bias_name;
    use.layer.quantized = first.quantization;
    use.layer.dtype = first.quantization->weight.dtype;
  }
}

std::vector<Layer> ScriptModel::layers() const {
  std::vector<Layer> layers;
  for (const LayerUse& use : uses()) layers.push_back(use.layer);
  return layers;
}

}  // namespace tersor

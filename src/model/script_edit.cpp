#include <algorithm>
#include <array>
#include <set>
#include <sstream>

#include <ATen/core/Tensor.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/custom_class.h>

#include "packed_layer.hpp"
#include "script.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor {
namespace {

/// Is the value the same whatever the network is fed: a constant, a plain attribute, or computed from such?
bool is_literal(const jit::Value* value) {
  const jit::Node* node = value->node();
  if (node->kind() == c10::prim::Param || value->type()->isSubtypeOf(*c10::TensorType::get())) return false;
  if (node->kind() == c10::prim::Constant) return true;
  if (node->kind() == c10::prim::GetAttr) return true;
  if (!node->blocks().empty() || node->inputs().empty()) return false;
  return std::all_of(node->inputs().begin(), node->inputs().end(),
                     [](const jit::Value* input) { return is_literal(input); });
}

jit::Value* constant_before(jit::Node* node, const c10::IValue& value) {
  const jit::WithInsertPoint here(node);
  return node->owningGraph()->insertConstant(value);
}

/// The relu that is the only reader of `value`; nullptr when there is none.
jit::Node* only_relu(jit::Value* value) {
  if (value->uses().size() != 1) return nullptr;
  jit::Node* user = value->uses().front().user;
  const bool relu = user->kind() == c10::aten::relu || user->kind() == c10::aten::relu_;
  return relu && user->owningBlock() == value->node()->owningBlock() ? user : nullptr;
}

bool starts_below(const jit::Value* value, const std::string& module) {
  const auto path = attribute_path(value);
  return path && path->starts_with(module + ".");
}

/// Is the value computed from the shape of `tensor` or from attributes of `module`?
bool asks_about(const jit::Value* value, const std::string& module, const jit::Value* tensor) {
  if (value == tensor) return true;
  const jit::Node* node = value->node();
  if (node->kind() == c10::prim::GetAttr) return starts_below(value, module);
  if (node->kind() == c10::prim::Param || value->type()->isSubtypeOf(*c10::TensorType::get())) return false;
  return std::any_of(node->inputs().begin(), node->inputs().end(),
                     [&](const jit::Value* input) { return asks_about(input, module, tensor); });
}

/// Does a block do nothing but raise, and count in tensors of `module`?
bool only_checks(jit::Block* block, const std::string& module) {
  for (jit::Node* node : all_nodes(block)) {
    const c10::FunctionSchema* schema = node->maybeSchema();
    if (node->kind() == c10::prim::SetAttr && !starts_below(node->input(0), module)) return false;
    if (schema && schema->is_mutable() && !starts_below(node->input(0), module)) return false;
  }
  return true;
}

/// The node and what stands in its blocks.
std::set<jit::Node*> with_blocks(jit::Node* node) {
  std::set<jit::Node*> all{node};
  for (jit::Block* block : node->blocks())
    for (jit::Node* inner : all_nodes(block)) all.insert(inner);
  return all;
}

bool is_pure(const std::set<jit::Node*>& nodes) {
  return std::none_of(nodes.begin(), nodes.end(), [](jit::Node* node) {
    const c10::FunctionSchema* schema = node->maybeSchema();
    return node->kind() == c10::prim::Param || node->hasSideEffects() || (schema && schema->is_mutable());
  });
}

/// Destroys nodes, readers before what they read, and then whatever only they read.
void destroy(const std::vector<jit::Node*>& nodes) {
  std::set<jit::Node*> candidates;
  const auto destroy_one = [&](jit::Node* node) {
    const std::set<jit::Node*> gone = with_blocks(node);
    for (jit::Node* one : gone)
      for (jit::Value* input : one->inputs()) candidates.insert(input->node());
    for (jit::Node* one : gone)
      for (jit::Block* block : one->blocks())
        for (jit::Value* output : block->outputs()) candidates.insert(output->node());
    for (jit::Node* one : gone) {
      candidates.erase(one);
      for (jit::Block* block : one->blocks()) candidates.erase(block->param_node());
    }
    node->destroy();
  };
  for (jit::Node* node : nodes) destroy_one(node);
  while (!candidates.empty()) {
    jit::Node* node = *candidates.begin();
    candidates.erase(candidates.begin());
    const bool read = std::any_of(node->outputs().begin(), node->outputs().end(),
                                  [](const jit::Value* output) { return output->hasUses(); });
    if (!read && is_pure(with_blocks(node))) destroy_one(node);
  }
}

std::vector<c10::IValue> items(const c10::IValue& value) {
  std::vector<c10::IValue> items;
  for (const c10::IValue& item : value.toList()) items.push_back(item);
  return items;
}

}  // namespace

std::string value_text(const c10::IValue& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

std::vector<std::string> ScriptModel::keep(const std::string& name, std::int64_t dim, const at::Tensor& indices) {
  at::Tensor tensor = attribute(name);
  std::vector<std::string> names;
  for (const NamedTensor& other : named_tensors(script_.root)) {
    if (other.tensor.is_same(tensor))
      names.push_back(other.name);
    else
      check(!other.tensor.is_alias_of(tensor), ErrorCode::UnsupportedModel,
            "'{}' and '{}' share memory but are not the same tensor", escaped(name), escaped(other.name));
  }
  // Every handle, in lists of tensors too, sees the new values.
  tensor.set_data(tensor.detach().index_select(dim, indices));
  uses_.reset();
  return names;
}

void ScriptModel::rewrite(const std::string& name, const at::Tensor& values) {
  at::Tensor tensor = attribute(name);
  tensor.set_data(values.detach().clone(at::MemoryFormat::Contiguous));
}

void ScriptModel::set_argument(NodeId id, std::size_t index, const c10::IValue& value) {
  const GraphNode& seen = known_graph->nodes[static_cast<std::size_t>(id)];
  jit::Node* node = origins_[static_cast<std::size_t>(id)];
  const std::string place = seen.scope.empty() ? seen.op : fmt::format("{} in '{}'", seen.op, seen.scope);
  const std::string argument = seen.argument_names[index];
  const auto* today = std::get_if<c10::IValue>(&seen.arguments[index]);
  check(node && today, ErrorCode::BadUsage, "set_argument: argument '{}' of {} is a tensor, not a literal",
        escaped(argument), escaped(place));
  if (*today == value) return;
  wishes_.push_back({node, index, value, fmt::format("argument '{}' of {}", argument, place)});
  graph_changed();

  jit::Value* input = node->input(index);
  if (input->node()->kind() != c10::prim::ListConstruct || !value.isList()) {
    if (is_literal(input)) node->replaceInput(index, constant_before(node, value));
    return;
  }
  const std::vector<c10::IValue> before = items(*today);
  const std::vector<c10::IValue> after = items(value);
  check(before.size() == after.size() && before.size() == input->node()->inputs().size(), ErrorCode::UnsupportedGraph,
        "argument '{}' of {} has {} elements and cannot become {}", escaped(argument), escaped(place), before.size(),
        after.size());
  std::vector<jit::Value*> elements;
  for (std::size_t i = 0; i < after.size(); ++i) {
    jit::Value* element = input->node()->input(i);
    elements.push_back(before[i] == after[i] || !is_literal(element) ? element : constant_before(node, after[i]));
  }
  // A list of its own: others may read the old one.
  jit::Node* list = node->owningGraph()->createList(input->type()->expect<c10::ListType>()->getElementType(), elements);
  list->insertBefore(node);
  node->replaceInput(index, list->output());
}

void ScriptModel::refresh() {
  std::vector<Wish> wishes = std::move(wishes_);
  wishes_.clear();
  Graph graph = build_graph();
  for (const Wish& wish : wishes)
    for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
      if (origins_[i] != wish.node) continue;
      const auto* now = std::get_if<c10::IValue>(&graph.nodes[i].arguments[wish.index]);
      check(now && *now == wish.value, ErrorCode::UnsupportedGraph,
            "{} is computed by the network's own code, which gives {} where {} is needed", escaped(wish.place),
            now ? value_text(*now) : "a tensor", value_text(wish.value));
    }
  known_graph = std::move(graph);
}

/// A convolution's stride, padding and dilation as numbers. `same` and `valid` become numbers too. Nothing, and `why`,
/// when they are not the same for every input or our operators cannot take them.
std::optional<std::array<c10::IValue, 3>> ScriptModel::convolution_geometry(const Layer& layer, const LayerCall& call,
                                                                            std::string& why) const {
  const auto dims = layer.shape.size() - 2;
  const auto numbers = [&](jit::Value* value) {
    std::vector<std::int64_t> list;
    if (const auto constant = jit::toIValue(value); constant && constant->isIntList()) {
      list = constant->toIntVector();
    } else if (value->node()->kind() == c10::prim::ListConstruct) {
      for (const jit::Value* element : value->node()->inputs())
        if (const auto number = literal(element); number && number->isInt()) list.push_back(number->toInt());
    }
    if (list.size() != dims) why = "its stride, padding or dilation is computed while the network runs";
    return list;
  };
  const std::vector<std::int64_t> stride = numbers(call.node->input(3));
  const std::vector<std::int64_t> dilation = numbers(call.node->input(5));
  const auto word = jit::toIValue(call.node->input(4));
  const bool named = word && word->isString();
  std::vector<std::int64_t> padding = named ? std::vector<std::int64_t>(dims, 0) : numbers(call.node->input(4));
  if (!why.empty()) return std::nullopt;
  for (std::size_t i = 0; i < dims && named && word->toStringRef() == "same"; ++i) {
    const std::int64_t all = dilation[i] * (layer.shape[i + 2] - 1);
    if (all % 2 != 0) {
      why = "it pads its two sides differently (padding 'same', an even kernel)";
      return std::nullopt;
    }
    padding[i] = all / 2;
  }
  return std::array<c10::IValue, 3>{stride, padding, dilation};
}

/// Why the weight of a layer cannot become codes; empty when it can.
std::string ScriptModel::why_float(const Layer& layer, const std::vector<LayerCall>& calls) const {
  const bool matrix = layer.kind == LayerKind::linear || layer.kind == LayerKind::embedding;
  if (layer.quantized || !(matrix || layer.kind == LayerKind::conv1d || layer.kind == LayerKind::conv2d)) return {};
  if (matrix && layer.shape.size() != 2) return "its weight is no matrix";
  const LayerCall& first = calls.front();
  for (const LayerCall& call : calls) {
    if (call.bias_key != first.bias_key) return "its weight is used with two different biases";
    if (call.bias_name.empty() && !has_no_bias(call)) return "its bias is computed and not a parameter";
    std::string why;
    if (!matrix && !convolution_geometry(layer, call, why)) return why;
  }
  if (!first.bias_name.empty() && attribute(first.bias_name).sizes() != at::IntArrayRef(layer.shape.front()))
    return "its bias does not hold one number for each output";
  // Names by which a packed weight and its bias are found again.
  const auto [owner, weight] = owner_of(script_.root, layer.weight);
  const std::string bias = bias_beside(weight);
  const bool own_bias = !first.bias_name.empty() && owner_of(script_.root, first.bias_name).second == bias;
  for (const std::string& name : {packed_name(weight), first.bias_name.empty() || own_bias ? std::string() : bias})
    if (!name.empty() && (owner.hasattr(name) || owner.type()->hasConstant(name)))
      return fmt::format("its module has an attribute '{}' already, which is how its codes would be named",
                         escaped(name));
  return {};
}

/// The value of a literal: a constant or a plain attribute.
std::optional<c10::IValue> ScriptModel::literal(const jit::Value* value) const {
  if (const auto constant = jit::toIValue(value)) return constant;
  const auto path = attribute_path(value);
  return path ? std::optional(attribute_at(script_.root, *path)) : std::nullopt;
}

bool ScriptModel::has_no_bias(const LayerCall& call) const {
  if (!call.bias) return true;
  const auto bias = literal(call.bias);
  return bias && bias->isNone();
}

/// Reads an attribute of the tree, at the insert point.
jit::Value* ScriptModel::read_attribute(std::string_view path) {
  jit::Value* value = script_.graph->inputs().front();
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find('.', begin), path.size());
    value = script_.graph->insertGetAttr(value, std::string(path.substr(begin, end - begin)));
    begin = end + 1;
  }
  return value;
}

/// Removes what else belongs to a BatchNorm that is gone: checks of its input's shape and the count of its batches.
void ScriptModel::drop_bookkeeping(const std::string& module, const jit::Value* input) {
  std::set<jit::Node*> gone;
  for (jit::Node* node : all_nodes(script_.graph->block())) {
    bool inside = false;
    for (jit::Node* around = node->owningBlock()->owningNode(); around && !inside;
         around = around->owningBlock()->owningNode())
      inside = gone.contains(around);
    const bool unused = std::none_of(node->outputs().begin(), node->outputs().end(),
                                     [](const jit::Value* output) { return output->hasUses(); });
    if (node->kind() == c10::prim::If && !inside && unused && asks_about(node->input(), module, input) &&
        only_checks(node->blocks()[0], module) && only_checks(node->blocks()[1], module))
      gone.insert(node);
  }
  destroy({gone.begin(), gone.end()});
}

/// Removes attributes that forward does not read any more.
void ScriptModel::drop_unread(const std::vector<std::string>& attributes) {
  std::set<std::string> own_names;
  for (const std::string& path : attributes) own_names.insert(path.substr(path.rfind('.') + 1));
  std::set<std::pair<const c10::ivalue::Object*, std::string>> read;
  for (jit::Node* node : all_nodes(script_.graph->block())) {
    if (node->kind() != c10::prim::GetAttr || !own_names.contains(node->s(c10::attr::name))) continue;
    const auto path = attribute_path(node->output());
    if (!path) continue;
    const auto [owner, name] = owner_of(script_.root, *path);
    read.emplace(owner._ivalue().get(), name);
  }
  for (const std::string& path : attributes) {
    const auto [owner, name] = owner_of(script_.root, path);
    if (!owner.hasattr(name) || read.contains({owner._ivalue().get(), name})) continue;
    owner._ivalue()->unsafeRemoveAttr(name);
    owner.type()->unsafeRemoveAttribute(name);
  }
}

void ScriptModel::quantize_layer(const Layer& layer, const LayerQuantization& quantization) {
  const bool linear = layer.kind == LayerKind::linear, embedding = layer.kind == LayerKind::embedding;
  const bool conv = layer.kind == LayerKind::conv1d || layer.kind == LayerKind::conv2d;
  check(linear || conv || embedding, ErrorCode::UnsupportedLayer,
        "layer '{}' is a {}; only Linear, Conv1d, Conv2d and Embedding can be quantized", escaped(layer.name),
        class_name(layer.kind));
  const std::vector<LayerCall> calls = calls_of(layer);
  const std::string bias_name = calls.front().bias_name;
  // Nothing may have changed when a call turns out to be unsupported.
  std::string why = why_float(layer, calls);
  check(why.empty(), ErrorCode::UnsupportedLayer, "layer '{}' cannot be quantized: {}", escaped(layer.name), why);
  std::vector<std::array<c10::IValue, 3>> geometry;
  if (conv)
    for (const LayerCall& call : calls) geometry.push_back(convolution_geometry(layer, call, why).value());
  std::optional<at::Tensor> bias;
  if (!bias_name.empty()) bias = attribute(bias_name).detach().clone();

  // The packed object stands beside the weight that it replaces.
  const std::string packed_path = packed_name(layer.weight);
  const auto [owner, own_name] = owner_of(script_.root, packed_path);
  const c10::IValue packed = pack_layer(layer.kind, quantization, bias);
  owner.type()->addAttribute(own_name, packed.type());
  owner._ivalue()->setAttr(own_name, packed);

  std::vector<std::string> unread{layer.weight};
  std::vector<jit::Node*> made;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const LayerCall& call = calls[i];
    for (const jit::Value* part : {call.weight, call.bias})
      if (const auto path = part ? attribute_path(part) : std::nullopt) unread.push_back(*path);

    std::vector<jit::Node*> replaced{call.node};
    if (call.output->node() != call.node) replaced.push_back(call.output->node());
    jit::Node* relu = linear ? only_relu(call.output) : nullptr;
    if (relu) replaced.push_back(relu);

    const jit::WithInsertPoint here(replaced.back());
    std::vector<jit::Value*> inputs{call.input(), read_attribute(packed_path)};
    if (conv) {
      for (const c10::IValue& numbers : geometry[i]) inputs.push_back(script_.graph->insertConstant(numbers));
      inputs.push_back(call.groups);
    }
    const char* op = conv        ? "tersor::conv"
                     : embedding ? "tersor::embedding"
                     : relu      ? "tersor::linear_relu"
                                 : "tersor::linear";
    jit::Node* node = script_.graph->insertNode(script_.graph->create(c10::Symbol::fromQualString(op), inputs));
    node->output()->setType(c10::TensorType::get());
    node->copyMetadata(call.node);
    replaced.back()->output()->replaceAllUsesWith(node->output());
    destroy({replaced.rbegin(), replaced.rend()});
    made.push_back(node);
  }
  drop_unread(unread);
  runner_.reset();
  now_quantized(layer, made);
}

void ScriptModel::dequantize_layers() {
  for (const PackedWeight& packed : packed_weights(script_.root)) {
    const auto [owner, weight_name] = owner_of(script_.root, packed.weight);
    const auto add = [&owner = owner](const std::string& name, const at::Tensor& values) {
      if (owner.hasattr(name)) return;
      owner.type()->addAttribute(name, c10::TensorType::get(), /*is_parameter=*/true);
      owner._ivalue()->setAttr(name, values);
    };
    add(weight_name, dequantize(packed.quantization.weight));
    if (packed.bias_values) add(owner_of(script_.root, packed.bias).second, packed.bias_values->clone());
  }
  std::vector<std::string> unread;
  for (jit::Node* node : all_nodes(script_.graph->block())) {
    const std::string op = node->kind().toQualString();
    if (!op.starts_with("tersor::")) continue;
    const std::string path = *attribute_path(node->input(1));
    const PackedWeight packed = *as_packed(path, attribute_at(script_.root, path));
    unread.push_back(path);

    const jit::WithInsertPoint here(node);
    jit::Graph& graph = *script_.graph;
    jit::Value* weight = read_attribute(packed.weight);
    jit::Value* bias = packed.bias_values ? read_attribute(packed.bias) : graph.insertConstant(c10::IValue());
    jit::Value* x = node->input(0);
    jit::Value* y = nullptr;
    if (op == "tersor::conv") {
      const auto conv = packed.quantization.weight.shape.size() == 3 ? c10::aten::conv1d : c10::aten::conv2d;
      y = graph.insert(conv, {x, weight, bias, node->input(2), node->input(3), node->input(4), node->input(5)});
    } else if (op == "tersor::embedding") {
      y = graph.insert(c10::aten::embedding, {weight, x});
    } else {
      y = graph.insert(c10::aten::linear, {x, weight, bias});
      if (op == "tersor::linear_relu") y = graph.insert(c10::aten::relu, {y});
    }
    node->output()->replaceAllUsesWith(y);
    destroy({node});
  }
  drop_unread(unread);
  graph_changed();
}

void ScriptModel::fold_into(const Layer& batch_norm, const Layer& producer, const at::Tensor& weight,
                            const at::Tensor& bias) {
  const std::vector<LayerCall> norms = calls_of(batch_norm);
  const std::vector<LayerCall> producers = calls_of(producer);
  const std::string bias_name = producer.bias.empty() ? producer.name + ".bias" : producer.bias;
  check(!producer.quantized, ErrorCode::UnsupportedLayer, "layer '{}' is quantized; fold before quantization",
        escaped(producer.name));
  for (const LayerCall& call : producers)
    check(call.bias_name.empty() ? producer.bias.empty() && has_no_bias(call) : call.bias_name == producer.bias,
          ErrorCode::UnsupportedLayer, "the bias of layer '{}' is computed, or not the same in every call",
          escaped(producer.name));

  if (producer.bias.empty()) {
    check(producer.weight == producer.name + ".weight", ErrorCode::UnsupportedLayer,
          "layer '{}' is a bare parameter and cannot get a bias", escaped(producer.name));
    for (const LayerCall& call : producers) {
      const std::string_view op = call.node->kind().toQualString();
      check(op != "aten::matmul" && op != "aten::mm", ErrorCode::UnsupportedLayer,
            "layer '{}' is a bare product and cannot get a bias", escaped(producer.name));
    }
    const auto [owner, name] = owner_of(script_.root, bias_name);
    // A layer without bias may still have the attribute, which then is None.
    if (owner.hasattr(name)) {
      owner._ivalue()->unsafeRemoveAttr(name);
      owner.type()->unsafeRemoveAttribute(name);
    }
    owner.type()->addAttribute(name, c10::TensorType::get(), /*is_parameter=*/true);
    owner._ivalue()->setAttr(name, bias);
    for (const LayerCall& call : producers) {
      const jit::WithInsertPoint here(call.node);
      call.node->replaceInput(2, read_attribute(bias_name));
    }
  } else {
    at::Tensor old = attribute(bias_name);
    old.set_data(bias.clone());
  }
  rewrite(producer.weight, weight);

  for (const LayerCall& norm : norms) {
    jit::Value* input = norm.input();
    norm.output->replaceAllUsesWith(input);
    destroy({norm.node});
    drop_bookkeeping(batch_norm.name, input);
  }
  std::vector<std::string> attributes;
  for (const char* name : {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"})
    attributes.push_back(batch_norm.name + "." + name);
  drop_unread(attributes);
  graph_changed();
}

}  // namespace tersor

#include <map>

#include <ATen/ops/zeros_like.h>

#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/model/targets.hpp"
#include "tersor/passes/fold.hpp"

namespace tersor::fold {
namespace {

/// A BatchNorm that can be folded, and what it is folded into.
struct Fold {
  Layer batch_norm, producer;
  double eps = 0;
};

using LayersByWeight = std::map<std::string, Layer>;

/// The value that an argument names, or nothing.
std::optional<ValueId> value_of(const Graph& graph, const GraphNode& node, std::string_view name) {
  const GraphArgument* argument = graph.argument(node, name);
  const ValueId* value = argument == nullptr ? nullptr : std::get_if<ValueId>(argument);
  return value == nullptr ? std::nullopt : std::optional(*value);
}

template <typename T>
std::optional<T> constant_of(const Graph& graph, const GraphNode& node, std::string_view name) {
  const GraphArgument* argument = graph.argument(node, name);
  const c10::IValue* value = argument == nullptr ? nullptr : std::get_if<c10::IValue>(argument);
  if (value == nullptr || value->isNone()) return std::nullopt;
  return value->to<T>();
}

const GraphNode* maker_of(const Graph& graph, ValueId value) {
  for (const GraphNode& node : graph.nodes)
    if (std::find(node.outputs.begin(), node.outputs.end(), value) != node.outputs.end()) return &node;
  return nullptr;
}

/// The parameter behind a weight argument, which a Linear may transpose first.
std::optional<ValueId> weight_of(const Graph& graph, const GraphNode& node) {
  std::optional<ValueId> weight = value_of(graph, node, "weight");
  if (node.op == "aten::addmm") weight = value_of(graph, node, "mat2");
  if (!weight || !graph.values[static_cast<std::size_t>(*weight)].parameter.empty()) return weight;
  const GraphNode* transpose = maker_of(graph, *weight);
  if (transpose == nullptr || transpose->op != "aten::t") return std::nullopt;
  return value_of(graph, *transpose, "self");
}

bool is_producer(std::string_view op) {
  return op == "aten::linear" || op == "aten::addmm" || op == "aten::convolution" || op == "aten::_convolution" ||
         op.starts_with("aten::conv1d") || op.starts_with("aten::conv2d") || op.starts_with("aten::conv3d") ||
         op.starts_with("aten::conv_transpose");
}

/// The parameter that an argument names; nothing when it is computed or left out.
std::string parameter_of(const Graph& graph, const GraphNode& node, std::string_view name) {
  const std::optional<ValueId> value = value_of(graph, node, name);
  return value ? graph.values[static_cast<std::size_t>(*value)].parameter : std::string();
}

/// Fills `fold` from the node of its BatchNorm; returns why it cannot be folded, or "".
std::string find_producer(const Graph& graph, const GraphNode& norm, const LayersByWeight& layers, Fold& fold) {
  if (constant_of<bool>(graph, norm, "training").value_or(false) || !value_of(graph, norm, "running_var"))
    return "it normalises with the statistics of the batch";
  fold.eps = constant_of<double>(graph, norm, "eps").value_or(1e-5);
  for (const auto& [argument, own] :
       {std::pair("weight", "weight"), std::pair("bias", "bias"), std::pair("running_mean", "running_mean"),
        std::pair("running_var", "running_var")})
    if (parameter_of(graph, norm, argument) != fmt::format("{}.{}", fold.batch_norm.name, own))
      return fmt::format("its {} is not a parameter of its own", argument);

  const ValueId input = value_of(graph, norm, "input").value();
  const GraphNode* producer = maker_of(graph, input);
  if (producer == nullptr) return "its input is an input of the model";
  if (!is_producer(producer->op)) return fmt::format("its input comes from {}", producer->op);
  const std::optional<ValueId> weight = weight_of(graph, *producer);
  const auto layer = weight ? layers.find(graph.values[static_cast<std::size_t>(*weight)].parameter) : layers.end();
  if (layer == layers.end()) return fmt::format("the weight of the {} before it belongs to no layer", producer->op);
  fold.producer = layer->second;
  const std::string name = escaped(fold.producer.name);

  if (graph.users(input).size() > 1 ||
      std::find(graph.outputs.begin(), graph.outputs.end(), input) != graph.outputs.end())
    return fmt::format("the output of '{}' is used elsewhere too", name);
  if (graph.users(*weight).size() > 1) return fmt::format("the weight of '{}' is used more than once", name);
  const std::optional<ValueId> bias = value_of(graph, *producer, producer->op == "aten::addmm" ? "self" : "bias");
  if (bias) {
    const GraphValue& held = graph.values[static_cast<std::size_t>(*bias)];
    if (held.parameter.empty() || fold.producer.bias.empty()) return fmt::format("the bias of '{}' is computed", name);
    if (graph.users(*bias).size() > 1) return fmt::format("the bias of '{}' is used more than once", name);
    if (held.value.dim() != 1) return fmt::format("the bias of '{}' does not hold one number for each output", name);
  }
  for (const ValueId value : {input, *weight, bias.value_or(input)})
    if (const auto other = graph.other_courses.find(value); other != graph.other_courses.end())
      return fmt::format("'{}' is used in another course at {} too", name, other->second);
  if (fold.producer.quantized) return fmt::format("'{}' is quantized already", name);
  // Dimension 1 is the channels only where the output has the batch in front.
  const at::Tensor& output = graph.values[static_cast<std::size_t>(input)].value;
  if (output.dim() != static_cast<std::int64_t>(fold.producer.shape.size()))
    return fmt::format("the channels of '{}' are not dimension 1 of its output", name);
  return {};
}

at::Tensor parameter(const Model& model, const Layer& layer, std::string_view name) {
  return model.tensor(layer.name.empty() ? std::string(name) : fmt::format("{}.{}", layer.name, name))
      .detach()
      .cpu()
      .to(at::kDouble);
}

/// gamma / sqrt(var + eps), per channel.
at::Tensor factor_of(const Model& model, const Fold& fold) {
  const at::Tensor variance = parameter(model, fold.batch_norm, "running_var");
  const auto fits = variance.ge(0).logical_and(variance.add(fold.eps).gt(0)).logical_and(variance.isfinite());
  if (!fits.all().item<bool>()) {
    const std::int64_t first = fits.logical_not().nonzero()[0][0].item<std::int64_t>();
    throw fail(ErrorCode::NonFiniteWeight,
               "running_var of '{}' is {} in channel {} (eps {}); expected a finite variance of at least 0",
               escaped(fold.batch_norm.name), variance[first].item<double>(), first, fold.eps);
  }
  return parameter(model, fold.batch_norm, "weight").div(variance.add(fold.eps).sqrt());
}

/// `factor` [out] shaped to multiply the weight. A transposed convolution holds [in, out / groups, …], its inputs group
/// after group.
at::Tensor scaled(const at::Tensor& weight, const at::Tensor& factor, const Layer& layer) {
  if (layer.kind != LayerKind::conv_transpose) {
    std::vector<std::int64_t> shape(layer.shape.size(), 1);
    shape[0] = -1;
    return weight.mul(factor.reshape(shape));
  }
  const std::int64_t groups = layer.groups;
  const at::Tensor grouped = weight.reshape({groups, layer.shape[0] / groups, layer.shape[1], -1});
  return grouped.mul(factor.reshape({groups, 1, layer.shape[1], 1})).reshape(layer.shape);
}

void check_finite(const at::Tensor& x, std::string_view what, const Fold& fold) {
  check(x.isfinite().all().item<bool>(), ErrorCode::NonFiniteWeight,
        "folding '{}' into '{}' makes a {} that is not finite; check both layers", escaped(fold.batch_norm.name),
        escaped(fold.producer.name), what);
}

struct NewValues {
  at::Tensor weight, bias;
};

NewValues new_values(const Model& model, const Fold& fold) {
  const at::Tensor factor = factor_of(model, fold);
  const Layer& producer = fold.producer;
  const at::Tensor bias =
      producer.bias.empty() ? at::zeros_like(factor) : model.tensor(producer.bias).detach().cpu().to(at::kDouble);
  NewValues values{scaled(model.tensor(producer.weight).detach().cpu().to(at::kDouble), factor, producer),
                   bias.sub(parameter(model, fold.batch_norm, "running_mean"))
                       .mul(factor)
                       .add(parameter(model, fold.batch_norm, "bias"))};
  values.weight = values.weight.to(producer.dtype);
  values.bias = values.bias.to(producer.dtype);
  check_finite(values.weight, "weight", fold);
  check_finite(values.bias, "bias", fold);
  return values;
}

}  // namespace

Changed BatchNorm::run(Model& model, PassContext& context) const {
  const Graph& graph = model.graph();
  LayersByWeight by_weight;
  for (const Layer& layer : model.layers()) by_weight.emplace(layer.weight, layer);
  const std::vector<Layer> selected = select_layers(
      model, targets, ignore, [](const Layer& layer) { return layer.kind == LayerKind::batch_norm; },
      context.report.warnings);

  std::vector<Fold> folds;
  for (const Layer& layer : selected) {
    check(layer.kind == LayerKind::batch_norm, ErrorCode::UnsupportedLayer, "layer '{}' is a {}; expected a BatchNorm",
          escaped(layer.name), class_name(layer.kind));
    const ValueId weight = graph.find(layer.weight);
    const std::vector<NodeId> users = weight < 0 ? std::vector<NodeId>{} : graph.users(weight);
    Fold fold{layer, {}, 0};
    std::string why;
    if (users.empty()) {
      why = "it takes no part in the example";
    } else if (users.size() > 1) {
      why = "it is used more than once";
    } else if (!graph.data_dependent.empty()) {
      why = fmt::format("the model's course depends on its input ({})", graph.data_dependent.front());
    } else {
      why = find_producer(graph, graph.nodes[static_cast<std::size_t>(users.front())], by_weight, fold);
    }
    if (why.empty()) {
      folds.push_back(std::move(fold));
    } else {
      context.report.skip(layer.name, why);
    }
  }

  // Without a parameter for its weight a BatchNorm is no layer, so nothing could select it.
  for (const GraphNode& node : graph.nodes)
    if (targets.empty() && node.op == "aten::batch_norm" && parameter_of(graph, node, "weight").empty()) {
      const std::string mean = parameter_of(graph, node, "running_mean");
      context.report.skip(mean.ends_with(".running_mean") ? mean.substr(0, mean.rfind('.')) : node.scope,
                          value_of(graph, node, "weight") ? "its weight is computed" : "it has no weight and no bias");
    }

  // All values first: an impossible one leaves the model as it was.
  std::vector<NewValues> values;
  for (const Fold& fold : folds) values.push_back(new_values(model, fold));
  bool changed = false;
  for (std::size_t i = 0; i < folds.size(); ++i) {
    const std::string& name = folds[i].batch_norm.name;
    try {
      model.fold_into(name, folds[i].producer.name, values[i].weight, values[i].bias);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::UnsupportedLayer) throw;  // of which nothing has been changed
      context.report.skip(name, error.message());
      continue;
    }
    context.report.row(name, "folded").details.emplace_back("into", folds[i].producer.name);
    changed = true;
  }
  if (!changed) return Changed::nothing;
  model.refresh();
  return Changed::structure;
}

}  // namespace tersor::fold

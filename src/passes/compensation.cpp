#include "compensation.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "tersor/calibrate/channels.hpp"
#include "tersor/core/error.hpp"

namespace tersor::prune {
namespace {

const ValueId* value_of(const Graph& graph, const GraphNode& node, std::string_view name) {
  const GraphArgument* argument = graph.argument(node, name);
  const ValueId* id = argument ? std::get_if<ValueId>(argument) : nullptr;
  return id && *id >= 0 ? id : nullptr;
}

/// What the network would compute if every channel behind a BatchNorm, a LayerNorm or a layer with weights were the
/// same everywhere: its mean plus `z` standard deviations. The mean is the norm's or the layer's bias, the deviation
/// the norm's scale; of a layer without a norm behind it nothing is known but the bias.
class Constants {
 public:
  Constants(const Graph& graph, double z) : graph_(graph), z_(z), maker_(graph.values.size(), nullptr) {
    for (const GraphNode& node : graph.nodes)
      for (const ValueId output : node.outputs) maker_[static_cast<std::size_t>(output)] = &node;
  }

  /// Nothing when it depends on inputs of the model in another way.
  std::optional<at::Tensor> operator()(ValueId id) {
    if (const auto known = known_.find(id); known != known_.end()) return known->second;
    std::optional<at::Tensor> found = find(id);
    known_.emplace(id, found);
    return found;
  }

 private:
  std::optional<at::Tensor> find(ValueId id) {
    const GraphValue& value = graph_.values[static_cast<std::size_t>(id)];
    if (!value.parameter.empty()) return value.value;
    const GraphNode* node = maker_[static_cast<std::size_t>(id)];
    if (!node) return std::nullopt;
    if (node->op == "aten::batch_norm" || node->op == "aten::group_norm") return spread(*node, value.value, 1, true);
    if (node->op == "aten::layer_norm") return spread(*node, value.value, value.value.dim() - 1, true);
    if (node->op == "aten::linear") return spread(*node, value.value, value.value.dim() - 1, false);
    if (const ValueId* weight = value_of(graph_, *node, "weight");
        weight && node->op.find("conv") != std::string::npos) {
      const std::int64_t kernel = graph_.values[static_cast<std::size_t>(*weight)].value.dim() - 2;
      return spread(*node, value.value, value.value.dim() - kernel - 1, false);
    }
    std::map<ValueId, at::Tensor> operands;
    for (const GraphArgument& argument : node->arguments) {
      std::vector<ValueId> ids;
      if (const auto* one = std::get_if<ValueId>(&argument)) ids = {*one};
      if (const auto* several = std::get_if<std::vector<ValueId>>(&argument)) ids = *several;
      for (const ValueId operand : ids) {
        if (operand < 0) continue;
        const std::optional<at::Tensor> found = (*this)(operand);
        if (!found) return std::nullopt;
        operands.emplace(operand, *found);
      }
    }
    if (operands.empty()) return value.value;
    // An operator that works in place would write into an operand.
    const std::vector<at::Tensor> outputs =
        run_node(*node, [&](ValueId operand) { return operands.at(operand).clone(); });
    const auto place = std::find(node->outputs.begin(), node->outputs.end(), id) - node->outputs.begin();
    return outputs.at(static_cast<std::size_t>(place));
  }

  std::optional<at::Tensor> spread(const GraphNode& node, const at::Tensor& like, std::int64_t axis, bool norm) const {
    at::Tensor channels = at::zeros({like.size(axis)}, like.options());
    const auto add = [&](std::string_view name, double factor, bool magnitudes) {
      const ValueId* id = value_of(graph_, node, name);
      if (!id) return true;
      const at::Tensor& values = graph_.values[static_cast<std::size_t>(*id)].value;
      if (values.dim() != 1 || values.size(0) != like.size(axis)) return false;
      channels = channels.add((magnitudes ? values.abs() : values).mul(factor));
      return true;
    };
    if (!add("bias", 1.0, false)) return std::nullopt;
    if (norm && !value_of(graph_, node, "weight")) channels = channels.add(z_);
    if (norm && !add("weight", z_, true)) return std::nullopt;
    std::vector<std::int64_t> along(static_cast<std::size_t>(like.dim()), 1);
    along[static_cast<std::size_t>(axis)] = -1;
    return channels.view(along).expand(like.sizes());
  }

  const Graph& graph_;
  const double z_;
  std::vector<const GraphNode*> maker_;
  std::map<ValueId, std::optional<at::Tensor>> known_;
};

/// Where the weight of a layer is used, and what it reads there.
struct Reader {
  const GraphNode* node = nullptr;
  ValueId input = -1;
  std::int64_t axis = 0;  ///< of the channels, in the input
};

std::vector<Reader> readers_of(const Graph& graph, const Layer& layer) {
  std::vector<Reader> readers;
  for (const NodeId id : graph.users(graph.find(layer.weight))) {
    const GraphNode& node = graph.nodes[static_cast<std::size_t>(id)];
    const ValueId* input = value_of(graph, node, "input");
    if (!input) return {};
    const std::int64_t rank = graph.values[static_cast<std::size_t>(*input)].value.dim();
    const bool linear = layer.kind == LayerKind::linear;
    readers.push_back({&node, *input, linear ? rank - 1 : rank - static_cast<std::int64_t>(layer.shape.size()) + 1});
  }
  return readers;
}

/// Mean of each input channel of the layers, from what stands behind them.
std::map<std::string, at::Tensor> constant_means(const Graph& graph, const std::vector<Layer>& layers) {
  // Normal density in steps of a quarter; sums of that kind are exact to rounding for smooth functions, and to a
  // hundredth of a deviation for one with a kink.
  std::map<std::string, at::Tensor> means;
  std::vector<std::string> unknown;
  double whole = 0;
  for (double z = -4; z <= 4; z += 0.25) whole += std::exp(-z * z / 2);
  for (double z = -4; z <= 4; z += 0.25) {
    Constants constants(graph, z);
    for (const Layer& layer : layers) {
      for (const Reader& reader : readers_of(graph, layer)) {
        const std::optional<at::Tensor> x = constants(reader.input);
        if (!x) {
          unknown.push_back(layer.name);
          continue;
        }
        const at::Tensor mean = x->to(at::kDouble).movedim(reader.axis, 0).flatten(1).mean(1);
        const double weight = std::exp(-z * z / 2) / whole / static_cast<double>(readers_of(graph, layer).size());
        at::Tensor& sum = means[layer.name];
        sum = sum.defined() ? sum.add(mean.mul(weight)) : mean.mul(weight);
      }
    }
  }
  for (const std::string& name : unknown) means.erase(name);
  return means;
}

/// The tensor that shifts every output of the layer, and in which direction; empty when there is none.
std::pair<std::string, double> shift_of(const Graph& graph, const Layer& layer, const std::vector<Reader>& readers) {
  if (!layer.bias.empty()) return {layer.bias, 1.0};
  std::string found;
  for (const Reader& reader : readers) {
    const std::vector<NodeId> next = graph.users(reader.node->outputs.front());
    if (next.size() != 1) return {};
    const GraphNode& norm = graph.nodes[static_cast<std::size_t>(next.front())];
    const ValueId* mean = norm.op == "aten::batch_norm" ? value_of(graph, norm, "running_mean") : nullptr;
    if (!mean) return {};
    const std::string& name = graph.values[static_cast<std::size_t>(*mean)].parameter;
    if (!found.empty() && found != name) return {};
    found = name;
  }
  return {found, -1.0};
}

}  // namespace

Compensation find_compensation(const Model& model, const ChannelGroups& groups, const Removal& removed, Compensate how,
                               const PassContext& context) {
  Compensation found;
  const Graph& graph = groups.graph();
  std::map<std::string, Layer> by_weight;
  for (const Layer& layer : model.layers()) by_weight.emplace(layer.weight, layer);
  std::vector<std::pair<Layer, std::vector<std::int64_t>>> readers;
  std::vector<Layer> layers;
  for (const ParameterIndices& reader : groups.consumers(removed)) {
    const auto layer = by_weight.find(reader.parameter);
    const bool known = layer != by_weight.end() && reader.dim == 1 && layer->second.groups == 1 &&
                       (layer->second.kind == LayerKind::linear || layer->second.kind == LayerKind::conv1d ||
                        layer->second.kind == LayerKind::conv2d || layer->second.kind == LayerKind::conv3d);
    if (!known) {
      found.left.emplace(reader.parameter, "no Linear or ungrouped Conv reads the channels there");
      continue;
    }
    readers.emplace_back(layer->second, reader.indices);
    layers.push_back(layer->second);
  }
  std::map<std::string, at::Tensor> means;
  if (how == Compensate::constant) {
    means = constant_means(graph, layers);
  } else {
    const auto measured =
        calibrate::channel_means(model, *context.options.calibration,
                                 {.samples = context.options.samples, .batch_size = context.options.batch_size});
    for (const auto& [name, mean] : measured)
      if (mean.input.defined()) means.emplace(name, mean.input);
  }
  for (const auto& [layer, indices] : readers) {
    const auto mean = means.find(layer.name);
    if (mean == means.end()) {
      found.left.emplace(layer.name, "nothing is known of its inputs' means");
      continue;
    }
    const auto [name, sign] = shift_of(graph, layer, readers_of(graph, layer));
    if (name.empty()) {
      found.left.emplace(layer.name, "it has neither a bias nor a BatchNorm behind it");
      continue;
    }
    const at::Tensor columns = at::tensor(indices);
    const at::Tensor weight = model.tensor(layer.weight).to(at::kDouble).index_select(1, columns);
    const at::Tensor shift = weight.reshape({weight.size(0), weight.size(1), -1})
                                 .sum(2)
                                 .matmul(mean->second.index_select(0, columns))
                                 .mul(sign);
    at::Tensor& sum = found.additions[name];
    sum = sum.defined() ? sum.add(shift) : shift;
  }
  return found;
}

void apply_compensation(Model& model, const ChannelGroups& groups, const Removal& removed,
                        const Compensation& compensation) {
  for (const auto& [name, addition] : compensation.additions) {
    const at::Tensor now = model.tensor(name), kept = at::tensor(groups.kept(name, 0, removed));
    model.rewrite(name, now.to(at::kDouble).add(addition.index_select(0, kept)));
  }
}

}  // namespace tersor::prune

#include "tersor/analysis/cost.hpp"

#include <algorithm>
#include <array>
#include <string_view>

namespace tersor {

std::int64_t macs_per_output(const Graph& graph, const GraphNode& node) {
  const auto tensor = [&](std::string_view name) -> const at::Tensor* {
    const GraphArgument* argument = graph.argument(node, name);
    const ValueId* id = argument ? std::get_if<ValueId>(argument) : nullptr;
    return id && *id >= 0 ? &graph.values[static_cast<std::size_t>(*id)].value : nullptr;
  };
  const std::string_view op = node.op;
  if (op == "aten::linear") return tensor("input")->size(-1);
  if (op == "aten::matmul" || op == "aten::mm" || op == "aten::bmm") return tensor("self")->size(-1);
  if (op == "aten::addmm") return tensor("mat1")->size(-1);
  if (op == "aten::baddbmm") return tensor("batch1")->size(-1);
  constexpr std::array convolutions{"aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::_convolution",
                                    "aten::convolution"};
  if (std::find(convolutions.begin(), convolutions.end(), op) != convolutions.end()) {
    const at::Tensor* weight = tensor("weight");
    return weight->size(0) == 0 ? 0 : weight->numel() / weight->size(0);
  }
  return 0;
}

std::int64_t macs(const Graph& graph) {
  std::int64_t sum = 0;
  for (const GraphNode& node : graph.nodes) {
    if (node.outputs.empty()) continue;
    sum += graph.values[static_cast<std::size_t>(node.outputs.front())].value.numel() * macs_per_output(graph, node);
  }
  return sum;
}

}  // namespace tersor

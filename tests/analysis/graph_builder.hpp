#pragma once
// Builds small graphs by hand: every call runs the operator and records the node.

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>

#include "tersor/model/graph.hpp"

namespace tersor {

/// Numbers without a pattern that could hide a mistake: different everywhere, of both signs.
inline at::Tensor numbers(at::IntArrayRef shape) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return at::arange(1, count + 1, at::kDouble).mul(1.7).sin().to(at::kFloat).view(shape);
}

class GraphBuilder {
 public:
  Graph graph;

  ValueId input(at::Tensor tensor) {
    graph.inputs.push_back(add("", std::move(tensor)));
    return graph.inputs.back();
  }
  ValueId parameter(std::string name, at::Tensor tensor) { return add(std::move(name), std::move(tensor)); }
  ValueId parameter(std::string name, at::IntArrayRef shape) { return add(std::move(name), numbers(shape)); }
  ValueId constant(at::Tensor tensor) { return add("", std::move(tensor)); }

  /// Arguments as far as they are given; the rest are the schema's defaults.
  std::vector<ValueId> call(const std::string& op, const std::string& overload, std::vector<GraphArgument> arguments) {
    const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(op.c_str(), overload.c_str());
    GraphNode node{op, overload, {}, std::move(arguments), {}, ""};
    torch::jit::Stack stack;
    const auto& parameters = handle.schema().arguments();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      node.argument_names.push_back(parameters[i].name());
      if (i >= node.arguments.size()) node.arguments.emplace_back(parameters[i].default_value().value());
      stack.push_back(value(node.arguments[i]));
    }
    handle.callBoxed(&stack);
    for (const c10::IValue& result : stack) {
      if (result.isTensor()) node.outputs.push_back(add("", result.toTensor()));
      if (result.isTensorList())
        for (const at::Tensor& tensor : result.toTensorVector()) node.outputs.push_back(add("", tensor));
    }
    graph.nodes.push_back(std::move(node));
    return graph.nodes.back().outputs;
  }
  ValueId one(const std::string& op, const std::string& overload, std::vector<GraphArgument> arguments) {
    return call(op, overload, std::move(arguments)).front();
  }

  // The layers that most tests use.
  ValueId linear(const std::string& name, ValueId x, std::int64_t in, std::int64_t out) {
    const ValueId w = parameter(name + ".weight", {out, in}), b = parameter(name + ".bias", {out});
    return one("aten::linear", "", {x, w, b});
  }
  ValueId conv(const std::string& name, ValueId x, std::int64_t in, std::int64_t out, std::int64_t kernel = 1,
               std::int64_t groups = 1) {
    const ValueId w = parameter(name + ".weight", {out, in / groups, kernel, kernel});
    const ValueId b = parameter(name + ".bias", {out});
    const std::vector<std::int64_t> ones{1, 1}, padding{kernel / 2, kernel / 2};
    return one("aten::conv2d", "",
               {x, w, b, c10::IValue(ones), c10::IValue(padding), c10::IValue(ones), c10::IValue(groups)});
  }
  ValueId batch_norm(const std::string& name, ValueId x, std::int64_t width) {
    const ValueId w = parameter(name + ".weight", {width}), b = parameter(name + ".bias", {width});
    const ValueId mean = parameter(name + ".running_mean", {width});
    const ValueId var = parameter(name + ".running_var", numbers({width}).abs().add(0.5));
    return one("aten::batch_norm", "",
               {x, w, b, mean, var, c10::IValue(false), c10::IValue(0.1), c10::IValue(1e-5), c10::IValue(false)});
  }
  ValueId relu(ValueId x) { return one("aten::relu", "", {x}); }
  ValueId add(ValueId x, ValueId y) { return one("aten::add", "Tensor", {x, y}); }
  ValueId reshape(ValueId x, std::vector<std::int64_t> shape) {
    return one("aten::reshape", "", {x, c10::IValue(std::move(shape))});
  }

  Graph result(std::vector<ValueId> outputs) {
    graph.outputs = std::move(outputs);
    return graph;
  }

 private:
  ValueId add(std::string parameter, at::Tensor tensor) {
    graph.values.push_back({std::move(parameter), std::move(tensor)});
    return static_cast<ValueId>(graph.values.size() - 1);
  }
  c10::IValue value(const GraphArgument& argument) const {
    const auto tensor = [&](ValueId id) {
      return id < 0 ? at::Tensor() : graph.values[static_cast<std::size_t>(id)].value;
    };
    if (const auto* id = std::get_if<ValueId>(&argument)) return *id < 0 ? c10::IValue() : c10::IValue(tensor(*id));
    if (const auto* ids = std::get_if<std::vector<ValueId>>(&argument)) {
      std::vector<at::Tensor> tensors;
      for (const ValueId id : *ids) tensors.push_back(tensor(id));
      return tensors;
    }
    return std::get<c10::IValue>(argument);
  }
};

}  // namespace tersor

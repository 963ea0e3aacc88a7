#include "tersor/model/graph.hpp"

#include <algorithm>

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>

#include "tersor/core/error.hpp"

namespace tersor {

ValueId Graph::find(std::string_view parameter) const {
  const auto same = [&](const GraphValue& value) { return value.parameter == parameter; };
  const auto found = parameter.empty() ? values.end() : std::find_if(values.begin(), values.end(), same);
  return found == values.end() ? -1 : static_cast<ValueId>(found - values.begin());
}

std::vector<NodeId> Graph::users(ValueId value) const {
  std::vector<NodeId> users;
  const auto reads = [&](const GraphArgument& argument) {
    if (const auto* one = std::get_if<ValueId>(&argument)) return *one == value;
    if (const auto* several = std::get_if<std::vector<ValueId>>(&argument))
      return std::find(several->begin(), several->end(), value) != several->end();
    return false;
  };
  for (std::size_t i = 0; i < nodes.size(); ++i)
    if (std::any_of(nodes[i].arguments.begin(), nodes[i].arguments.end(), reads))
      users.push_back(static_cast<NodeId>(i));
  return users;
}

const GraphArgument* Graph::argument(const GraphNode& node, std::string_view name) const {
  const auto found = std::find(node.argument_names.begin(), node.argument_names.end(), name);
  return found == node.argument_names.end()
             ? nullptr
             : &node.arguments[static_cast<std::size_t>(found - node.argument_names.begin())];
}

std::vector<at::Tensor> run_node(const GraphNode& node, const std::function<at::Tensor(ValueId)>& tensor_of) {
  const auto op = c10::Dispatcher::singleton().findSchema({node.op, node.overload});
  check(op.has_value(), ErrorCode::UnsupportedGraph, "operator {}.{} is not registered", node.op, node.overload);
  const auto takes_missing = [&](std::size_t i) {  // a list of optional tensors
    const auto list = op->schema().arguments()[i].type()->cast<c10::ListType>();
    return list && list->getElementType()->kind() == c10::TypeKind::OptionalType;
  };
  std::vector<c10::IValue> stack;
  for (std::size_t i = 0; i < node.arguments.size(); ++i) {
    if (const auto* one = std::get_if<ValueId>(&node.arguments[i])) {
      stack.emplace_back(*one < 0 ? c10::IValue() : c10::IValue(tensor_of(*one)));
    } else if (const auto* several = std::get_if<std::vector<ValueId>>(&node.arguments[i])) {
      if (takes_missing(i)) {
        c10::List<std::optional<at::Tensor>> tensors;
        for (const ValueId id : *several)
          tensors.push_back(id < 0 ? std::nullopt : std::optional<at::Tensor>(tensor_of(id)));
        stack.emplace_back(std::move(tensors));
      } else {
        std::vector<at::Tensor> tensors;
        for (const ValueId id : *several) tensors.push_back(tensor_of(id));
        stack.emplace_back(std::move(tensors));
      }
    } else {
      stack.push_back(std::get<c10::IValue>(node.arguments[i]));
    }
  }
  const at::NoGradGuard no_grad;
  op->callBoxed(&stack);
  std::vector<at::Tensor> outputs;
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) {
      outputs.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) outputs.push_back(tensor);
    }
  }
  return outputs;
}

}  // namespace tersor

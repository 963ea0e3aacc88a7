#include "tersor/model/graph.hpp"

#include <algorithm>

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

}  // namespace tersor

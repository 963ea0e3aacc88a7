#include "channel_tracer.hpp"

#include <algorithm>
#include <cstring>
#include <set>

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor {

std::vector<at::Tensor> call_operator(const GraphNode& node, std::vector<c10::IValue> arguments) {
  const auto op = c10::Dispatcher::singleton().findSchema({node.op, node.overload});
  check(op.has_value(), ErrorCode::UnsupportedGraph, "operator {}.{} is not registered", node.op, node.overload);
  const auto& parameters = op->schema().arguments();
  for (std::size_t i = 0; i < arguments.size() && i < parameters.size(); ++i) {
    if (!arguments[i].isTensorList() || parameters[i].type()->castRaw<c10::ListType>() == nullptr) continue;
    if (parameters[i].type()->castRaw<c10::ListType>()->getElementType()->kind() != c10::TypeKind::OptionalType)
      continue;
    c10::List<std::optional<at::Tensor>> optional;
    for (const at::Tensor& tensor : arguments[i].toTensorVector())
      optional.push_back(tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt);
    arguments[i] = optional;
  }
  op->callBoxed(&arguments);
  std::vector<at::Tensor> outputs;
  for (const c10::IValue& value : arguments) {
    if (value.isTensor()) {
      outputs.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) outputs.push_back(tensor);
    }
  }
  return outputs;
}

ChannelTracer::ChannelTracer(ChannelGroups& groups)
    : labels(groups.labels_), graph(groups.graph_), groups_(groups), origin_(graph.values.size(), -1) {
  groups_.axes_.resize(graph.values.size());
  std::map<const void*, ValueId> owner;  // of a storage
  for (ValueId id = 0; id < static_cast<ValueId>(graph.values.size()); ++id) {
    const at::Tensor& tensor = value(id);
    axes(id).resize(static_cast<std::size_t>(tensor.dim()));
    if (graph.values[static_cast<std::size_t>(id)].parameter.empty()) continue;
    origin_[static_cast<std::size_t>(id)] = id;
    for (std::int64_t a = 0; a < tensor.dim(); ++a)
      if (wide(id, a)) axis(id, a) = {labels.fresh(tensor.size(a))};
    if (tensor.numel() == 0) continue;
    const auto [first, fresh] = owner.emplace(tensor.storage().data(), id);
    if (fresh) continue;
    // One tensor under two names shrinks as one; views that overlap otherwise cannot shrink.
    const at::Tensor& other = value(first->second);
    if (tensor.sizes() == other.sizes() && tensor.strides() == other.strides() &&
        tensor.storage_offset() == other.storage_offset()) {
      for (std::int64_t a = 0; a < tensor.dim(); ++a) unify(axis(first->second, a), axis(id, a));
    } else {
      fix_all(id, "its memory is shared with another parameter");
      fix_all(first->second, "its memory is shared with another parameter");
    }
  }
}

void ChannelTracer::run() {
  for (const GraphNode& node : graph.nodes) {
    if (node.outputs.empty()) {
      for (const ValueId id : tensors(node)) fix_all(id, "its values are read as numbers");
      continue;
    }
    if (const ChannelRule* rule = find_channel_rule(node.op)) {
      rule->trace(*this, node);
    } else {
      unknown(node);
    }
  }
  for (const ValueId id : graph.outputs) fix_all(id, "it makes an output of the model");
  groups_.build_families(producers_, statistics_, unmaskable_);
}

ValueId ChannelTracer::tensor(const GraphNode& node, std::string_view name) const {
  const GraphArgument* argument = graph.argument(node, name);
  const ValueId* id = argument ? std::get_if<ValueId>(argument) : nullptr;
  return id ? *id : -1;
}

std::vector<ValueId> ChannelTracer::tensors(const GraphNode& node) const {
  std::vector<ValueId> ids;
  for (const GraphArgument& argument : node.arguments) {
    if (const auto* one = std::get_if<ValueId>(&argument)) {
      if (*one >= 0) ids.push_back(*one);
    } else if (const auto* several = std::get_if<std::vector<ValueId>>(&argument)) {
      std::copy_if(several->begin(), several->end(), std::back_inserter(ids), [](ValueId id) { return id >= 0; });
    }
  }
  return ids;
}

c10::IValue ChannelTracer::literal(const GraphNode& node, std::string_view name) const {
  const GraphArgument* argument = graph.argument(node, name);
  const c10::IValue* value = argument ? std::get_if<c10::IValue>(argument) : nullptr;
  return value ? *value : c10::IValue();
}

std::int64_t ChannelTracer::dim(const GraphNode& node, std::int64_t rank, std::string_view name) const {
  const std::int64_t d = literal(node, name).toInt();
  return d < 0 ? d + rank : d;
}

void ChannelTracer::fix(const Axis& axis, std::string why) {
  if (axis.empty()) return;
  const std::int32_t reason = labels.reason(std::move(why));
  for (const LabelVector& vector : axis)
    for (const Label label : vector) labels.fix(label, reason);
}

void ChannelTracer::fix_all(ValueId id, const std::string& why) {
  for (const Axis& axis : axes(id)) fix(axis, why);
}

ChannelTracer::Axis ChannelTracer::unify(const Axis& a, const Axis& b) {
  if (a.empty() || b.empty()) return a.empty() ? b : a;
  if (a.size() == b.size()) {
    for (std::size_t i = 0; i < a.size(); ++i) labels.unite(a[i], b[i]);
    return a;
  }
  const Axis& fewer = a.size() < b.size() ? a : b;
  const Axis& more = a.size() < b.size() ? b : a;
  for (std::size_t j = 0; j < fewer.front().size(); ++j) {
    LabelVector parts;
    for (const LabelVector& vector : more) parts.push_back(vector[j]);
    if (fewer.size() == 1) {
      labels.substitute(fewer.front()[j], parts);
    } else {
      for (const LabelVector& vector : fewer) parts.push_back(vector[j]);
      for (const Label part : parts) labels.unite(parts.front(), part);
    }
  }
  return more;
}

ChannelTracer::Axis ChannelTracer::meet(const Axis& a, const Axis& b, std::string_view why) {
  if (!a.empty() && !b.empty()) return unify(a, b);
  fix(a, std::string(why));
  fix(b, std::string(why));
  return a.empty() ? b : a;
}

at::Tensor ChannelTracer::plane(at::IntArrayRef shape, std::int64_t a, const LabelVector& vector) const {
  const at::Tensor line = at::empty({static_cast<std::int64_t>(vector.size())}, at::kLong);
  std::int64_t* out = line.mutable_data_ptr<std::int64_t>();
  for (const Label label : vector) *out++ = labels.find(label);
  std::vector<std::int64_t> ones(shape.size(), 1);
  ones[static_cast<std::size_t>(a)] = -1;
  return line.view(ones).expand(shape).contiguous();
}

namespace {

LabelVector to_labels(const at::Tensor& plane) {
  const at::Tensor flat = plane.contiguous();
  const std::int64_t* data = flat.const_data_ptr<std::int64_t>();
  return LabelVector(data, data + flat.numel());
}

/// Whether a contiguous tensor differs along axis `a`.
bool varies(const at::Tensor& plane, std::int64_t a) {
  const std::int64_t count = plane.size(a), inner = plane.stride(a), outer = plane.numel() / (count * inner);
  const std::int64_t* data = plane.const_data_ptr<std::int64_t>();
  for (std::int64_t o = 0; o < outer; ++o, data += count * inner)
    for (std::int64_t k = 1; k < count; ++k)
      if (std::memcmp(data, data + k * inner, static_cast<std::size_t>(inner) * sizeof(std::int64_t)) != 0) return true;
  return false;
}

std::size_t distinct(LabelVector labels) {
  std::sort(labels.begin(), labels.end());
  return static_cast<std::size_t>(std::unique(labels.begin(), labels.end()) - labels.begin());
}

}  // namespace

ChannelTracer::Axes ChannelTracer::normal(const std::vector<at::Tensor>& planes) {
  Axes result;
  for (const at::Tensor& given : planes) {
    const at::Tensor whole = given.contiguous();
    result.resize(static_cast<std::size_t>(whole.dim()));
    if (whole.numel() == 0) continue;

    // What is left after dropping the axes along which nothing varies.
    std::vector<std::int64_t> varying;
    for (std::int64_t a = 0; a < whole.dim(); ++a)
      if (whole.size(a) > 1 && varies(whole, a)) varying.push_back(a);
    at::Tensor core = whole;
    for (std::int64_t a = whole.dim() - 1; a >= 0; --a)
      if (std::find(varying.begin(), varying.end(), a) == varying.end()) core = core.select(a, 0);
    const LabelVector flat = to_labels(core);

    if (varying.empty()) {
      labels.fix(flat.front(), labels.reason("one of its channels is used alone"));
      continue;
    }
    if (varying.size() == 1) {
      result[static_cast<std::size_t>(varying.front())].push_back(flat);
      continue;
    }
    const bool product = distinct(flat) == flat.size() &&
                         std::none_of(flat.begin(), flat.end(), [&](Label label) { return labels.fixed(label); });
    if (product) {
      // Every element its own label: new labels along each axis, the old ones stand for their coordinates.
      std::vector<LabelVector> along;
      for (const std::int64_t size : core.sizes()) along.push_back(labels.fresh(size));
      std::vector<std::size_t> at(along.size(), 0);
      for (const Label label : flat) {
        LabelVector coordinates;
        for (std::size_t k = 0; k < at.size(); ++k) coordinates.push_back(along[k][at[k]]);
        labels.substitute(label, coordinates);
        for (std::size_t k = at.size(); k-- > 0 && ++at[k] == along[k].size();) at[k] = 0;
      }
      for (std::size_t k = 0; k < along.size(); ++k) result[static_cast<std::size_t>(varying[k])].push_back(along[k]);
      continue;
    }
    // Keep the axis with the most classes; along the others the labels leave together.
    std::size_t best = 0, most = 0;
    for (std::size_t k = 0; k < varying.size(); ++k) {
      std::set<LabelVector> classes;
      const at::Tensor rows = core.movedim(static_cast<std::int64_t>(k), 0).flatten(1);
      for (std::int64_t j = 0; j < rows.size(0); ++j) {
        LabelVector row = to_labels(rows.select(0, j));
        std::sort(row.begin(), row.end());
        row.erase(std::unique(row.begin(), row.end()), row.end());
        classes.insert(std::move(row));
      }
      if (classes.size() > most) {
        most = classes.size();
        best = k;
      }
    }
    const at::Tensor rows = core.movedim(static_cast<std::int64_t>(best), 0).flatten(1);
    LabelVector vector;
    for (std::int64_t j = 0; j < rows.size(0); ++j) {
      const LabelVector row = to_labels(rows.select(0, j));
      for (const Label label : row) labels.unite(row.front(), label);
      vector.push_back(row.front());
    }
    result[static_cast<std::size_t>(varying[best])].push_back(std::move(vector));
  }
  return result;
}

void ChannelTracer::move_elements(const GraphNode& node) {
  const std::vector<ValueId> all = tensors(node);
  if (all.empty()) return;
  const ValueId input = all.front();
  std::vector<std::vector<at::Tensor>> planes(node.outputs.size());
  for (std::int64_t a = 0; a < value(input).dim(); ++a) {
    for (const LabelVector& vector : axis(input, a)) {
      const at::Tensor spread = plane(value(input).sizes(), a, vector);
      std::vector<c10::IValue> arguments =
          argument_values(node, [&](ValueId id) { return id == input ? spread : value(id); });
      const std::vector<at::Tensor> moved = call_operator(node, std::move(arguments));
      for (std::size_t i = 0; i < planes.size(); ++i) planes[i].push_back(moved.at(i));
    }
  }
  for (std::size_t i = 0; i < planes.size(); ++i) {
    const ValueId output = node.outputs[i];
    origin_[static_cast<std::size_t>(output)] = origin_[static_cast<std::size_t>(input)];
    if (!planes[i].empty()) axes(output) = normal(planes[i]);
  }
}

void ChannelTracer::elementwise(const std::vector<ValueId>& operands, ValueId output) {
  const std::int64_t rank = value(output).dim();
  for (std::int64_t a = 0; a < rank; ++a) {
    if (!wide(output, a)) continue;
    Axis all;
    bool labelled = false, bare = false;
    for (const ValueId id : operands) {
      const std::int64_t own = value(id).dim() - rank + a;
      if (own < 0 || !wide(id, own)) continue;
      (axis(id, own).empty() ? bare : labelled) = true;
      all = unify(all, axis(id, own));
    }
    if (labelled && bare) fix(all, "it meets a tensor that cannot shrink");
    axis(output, a) = std::move(all);
  }
}

std::vector<ChannelGroups::Place> ChannelTracer::places(ValueId value, std::int64_t a) {
  std::vector<ChannelGroups::Place> found;
  const ValueId parameter = origin_[static_cast<std::size_t>(value)];
  if (parameter < 0 || axis(value, a).empty()) return found;
  const Label first = labels.find(axis(value, a).front().front());
  for (std::int64_t d = 0; d < this->value(parameter).dim(); ++d) {
    const Axis& own = axis(parameter, d);
    if (!own.empty() && (parameter == value ? d == a : labels.find(own.front().front()) == first))
      found.push_back({parameter, d});
  }
  return found;
}

void ChannelTracer::contract(ValueId x, std::int64_t x_axis, ValueId y, std::int64_t y_axis, std::string_view why) {
  contract(x, x_axis, axis(x, x_axis), y, y_axis, why);
}

void ChannelTracer::contract(ValueId x, std::int64_t x_axis, const Axis& x_labels, ValueId y, std::int64_t y_axis,
                             std::string_view why) {
  std::vector<ChannelGroups::Place> readers = places(x, x_axis);
  for (const ChannelGroups::Place& place : places(y, y_axis)) readers.push_back(place);
  const Axis both = meet(x_labels, axis(y, y_axis), why);
  if (readers.empty()) unmaskable_.push_back(both);
  groups_.consumers_.insert(groups_.consumers_.end(), readers.begin(), readers.end());
}

void ChannelTracer::produces(ValueId value, std::int64_t a) {
  for (const ChannelGroups::Place& place : places(value, a))
    if (std::find(producers_.begin(), producers_.end(), place) == producers_.end()) producers_.push_back(place);
}

void ChannelTracer::equal_counts(const GraphNode& node, const Axis& axis, std::int64_t count) {
  if (axis.empty() || count <= 1 || axis.front().size() % static_cast<std::size_t>(count) != 0) return;
  groups_.groups_.push_back({static_cast<NodeId>(&node - graph.nodes.data()), axis, count});
}

void ChannelTracer::unknown(const GraphNode& node) {
  bool reached = false;
  const std::string why = fmt::format("it reaches the unknown operator {}", escaped(node.op));
  for (const ValueId id : tensors(node)) {
    for (const Axis& axis : axes(id)) reached |= !axis.empty();
    fix_all(id, why);
  }
  if (reached && unknown_.emplace(node.op, groups_.blocked_.size()).second)
    groups_.blocked_.push_back(
        {node.scope.empty() ? node.op : node.scope, fmt::format("unknown operator {}", escaped(node.op))});
}

}  // namespace tersor

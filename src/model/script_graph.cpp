#include <algorithm>
#include <set>
#include <unordered_set>

#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/runtime/operator.h>

#include "script.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor {
namespace {

using c10::IValue;

bool holds_tensor(const IValue& value) {
  std::vector<at::Tensor> tensors;
  flatten(value, tensors);
  return !tensors.empty();
}

/// Operators that ask a tensor for what does not depend on its values.
bool reads_only_shape(const jit::Node* node) {
  static const std::unordered_set<std::string_view> ops{"aten::size",
                                                        "aten::dim",
                                                        "aten::numel",
                                                        "aten::stride",
                                                        "aten::is_floating_point",
                                                        "aten::is_complex",
                                                        "aten::storage_offset",
                                                        "aten::sym_size",
                                                        "aten::is_contiguous",
                                                        "aten::get_device",
                                                        "prim::dtype",
                                                        "prim::device",
                                                        "prim::shape",
                                                        "prim::layout",
                                                        "prim::is_cuda",
                                                        "prim::is_cpu",
                                                        "prim::requires_grad",
                                                        "prim::is_sparse",
                                                        "prim::is_quantized",
                                                        "prim::is_meta",
                                                        "prim::is_nested",
                                                        "aten::len",
                                                        "aten::__is__",
                                                        "aten::__isnot__",
                                                        "prim::isinstance"};
  return ops.contains(node->kind().toQualString());
}

/// Does the value depend on the sizes of the network's inputs, or on what they hold? Their types and numbers of
/// dimensions are taken to be those of the example.
class SizeDependence {
 public:
  bool operator()(const jit::Value* value) {
    const auto [known, fresh] = known_.try_emplace(value, false);  // false while a loop is followed round
    if (!fresh) return known->second;
    const bool depends = follow(value);
    known_[value] = depends;
    return depends;
  }

 private:
  bool follow(const jit::Value* value) {
    static const std::unordered_set<std::string_view> fixed{
        "aten::dim",     "aten::is_floating_point", "aten::is_complex", "aten::get_device",    "prim::dtype",
        "prim::device",  "prim::is_cuda",           "prim::is_cpu",     "prim::requires_grad", "prim::layout",
        "prim::is_meta", "prim::is_quantized",      "prim::is_sparse",  "prim::is_nested",     "prim::isinstance",
        "aten::__is__",  "aten::__isnot__"};
    const jit::Node* node = value->node();
    const auto any = [&](const auto& values) {
      return std::any_of(values.begin(), values.end(), [&](const jit::Value* one) { return (*this)(one); });
    };
    if (node->kind() == c10::prim::Param) {
      const jit::Node* owner = node->owningBlock()->owningNode();
      return owner ? any(owner->inputs()) || any(owner->blocks()[0]->outputs())
                   : value != node->owningGraph()->inputs().front();
    }
    if (node->kind() == c10::prim::GetAttr || fixed.contains(node->kind().toQualString())) return false;
    const c10::FunctionSchema* schema = node->maybeSchema();
    if (node->kind() == c10::aten::len && schema && schema->overload_name() != "Tensor") return false;
    if (any(node->inputs())) return true;
    return std::any_of(node->blocks().begin(), node->blocks().end(),
                       [&](const jit::Block* block) { return any(block->outputs()); });
  }

  std::unordered_map<const jit::Value*, bool> known_;
};

bool only_raises(const jit::Block* block) {
  return std::any_of(block->nodes().begin(), block->nodes().end(),
                     [](const jit::Node* node) { return node->kind() == c10::prim::RaiseException; });
}

/// `block.1` where the node came from a submodule's own forward.
std::string scope_of(const jit::Node* node) {
  std::string scope;
  if (const auto stack = node->callstack())
    for (const auto& entry : (*stack)->vec())
      if (const auto& instance = std::get<jit::kModuleInstanceInfo>(entry)) {
        const std::string name = instance->instance_name();
        if (name.empty() || name == "SELF" || name.starts_with("INSTANCE_NAME_UNKNOWN")) continue;
        scope += scope.empty() ? name : "." + name;
      }
  return scope;
}

std::string place_of(const jit::Node* node) {
  const std::string scope = scope_of(node);
  return scope.empty() ? node->kind().toQualString()
                       : fmt::format("{} in '{}'", node->kind().toQualString(), escaped(scope));
}

/// What happens while the graph runs; nothing by default.
class Watcher {
 public:
  virtual ~Watcher() = default;
  /// `inputs` and `outputs` of an operator; `depends` when a value that is no tensor was read out of a tensor's values.
  virtual void operation(jit::Node*, const std::vector<IValue>& /*inputs*/, const std::vector<IValue>& /*outputs*/,
                         bool /*depends*/) {}
  virtual void branch(jit::Node*) {}  ///< an If or Loop whose course depends on the values of tensors
  /// An If or Loop whose course depends on sizes of the inputs: what the way not taken reads, and what came out of the
  /// way taken.
  virtual void other_course(jit::Node*, const std::vector<IValue>& /*values*/) {}
  virtual void done(jit::Node*) {}  ///< every node, after its outputs are known
};

/// Runs a graph without calls node by node, on today's attributes.
class Interpreter {
 public:
  Interpreter(const Script& script, Watcher& watcher) : script_(script), watcher_(watcher) {}

  std::vector<IValue> run(const std::vector<IValue>& arguments) {
    const auto inputs = script_.graph->inputs();
    values_[inputs[0]] = script_.root._ivalue();
    for (std::size_t i = 1; i < inputs.size(); ++i) {
      values_[inputs[i]] = arguments[i - 1];
      if (holds_tensor(arguments[i - 1])) from_data_.insert(inputs[i]);
    }
    run(script_.graph->block());
    std::vector<IValue> outputs;
    for (const jit::Value* output : script_.graph->outputs()) outputs.push_back(value(output));
    return outputs;
  }

  const IValue& value(const jit::Value* value) const { return values_.at(value); }

 private:
  void run(jit::Block* block) {
    for (jit::Node* node : block->nodes()) {
      step(node);
      watcher_.done(node);
    }
  }

  void step(jit::Node* node) {
    switch (node->kind()) {
      case c10::prim::Constant:
        return set(node->output(), *jit::toIValue(node->output()), false);
      case c10::prim::GetAttr:
        return set(node->output(), value(node->input()).toObjectRef().getAttr(node->s(c10::attr::name)), false);
      case c10::prim::If:
        return branch(node);
      case c10::prim::Loop:
        return loop(node);
      case c10::prim::TupleConstruct: {
        const auto type = node->output()->type()->expect<c10::TupleType>();
        std::vector<IValue> items = inputs(node);
        return set(node->output(),
                   type->schema() ? c10::ivalue::Tuple::createNamed(std::move(items), type)
                                  : c10::ivalue::Tuple::create(std::move(items)),
                   depends(node));
      }
      case c10::prim::ListConstruct: {
        c10::List<IValue> list(node->output()->type()->expect<c10::ListType>()->getElementType());
        for (const IValue& item : inputs(node)) list.push_back(item);
        return set(node->output(), std::move(list), depends(node));
      }
      case c10::prim::DictConstruct: {
        const auto type = node->output()->type()->expect<c10::DictType>();
        c10::Dict<IValue, IValue> dict(type->getKeyType(), type->getValueType());
        for (std::size_t i = 0; i < node->inputs().size(); i += 2)
          dict.insert_or_assign(value(node->input(i)), value(node->input(i + 1)));
        return set(node->output(), std::move(dict), depends(node));
      }
      case c10::prim::TupleUnpack: {
        const IValue tuple = value(node->input());
        for (std::size_t i = 0; i < node->outputs().size(); ++i)
          set(node->output(i), tuple.toTupleRef().elements()[i], depends(node));
        return;
      }
      case c10::prim::TupleSlice: {
        const auto& items = value(node->input()).toTupleRef().elements();
        std::vector<IValue> slice;
        for (std::int64_t i = node->i(c10::attr::beg); i < node->i(c10::attr::end); ++i)
          slice.push_back(items[static_cast<std::size_t>(i)]);
        return set(node->output(), c10::ivalue::Tuple::create(std::move(slice)), depends(node));
      }
      case c10::prim::ListUnpack: {
        const c10::List<IValue> list = value(node->input()).toList();
        check(list.size() == node->outputs().size(), ErrorCode::UnsupportedGraph, "{}: expected {} tensors, got {}",
              place_of(node), node->outputs().size(), list.size());
        for (std::size_t i = 0; i < node->outputs().size(); ++i) set(node->output(i), list.get(i), depends(node));
        return;
      }
      case c10::prim::unchecked_cast:
        return set(node->output(), value(node->input()), depends(node));
      case c10::prim::isinstance: {
        const c10::TypePtr type = value(node->input()).type();
        const std::vector<c10::TypePtr>& wanted = node->tys(c10::attr::types);
        const bool is =
            std::any_of(wanted.begin(), wanted.end(), [&](const c10::TypePtr& one) { return type->isSubtypeOf(*one); });
        return set(node->output(), is, false);
      }
      case c10::prim::Uninitialized:
        return set(node->output(), IValue::uninitialized(), false);
      case c10::prim::RaiseException:
        throw fail(ErrorCode::UnsupportedGraph, "the network raises an exception: {}",
                   escaped(value(node->input(0)).toStringRef()));
      case c10::prim::SetAttr:
        throw fail(ErrorCode::UnsupportedModel, "forward changes the network's own attribute '{}'",
                   escaped(node->s(c10::attr::name)));
      default:
        return operation(node);
    }
  }

  void branch(jit::Node* node) {
    const bool from_data = from_data_.contains(node->input());
    if (from_data) watcher_.branch(node);
    const std::size_t way = value(node->input()).toBool() ? 0 : 1;
    jit::Block* taken = node->blocks()[way];
    run(taken);
    for (std::size_t i = 0; i < node->outputs().size(); ++i)
      set(node->output(i), value(taken->outputs()[i]), from_data || from_data_.contains(taken->outputs()[i]));
    if (!from_data && depends_on_sizes_(node->input())) other_course(node, node->blocks()[1 - way]);
  }

  /// The values that a block which did not run reads from outside, and the outputs of its node.
  void other_course(jit::Node* node, jit::Block* block) {
    if (only_raises(block)) return;
    std::vector<IValue> values;
    read_by(block, values);
    for (const jit::Value* output : node->outputs()) values.push_back(value(output));
    watcher_.other_course(node, values);
  }

  void read_by(const jit::Block* block, std::vector<IValue>& values) const {
    if (only_raises(block)) return;
    const auto read = [&](const jit::Value* one) {
      const auto path = attribute_path(one);
      if (path)
        values.push_back(attribute_at(script_.root, *path));
      else if (const auto known = values_.find(one); known != values_.end())
        values.push_back(known->second);
    };
    for (const jit::Node* node : block->nodes()) {
      if (node->kind() != c10::prim::GetAttr)
        for (const jit::Value* input : node->inputs()) read(input);
      for (const jit::Block* inner : node->blocks()) read_by(inner, values);
    }
    for (const jit::Value* output : block->outputs()) read(output);
  }

  void loop(jit::Node* node) {
    jit::Block* body = node->blocks()[0];
    const std::int64_t most = value(node->input(0)).toInt();
    bool go_on = value(node->input(1)).toBool();
    bool from_data = from_data_.contains(node->input(0)) || from_data_.contains(node->input(1));
    for (std::size_t i = 1; i < body->inputs().size(); ++i)
      set(body->inputs()[i], value(node->input(i + 1)), from_data_.contains(node->input(i + 1)));
    const bool ran = most > 0 && go_on;
    for (std::int64_t trip = 0; trip < most && go_on; ++trip) {
      set(body->inputs()[0], trip, false);
      run(body);
      go_on = value(body->outputs()[0]).toBool();
      from_data = from_data || from_data_.contains(body->outputs()[0]);
      std::vector<std::pair<IValue, bool>> carried;
      for (const jit::Value* output : body->outputs().slice(1))
        carried.emplace_back(value(output), from_data_.contains(output));
      for (std::size_t i = 0; i < carried.size(); ++i) set(body->inputs()[i + 1], carried[i].first, carried[i].second);
    }
    if (from_data) watcher_.branch(node);
    for (std::size_t i = 0; i < node->outputs().size(); ++i)
      set(node->output(i), value(body->inputs()[i + 1]), from_data || from_data_.contains(body->inputs()[i + 1]));
    if (!ran && !from_data && (depends_on_sizes_(node->input(0)) || depends_on_sizes_(node->input(1))))
      other_course(node, body);
  }

  void operation(jit::Node* node) {
    const std::vector<IValue> in = inputs(node);
    jit::Stack stack = in;
    if (const c10::FunctionSchema* schema = node->maybeSchema(); schema && schema->is_vararg())
      stack.emplace_back(static_cast<std::int64_t>(in.size()));
    try {
      if (node->getOperator().hasOperation()) {
        node->getOperation()(stack);
      } else {
        throw fail(ErrorCode::UnsupportedGraph, "operator {} cannot be run on its own", place_of(node));
      }
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      throw fail(ErrorCode::UnsupportedGraph, "{}: {}", place_of(node), escaped(first_line(error)));
    }
    const bool shape = reads_only_shape(node);
    const bool from_data = !shape && depends(node);
    std::vector<IValue> out(stack.end() - static_cast<std::ptrdiff_t>(node->outputs().size()), stack.end());
    const bool escapes = from_data && std::any_of(in.begin(), in.end(), holds_tensor) &&
                         std::any_of(out.begin(), out.end(), [](const IValue& one) {
                           return !holds_tensor(one) && !one.isNone() && !one.isList();
                         });
    watcher_.operation(node, in, out, escapes);
    for (std::size_t i = 0; i < out.size(); ++i) set(node->output(i), std::move(out[i]), from_data);
  }

  std::vector<IValue> inputs(const jit::Node* node) const {
    std::vector<IValue> inputs;
    for (const jit::Value* input : node->inputs()) inputs.push_back(value(input));
    return inputs;
  }

  bool depends(const jit::Node* node) const {
    return std::any_of(node->inputs().begin(), node->inputs().end(),
                       [&](const jit::Value* input) { return from_data_.contains(input); });
  }

  void set(const jit::Value* value, IValue held, bool from_data) {
    values_[value] = std::move(held);
    if (from_data)
      from_data_.insert(value);
    else
      from_data_.erase(value);
  }

  const Script& script_;
  Watcher& watcher_;
  std::unordered_map<const jit::Value*, IValue> values_;
  std::unordered_set<const jit::Value*> from_data_;  // computed from the values of the network's inputs
  SizeDependence depends_on_sizes_;
};

class HookWatcher final : public Watcher {
 public:
  explicit HookWatcher(const NodeHook& hook) : hook_(hook) {}
  void bind(const Interpreter& interpreter) {
    lookup_ = [&interpreter](const jit::Value* value) -> const IValue& { return interpreter.value(value); };
  }
  void done(jit::Node* node) override { hook_(node, lookup_); }

 private:
  const NodeHook& hook_;
  ValueLookup lookup_;
};

bool is_tensor_type(const c10::TypePtr& type) { return type->isSubtypeOf(*c10::OptionalType::ofTensor()); }

class Recorder final : public Watcher {
 public:
  Recorder(const jit::Module& root, std::vector<jit::Node*>& origins) : origins_(origins) {
    for (const NamedTensor& tensor : named_tensors(root))
      names_.try_emplace(tensor.tensor.unsafeGetTensorImpl(), tensor.name);
  }

  void operation(jit::Node* node, const std::vector<IValue>& inputs, const std::vector<IValue>& outputs,
                 bool depends) override {
    std::vector<at::Tensor> in, out;
    for (const IValue& input : inputs) flatten(input, in);
    for (const IValue& output : outputs) flatten(output, out);
    const std::vector<at::Tensor> written = written_tensors(node, inputs);
    for (const at::Tensor& tensor : written)
      if (const auto own = names_.find(tensor.unsafeGetTensorImpl()); own != names_.end())
        throw fail(ErrorCode::UnsupportedModel, "forward changes the network's own attribute '{}'",
                   escaped(own->second));
    const auto is_input = [&](const at::Tensor& tensor) {
      return std::any_of(in.begin(), in.end(), [&](const at::Tensor& one) { return one.is_same(tensor); });
    };
    // Picking from a list, and operators with nothing to do (dropout in eval mode, contiguous), give what they were
    // given.
    if (written.empty() && !depends && std::all_of(out.begin(), out.end(), is_input)) return;

    GraphNode record = describe(node);
    for (const IValue& input : inputs) record.arguments.push_back(argument(input));
    for (const at::Tensor& tensor : written) fresh(tensor);
    for (const at::Tensor& tensor : out) {
      if (!is_input(tensor)) fresh(tensor);
      record.outputs.push_back(id(tensor));
    }
    const ValueId source = record.outputs.empty() ? -1 : record.outputs.front();
    push(std::move(record), node);
    for (const at::Tensor& tensor : written) mark_stale(tensor, source);
  }

  void branch(jit::Node* node) override { graph.data_dependent.push_back(place_of(node)); }

  void other_course(jit::Node* node, const std::vector<IValue>& values) override {
    std::vector<at::Tensor> tensors;
    for (const IValue& value : values) flatten(value, tensors);
    for (const at::Tensor& tensor : tensors) graph.other_courses.emplace(id(tensor), place_of(node));
  }

  /// The value that a tensor is now.
  ValueId id(const at::Tensor& tensor) {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    auto [entry, is_new] = ids_.try_emplace(impl, static_cast<ValueId>(graph.values.size()));
    if (is_new) add(tensor);
    if (const auto stale = stale_.find(impl); stale != stale_.end()) {
      GraphNode through{"tersor::written_through", "", {"self", "source"}, {entry->second, stale->second}, {}, ""};
      stale_.erase(stale);
      fresh(tensor);
      through.outputs.push_back(ids_.at(impl));
      push(std::move(through), nullptr);
    }
    return ids_.at(impl);
  }

  Graph graph;

 private:
  void add(const at::Tensor& tensor) {
    const auto name = names_.find(tensor.unsafeGetTensorImpl());
    const bool named = name != names_.end() && known_.insert(name->second).second;
    // Detached: a later in-place operator may give the tensor itself another shape.
    graph.values.push_back({named ? name->second : std::string(), tensor.detach()});
    held_.push_back(tensor);
  }

  void fresh(const at::Tensor& tensor) {
    ids_[tensor.unsafeGetTensorImpl()] = static_cast<ValueId>(graph.values.size());
    stale_.erase(tensor.unsafeGetTensorImpl());
    graph.values.push_back({"", tensor.detach()});
    held_.push_back(tensor);
  }

  GraphArgument argument(const IValue& value) {
    if (value.isTensor())
      return value.toTensor().defined() ? GraphArgument(id(value.toTensor())) : GraphArgument(IValue());
    if (!holds_tensor(value)) return value.isList() ? value.deepcopy() : value;
    std::vector<ValueId> several;
    if (value.isList()) {
      for (const IValue& item : value.toList())
        several.push_back(item.isTensor() && item.toTensor().defined() ? id(item.toTensor()) : -1);
      return several;
    }
    std::vector<at::Tensor> tensors;
    flatten(value, tensors);
    for (const at::Tensor& tensor : tensors) several.push_back(id(tensor));
    return several;
  }

  static GraphNode describe(const jit::Node* node) {
    GraphNode record;
    record.op = node->kind().toQualString();
    record.scope = scope_of(node);
    const c10::FunctionSchema* schema = node->maybeSchema();
    if (schema) record.overload = schema->overload_name();
    for (std::size_t i = 0; i < node->inputs().size(); ++i)
      record.argument_names.push_back(schema && i < schema->arguments().size() ? schema->arguments()[i].name()
                                                                               : fmt::format("input{}", i));
    return record;
  }

  static std::vector<at::Tensor> written_tensors(const jit::Node* node, const std::vector<IValue>& inputs) {
    std::vector<at::Tensor> written;
    const c10::FunctionSchema* schema = node->maybeSchema();
    if (!schema) return written;
    for (std::size_t i = 0; i < std::min(inputs.size(), schema->arguments().size()); ++i) {
      const c10::Argument& argument = schema->arguments()[i];
      if (argument.alias_info() && argument.alias_info()->isWrite() && is_tensor_type(argument.type()) &&
          inputs[i].isTensor())
        written.push_back(inputs[i].toTensor());
    }
    return written;
  }

  /// Tensors that show the same memory hold something else now; they get a value of their own when they are read again.
  void mark_stale(const at::Tensor& written, ValueId source) {
    if (source < 0 || !written.has_storage()) return;
    for (const at::Tensor& other : held_)
      if (!other.is_same(written) && other.has_storage() && other.is_alias_of(written))
        stale_[other.unsafeGetTensorImpl()] = source;
  }

  void push(GraphNode record, jit::Node* origin) {
    graph.nodes.push_back(std::move(record));
    origins_.push_back(origin);
  }

  std::vector<jit::Node*>& origins_;
  std::unordered_map<const c10::TensorImpl*, std::string> names_;
  std::set<std::string> known_;
  std::unordered_map<const c10::TensorImpl*, ValueId> ids_;
  std::unordered_map<const c10::TensorImpl*, ValueId> stale_;
  std::vector<at::Tensor> held_;  // an address names a tensor only as long as it lives
};

}  // namespace

void flatten(const IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) tensors.push_back(value.toTensor());
  } else if (value.isTensorList() || value.isList()) {
    for (const IValue& item : value.toList()) flatten(item, tensors);
  } else if (value.isTuple()) {
    for (const IValue& item : value.toTupleRef().elements()) flatten(item, tensors);
  } else if (value.isGenericDict()) {
    std::vector<std::pair<IValue, IValue>> items;
    for (const auto& item : value.toGenericDict()) items.emplace_back(item.key(), item.value());
    std::stable_sort(items.begin(), items.end(), [](const auto& a, const auto& b) {
      if (a.first.isString() && b.first.isString()) return a.first.toStringRef() < b.first.toStringRef();
      if (a.first.isInt() && b.first.isInt()) return a.first.toInt() < b.first.toInt();
      return false;
    });
    for (const auto& item : items) flatten(item.second, tensors);
  }
}

std::vector<IValue> bind_inputs(const std::vector<c10::Argument>& arguments, const std::vector<at::Tensor>& inputs) {
  std::vector<IValue> bound;
  std::size_t next = 0;
  const auto take = [&](const c10::Argument& argument) -> IValue {
    check(next < inputs.size(), ErrorCode::MissingData,
          "forward needs a tensor for '{}', but only {} inputs were given", escaped(argument.name()), inputs.size());
    return inputs[next++];
  };
  for (const c10::Argument& argument : arguments) {
    const c10::TypePtr& type = argument.type();
    if (type->isSubtypeOf(*c10::TensorType::get())) {
      if (argument.default_value() && next >= inputs.size())
        bound.push_back(*argument.default_value());
      else
        bound.push_back(take(argument));
    } else if (type->isSubtypeOf(*c10::OptionalType::ofTensor())) {
      bound.push_back(next < inputs.size() ? IValue(inputs[next++]) : IValue());
    } else if (const auto tuple = type->cast<c10::TupleType>();
               tuple &&
               std::all_of(tuple->elements().begin(), tuple->elements().end(),
                           [](const c10::TypePtr& element) { return element->isSubtypeOf(*c10::TensorType::get()); })) {
      std::vector<IValue> items;
      for (std::size_t i = 0; i < tuple->elements().size(); ++i) items.push_back(take(argument));
      bound.push_back(tuple->schema() ? c10::ivalue::Tuple::createNamed(std::move(items), tuple)
                                      : c10::ivalue::Tuple::create(std::move(items)));
    } else if (type->isSubtypeOf(*c10::ListType::ofTensors())) {
      bound.push_back(std::vector<at::Tensor>(inputs.begin() + static_cast<std::ptrdiff_t>(next), inputs.end()));
      next = inputs.size();
    } else if (argument.default_value()) {
      bound.push_back(*argument.default_value());
    } else if (type->kind() == c10::TypeKind::OptionalType) {
      bound.emplace_back();
    } else {
      throw fail(ErrorCode::UnsupportedModel, "forward's argument '{}' is a {}, which cannot be made from tensors",
                 escaped(argument.name()), type->annotation_str());
    }
  }
  check(next == inputs.size(), ErrorCode::BadUsage, "forward takes {} tensors, {} were given", next, inputs.size());
  return bound;
}

void interpret(const Script& script, const std::vector<at::Tensor>& inputs, const NodeHook& after) {
  HookWatcher watcher(after);
  Interpreter interpreter(script, watcher);
  watcher.bind(interpreter);
  interpreter.run(bind_inputs(script.arguments, inputs));
}

Graph record(const Script& script, const std::vector<at::Tensor>& inputs, std::vector<jit::Node*>& origins) {
  origins.clear();
  Recorder recorder(script.root, origins);
  Interpreter interpreter(script, recorder);
  const std::vector<at::Tensor> own = copies(inputs);
  for (const at::Tensor& input : own) recorder.graph.inputs.push_back(recorder.id(input));
  std::vector<at::Tensor> outputs;
  for (const IValue& output : interpreter.run(bind_inputs(script.arguments, own))) flatten(output, outputs);
  for (const at::Tensor& output : outputs) {
    const ValueId id = recorder.id(output);
    recorder.graph.outputs.push_back(id);
  }
  return std::move(recorder.graph);
}

}  // namespace tersor

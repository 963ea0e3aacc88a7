#include "capture.hpp"

#include <algorithm>
#include <set>

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/passes/lower_tuples.h>

#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor {
namespace {

using Tensors = std::vector<at::Tensor>;

/// The module's tree as TorchScript sees one: the same tensors under the same names.
class Mirror {
 public:
  explicit Mirror(std::shared_ptr<jit::CompilationUnit> unit) : unit_(std::move(unit)) {}

  jit::Module operator()(const std::shared_ptr<torch::nn::Module>& module) {
    if (const auto done = made_.find(module.get()); done != made_.end()) return done->second;
    jit::Module mirror(c10::QualifiedName("__torch__." + class_name(*module)), unit_, /*shouldMangle=*/true);
    made_.emplace(module.get(), mirror);
    mirror.register_attribute("training", c10::BoolType::get(), false);
    for (const auto& item : module->named_parameters(/*recurse=*/false))
      if (item.value().defined()) mirror.register_parameter(item.key(), item.value(), /*is_buffer=*/false);
    for (const auto& item : module->named_buffers(/*recurse=*/false))
      if (item.value().defined()) mirror.register_parameter(item.key(), item.value(), /*is_buffer=*/true);
    for (const auto& item : module->named_children())
      if (item.value()) mirror.register_module(item.key(), (*this)(item.value()));
    return mirror;
  }

 private:
  /// `MyNet` of `ns::MyNetImpl`.
  static std::string class_name(const torch::nn::Module& module) {
    std::string name = module.name();
    if (const std::size_t colon = name.rfind(':'); colon != std::string::npos) name = name.substr(colon + 1);
    if (name.ends_with("Impl")) name.resize(name.size() - 4);
    const auto odd = [](unsigned char c) { return std::isalnum(c) == 0 && c != '_'; };
    std::replace_if(name.begin(), name.end(), odd, '_');
    const bool begins = !name.empty() && std::isdigit(static_cast<unsigned char>(name.front())) == 0;
    return begins ? name : "Network_" + name;
  }

  std::shared_ptr<jit::CompilationUnit> unit_;
  std::map<const torch::nn::Module*, jit::Module> made_;
};

std::shared_ptr<jit::Graph> trace(const EagerNetwork& network, jit::Module& mirror, const Tensors& inputs,
                                  const std::vector<std::string>& names) {
  jit::Stack stack(inputs.begin(), inputs.end());
  const auto run = [&](jit::Stack given) {
    Tensors tensors;
    for (const c10::IValue& value : given) tensors.push_back(value.toTensor());
    const Tensors outputs = network.forward(tensors);
    check(!outputs.empty(), ErrorCode::UnsupportedModel, "Model::wrap: forward gives no tensor");
    if (outputs.size() == 1) return jit::Stack{outputs.front()};
    std::vector<c10::IValue> items(outputs.begin(), outputs.end());
    return jit::Stack{c10::ivalue::Tuple::create(std::move(items))};
  };
  const auto traced = jit::tracer::trace(
      std::move(stack), run, [](const at::Tensor&) { return std::string(); }, /*strict=*/true,
      /*force_outplace=*/false, &mirror, names);
  return traced.first->graph;
}

std::string shape_text(const Tensors& inputs) {
  std::string text;
  for (const at::Tensor& input : inputs)
    text += fmt::format("{}[{}]", text.empty() ? "" : ", ", fmt::join(input.sizes(), ", "));
  return text;
}

/// The layer whose weight was read last before `node`, for messages.
std::string place_of(const jit::Node* node) {
  const std::string op = node->kind().toQualString();
  for (const jit::Node* before = node; before->kind() != c10::prim::Param; before = before->prev()) {
    if (before->kind() == c10::prim::Return) break;
    for (const jit::Value* input : before->inputs()) {
      const auto path = attribute_path(input);
      if (path && input->type()->isSubtypeOf(*c10::TensorType::get()))
        return fmt::format("{} {} '{}'", op, before == node ? "of" : "behind", escaped(*path));
    }
  }
  return op;
}

/// A size of an input that may vary, in both captures.
struct Symbol {
  std::size_t input = 0;
  std::int64_t dim = 0;
  std::int64_t first = 0, second = 0;
};

std::vector<Symbol> symbols_of(const Tensors& first, const Tensors& second) {
  std::vector<Symbol> symbols;
  for (std::size_t i = 0; i < first.size(); ++i)
    for (std::int64_t d = 0; d < first[i].dim(); ++d) {
      const Symbol symbol{i, d, first[i].size(d), second[i].size(d)};
      const bool known = std::any_of(symbols.begin(), symbols.end(), [&](const Symbol& other) {
        return other.first == symbol.first && other.second == symbol.second;
      });
      if (symbol.first != symbol.second && !known) symbols.push_back(symbol);
    }
  return symbols;
}

/// An integer that follows the sizes: product of symbols * times / over + plus.
struct Formula {
  std::vector<std::size_t> symbols;
  std::int64_t times = 1, over = 1, plus = 0;
};

/// The simplest formula that gives `first` and `second` in the two captures.
std::optional<Formula> explain(std::int64_t first, std::int64_t second, const std::vector<Symbol>& symbols) {
  std::vector<std::vector<std::size_t>> products;
  for (std::size_t a = 0; a < symbols.size(); ++a) products.push_back({a});
  for (std::size_t a = 0; a < symbols.size(); ++a)
    for (std::size_t b = a; b < symbols.size(); ++b) products.push_back({a, b});
  std::optional<Formula> multiple, sum, fraction;
  for (const auto& product : products) {
    std::int64_t x = 1, y = 1;
    for (const std::size_t s : product) {
      x *= symbols[s].first;
      y *= symbols[s].second;
    }
    if (x == 0 || y == 0 || x == y) continue;
    if (first == x && second == y) return Formula{product};
    if (!multiple && first % x == 0 && second % y == 0 && first / x == second / y)
      multiple = Formula{product, first / x};
    if (!sum && first - x == second - y) sum = Formula{product, 1, 1, first - x};
    if (!fraction && first != 0 && second != 0 && x % first == 0 && y % second == 0 && x / first == y / second)
      fraction = Formula{product, 1, x / first};
  }
  return multiple ? multiple : sum ? sum : fraction;
}

/// Turns integers that differ between two captures into what they are computed from. Both have the same form.
class Generaliser {
 public:
  Generaliser(jit::Graph& graph, const std::vector<Symbol>& symbols) : graph_(graph), symbols_(symbols) {}

  void operator()(jit::Graph& other) {
    auto a = graph_.nodes().begin();
    auto b = other.nodes().begin();
    std::unordered_map<const jit::Value*, const jit::Value*> same;
    for (std::size_t i = 0; i < graph_.inputs().size(); ++i) same[graph_.inputs()[i]] = other.inputs()[i];
    std::vector<std::pair<jit::Node*, jit::Node*>> constants;
    for (; a != graph_.nodes().end() && b != other.nodes().end(); ++a, ++b) {
      const bool alike = a->kind() == b->kind() && a->inputs().size() == b->inputs().size() &&
                         a->outputs().size() == b->outputs().size() &&
                         (a->kind() != c10::prim::GetAttr || a->s(c10::attr::name) == b->s(c10::attr::name));
      if (!alike) other_course(*a);
      for (std::size_t i = 0; i < a->inputs().size(); ++i)
        if (same[a->input(i)] != b->input(i)) other_course(*a);
      for (std::size_t i = 0; i < a->outputs().size(); ++i) same[a->output(i)] = b->output(i);
      if (a->kind() == c10::prim::Constant) constants.emplace_back(*a, *b);
    }
    if (a != graph_.nodes().end() || b != other.nodes().end())
      other_course(a != graph_.nodes().end() ? *a : graph_.return_node());
    for (const auto& [one, two] : constants) follow(one, *jit::toIValue(one->output()), *jit::toIValue(two->output()));
  }

 private:
  [[noreturn]] static void other_course(const jit::Node* node) {
    throw fail(ErrorCode::UnsupportedModel,
               "Model::wrap: with another batch size the network takes another course at {}; give "
               "WrapOptions::batch_dims (-1 for inputs that do not count samples) or an example of other sizes",
               place_of(node));
  }

  void follow(jit::Node* constant, const c10::IValue& first, const c10::IValue& second) {
    if (first.isTensor() && second.isTensor()) {
      const at::Tensor &a = first.toTensor(), &b = second.toTensor();
      const bool same = a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && a.equal(b);
      if (!same) refuse(constant, "a tensor that the module's code computed on its own", "");
      return;
    }
    if (first == second) return;
    const std::string change =
        first.isTensor() || second.isTensor() ? "" : fmt::format(" ({} and {})", text(first), text(second));
    if (!first.isInt() || !second.isInt())
      refuse(constant, first.isDouble() ? "a floating-point number" : "a value", change);
    const auto formula = explain(first.toInt(), second.toInt(), symbols_);
    if (!formula) refuse(constant, "an integer", change);
    constant->output()->replaceAllUsesWith(compute(*formula));
  }

  [[noreturn]] static void refuse(jit::Node* constant, std::string_view what, const std::string& change) {
    const jit::Node* user = constant->output()->uses().empty() ? constant : constant->output()->uses().front().user;
    if (user->kind() == c10::prim::ListConstruct && !user->output()->uses().empty())
      user = user->output()->uses().front().user;
    throw fail(
        ErrorCode::UnsupportedModel,
        "Model::wrap: {} at {} follows the batch size{} and is fixed by the capture; compute it from tensors, or "
        "say with WrapOptions::batch_dims which dimensions count samples",
        what, place_of(user), change);
  }

  static std::string text(const c10::IValue& value) {
    std::ostringstream out;
    out << value;
    return out.str();
  }

  jit::Value* compute(const Formula& formula) {
    const jit::WithInsertPoint at_start(*graph_.nodes().begin());
    jit::Value* value = nullptr;
    for (const std::size_t s : formula.symbols) {
      jit::Value* size = size_of(s);
      value = value ? graph_.insert(c10::aten::mul, {value, size}) : size;
    }
    if (formula.times != 1) value = graph_.insert(c10::aten::mul, {value, formula.times});
    if (formula.over != 1) value = graph_.insert(c10::aten::floordiv, {value, formula.over});
    if (formula.plus != 0) value = graph_.insert(c10::aten::add, {value, formula.plus});
    return value;
  }

  jit::Value* size_of(std::size_t symbol) {
    const Symbol& s = symbols_[symbol];
    return graph_.insert(c10::aten::size, {graph_.inputs()[s.input + 1], s.dim});
  }

  jit::Graph& graph_;
  const std::vector<Symbol>& symbols_;
};

at::Tensor one_more(const at::Tensor& input, std::int64_t dim) {
  return input.index_select(dim, at::arange(input.size(dim) + 1, at::kLong).remainder(input.size(dim)));
}

/// The example with one more sample.
Tensors one_more_sample(const Tensors& example, const std::vector<std::int64_t>& batch_dims) {
  Tensors inputs;
  for (std::size_t i = 0; i < example.size(); ++i) {
    const std::int64_t dim = batch_dims.empty() ? 0 : batch_dims[i];
    const at::Tensor& input = example[i];
    if (dim < 0 || (input.dim() == 0 && batch_dims.empty())) {
      inputs.push_back(input.clone());
      continue;
    }
    check(dim < input.dim(), ErrorCode::BadUsage, "Model::wrap: input {} is [{}] and has no batch dimension {}", i,
          fmt::join(input.sizes(), ", "), dim);
    check(input.size(dim) > 0, ErrorCode::BadUsage, "Model::wrap: input {} is [{}] and holds no sample", i,
          fmt::join(input.sizes(), ", "));
    inputs.push_back(one_more(input, dim));
  }
  return inputs;
}

/// `second` with one more of everything that differs between the two: sizes that no capture has seen.
Tensors unseen_sizes(const Tensors& first, const Tensors& second) {
  Tensors inputs;
  for (std::size_t i = 0; i < first.size(); ++i) {
    at::Tensor input = second[i];
    for (std::int64_t d = 0; d < input.dim(); ++d)
      if (first[i].size(d) != second[i].size(d)) input = one_more(input, d);
    inputs.push_back(input);
  }
  return inputs;
}

/// Other values of the same kind: what a module decides by values shows.
Tensors changed(const Tensors& inputs) {
  Tensors other;
  for (const at::Tensor& input : inputs) {
    const at::Tensor mixed = input.flatten().flip(0).view(input.sizes());
    other.push_back(input.is_floating_point() ? mixed.mul(-0.75) : mixed);
  }
  return other;
}

Tensors copies(const Tensors& inputs) {
  Tensors out;
  for (const at::Tensor& input : inputs) out.push_back(input.clone());
  return out;
}

/// The capture computes what the module does. Inputs that the module itself does not take show nothing.
void verify(const EagerNetwork& network, const Script& script, const Tensors& inputs) {
  Tensors wanted, got;
  try {
    wanted = network.forward(copies(inputs));
  } catch (const std::exception&) {
    return;
  }
  try {
    flatten(assemble(script).get_method("forward")(bind_inputs(script.arguments, copies(inputs))), got);
  } catch (const std::exception& error) {
    throw fail(
        ErrorCode::UnsupportedModel,
        "Model::wrap: the capture does not run on {}: {}; say with WrapOptions::batch_dims or other_example which "
        "sizes vary",
        shape_text(inputs), escaped(first_line(error)));
  }
  const auto different = first_difference(wanted, got);
  check(
      !different, ErrorCode::UnsupportedModel,
      "Model::wrap: output {} of the capture is not what the module gives on other values of {}; a branch or a number "
      "in forward depends on values, or the network is random in eval mode",
      different.value_or(0), shape_text(inputs));
}

}  // namespace

std::optional<std::size_t> first_difference(const Tensors& wanted, const Tensors& got) {
  for (std::size_t i = 0; i < std::max(wanted.size(), got.size()); ++i) {
    if (i >= wanted.size() || i >= got.size() || wanted[i].sizes() != got[i].sizes()) return i;
    if (wanted[i].equal(got[i]) || wanted[i].numel() == 0) continue;
    if (!wanted[i].is_floating_point()) return i;
    const at::Tensor a = wanted[i].to(at::kDouble), b = got[i].to(at::kDouble);
    const double eps = wanted[i].scalar_type() == at::kHalf || wanted[i].scalar_type() == at::kBFloat16 ? 0x1p-7 : 1e-5;
    // Not a number in both places is the same.
    if (!a.isnan().equal(b.isnan())) return i;
    const double size = a.nan_to_num().abs().max().item().toDouble();
    if (a.sub(b).nan_to_num().abs().max().item().toDouble() > eps * size) return i;
  }
  return std::nullopt;
}

Script capture(const EagerNetwork& network, const Tensors& example, const WrapOptions& options) {
  check(!example.empty(), ErrorCode::BadUsage, "Model::wrap: give an example input");
  check(options.batch_dims.empty() || options.batch_dims.size() == example.size(), ErrorCode::BadUsage,
        "Model::wrap: {} batch_dims for {} inputs", options.batch_dims.size(), example.size());
  const Tensors other =
      options.other_example.empty() ? one_more_sample(example, options.batch_dims) : copies(options.other_example);
  check(other.size() == example.size(), ErrorCode::BadUsage, "Model::wrap: other_example has {} inputs, the example {}",
        other.size(), example.size());
  for (std::size_t i = 0; i < other.size(); ++i)
    check(other[i].dim() == example[i].dim() && other[i].scalar_type() == example[i].scalar_type(), ErrorCode::BadUsage,
          "Model::wrap: input {} of other_example differs from the example in its type or number of dimensions", i);

  const EvalMode eval(network.module);
  std::vector<std::string> names = network.keys;
  for (std::size_t i = names.size(); i < example.size(); ++i) names.push_back(fmt::format("input{}", i));

  Script script;
  script.origin = std::make_shared<jit::CompilationUnit>();
  script.root = Mirror(script.origin)(network.module);
  const auto traced = [&](const Tensors& inputs) {
    try {
      return trace(network, script.root, copies(inputs), names);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      throw fail(ErrorCode::UnsupportedModel, "Model::wrap: the module does not run on {}: {}{}", shape_text(inputs),
                 escaped(first_line(error)),
                 &inputs == &other ? "; it must take another batch size too, or say with WrapOptions::batch_dims which "
                                     "dimensions count samples (-1: none)"
                                   : "");
    }
  };
  script.graph = traced(example);
  const std::vector<Symbol> symbols = symbols_of(example, other);
  if (!symbols.empty()) Generaliser(*script.graph, symbols)(*traced(other));
  jit::ConstantPropagationImmutableTypes(script.graph);
  jit::LowerSimpleTuples(script.graph);
  jit::EliminateDeadCode(script.graph);
  for (const std::string& name : names) script.arguments.emplace_back(name, c10::TensorType::get());

  Script own = rebuild(script, false);
  verify(network, own, changed(example));
  if (!symbols.empty()) verify(network, own, changed(unseen_sizes(example, other)));
  return own;
}

}  // namespace tersor

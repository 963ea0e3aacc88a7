#include "capture.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <set>

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/frontend/lexer.h>
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

  jit::Module operator()(const std::shared_ptr<torch::nn::Module>& module, const std::string& path = "") {
    if (const auto done = made_.find(module.get()); done != made_.end()) return done->second;
    jit::Module mirror(c10::QualifiedName("__torch__." + class_name(*module)), unit_, /*shouldMangle=*/true);
    made_.emplace(module.get(), mirror);
    mirror.register_attribute("training", c10::BoolType::get(), false);
    const auto checked = [&](const std::string& name) {
      check(
          !is_reserved(name), ErrorCode::UnsupportedModel,
          "Model::wrap: '{}' cannot be written to a TorchScript file, where '{}' has a meaning of its own; register it "
          "under another name",
          escaped(path + name), escaped(name));
      return name;
    };
    for (const auto& item : module->named_parameters(/*recurse=*/false))
      if (item.value().defined()) mirror.register_parameter(checked(item.key()), item.value(), /*is_buffer=*/false);
    for (const auto& item : module->named_buffers(/*recurse=*/false))
      if (item.value().defined()) mirror.register_parameter(checked(item.key()), item.value(), /*is_buffer=*/true);
    for (const auto& item : module->named_children())
      if (item.value()) mirror.register_module(checked(item.key()), (*this)(item.value(), path + item.key() + "."));
    return mirror;
  }

 private:
  /// A word of the language, or what every module has.
  static bool is_reserved(const std::string& name) {
    if (name == "training" || name == "forward") return true;
    const auto in_word = [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; };
    const bool word =
        std::all_of(name.begin(), name.end(), in_word) && std::isdigit(static_cast<unsigned char>(name[0])) == 0;
    return word && jit::Lexer(std::make_shared<jit::Source>(name)).cur().kind != jit::TK_IDENT;
  }

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
    for (std::size_t i = 0; i < outputs.size(); ++i)
      check(outputs[i].defined(), ErrorCode::UnsupportedModel,
            "Model::wrap: output {} of forward is an undefined tensor; give a callable that leaves it out", i);
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

/// A size of an input that may vary, in all captures.
struct Symbol {
  std::size_t input = 0;
  std::int64_t dim = 0;
  std::array<std::int64_t, 3> sizes{};
};

/// Captures of the same network with other sizes. The third is of the second's sizes when no other could be made.
using Captures = std::array<Tensors, 3>;

std::vector<Symbol> symbols_of(const Captures& inputs) {
  std::vector<Symbol> symbols;
  for (std::size_t i = 0; i < inputs[0].size(); ++i)
    for (std::int64_t d = 0; d < inputs[0][i].dim(); ++d) {
      const Symbol symbol{i, d, {inputs[0][i].size(d), inputs[1][i].size(d), inputs[2][i].size(d)}};
      const bool known =
          std::any_of(symbols.begin(), symbols.end(), [&](const Symbol& other) { return other.sizes == symbol.sizes; });
      if (symbol.sizes[0] != symbol.sizes[1] && !known) symbols.push_back(symbol);
    }
  return symbols;
}

/// An integer that follows the sizes: product of symbols * times / over + plus.
struct Formula {
  std::vector<std::size_t> symbols;
  std::int64_t times = 1, over = 1, plus = 0;
};

using Three = std::array<std::int64_t, 3>;

/// The simplest formula that gives `wanted` in the three captures.
std::optional<Formula> explain(const Three& wanted, const std::vector<Symbol>& symbols) {
  std::vector<std::vector<std::size_t>> products;
  for (std::size_t a = 0; a < symbols.size(); ++a) products.push_back({a});
  for (std::size_t a = 0; a < symbols.size(); ++a)
    for (std::size_t b = a; b < symbols.size(); ++b) products.push_back({a, b});
  std::optional<Formula> multiple, sum, fraction;
  for (const auto& product : products) {
    Three x{1, 1, 1};
    for (std::size_t i = 0; i < 3; ++i)
      for (const std::size_t s : product) x[i] *= symbols[s].sizes[i];
    if (x[0] == 0 || x[1] == 0 || x[0] == x[1]) continue;
    const auto gives = [&](const Formula& formula) {
      for (std::size_t i = 0; i < 3; ++i)
        if (x[i] * formula.times / formula.over + formula.plus != wanted[i]) return false;
      return true;
    };
    if (const Formula formula{product}; gives(formula)) return formula;
    if (const Formula formula{product, wanted[0] / x[0]}; !multiple && gives(formula)) multiple = formula;
    if (const Formula formula{product, 1, 1, wanted[0] - x[0]}; !sum && gives(formula)) sum = formula;
    // The first two are exact: a rounded quotient would fit by chance.
    const bool exact = wanted[0] != 0 && wanted[1] != 0 && x[0] % wanted[0] == 0 && x[1] % wanted[1] == 0;
    if (const Formula formula{product, 1, exact ? x[0] / wanted[0] : 1}; !fraction && exact && gives(formula))
      fraction = formula;
  }
  return multiple ? multiple : sum ? sum : fraction;
}

/// Turns integers that differ between two captures into what they are computed from. Both have the same form.
class Generaliser {
 public:
  Generaliser(jit::Graph& graph, const std::vector<Symbol>& symbols) : graph_(graph), symbols_(symbols) {}

  void operator()(const jit::Graph& second, const jit::Graph& third) {
    const Pairs pairs = constants(second), others = constants(third);
    for (std::size_t i = 0; i < pairs.size(); ++i)
      follow(pairs[i].first, *jit::toIValue(pairs[i].first->output()), *jit::toIValue(pairs[i].second->output()),
             *jit::toIValue(others[i].second->output()));
  }

 private:
  using Pairs = std::vector<std::pair<jit::Node*, const jit::Node*>>;

  /// The constants of both graphs, which otherwise are the same.
  Pairs constants(const jit::Graph& other) const {
    auto a = graph_.nodes().begin();
    auto b = other.nodes().begin();
    std::unordered_map<const jit::Value*, const jit::Value*> same;
    for (std::size_t i = 0; i < graph_.inputs().size(); ++i) same[graph_.inputs()[i]] = other.inputs()[i];
    Pairs pairs;
    for (; a != graph_.nodes().end() && b != other.nodes().end(); ++a, ++b) {
      const bool alike = a->kind() == b->kind() && a->inputs().size() == b->inputs().size() &&
                         a->outputs().size() == b->outputs().size() &&
                         (a->kind() != c10::prim::GetAttr || a->s(c10::attr::name) == b->s(c10::attr::name));
      if (!alike) other_course(*a);
      for (std::size_t i = 0; i < a->inputs().size(); ++i)
        if (same[a->input(i)] != b->input(i)) other_course(*a);
      for (std::size_t i = 0; i < a->outputs().size(); ++i) same[a->output(i)] = b->output(i);
      if (a->kind() == c10::prim::Constant) pairs.emplace_back(*a, *b);
    }
    if (a != graph_.nodes().end() || b != other.nodes().end())
      other_course(a != graph_.nodes().end() ? *a : graph_.return_node());
    return pairs;
  }

  [[noreturn]] static void other_course(const jit::Node* node) {
    throw fail(ErrorCode::UnsupportedModel,
               "Model::wrap: with another batch size the network takes another course at {}; give "
               "WrapOptions::batch_dims (-1 for inputs that do not count samples) or an example of other sizes",
               place_of(node));
  }

  void follow(jit::Node* constant, const c10::IValue& first, const c10::IValue& second, const c10::IValue& third) {
    if (first.isTensor() && second.isTensor() && third.isTensor()) {
      const at::Tensor& a = first.toTensor();
      const auto same = [&](const at::Tensor& b) {
        return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && a.equal(b);
      };
      if (!same(second.toTensor()) || !same(third.toTensor()))
        refuse(constant, "a tensor that the module's code computed on its own", "");
      return;
    }
    if (first == second && first == third) return;
    const bool tensors = first.isTensor() || second.isTensor() || third.isTensor();
    const std::string change =
        tensors ? "" : fmt::format(" ({}, {} and {})", value_text(first), value_text(second), value_text(third));
    if (!first.isInt() || !second.isInt() || !third.isInt())
      refuse(constant, first.isDouble() ? "a floating-point number" : "a value", change);
    const auto formula = explain({first.toInt(), second.toInt(), third.toInt()}, symbols_);
    if (!formula) refuse(constant, "an integer", change);
    constant->output()->replaceAllUsesWith(compute(*formula));
  }

  [[noreturn]] static void refuse(jit::Node* constant, std::string_view what, const std::string& change) {
    const jit::Node* user = constant->output()->uses().empty() ? constant : constant->output()->uses().front().user;
    if (user->kind() == c10::prim::ListConstruct && !user->output()->uses().empty())
      user = user->output()->uses().front().user;
    throw fail(ErrorCode::UnsupportedModel,
               "Model::wrap: {} at {} follows the sizes of the inputs{} and is fixed by the capture; compute it from "
               "tensors, or "
               "say with WrapOptions::batch_dims which dimensions count samples",
               what, place_of(user), change);
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

/// `input` with `size` elements in dimension `dim`, its own over and over.
at::Tensor resized(const at::Tensor& input, std::int64_t dim, std::int64_t size) {
  return input.index_select(
      dim, at::arange(size, at::TensorOptions(at::kLong).device(input.device())).remainder(input.size(dim)));
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
    inputs.push_back(resized(input, dim, input.size(dim) + 1));
  }
  return inputs;
}

/// `second` with another size in every dimension that differs between the two: `size_of(its size in first, its size in
/// second, which of the pairs of sizes that is)`.
template <typename Size>
Tensors with_sizes(const Tensors& first, const Tensors& second, Size size_of) {
  std::vector<std::pair<std::int64_t, std::int64_t>> pairs;
  Tensors inputs;
  for (std::size_t i = 0; i < first.size(); ++i) {
    at::Tensor input = second[i];
    for (std::int64_t d = 0; d < input.dim(); ++d) {
      const std::pair pair{first[i].size(d), second[i].size(d)};
      if (pair.first == pair.second || pair.second == 0) continue;
      const auto place = std::find(pairs.begin(), pairs.end(), pair);
      const auto which = place - pairs.begin();
      if (place == pairs.end()) pairs.push_back(pair);
      input = resized(input, d, size_of(pair.first, pair.second, which));
    }
    inputs.push_back(input);
  }
  return inputs;
}

/// Sizes that no capture has seen. The first two are about twice and half as large and multiples of what both sizes are
/// multiples of; no two of `twice` are to each other as those in the captures.
std::int64_t twice(std::int64_t first, std::int64_t second, std::int64_t which) {
  return 2 * second + (which + 1) * std::abs(second - first);
}
std::int64_t half(std::int64_t first, std::int64_t second, std::int64_t) {
  const std::int64_t step = std::abs(second - first);
  return std::max<std::int64_t>(1, first - first / 2 / step * step);
}
std::int64_t one_more(std::int64_t, std::int64_t second, std::int64_t) { return second + 1; }

/// Other values of the same kind: what a module decides by values shows.
Tensors changed(const Tensors& inputs) {
  Tensors other;
  for (const at::Tensor& input : inputs) {
    const at::Tensor mixed = input.flatten().flip(0).view(input.sizes());
    other.push_back(input.is_floating_point() ? mixed.mul(-0.75) : mixed);
  }
  return other;
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

/// Buffers that forward writes to, a counter or a cache, would be written to by every look at the network.
class Unwritten {
 public:
  explicit Unwritten(const std::shared_ptr<torch::nn::Module>& module) {
    for (const Slot& slot : slots(module))
      if (!slot.is_parameter) buffers_.emplace_back(slot, slot.tensor.clone());
  }
  ~Unwritten() {
    for (auto& [slot, before] : buffers_)
      if (changed(slot.tensor, before)) put_back(slot.tensor, before);
  }
  Unwritten(const Unwritten&) = delete;
  Unwritten& operator=(const Unwritten&) = delete;

  void check() const {
    for (const auto& [slot, before] : buffers_)
      tersor::check(!changed(slot.tensor, before), ErrorCode::UnsupportedModel,
                    "Model::wrap: forward changes the buffer '{}' in eval mode too; give a callable that does not",
                    escaped(slot.name));
  }

 private:
  static bool changed(const at::Tensor& now, const at::Tensor& before) {
    return first_difference({before}, {now}).has_value();
  }
  static void put_back(at::Tensor buffer, const at::Tensor& before) {
    if (buffer.sizes() == before.sizes())
      buffer.copy_(before);
    else
      buffer.set_data(before);
  }

  std::vector<std::pair<Slot, at::Tensor>> buffers_;
};

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

  const Unwritten buffers(network.module);
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
  const bool varies = !symbols_of({example, other, other}).empty();
  if (varies) {
    const std::shared_ptr<jit::Graph> second = traced(other);
    Captures inputs{example, other, other};
    std::shared_ptr<jit::Graph> third = second;
    for (const auto size : {twice, half}) {
      const Tensors unseen = with_sizes(example, other, size);
      if (symbols_of({example, unseen, unseen}).empty()) continue;
      try {
        third = trace(network, script.root, copies(unseen), names);
        inputs[2] = unseen;
        break;
      } catch (const std::exception&) {  // a size that the module does not take shows nothing
      }
    }
    const std::vector<Symbol> symbols = symbols_of(inputs);
    Generaliser(*script.graph, symbols)(*second, *third);
  }
  jit::ConstantPropagationImmutableTypes(script.graph);
  jit::LowerSimpleTuples(script.graph);
  jit::EliminateDeadCode(script.graph);
  for (const std::string& name : names) script.arguments.emplace_back(name, c10::TensorType::get());

  Script own = rebuild(script, false);
  verify(network, own, changed(example));
  if (varies)
    for (const auto size : {twice, half, one_more}) verify(network, own, changed(with_sizes(example, other, size)));
  buffers.check();
  return own;
}

}  // namespace tersor

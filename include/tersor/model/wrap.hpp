#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include "tersor/core/error.hpp"
#include "tersor/model/model.hpp"

/// Eager modules: networks of the user's own program, edited in place.
///
///     MyNet net;                                            // TORCH_MODULE holder or std::shared_ptr<MyNetImpl>
///     auto model = tersor::Model::wrap(net, {torch::rand({8, 784})});
///     tersor::Pipeline{tersor::prune::Structured{.amount = 0.3}}.run(model);
///     net->forward(x);                                      // the smaller network
namespace tersor {

/// A module and how it is called, with the types erased. `forward` takes and gives flat lists of tensors.
struct EagerNetwork {
  std::shared_ptr<torch::nn::Module> module;
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> forward;
  std::vector<std::string> keys;  ///< of a dictionary of inputs, in order; empty: positional
};

namespace detail {

template <typename M>
concept ModuleHolder = requires(const M& module) {
  {module.ptr()->parameters()};
};

template <typename M>
std::shared_ptr<M> module_pointer(const std::shared_ptr<M>& module) {
  return module;
}
template <ModuleHolder M>
auto module_pointer(const M& module) {
  return module.ptr();
}

// What forward may give: a tensor, or tuples, pairs, arrays, vectors, optionals and dictionaries of such. Dictionaries
// are flattened in order of their keys.
inline void collect(const at::Tensor& value, std::vector<at::Tensor>& out) { out.push_back(value); }
template <typename T>
void collect(const std::optional<T>& value, std::vector<at::Tensor>& out);
template <typename A, typename B>
void collect(const std::pair<A, B>& value, std::vector<at::Tensor>& out);
template <typename... T>
void collect(const std::tuple<T...>& value, std::vector<at::Tensor>& out);
template <typename T, std::size_t N>
void collect(const std::array<T, N>& value, std::vector<at::Tensor>& out);
template <typename T>
void collect(const std::vector<T>& value, std::vector<at::Tensor>& out);
template <typename T>
void collect(const std::map<std::string, T>& value, std::vector<at::Tensor>& out);
template <typename T>
void collect(const std::unordered_map<std::string, T>& value, std::vector<at::Tensor>& out);
template <typename T>
void collect(const torch::OrderedDict<std::string, T>& value, std::vector<at::Tensor>& out);

template <typename T>
void collect(const std::optional<T>& value, std::vector<at::Tensor>& out) {
  if (value) collect(*value, out);
}
template <typename A, typename B>
void collect(const std::pair<A, B>& value, std::vector<at::Tensor>& out) {
  collect(value.first, out);
  collect(value.second, out);
}
template <typename... T>
void collect(const std::tuple<T...>& value, std::vector<at::Tensor>& out) {
  std::apply([&](const auto&... items) { (collect(items, out), ...); }, value);
}
template <typename T, std::size_t N>
void collect(const std::array<T, N>& value, std::vector<at::Tensor>& out) {
  for (const T& item : value) collect(item, out);
}
template <typename T>
void collect(const std::vector<T>& value, std::vector<at::Tensor>& out) {
  for (const T& item : value) collect(item, out);
}
template <typename T>
void collect(const std::map<std::string, T>& value, std::vector<at::Tensor>& out) {
  for (const auto& [key, item] : value) collect(item, out);
}
template <typename T>
void collect(const std::unordered_map<std::string, T>& value, std::vector<at::Tensor>& out) {
  collect(std::map<std::string, T>(value.begin(), value.end()), out);
}
template <typename T>
void collect(const torch::OrderedDict<std::string, T>& value, std::vector<at::Tensor>& out) {
  std::map<std::string, T> sorted;
  for (const auto& item : value) sorted.emplace(item.key(), item.value());
  collect(sorted, out);
}

template <typename T>
concept Collectable = requires(const std::remove_cvref_t<T>& value, std::vector<at::Tensor>& out) {
  collect(value, out);
};

template <std::size_t>
using AsTensor = at::Tensor;

constexpr std::size_t most_inputs = 8;

template <typename Call, std::size_t... I>
constexpr bool takes_tensors(std::index_sequence<I...>) {
  return std::invocable<Call&, AsTensor<I>...>;
}

template <typename Call, std::size_t... I>
std::vector<at::Tensor> give_tensors(Call& call, const std::vector<at::Tensor>& inputs, std::index_sequence<I...>) {
  static_assert(Collectable<decltype(call(inputs[I]...))>,
                "what this forward returns is no tensor, tuple or dictionary of tensors: give Model::wrap a callable");
  std::vector<at::Tensor> out;
  collect(call(inputs[I]...), out);
  return out;
}

template <typename Dictionary, typename Call>
std::vector<at::Tensor> give_dictionary(Call& call, const std::vector<std::string>& keys,
                                        const std::vector<at::Tensor>& inputs) {
  Dictionary dictionary;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if constexpr (requires { dictionary.emplace(keys[i], inputs[i]); })
      dictionary.emplace(keys[i], inputs[i]);
    else
      dictionary.insert(keys[i], inputs[i]);
  }
  std::vector<at::Tensor> out;
  collect(call(std::move(dictionary)), out);
  return out;
}

/// Calls with as many tensors as there are, a vector of them, or a dictionary, whichever `call` takes.
template <typename Call>
std::vector<at::Tensor> call_with(Call& call, const std::vector<std::string>& keys,
                                  const std::vector<at::Tensor>& inputs) {
  std::optional<std::vector<at::Tensor>> out;
  if (!keys.empty()) {
    using Map = std::map<std::string, at::Tensor>;
    using Hash = std::unordered_map<std::string, at::Tensor>;
    using Ordered = torch::OrderedDict<std::string, at::Tensor>;
    if constexpr (std::invocable<Call&, Map>)
      out = give_dictionary<Map>(call, keys, inputs);
    else if constexpr (std::invocable<Call&, Hash>)
      out = give_dictionary<Hash>(call, keys, inputs);
    else if constexpr (std::invocable<Call&, Ordered>)
      out = give_dictionary<Ordered>(call, keys, inputs);
    check(out.has_value(), ErrorCode::BadUsage, "Model::wrap: the network does not take a dictionary of tensors");
    return *out;
  }
  const auto attempt = [&]<std::size_t N>(std::integral_constant<std::size_t, N>) {
    if constexpr (takes_tensors<Call>(std::make_index_sequence<N>()))
      if (!out && inputs.size() == N) out = give_tensors(call, inputs, std::make_index_sequence<N>());
  };
  [&]<std::size_t... N>(std::index_sequence<N...>) { (attempt(std::integral_constant<std::size_t, N + 1>()), ...); }
  (std::make_index_sequence<most_inputs>());
  if constexpr (std::invocable<Call&, std::vector<at::Tensor>>)
    if (!out) {
      out.emplace();
      collect(call(inputs), *out);
    }
  check(out.has_value(), ErrorCode::BadUsage, "Model::wrap: the network does not take {} tensors", inputs.size());
  return *out;
}

template <typename Call>
EagerNetwork eager_network(std::shared_ptr<torch::nn::Module> module, Call call, std::vector<std::string> keys) {
  EagerNetwork network{std::move(module), nullptr, std::move(keys)};
  network.forward = [call = std::move(call), keys = network.keys](const std::vector<at::Tensor>& inputs) mutable {
    return call_with(call, keys, inputs);
  };
  return network;
}

/// `forward` as a function object that can be asked what it takes.
template <typename M>
auto forward_of(const std::shared_ptr<M>& module) {
  static_assert(!std::same_as<M, torch::nn::Module>,
                "torch::nn::Module itself has no forward: give Model::wrap the module's own type, or a callable");
  return [module](auto&&... inputs) -> decltype(module->forward(std::forward<decltype(inputs)>(inputs)...)) {
    return module->forward(std::forward<decltype(inputs)>(inputs)...);
  };
}

}  // namespace detail

/// An example of a network that takes one tensor or several in their order, or a dictionary of tensors.
class Example {
 public:
  Example(std::vector<at::Tensor> inputs) : tensors(std::move(inputs)) {}  // NOLINT(google-explicit-constructor)
  Example(std::initializer_list<at::Tensor> inputs) : tensors(inputs) {}   // NOLINT(google-explicit-constructor)
  Example(const at::Tensor& input) : tensors{input} {}                     // NOLINT(google-explicit-constructor)
  Example(const std::map<std::string, at::Tensor>& inputs) {               // NOLINT(google-explicit-constructor)
    for (const auto& [key, tensor] : inputs) {
      keys.push_back(key);
      tensors.push_back(tensor);
    }
  }
  Example(std::initializer_list<std::pair<const std::string, at::Tensor>> inputs) : Example(std::map(inputs)) {}

  std::vector<at::Tensor> tensors;
  std::vector<std::string> keys;
};

template <typename M>
Model Model::wrap(const M& module, const Example& example, const WrapOptions& options) {
  const auto pointer = detail::module_pointer(module);
  return wrap_network(detail::eager_network(pointer, detail::forward_of(pointer), example.keys), example.tensors,
                      options);
}

template <typename M, typename Call>
requires(!std::convertible_to<Call, Example>) Model Model::wrap(const M& module, Call call, const Example& example,
                                                                const WrapOptions& options) {
  const auto pointer = detail::module_pointer(module);
  const auto bound = [pointer, call](auto&&... inputs) -> decltype(std::declval<const Call&>()(
                                                           *pointer, std::forward<decltype(inputs)>(inputs)...)) {
    return call(*pointer, std::forward<decltype(inputs)>(inputs)...);
  };
  return wrap_network(detail::eager_network(pointer, bound, example.keys), example.tensors, options);
}

}  // namespace tersor

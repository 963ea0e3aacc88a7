#include "tersor/model/optimizer_state.hpp"

#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "catch.hpp"
#include "support.hpp"

using namespace tersor;
using namespace torch::optim;

namespace {

const at::Tensor& rows() {
  static const at::Tensor indices = torch::tensor({0, 2, 3});
  return indices;
}
const at::Tensor& columns() {
  static const at::Tensor indices = torch::tensor({1, 2, 4, 5});
  return indices;
}

/// What the cut makes of any tensor that belongs to the weight ([5, 6] → [3, 4]) or the bias ([5] → [3]).
at::Tensor cut(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const at::Tensor kept = tensor.detach().index_select(0, rows());
  return kept.dim() == 2 ? kept.index_select(1, columns()) : kept;
}

using State = std::unique_ptr<OptimizerParamState>;

State cut_state(const SGDParamState& old) {
  auto state = std::make_unique<SGDParamState>(old);
  state->momentum_buffer(cut(old.momentum_buffer()));
  return state;
}
template <typename Adam>
State cut_adam(const Adam& old) {
  auto state = std::make_unique<Adam>(old);
  state->exp_avg(cut(old.exp_avg()));
  state->exp_avg_sq(cut(old.exp_avg_sq()));
  state->max_exp_avg_sq(cut(old.max_exp_avg_sq()));
  return state;
}
State cut_state(const AdamParamState& old) { return cut_adam(old); }
State cut_state(const AdamWParamState& old) { return cut_adam(old); }
State cut_state(const RMSpropParamState& old) {
  auto state = std::make_unique<RMSpropParamState>(old);
  state->square_avg(cut(old.square_avg()));
  state->momentum_buffer(cut(old.momentum_buffer()));
  state->grad_avg(cut(old.grad_avg()));
  return state;
}
State cut_state(const AdagradParamState& old) {
  auto state = std::make_unique<AdagradParamState>(old);
  state->sum(cut(old.sum()));
  return state;
}

/// One step on the data of step `i`, which a network of any width sees cut to its own.
void train(torch::nn::Linear& layer, Optimizer& optimizer, int i) {
  torch::manual_seed(100 + i);
  at::Tensor x = torch::randn({8, 6}), y = torch::randn({8, 5});
  if (layer->weight.size(0) == 3) {
    x = x.index_select(1, columns());
    y = y.index_select(1, rows());
  }
  optimizer.step([&] {
    optimizer.zero_grad();
    const at::Tensor loss = (layer->forward(x) - y).pow(2).mean();
    loss.backward();
    return loss;
  });
}

/// Cuts the layer where it stands, with what belongs to it.
void cut_in_place(torch::nn::Linear& layer, Optimizer& optimizer) {
  for (at::Tensor parameter : layer->parameters()) {
    const std::int64_t dims = parameter.dim();
    for (std::int64_t dim = 0; dim < dims; ++dim) {
      const at::Tensor& indices = dim == 0 ? rows() : columns();
      keep_in_state(optimizer, parameter, dim, indices);
      parameter.set_data(parameter.detach().index_select(dim, indices));
      keep_in_grad(parameter, dim, indices);
    }
  }
}

template <typename Kind, typename ParamState, typename Options>
void check_follows(const Options& options) {
  torch::manual_seed(1);
  torch::nn::Linear layer(6, 5);
  Kind optimizer(layer->parameters(), options);
  check_followed(optimizer);
  for (int i = 0; i < 3; ++i) train(layer, optimizer, i);

  torch::nn::Linear narrow(4, 3);
  Kind expected(narrow->parameters(), options);
  for (std::size_t i = 0; i < 2; ++i) {
    narrow->parameters()[i].set_data(cut(layer->parameters()[i]));
    const auto old = optimizer.state().find(layer->parameters()[i].unsafeGetTensorImpl());
    if (old == optimizer.state().end()) continue;
    expected.state()[narrow->parameters()[i].unsafeGetTensorImpl()] =
        cut_state(dynamic_cast<const ParamState&>(*old->second));
  }
  cut_in_place(layer, optimizer);
  for (int i = 3; i < 6; ++i) {
    train(layer, optimizer, i);
    train(narrow, expected, i);
    CHECK(layer->weight.equal(narrow->weight));
    CHECK(layer->bias.equal(narrow->bias));
  }
}

/// A cut that is undone leaves no trace.
template <typename Kind, typename Options>
void check_undone(const Options& options) {
  torch::manual_seed(1);
  torch::nn::Linear layer(6, 5), same(6, 5);
  for (std::size_t i = 0; i < 2; ++i) same->parameters()[i].detach().copy_(layer->parameters()[i].detach());
  Kind optimizer(layer->parameters(), options), expected(same->parameters(), options);
  for (int i = 0; i < 3; ++i) {
    train(layer, optimizer, i);
    train(same, expected, i);
  }
  const OptimizerSnapshot before(optimizer);
  const at::Tensor weight = layer->weight.detach().clone(), bias = layer->bias.detach().clone();
  const at::Tensor weight_gradient = layer->weight.grad(), bias_gradient = layer->bias.grad();
  for (int attempt = 0; attempt < 2; ++attempt) {
    cut_in_place(layer, optimizer);
    if (attempt == 1) train(layer, optimizer, 7);
    layer->weight.set_data(weight);
    layer->bias.set_data(bias);
    layer->weight.mutable_grad() = weight_gradient;
    layer->bias.mutable_grad() = bias_gradient;
    before.restore();
  }
  for (int i = 3; i < 6; ++i) {
    train(layer, optimizer, i);
    train(same, expected, i);
    CHECK(layer->weight.equal(same->weight));
    CHECK(layer->bias.equal(same->bias));
  }
}

class OwnOptimizer : public Optimizer {
 public:
  explicit OwnOptimizer(std::vector<at::Tensor> parameters)
      : Optimizer(std::move(parameters), std::make_unique<SGDOptions>(0.1)) {}
  at::Tensor step(LossClosure) override { return {}; }
};

struct OwnState : OptimizerCloneableParamState<OwnState> {};

}  // namespace

TEST_CASE("training goes on after a cut as in a network that was narrow before", "[optimizer_state]") {
  SECTION("SGD") { check_follows<SGD, SGDParamState>(SGDOptions(0.1)); }
  SECTION("SGD with momentum") { check_follows<SGD, SGDParamState>(SGDOptions(0.1).momentum(0.9).weight_decay(0.1)); }
  SECTION("SGD, nesterov") { check_follows<SGD, SGDParamState>(SGDOptions(0.1).momentum(0.9).nesterov(true)); }
  SECTION("Adam") { check_follows<Adam, AdamParamState>(AdamOptions(0.05)); }
  SECTION("Adam, amsgrad") { check_follows<Adam, AdamParamState>(AdamOptions(0.05).amsgrad(true).weight_decay(0.1)); }
  SECTION("AdamW") { check_follows<AdamW, AdamWParamState>(AdamWOptions(0.05)); }
  SECTION("AdamW, amsgrad") { check_follows<AdamW, AdamWParamState>(AdamWOptions(0.05).amsgrad(true)); }
  SECTION("RMSprop") { check_follows<RMSprop, RMSpropParamState>(RMSpropOptions(0.05)); }
  SECTION("RMSprop, centered, momentum") {
    check_follows<RMSprop, RMSpropParamState>(RMSpropOptions(0.05).centered(true).momentum(0.9));
  }
  SECTION("Adagrad") { check_follows<Adagrad, AdagradParamState>(AdagradOptions(0.05).lr_decay(0.1)); }
}

TEST_CASE("a cut that is undone leaves no trace in the optimizer", "[optimizer_state]") {
  SECTION("SGD") { check_undone<SGD>(SGDOptions(0.1).momentum(0.9)); }
  SECTION("Adam") { check_undone<Adam>(AdamOptions(0.05).amsgrad(true)); }
  SECTION("AdamW") { check_undone<AdamW>(AdamWOptions(0.05)); }
  SECTION("RMSprop") { check_undone<RMSprop>(RMSpropOptions(0.05).centered(true).momentum(0.9)); }
  SECTION("Adagrad") { check_undone<Adagrad>(AdagradOptions(0.05)); }
  SECTION("LBFGS") { check_undone<LBFGS>(LBFGSOptions(0.5).max_iter(4).history_size(3)); }
}

TEST_CASE("LBFGS starts anew after a cut", "[optimizer_state]") {
  torch::manual_seed(1);
  torch::nn::Linear layer(6, 5), narrow(4, 3);
  LBFGS optimizer(layer->parameters(), LBFGSOptions(0.5).max_iter(4).history_size(3));
  for (int i = 0; i < 3; ++i) train(layer, optimizer, i);
  optimizer.param_groups()[0].options().set_lr(1);  // as a scheduler does
  cut_in_place(layer, optimizer);
  CHECK(optimizer.state().empty());
  CHECK(optimizer.param_groups()[0].options().get_lr() == 1);

  for (std::size_t i = 0; i < 2; ++i) narrow->parameters()[i].set_data(layer->parameters()[i].detach().clone());
  LBFGS expected(narrow->parameters(), LBFGSOptions(1).max_iter(4).history_size(3));
  for (int i = 3; i < 6; ++i) {
    train(layer, optimizer, i);
    train(narrow, expected, i);
    CHECK(layer->weight.equal(narrow->weight));
  }
}

TEST_CASE("what was remembered before a cut is not touched", "[optimizer_state]") {
  torch::manual_seed(1);
  torch::nn::Linear layer(6, 5), apart(6, 5);
  SGD optimizer(layer->parameters(), SGDOptions(0.1).momentum(0.9));
  train(layer, optimizer, 0);
  const auto momentum = [&](const at::Tensor& parameter) {
    return dynamic_cast<SGDParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl())).momentum_buffer();
  };
  const at::Tensor old = momentum(layer->weight), values = old.clone();
  keep_in_state(optimizer, apart->weight, 0, rows());  // not this optimizer's
  CHECK(momentum(layer->weight).is_same(old));
  keep_in_state(optimizer, layer->weight, 0, rows());
  CHECK(old.equal(values));
  CHECK(momentum(layer->weight).equal(values.index_select(0, rows())));
  CHECK(momentum(layer->bias).sizes() == at::IntArrayRef{5});
}

TEST_CASE("the accumulated gradient follows a cut", "[optimizer_state]") {
  at::Tensor w = torch::randn({5, 6}).requires_grad_();
  keep_in_grad(w, 0, rows());
  CHECK_FALSE(w.grad().defined());
  (w * w).sum().backward();
  const at::Tensor old = w.grad(), values = old.clone();
  w.set_data(w.detach().index_select(0, rows()));
  keep_in_grad(w, 0, rows());
  CHECK(w.grad().equal(2 * w.detach()));
  CHECK(old.equal(values));
  (w * w).sum().backward();
  CHECK(w.grad().equal(4 * w.detach()));
}

TEST_CASE("a graph that is alive keeps the old shape, and is seen", "[optimizer_state]") {
  torch::nn::Linear layer(6, 5);
  CHECK_FALSE(graph_alive(layer->weight));
  CHECK_FALSE(graph_alive(torch::ones(3)));
  at::Tensor output = layer->forward(torch::ones({2, 6}));
  CHECK(graph_alive(layer->weight));
  CHECK(graph_alive(layer->bias));

  const auto narrow_backward = [&] { layer->forward(torch::ones({2, 4})).sum().backward(); };
  SECTION("what happens without the look") {
    for (std::int64_t dim = 0; dim < 2; ++dim)
      layer->weight.set_data(layer->weight.detach().index_select(dim, dim == 0 ? rows() : columns()));
    layer->bias.set_data(layer->bias.detach().index_select(0, rows()));
    std::string message;
    try {
      narrow_backward();
    } catch (const c10::Error& error) {
      message = error.what();
    }
    CHECK(message.find("invalid gradient") != std::string::npos);
    output = at::Tensor();
    narrow_backward();
    CHECK(layer->weight.grad().equal(torch::full({3, 4}, 2.0F)));
  }
  SECTION("its end is seen") {
    output = at::Tensor();
    CHECK_FALSE(graph_alive(layer->weight));
  }
  SECTION("a backward ends it, as far as nobody holds the output") {
    output.sum().backward();
    CHECK(graph_alive(layer->weight));
    output = at::Tensor();
    CHECK_FALSE(graph_alive(layer->weight));
  }
  SECTION("without gradients there is none") {
    output = at::Tensor();
    const at::NoGradGuard no_grad;
    output = layer->forward(torch::ones({2, 6}));
    CHECK_FALSE(graph_alive(layer->weight));
  }
}

TEST_CASE("an optimizer that is not known is refused by its type", "[optimizer_state]") {
  torch::nn::Linear layer(6, 5), apart(6, 5);
  OwnOptimizer own(layer->parameters());
  check_error(ErrorCode::UnsupportedModel, {"OwnOptimizer", "Adam", "anew"}, [&] { check_followed(own); });
  check_error(ErrorCode::UnsupportedModel, {"OwnOptimizer"}, [&] { OptimizerSnapshot{own}; });
  check_error(ErrorCode::UnsupportedModel, {"OwnOptimizer"}, [&] { keep_in_state(own, layer->weight, 0, rows()); });
  keep_in_state(own, apart->weight, 0, rows());

  SGD sgd(layer->parameters(), 0.1);
  sgd.state()[layer->weight.unsafeGetTensorImpl()] = std::make_unique<OwnState>();
  check_error(ErrorCode::UnsupportedModel, {"SGD", "OwnState"}, [&] { keep_in_state(sgd, layer->weight, 0, rows()); });
}

#include "tersor/passes/masked.hpp"

#include <array>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "catch.hpp"
#include "support.hpp"

using namespace tersor;
using namespace torch::optim;
using tersor::prune::Masked;

namespace {

bool positive_zeros(const at::Tensor& values, const at::Tensor& keep) {
  const at::Tensor dropped = values.detach().masked_select(keep.logical_not());
  return dropped.eq(0).all().item<bool>() && !dropped.signbit().any().item<bool>();
}

const std::map<std::string, at::Tensor>& state_of_case() {
  static const auto tensors = read_tensors("cases/us-revive/state.safetensors");
  return tensors;
}

void step_with(Optimizer& optimizer, const at::Tensor& gradient) {
  optimizer.param_groups()[0].params()[0].mutable_grad() = gradient.clone();  // past the hooks
  optimizer.step();
}

/// The last steps of a run of the case us-revive: kept weights [0] and [3] after a step with gradient 0 and after one
/// more with the constant gradient. `revives`: whether the first of them moves a pruned weight that nothing masks.
struct Expected {
  std::array<float, 2> zero_gradient, constant_gradient;
  bool revives = true;
};

template <typename Kind, typename Options>
void check_revive(const Options& options, const Expected& expected) {
  const at::Tensor gradient = state_of_case().at("grad"), keep = state_of_case().at("sgd.mask").to(at::kBool);
  const at::Tensor zero = torch::zeros_like(gradient);
  for (const bool reloaded : {false, true}) {
    INFO("reloaded: " << reloaded);
    at::Tensor w = state_of_case().at("weight0").clone().requires_grad_();
    at::Tensor unmasked = w.detach().clone().requires_grad_();
    Masks masks;
    auto optimizer = std::make_unique<Masked<Kind>>(masks, std::vector{w}, options);
    Kind plain({unmasked}, options);
    for (int i = 0; i < 3; ++i) {
      step_with(*optimizer, gradient);
      step_with(plain, gradient);
    }
    CHECK(w.equal(unmasked));
    masks.set("w", w, keep);
    unmasked.detach().masked_fill_(keep.logical_not(), 0);
    if (reloaded) {
      std::stringstream file;
      torch::save(*optimizer, file);
      optimizer = std::make_unique<Masked<Kind>>(masks, std::vector{w}, options);
      torch::load(*optimizer, file);
    }

    const auto check_values = [&](const std::array<float, 2>& kept) {
      CHECK(positive_zeros(w, keep));
      CHECK(torch::allclose(w.detach(), torch::tensor({kept[0], 0.0F, 0.0F, kept[1]}), 1e-6, 1e-6));
      CHECK(w.masked_select(keep).equal(unmasked.masked_select(keep)));
    };
    step_with(*optimizer, zero);
    step_with(plain, zero);
    check_values(expected.zero_gradient);
    CHECK((unmasked[1].item<float>() != 0) == expected.revives);
    step_with(*optimizer, gradient);
    step_with(plain, gradient);
    check_values(expected.constant_gradient);
    CHECK(unmasked[1].item<float>() != 0);
  }
}

torch::nn::Sequential network() {
  return torch::nn::Sequential(torch::nn::Linear(10, 16), torch::nn::ReLU(), torch::nn::Linear(16, 3));
}

/// The half of the weights with the larger magnitude, among those that are not zero.
at::Tensor larger_half(const at::Tensor& weight) {
  const at::Tensor size = weight.detach().abs();
  return size.gt(size.masked_select(size.gt(0)).median());
}

void train(torch::nn::Sequential& net, Optimizer& optimizer, int steps) {
  const auto dtype = net->parameters()[0].scalar_type();
  for (int i = 0; i < steps; ++i) {
    optimizer.zero_grad();
    const at::Tensor x = torch::randn({8, 10}).to(dtype), y = torch::randn({8, 3}).to(dtype);
    torch::nn::functional::mse_loss(net->forward(x), y).backward();
    optimizer.step();
  }
}

}  // namespace

// The numbers are what torch.optim of Python gives for the same steps (foreach=False).
TEST_CASE("pruned weights do not come back to life", "[masked]") {
  SECTION("the values of the case") {
    const auto expected = read_tensors("cases/us-revive/expected.safetensors");
    for (const bool adam : {false, true}) {
      const at::Tensor values = expected.at(adam ? "adam.after_step" : "sgd.after_step");
      const Expected kept{{values[0].item<float>(), values[3].item<float>()},
                          adam ? std::array{1.530843F, -3.469156F} : std::array{1.437795F, -3.224882F}};
      if (adam)
        check_revive<Adam>(AdamOptions(0.1), kept);
      else
        check_revive<SGD>(SGDOptions(0.1).momentum(0.9), kept);
    }
  }
  SECTION("SGD, weight decay") {
    check_revive<SGD>(SGDOptions(0.1).momentum(0.9).weight_decay(0.1),
                      {{1.426204F, -2.890886F}, {1.195938F, -2.833834F}});
  }
  SECTION("SGD, dampening") {
    check_revive<SGD>(SGDOptions(0.1).momentum(0.9).dampening(0.5), {{1.7128F, -3.11488F}, {1.61652F, -3.153392F}});
  }
  SECTION("SGD, nesterov") {
    check_revive<SGD>(SGDOptions(0.1).momentum(0.9).nesterov(true), {{1.487795F, -3.204882F}, {1.294016F, -3.282394F}});
  }
  SECTION("SGD, nesterov, weight decay") {
    check_revive<SGD>(SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.1),
                      {{1.268685F, -2.843955F}, {1.00278F, -2.784963F}});
  }
  SECTION("Adam, amsgrad") {
    check_revive<Adam>(AdamOptions(0.1).amsgrad(true), {{1.618127F, -3.381873F}, {1.530884F, -3.469115F}});
  }
  SECTION("Adam, weight decay") {
    check_revive<Adam>(AdamOptions(0.1).weight_decay(0.1), {{1.610947F, -2.610738F}, {1.51861F, -2.5249F}});
  }
  SECTION("AdamW") {
    check_revive<AdamW>(AdamWOptions(0.1).weight_decay(0.1), {{1.545238F, -3.257742F}, {1.442543F, -3.312407F}});
  }
  SECTION("AdamW, amsgrad") {
    check_revive<AdamW>(AdamWOptions(0.1).weight_decay(0.1).amsgrad(true),
                        {{1.545279F, -3.257701F}, {1.442584F, -3.312366F}});
  }
  SECTION("RMSprop") {
    check_revive<RMSprop>(RMSpropOptions(0.1), {{-0.2891299F, -5.289129F}, {-0.7947872F, -5.794786F}, false});
  }
  SECTION("RMSprop, momentum") {
    check_revive<RMSprop>(RMSpropOptions(0.1).momentum(0.9), {{-4.462541F, -9.462539F}, {-6.611074F, -11.61107F}});
  }
  SECTION("RMSprop, centered, momentum, weight decay") {
    check_revive<RMSprop>(RMSpropOptions(0.1).centered(true).momentum(0.9).weight_decay(0.1),
                          {{-3.84784F, -0.2536256F}, {-5.246566F, -0.3475927F}});
  }
  SECTION("Adagrad") {
    check_revive<Adagrad>(AdagradOptions(0.1), {{1.771554F, -3.228446F}, {1.721554F, -3.278445F}, false});
  }
  SECTION("Adagrad, decays") {
    check_revive<Adagrad>(AdagradOptions(0.1).lr_decay(0.1).weight_decay(0.1),
                          {{1.777234F, -2.728175F}, {1.742341F, -2.712389F}, false});
  }
}

TEST_CASE("zeros hold through long training and further pruning", "[masked]") {
  torch::manual_seed(5);
  auto net = network();
  Masks masks;
  Masked<AdamW> optimizer(masks, net->parameters(), AdamWOptions(0.01).weight_decay(0.05));
  train(net, optimizer, 20);
  const std::vector<std::string> names{"0.weight", "2.weight"};
  std::map<std::string, at::Tensor> kept;
  const auto prune = [&] {
    for (const std::string& name : names) {
      const at::Tensor weight = net->named_parameters()[name];
      kept[name] = larger_half(weight);
      masks.set(name, weight, kept[name]);
    }
  };
  const auto sparsity = [&](const std::string& name) {
    const at::Tensor weight = net->named_parameters()[name];
    CHECK(positive_zeros(weight, kept[name]));
    return weight.eq(0).sum().item<std::int64_t>();
  };
  prune();
  train(net, optimizer, 500);
  CHECK(sparsity("0.weight") == 80);  // of 160
  CHECK(sparsity("2.weight") == 24);  // of 48
  const auto first = kept;
  prune();
  train(net, optimizer, 100);
  CHECK(sparsity("0.weight") == 120);
  CHECK(sparsity("2.weight") == 36);
  for (const std::string& name : names) CHECK(positive_zeros(net->named_parameters()[name], first.at(name)));

  SECTION("to double and back") {
    net->to(at::kDouble);
    Masked<Adam> other(masks, net->parameters(), AdamOptions(0.01));
    train(net, other, 5);
    CHECK(sparsity("0.weight") == 120);
    net->to(at::kFloat);
    Masked<Adam> again(masks, net->parameters(), AdamOptions(0.01));
    train(net, again, 5);
    CHECK(sparsity("0.weight") == 120);
  }
  SECTION("a deep copy") {
    torch::nn::Sequential copy(std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone()));
    const Masks theirs = masks.rebound([&](const std::string& name) { return copy->named_parameters()[name]; });
    Masked<Adam> other(theirs, copy->parameters(), AdamOptions(0.01));
    masks.release();
    train(copy, other, 20);
    for (const std::string& name : names) CHECK(positive_zeros(copy->named_parameters()[name], kept[name]));
    CHECK(copy->named_parameters()["0.weight"].eq(0).sum().item<std::int64_t>() == 120);
  }
  SECTION("released, everything trains") {
    masks.release();
    CHECK(sparsity("0.weight") == 120);
    train(net, optimizer, 20);
    CHECK(net->named_parameters()["0.weight"].eq(0).sum().item<std::int64_t>() == 0);
  }
}

TEST_CASE("LBFGS sees masked weights whenever it evaluates", "[masked]") {
  torch::manual_seed(6);
  const bool wolfe = GENERATE(false, true);
  at::Tensor w = torch::ones(6).requires_grad_();
  const at::Tensor scale = torch::tensor({1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.0F});
  const at::Tensor keep = torch::tensor({1, 0, 1, 0, 1, 1}).to(at::kBool);
  Masks masks;
  LBFGSOptions options(wolfe ? 1.0 : 0.1);
  options.max_iter(5);
  if (wolfe) options.line_search_fn("strong_wolfe");
  Masked<LBFGS> optimizer(masks, {w}, options);
  int evaluations = 0;
  bool pruned = false;
  const auto closure = [&] {
    ++evaluations;
    if (pruned) CHECK(positive_zeros(w, keep));
    optimizer.zero_grad();
    const at::Tensor loss = ((w - 3).pow(2) * scale).sum() + (w.sum() - 2).pow(4) * 0.01;
    loss.backward();
    return loss;
  };
  optimizer.step(closure);  // what it remembers of this moves all weights
  REQUIRE_FALSE(w.detach().eq(0).any().item<bool>());
  masks.set("w", w, keep);
  pruned = true;
  const float before = closure().item<float>();
  evaluations = 0;
  const float first = optimizer.step(closure).item<float>();  // the loss of its first evaluation, as LBFGS says
  CHECK(first == before);
  CHECK(evaluations > 1);
  CHECK(positive_zeros(w, keep));
  CHECK(closure().item<float>() < before);
}

TEST_CASE("otherwise a masked optimizer is the optimizer", "[masked]") {
  torch::manual_seed(7);
  auto net = network(), same = network();
  for (std::size_t i = 0; i < 4; ++i) same->parameters()[i].detach().copy_(net->parameters()[i].detach());
  const auto groups = [](torch::nn::Sequential& of) {
    std::vector<OptimizerParamGroup> all;
    all.emplace_back(of->ptr(0)->parameters());
    all.emplace_back(of->ptr(2)->parameters(), std::make_unique<SGDOptions>(SGDOptions(0.01).momentum(0.5)));
    return all;
  };
  Masked<SGD> optimizer(Masks(), groups(net), SGDOptions(0.1).momentum(0.9));
  SGD plain(groups(same), SGDOptions(0.1).momentum(0.9));
  REQUIRE(optimizer.param_groups().size() == 2);
  StepLR scheduler(optimizer, 2, 0.1), plain_scheduler(plain, 2, 0.1);
  for (int i = 0; i < 6; ++i) {
    torch::manual_seed(100 + i);
    train(net, optimizer, 1);
    torch::manual_seed(100 + i);
    train(same, plain, 1);
    scheduler.step();
    plain_scheduler.step();
  }
  const double rate = optimizer.param_groups()[1].options().get_lr();
  CHECK(rate < 0.01);
  CHECK(rate == plain.param_groups()[1].options().get_lr());
  for (std::size_t i = 0; i < 4; ++i) CHECK(net->parameters()[i].equal(same->parameters()[i]));
  optimizer.zero_grad();
  CHECK_FALSE(net->parameters()[0].grad().defined());

  const at::Tensor loss = optimizer.step([&] {
    const at::Tensor value = net->forward(torch::ones({1, 10})).sum();
    value.backward();
    return value;
  });
  CHECK(loss.defined());
  CHECK_FALSE(optimizer.step().defined());

  // Each reads what the other has saved.
  std::stringstream file, plain_file;
  torch::save(optimizer, file);
  torch::save(plain, plain_file);
  SGD loaded(groups(same), SGDOptions(0.1).momentum(0.9));
  torch::load(loaded, file);
  Masked<SGD> masked_loaded(Masks(), groups(net), SGDOptions(0.1).momentum(0.9));
  torch::load(masked_loaded, plain_file);
  const auto momentum = [](const Optimizer& of, const at::Tensor& parameter) {
    return dynamic_cast<SGDParamState&>(*of.state().at(parameter.unsafeGetTensorImpl())).momentum_buffer();
  };
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(momentum(loaded, same->parameters()[i]).equal(momentum(optimizer, net->parameters()[i])));
    CHECK(momentum(masked_loaded, net->parameters()[i]).equal(momentum(plain, same->parameters()[i])));
  }
}

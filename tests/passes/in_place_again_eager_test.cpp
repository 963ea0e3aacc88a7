#include "catch.hpp"

#include <c10/core/InferenceMode.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include "eager/networks.hpp"
#include "io/temporary.hpp"
#include "support.hpp"
#include "tersor/model/load_into.hpp"
#include "tersor/model/wrap.hpp"
#include "tersor/passes/fold.hpp"
#include "tersor/passes/masked.hpp"
#include "tersor/passes/prune.hpp"
#include "tersor/passes/quantize.hpp"
#include "tersor/pipeline/pipeline.hpp"
#include "tersor/runtime/weight_tensor.hpp"

// What happens around the passes: failures, second wraps, changes by others, other types and modes.
using namespace tersor;

namespace {

namespace nn = torch::nn;

/// A pass that fails after those before it have changed the network.
struct Fails {
  static constexpr std::string_view name = "fails";
  static constexpr std::string_view summary = "throws";
  static constexpr auto fields() { return std::tuple<>{}; }
  Need needs() const { return Need::weights; }
  Changed run(Model&, PassContext&) const { throw std::runtime_error("as it should"); }
};

const quantize::Dynamic all_linear{.targets = {"Linear"}};

std::vector<at::Tensor> values_of(const nn::Module& module) {
  std::vector<at::Tensor> values;
  for (const at::Tensor& parameter : module.parameters()) values.push_back(parameter.detach().clone());
  return values;
}

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return x.equal(y); });
}

std::int64_t zeros(const at::Tensor& tensor) { return tensor.eq(0).sum().item<std::int64_t>(); }

template <typename Net, typename Optimizer>
void step(Net& net, Optimizer& optimizer, const at::Tensor& x) {
  const auto loss = [&] {
    optimizer.zero_grad();
    const at::Tensor value = net->forward(x).square().mean();
    value.backward();
    return value;
  };
  optimizer.step(loss);
}

/// Two layers, the second of which is easily replaced.
struct PairImpl : nn::Module {
  PairImpl() : a(24, 24), b(24, 24) {
    register_module("a", a);
    register_module("b", b);
  }
  at::Tensor encode(const at::Tensor& x) { return torch::relu(a(x)); }
  at::Tensor forward(const at::Tensor& x) { return b(encode(x)); }
  nn::Linear a, b;
};
TORCH_MODULE(Pair);

}  // namespace

TEST_CASE("a failed pipeline leaves a layer of two names whole", "[in_place]") {
  torch::manual_seed(1);
  eager::Shared net;
  const at::Tensor x = torch::randn({4, 8}), before = net->forward(x).detach();
  Model model = Model::wrap(net, x);
  for (const Pass& pass : {Pass(prune::L1{}), Pass(prune::Structured{.amount = 0.5}), Pass(all_linear)}) {
    CAPTURE(pass.text());
    REQUIRE_THROWS_WITH((Pipeline{pass, Fails{}}.run(model)), "as it should");
    REQUIRE(net->middle->bias.defined());
    REQUIRE(net->forward(x).equal(before));
    REQUIRE(model.forward({x}).at(0).equal(before));
  }
  // Also when its bias was trained while the weight was codes.
  Pipeline{all_linear}.run(model);
  net->middle->bias.detach().add_(1);
  const at::Tensor trained = net->forward(x).detach();
  REQUIRE_THROWS((Pipeline{prune::L1{}, Fails{}}.run(model)));
  REQUIRE(net->forward(x).equal(trained));
}

TEST_CASE("a layer that was replaced after wrapping is not written to", "[in_place]") {
  torch::manual_seed(2);
  Pair net;
  const at::Tensor x = torch::randn({4, 24});
  const TemporaryDirectory folder;
  Model model = Model::wrap(net, x);
  net->b = net->replace_module("b", nn::Linear(24, 24));
  const auto before = values_of(*net);
  const std::vector<std::string> words{"changed after Model::wrap", "'b' is another layer now", "wrap it again"};
  check_error(ErrorCode::BadUsage, words, [&] { Pipeline{all_linear}.run(model); });
  check_error(ErrorCode::BadUsage, words, [&] { Pipeline{prune::L1{}}.run(model); });
  check_error(ErrorCode::BadUsage, words, [&] { model.save(folder / "net.pt"); });
  check_error(ErrorCode::BadUsage, words, [&] { model.clone(); });
  check_error(ErrorCode::BadUsage, words, [&] { model.mask("a.weight", torch::zeros({24, 24}, at::kBool)); });
  check_error(ErrorCode::BadUsage, words, [&] { model.keep("a.weight", 0, {1, 2}); });
  check_error(ErrorCode::BadUsage, words, [&] { dequantize(model); });
  REQUIRE(same(values_of(*net), before));
  REQUIRE_NOTHROW(Model::wrap(net, x).save(folder / "net.pt"));
}

TEST_CASE("of two models on one module the older one is refused once the other has edited it", "[in_place]") {
  torch::manual_seed(3);
  const at::Tensor x = torch::randn({4, 24});
  for (const Pass& pass : {Pass(prune::Structured{.amount = 0.5}), Pass(all_linear)}) {
    CAPTURE(pass.text());
    auto net = eager::mlp();
    Model older = Model::wrap(net, x), newer = Model::wrap(net, x);
    Pipeline{pass}.run(newer);
    const at::Tensor after = net->forward(x).detach();
    check_error(ErrorCode::BadUsage, {"changed after Model::wrap", "'0."}, [&] { Pipeline{prune::L1{}}.run(older); });
    REQUIRE(net->forward(x).equal(after));
    REQUIRE_NOTHROW(Pipeline{Pass(prune::Structured{})}.run(newer));
  }
}

TEST_CASE("a quantized module that is wrapped again is trained again", "[in_place]") {
  torch::manual_seed(4);
  const at::Tensor x = torch::randn({4, 24});
  const TemporaryDirectory folder;
  auto net = eager::mlp(), loaded = eager::mlp();
  {
    Model model = Model::wrap(net, x);
    Pipeline{all_linear}.run(model);
    model.save(folder / "net.pt");
    load_into(loaded, folder / "net.pt");
    // The first model goes on too: the second wrap has changed nothing.
    const at::Tensor codes = net->parameters()[0];
    Model::wrap(net, x);
    REQUIRE(net->parameters()[0].is_same(codes));
    REQUIRE_NOTHROW(model.clone());
  }
  for (auto* any : {&net, &loaded}) {
    Model again = Model::wrap(*any, x);
    REQUIRE(again.nbytes() < 24 * 64 * 4);
    dequantize(again);
    torch::optim::SGD sgd((*any)->parameters(), 0.1);
    const auto before = values_of(*any->ptr());
    step(*any, sgd, x);
    for (std::size_t i = 0; i < before.size(); ++i) {
      REQUIRE((*any)->parameters()[i].requires_grad());
      REQUIRE_FALSE((*any)->parameters()[i].equal(before[i]));
    }
  }
}

TEST_CASE("layers that the second capture does not read keep their codes", "[in_place]") {
  torch::manual_seed(5);
  Pair net;
  const at::Tensor x = torch::randn({4, 24});
  {
    Model model = Model::wrap(net, x);
    Pipeline{all_linear}.run(model);
  }
  const at::Tensor after = net->forward(x).detach();
  Model part = Model::wrap(
      net, [](PairImpl& self, const at::Tensor& input) { return self.encode(input); }, x);
  REQUIRE(is_weight_tensor(net->a->weight));
  REQUIRE(is_weight_tensor(net->b->weight));
  REQUIRE(net->forward(x).equal(after));
  REQUIRE_THROWS((Pipeline{Fails{}}.run(part)));
  REQUIRE(is_weight_tensor(net->b->weight));
  REQUIRE(net->forward(x).equal(after));
  dequantize(part);
  REQUIRE_FALSE(is_weight_tensor(net->a->weight));
  REQUIRE_FALSE(is_weight_tensor(net->b->weight));
}

TEST_CASE("masks come back with float weights", "[in_place]") {
  torch::manual_seed(6);
  auto net = eager::mlp();
  const at::Tensor x = torch::randn({16, 24});
  Model model = Model::wrap(net, x);
  prune::Masked<torch::optim::SGD> sgd(model.masks(), net->parameters(), 0.1);
  Pipeline{prune::L1{.amount = 0.5}, all_linear}.run(model);
  REQUIRE(model.masks().empty());
  dequantize(model);
  REQUIRE(model.masks().names() == std::vector<std::string>{"0.weight", "2.weight", "4.weight"});
  const std::int64_t half = zeros(net->parameters()[0]);
  REQUIRE(half >= 24 * 64 / 2);
  for (int i = 0; i < 3; ++i) step(net, sgd, x);
  REQUIRE(zeros(net->parameters()[0]) == half);
}

TEST_CASE("a quantized module in half precision stays in it", "[in_place]") {
  torch::manual_seed(7);
  Pair net;
  const at::Tensor x = torch::randn({4, 24}), half = x.to(at::kHalf);
  Model model = Model::wrap(net, x);
  Pipeline{quantize::Dynamic{.targets = {"a"}}}.run(model);
  net->to(at::kHalf);
  const at::Tensor after = net->forward(half).detach();

  REQUIRE_THROWS_WITH((Pipeline{prune::L1{.targets = {"b"}}, Fails{}}.run(model)), "as it should");
  REQUIRE(net->forward(half).equal(after));

  Model again = Model::wrap(net, half);
  REQUIRE(net->a->weight.scalar_type() == at::kHalf);
  REQUIRE(net->forward(half).equal(after));
  dequantize(again);
  REQUIRE(net->a->weight.scalar_type() == at::kHalf);
  // Half has 11 bits, the codes 8.
  REQUIRE(torch::allclose(net->forward(half).to(at::kFloat), after.to(at::kFloat), 0.02, 0.02));
  REQUIRE(again.forward({half}).at(0).equal(net->forward(half)));
}

TEST_CASE("a failed pipeline gives gradients back", "[in_place]") {
  torch::manual_seed(8);
  auto net = eager::mlp();
  const at::Tensor x = torch::randn({16, 24});
  net->forward(x).square().mean().backward();
  std::vector<at::Tensor> before;
  for (const at::Tensor& parameter : net->parameters()) before.push_back(parameter.grad().clone());
  Model model = Model::wrap(net, x);
  for (const Pass& pass : {Pass(prune::L1{}), Pass(prune::Structured{.amount = 0.5}), Pass(all_linear)}) {
    CAPTURE(pass.text());
    REQUIRE_THROWS((Pipeline{pass, Fails{}}.run(model)));
    for (std::size_t i = 0; i < before.size(); ++i) {
      REQUIRE(net->parameters()[i].grad().defined());
      REQUIRE(net->parameters()[i].grad().equal(before[i]));
    }
  }
}

TEST_CASE("LBFGS goes on when weights become codes and floats again", "[in_place]") {
  torch::manual_seed(9);
  auto net = eager::mlp();
  const at::Tensor x = torch::randn({16, 24});
  torch::optim::LBFGS lbfgs(net->parameters(), torch::optim::LBFGSOptions(0.1).max_iter(3));
  step(net, lbfgs, x);
  Model model = Model::wrap(net, x);
  model.follow(lbfgs);
  Pipeline{all_linear}.run(model);
  for (int i = 0; i < 2; ++i) REQUIRE_NOTHROW(step(net, lbfgs, x));
  dequantize(model);
  const auto before = values_of(*net);
  for (int i = 0; i < 2; ++i) REQUIRE_NOTHROW(step(net, lbfgs, x));
  REQUIRE_FALSE(same(values_of(*net), before));
}

TEST_CASE("a pruned clone is taken over with masks, moments and gradients", "[in_place]") {
  torch::manual_seed(10);
  auto net = eager::mlp();
  const at::Tensor x = torch::randn({16, 24});
  torch::optim::Adam adam(net->parameters(), 1e-2);
  Model model = Model::wrap(net, x);
  model.follow(adam);
  Pipeline{prune::L1{.amount = 0.5, .targets = {"0"}}}.run(model);
  step(net, adam, x);
  model.masks().apply();
  const at::Tensor moment =
      dynamic_cast<torch::optim::AdamParamState&>(*adam.state().at(net->parameters()[0].unsafeGetTensorImpl()))
          .exp_avg()
          .clone();
  Model candidate = model.clone();
  Pipeline{prune::Structured{.amount = 0.5}, prune::L1{.amount = 0.5, .targets = {"2"}}}.run(candidate);
  const at::Tensor wanted = candidate.forward({x}).at(0);
  model.assign(candidate);
  REQUIRE(net->parameters()[0].sizes() == at::IntArrayRef({32, 24}));
  net->eval();
  REQUIRE(torch::allclose(net->forward(x), wanted));
  REQUIRE(model.masks().names() == std::vector<std::string>{"0.weight", "2.weight"});
  REQUIRE(model.masks().mask("0.weight").logical_not().equal(net->parameters()[0].eq(0)));
  const std::vector<std::int64_t>& kept = model.kept().at("0.weight:0");
  const at::Tensor now =
      dynamic_cast<torch::optim::AdamParamState&>(*adam.state().at(net->parameters()[0].unsafeGetTensorImpl()))
          .exp_avg();
  REQUIRE(now.equal(moment.index_select(0, torch::tensor(kept))));
  REQUIRE(net->parameters()[0].grad().sizes() == net->parameters()[0].sizes());
  for (int i = 0; i < 3; ++i) REQUIRE_NOTHROW(step(net, adam, x));
}

TEST_CASE("what a clone became that the module cannot follow is refused before anything changes", "[in_place]") {
  torch::manual_seed(11);
  eager::ResNet net;
  net->eval();
  const at::Tensor x = torch::randn({2, 3, 8, 8});
  Model model = Model::wrap(net, x);
  Model folded = model.clone();
  Pipeline{fold::BatchNorm{}}.run(folded);
  const auto before = values_of(*net);
  check_error(ErrorCode::BadUsage, {"bn1", "folded in a clone"}, [&] { model.assign(folded); });
  REQUIRE(same(values_of(*net), before));
  Model quantized = model.clone();
  Pipeline{quantize::Weights{}}.run(quantized);
  const at::Tensor wanted = quantized.forward({x}).at(0);
  model.assign(quantized);
  REQUIRE(is_weight_tensor(net->conv1->weight));
  REQUIRE(torch::allclose(net->forward(x), wanted, 1e-4, 1e-5));
}

TEST_CASE("passes within InferenceMode leave parameters that can be trained", "[in_place]") {
  torch::manual_seed(12);
  const at::Tensor x = torch::randn({8, 24});
  const auto check_trained = [&](const std::function<void(Model&)>& edit) {
    nn::Sequential net(nn::Linear(24, 64), nn::BatchNorm1d(64), nn::ReLU(), nn::Linear(64, 5));
    {
      const c10::InferenceMode inference;
      Model model = Model::wrap(net, x);
      edit(model);
    }
    for (const at::Tensor& parameter : net->parameters()) REQUIRE_FALSE(parameter.is_inference());
    torch::optim::SGD sgd(net->parameters(), 0.1);
    for (int i = 0; i < 2; ++i) REQUIRE_NOTHROW(step(net, sgd, x));
  };
  check_trained([](Model& model) { Pipeline{prune::Structured{.amount = 0.5}}.run(model); });
  check_trained([](Model& model) { Pipeline{prune::L1{}}.run(model); });
  check_trained([](Model& model) { Pipeline{fold::BatchNorm{}}.run(model); });
  check_trained([](Model& model) {
    Pipeline{all_linear}.run(model);
    dequantize(model);
  });
  check_trained([](Model& model) { REQUIRE_THROWS((Pipeline{prune::L1{}, Fails{}}.run(model))); });

  std::optional<nn::Sequential> made;
  {
    const c10::InferenceMode inference;
    made = eager::mlp();
  }
  check_error(ErrorCode::UnsupportedModel, {"'0.", "InferenceMode"}, [&] { Model::wrap(*made, x); });
}

namespace {

/// Merges its adapter into the weight whenever it enters eval mode.
struct AdapterImpl : nn::Module {
  AdapterImpl() {
    w = register_parameter("w", torch::randn({8, 6}), false);
    a = register_parameter("a", torch::randn({2, 6}));
    b = register_parameter("b", torch::randn({8, 2}));
  }
  void train(bool on = true) override {
    const torch::NoGradGuard no_grad;
    if (on == merged) w.add_(b.mm(a), on ? -1 : 1);
    merged = !on;
    nn::Module::train(on);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = x.mm(w.t());
    return merged ? y : y + x.mm(a.t()).mm(b.t());
  }
  at::Tensor w, a, b;
  bool merged = false;
};
TORCH_MODULE(Adapter);

}  // namespace

TEST_CASE("a module whose weights change in eval mode is saved as it is there", "[in_place]") {
  torch::manual_seed(13);
  Adapter net;
  const at::Tensor x = torch::randn({4, 6}), wanted = net->forward(x).detach();
  const TemporaryDirectory folder;
  Model model = Model::wrap(net, x);
  model.save(folder / "net.pt");
  REQUIRE(torch::allclose(Model::load(folder / "net.pt").forward({x}).at(0), wanted, 1e-4, 1e-5));
  REQUIRE_NOTHROW(model.refresh());
  REQUIRE(net->is_training());
  REQUIRE_FALSE(net->merged);
}

TEST_CASE("load_into keeps the module's dtype", "[in_place]") {
  torch::manual_seed(14);
  const at::Tensor x = torch::randn({4, 24});
  const TemporaryDirectory folder;
  auto net = eager::mlp();
  Model model = Model::wrap(net, x);
  model.save(folder / "float.pt");
  Pipeline{quantize::Dynamic{.targets = {"0", "2"}}}.run(model);
  model.save(folder / "codes.pt");
  for (const char* file : {"float.pt", "codes.pt"}) {
    CAPTURE(file);
    auto half = eager::mlp();
    half->to(at::kHalf);
    load_into(half, folder / file);
    for (const at::Tensor& parameter : half->parameters()) REQUIRE(parameter.scalar_type() == at::kHalf);
    const at::Tensor y = half->forward(x.to(at::kHalf));
    REQUIRE(y.scalar_type() == at::kHalf);
    REQUIRE(torch::allclose(y.to(at::kFloat), Model::load(folder / file).forward({x}).at(0), 0.02, 0.02));
  }
  auto wide = eager::mlp();
  wide->to(at::kDouble);
  const auto before = values_of(*wide);
  check_error(ErrorCode::UnsupportedDtype, {"0.weight", "quantized in the file"},
              [&] { load_into(wide, folder / "codes.pt"); });
  REQUIRE(same(values_of(*wide), before));
}

TEST_CASE("load_into takes a file of masked and quantized layers", "[in_place]") {
  torch::manual_seed(15);
  const at::Tensor x = torch::randn({4, 24});
  const TemporaryDirectory folder;
  auto net = eager::mlp(), fresh = eager::mlp();
  Model model = Model::wrap(net, x);
  Pipeline{prune::L1{}, quantize::Dynamic{.targets = {"0"}}}.run(model);
  model.save(folder / "net.pt");
  const Masks masks = load_into(fresh, folder / "net.pt");
  REQUIRE(masks.names() == std::vector<std::string>{"2.weight", "4.weight"});
  REQUIRE(fresh->forward(x).equal(net->forward(x)));
}

TEST_CASE("load_into refuses a module in use before it changes anything", "[in_place]") {
  torch::manual_seed(16);
  const at::Tensor x = torch::randn({4, 24});
  const TemporaryDirectory folder;
  Model::wrap(eager::mlp(), x).save(folder / "net.pt");
  auto quantized = eager::mlp();
  Model model = Model::wrap(quantized, x);
  Pipeline{quantize::Dynamic{.targets = {"2"}}}.run(model);
  const at::Tensor before = quantized->forward(x).detach();
  check_error(ErrorCode::BadUsage, {"2.weight", "holds codes already"},
              [&] { load_into(quantized, folder / "net.pt"); });
  REQUIRE(quantized->forward(x).equal(before));

  auto alive = eager::mlp();
  const at::Tensor y = alive->forward(x);
  check_error(ErrorCode::BadUsage, {"graph of an earlier forward", "0.weight"},
              [&] { load_into(alive, folder / "net.pt"); });
  REQUIRE_NOTHROW(y.sum().backward());
}

namespace {

nn::Sequential upscaler() {
  return nn::Sequential(nn::Conv2d(3, 12, 3), nn::ReLU(),
                        nn::ConvTranspose2d(nn::ConvTranspose2dOptions(12, 8, 2).stride(2)), nn::BatchNorm2d(8),
                        nn::ReLU(), nn::Conv2d(8, 4, 3));
}

/// A convolution and its norm under two names each; the first are used in files.
struct TwoNamesImpl : nn::Module {
  TwoNamesImpl() : conv(3, 8, 3), norm(8), out(8, 4, 3) {
    register_module("z_conv", conv);
    register_module("a_conv", conv);
    register_module("z_norm", norm);
    register_module("a_norm", norm);
    register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& x) { return out(torch::relu(norm(conv(x)))); }
  nn::Conv2d conv;
  nn::BatchNorm2d norm;
  nn::Conv2d out;
};
TORCH_MODULE(TwoNames);

/// Folds, prunes and loads into a fresh one.
template <typename Make>
void check_folded(Make make) {
  auto net = make();
  const at::Tensor x = torch::randn({2, 3, 9, 9});
  for (int i = 0; i < 3; ++i) net->forward(torch::randn({4, 3, 9, 9}) * 2 + 1);
  net->eval();
  const torch::NoGradGuard no_grad;
  const TemporaryDirectory folder;
  const at::Tensor before = net->forward(x);
  Model model = Model::wrap(net, x);
  const auto check_loaded = [&] {
    auto fresh = make();
    model.save(folder / "net.pt", {.overwrite = true});
    load_into(fresh, folder / "net.pt");
    fresh->eval();
    REQUIRE(torch::allclose(fresh->forward(x), net->forward(x), 1e-4, 1e-5));
  };
  Pipeline{fold::BatchNorm{}}.run(model);
  REQUIRE(torch::allclose(net->forward(x), before, 1e-4, 1e-5));
  check_loaded();
  const std::int64_t bytes = model.nbytes();
  Pipeline{prune::Structured{.amount = 0.5}}.run(model);
  REQUIRE(model.nbytes() < 0.7 * bytes);
  check_loaded();
}

}  // namespace

TEST_CASE("a norm behind a transposed convolution is folded, cut and loaded", "[in_place]") {
  torch::manual_seed(17);
  check_folded(upscaler);
}

TEST_CASE("a norm of two names is folded, cut and loaded", "[in_place]") {
  torch::manual_seed(18);
  check_folded([] { return TwoNames(); });
}

namespace {

/// Ties by the member alone, as most programs do: the registry still has the old tensor.
struct TiedImpl : nn::Module {
  explicit TiedImpl(bool bias = false)
      : a(nn::LinearOptions(24, 24).bias(bias)), b(nn::LinearOptions(24, 24).bias(bias)) {
    register_module("a", a);
    register_module("b", b);
    b->weight = a->weight;
  }
  at::Tensor forward(const at::Tensor& x) { return b(torch::relu(a(x))); }
  nn::Linear a, b;
};
TORCH_MODULE(Tied);

}  // namespace

TEST_CASE("a weight that another layer reads unregistered stays float, with that layer's name", "[in_place]") {
  torch::manual_seed(19);
  Tied net;
  const at::Tensor x = torch::randn({4, 24}), before = net->forward(x).detach();
  Model model = Model::wrap(net, x);
  const Report report = Pipeline{quantize::Weights{}}.run(model);
  INFO(report.table());
  REQUIRE(report.table().find("'b' reads its weight too") != std::string::npos);
  check_error(ErrorCode::UnsupportedLayer, {"'a'", "'b' reads its weight too"},
              [&] { Pipeline{all_linear}.run(model); });
  REQUIRE(net->forward(x).equal(before));
}

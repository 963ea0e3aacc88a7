#include "catch.hpp"

#include <thread>

#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "eager/networks.hpp"
#include "io/temporary.hpp"
#include "tersor/model/load_into.hpp"
#include "tersor/model/wrap.hpp"
#include "tersor/passes/fold.hpp"
#include "tersor/passes/masked.hpp"
#include "tersor/passes/prune.hpp"
#include "tersor/passes/quantize.hpp"
#include "tersor/pipeline/pipeline.hpp"
#include "tersor/runtime/weight_tensor.hpp"

using namespace tersor;

namespace {

/// Relative distance of two tensors.
double distance(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).norm().item<double>() / b.norm().item<double>();
}

std::string message_of(const std::function<void()>& what) {
  try {
    what();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl()
      : words(40, 16),
        conv(torch::nn::Conv1dOptions(16, 24, 3).padding(1)),
        image(torch::nn::Conv2dOptions(1, 8, 3)),
        fc(24 + 8, 5) {
    register_module("words", words);
    register_module("conv", conv);
    register_module("image", image);
    register_module("fc", fc);
  }
  torch::Tensor forward(torch::Tensor ids, torch::Tensor picture) {
    const auto a = torch::relu(conv(words(ids).transpose(1, 2))).mean(-1);
    const auto b = torch::relu(image(picture)).mean({-1, -2});
    return fc(torch::cat({a, b}, 1));
  }
  torch::nn::Embedding words;
  torch::nn::Conv1d conv;
  torch::nn::Conv2d image;
  torch::nn::Linear fc;
};
TORCH_MODULE(ConvNet);

}  // namespace

TEST_CASE("a module is quantized in place: dynamic, static, weight-only", "[in_place]") {
  torch::manual_seed(11);
  const torch::NoGradGuard no_grad;
  const torch::Tensor x = torch::randn({32, 24});
  for (const Pass& pass :
       {Pass(quantize::Dynamic{.targets = {"Linear"}}), Pass(quantize::Static{.targets = {"Linear"}}),
        Pass(quantize::Weights{.bits = 8}), Pass(quantize::Weights{.bits = 4, .group_size = 8})}) {
    CAPTURE(pass.text());
    auto net = eager::mlp();
    const torch::Tensor wanted = net->forward(x);
    Model model = Model::wrap(net, x);
    const TemporaryDirectory folder;
    model.save(folder / "float.pt");
    RunOptions options;
    options.calibration = Dataset{{x}, std::nullopt};
    Pipeline{pass}.run(model, options);
    REQUIRE(is_weight_tensor(net->parameters()[0]));
    const torch::Tensor got = net->forward(x);
    REQUIRE_FALSE(got.equal(wanted));
    REQUIRE(distance(got, wanted) < (pass.text().find("bits=4") == std::string::npos ? 0.03 : 0.25));

    // The same as from the file that was exported before.
    Model file = Model::load(folder / "float.pt");
    file.set_example({x});
    Pipeline{pass}.run(file, options);
    REQUIRE(file.forward({x}).at(0).equal(got));
    model.save(folder / "in_place.pt");
    file.save(folder / "from_file.pt");
    REQUIRE(Model::load(folder / "in_place.pt").forward({x}).at(0).equal(got));

    // Back again: what the codes stand for.
    dequantize(model);
    REQUIRE_FALSE(is_weight_tensor(net->parameters()[0]));
    REQUIRE(distance(net->forward(x), wanted) < (pass.text().find("bits=4") == std::string::npos ? 0.03 : 0.25));
    REQUIRE(model.forward({x}).at(0).equal(net->forward(x)));
    REQUIRE_FALSE(model.layer("0").quantized);
  }
}

TEST_CASE("convolutions and embeddings hold codes in place", "[in_place]") {
  torch::manual_seed(12);
  const torch::NoGradGuard no_grad;
  ConvNet net;
  const std::vector<at::Tensor> inputs{torch::randint(40, {3, 9}), torch::randn({3, 1, 7, 7})};
  const torch::Tensor wanted = net->forward(inputs[0], inputs[1]);
  Model model = Model::wrap(net, inputs);
  Pipeline{quantize::Weights{.targets = {"words", "conv", "image", "fc"}}}.run(model);
  for (const at::Tensor& weight : {net->words->weight, net->conv->weight, net->image->weight, net->fc->weight})
    REQUIRE(is_weight_tensor(weight));
  const torch::Tensor got = net->forward(inputs[0], inputs[1]);
  REQUIRE(distance(got, wanted) < 0.03);

  const TemporaryDirectory folder;
  for (const Lowering lowering : {Lowering::tersor, Lowering::aten}) {
    const SaveOptions options{.lowering = lowering, .overwrite = true};
    model.save(folder / "net.pt", options);
    REQUIRE(torch::allclose(Model::load(folder / "net.pt").forward(inputs).at(0), got, 1e-4, 1e-5));
  }
  model.save(folder / "codes.pt");
  ConvNet fresh;
  load_into(fresh, folder / "codes.pt");
  REQUIRE(is_weight_tensor(fresh->words->weight));
  REQUIRE(fresh->forward(inputs[0], inputs[1]).equal(got));
}

TEST_CASE("the gradient passes through quantized layers to what is trained before them", "[in_place]") {
  torch::manual_seed(13);
  auto net = eager::mlp();
  const torch::Tensor x = torch::randn({8, 24});
  Model model = Model::wrap(net, x);
  Pipeline{quantize::Dynamic{.targets = {"2", "4"}}}.run(model);
  torch::optim::SGD sgd(net->parameters(), 0.1);  // weights of codes are among them, and stay
  const torch::Tensor codes = net->parameters()[2].dequantize();
  double first = 0, last = 0;
  for (int step = 0; step < 20; ++step) {
    sgd.zero_grad();
    const torch::Tensor loss = net->forward(x).square().mean();
    loss.backward();
    sgd.step();
    (step == 0 ? first : last) = loss.item<double>();
  }
  REQUIRE(last < 0.5 * first);
  REQUIRE(net->parameters()[2].dequantize().equal(codes));

  // Biases were trained too: the file has them.
  const TemporaryDirectory folder;
  model.save(folder / "net.pt");
  const torch::NoGradGuard no_grad;
  REQUIRE(torch::allclose(Model::load(folder / "net.pt").forward({x}).at(0), net->forward(x), 1e-5, 1e-6));
}

TEST_CASE("what LibTorch does to a quantized module is defined", "[in_place]") {
  torch::manual_seed(14);
  const torch::NoGradGuard no_grad;
  const torch::Tensor x = torch::randn({8, 24});
  auto net = eager::mlp();
  Model model = Model::wrap(net, x);
  Pipeline{quantize::Dynamic{.targets = {"Linear"}}}.run(model);
  const torch::Tensor got = net->forward(x);
  const TemporaryDirectory folder;

  const std::string saving = message_of([&] { torch::save(net, (folder / "net.zip").string()); });
  REQUIRE(saving.find("Model::save") != std::string::npos);
  REQUIRE(message_of([&] { net->parameters()[0].abs(); }).find("aten::abs") != std::string::npos);

  const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
  REQUIRE_FALSE(is_weight_tensor(copy->parameters()[0]));
  REQUIRE(distance(copy->forward(x), got) < 0.03);

  net->to(torch::kCPU);
  REQUIRE(net->forward(x).equal(got));
  // Wrapped again, it is what it was.
  Model again = Model::wrap(net, x);
  REQUIRE(again.layer("0").quantized);
  REQUIRE(net->forward(x).equal(got));
  REQUIRE(again.forward({x}).at(0).equal(got));
}

TEST_CASE("a failed pipeline takes the codes back", "[in_place]") {
  torch::manual_seed(15);
  const torch::NoGradGuard no_grad;
  auto net = eager::mlp();
  const torch::Tensor x = torch::randn({8, 24}), before = net->forward(x), handle = net->parameters()[0];
  Model model = Model::wrap(net, x);
  REQUIRE_THROWS_AS((Pipeline{quantize::Dynamic{.targets = {"Linear"}}, fold::BatchNorm{.targets = {"2"}}}.run(model)),
                    Error);
  REQUIRE(net->parameters()[0].is_same(handle));
  REQUIRE(net->forward(x).equal(before));
}

TEST_CASE("masks hold in training, in a deep copy and after a reload, until they are permanent", "[in_place]") {
  torch::manual_seed(16);
  auto net = eager::mlp();
  const torch::Tensor x = torch::randn({16, 24});
  Model model = Model::wrap(net, x);
  Pipeline{prune::L1{.amount = 0.5}}.run(model);
  const auto zeros = [](const auto& any) { return any->parameters()[0].eq(0).sum().template item<std::int64_t>(); };
  const auto train = [&](auto& any, Masks masks) {
    prune::Masked<torch::optim::Adam> adam(std::move(masks), any->parameters(), 1e-2);
    for (int step = 0; step < 10; ++step) {
      adam.zero_grad();
      any->forward(x).square().mean().backward();
      adam.step();
    }
  };
  const std::int64_t half = 64 * 24 / 2;
  REQUIRE(zeros(net) == half);
  train(net, model.masks());
  REQUIRE(zeros(net) == half);

  const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
  const Model of_copy = Model::wrap(copy, x, {.masks = model.masks()});
  train(copy, of_copy.masks());
  REQUIRE(zeros(copy) == half);
  REQUIRE_FALSE(copy->parameters()[0].equal(net->parameters()[0]));

  const TemporaryDirectory folder;
  model.save(folder / "net.pt");
  auto fresh = eager::mlp();
  train(fresh, load_into(fresh, folder / "net.pt"));
  REQUIRE(zeros(fresh) == half);

  model.permanent();
  train(net, model.masks());
  REQUIRE(zeros(net) < half);
}

TEST_CASE("masks follow a cut and are taken back with it", "[in_place]") {
  torch::manual_seed(17);
  auto net = eager::mlp();
  const torch::Tensor x = torch::randn({16, 24});
  Model model = Model::wrap(net, x);
  Pipeline{prune::L1{.amount = 0.5}, prune::Structured{.amount = 0.25}}.run(model);
  prune::Masked<torch::optim::SGD> sgd(model.masks(), net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const torch::Tensor pattern = net->parameters()[0].eq(0);
  REQUIRE(pattern.size(0) == 48);
  for (int step = 0; step < 5; ++step) {
    sgd.zero_grad();
    net->forward(x).square().mean().backward();
    sgd.step();
  }
  REQUIRE(net->parameters()[0].eq(0).equal(pattern));
  REQUIRE_THROWS_AS((Pipeline{prune::Structured{.amount = 0.5}, fold::BatchNorm{.targets = {"2"}}}.run(model)), Error);
  REQUIRE(model.masks().mask("0.weight").logical_not().equal(pattern));
}

TEST_CASE("load_into says what does not fit and changes nothing", "[in_place]") {
  torch::manual_seed(18);
  const torch::NoGradGuard no_grad;
  const TemporaryDirectory folder;
  Model::wrap(eager::mlp(), torch::randn({2, 24})).save(folder / "mlp.pt");
  eager::Shared other;
  const std::string missing = message_of([&] { load_into(other, folder / "mlp.pt"); });
  INFO(missing);
  REQUIRE(missing.find("first.weight") != std::string::npos);
  torch::nn::Sequential shorter(torch::nn::Linear(24, 64), torch::nn::ReLU(), torch::nn::Linear(64, 32));
  const std::string unknown = message_of([&] { load_into(shorter, folder / "mlp.pt"); });
  INFO(unknown);
  REQUIRE(unknown.find("4.weight") != std::string::npos);
  REQUIRE(shorter->parameters()[0].sizes() == at::IntArrayRef({64, 24}));
}

TEST_CASE("a folded network is loaded into a module with its BatchNorms", "[in_place]") {
  torch::manual_seed(19);
  eager::ResNet net;
  const torch::Tensor x = torch::randn({2, 3, 8, 8});
  for (int i = 0; i < 5; ++i) net->forward(torch::randn({8, 3, 8, 8}) * 2 + 1);
  net->eval();
  const torch::NoGradGuard no_grad;
  Model model = Model::wrap(net, x);
  Pipeline{prune::Structured{.amount = 0.25}, fold::BatchNorm{}, quantize::Weights{}}.run(model);
  const TemporaryDirectory folder;
  model.save(folder / "net.pt");
  eager::ResNet fresh;
  load_into(fresh, folder / "net.pt");
  fresh->eval();
  REQUIRE(torch::allclose(fresh->forward(x), net->forward(x), 1e-4, 1e-5));
}

TEST_CASE("many threads call one quantized module", "[in_place]") {
  torch::manual_seed(20);
  auto net = eager::mlp();
  const torch::Tensor x = torch::randn({4, 24});
  Model model = Model::wrap(net, x);
  Pipeline{quantize::Dynamic{.targets = {"Linear"}}}.run(model);
  net->eval();
  const torch::Tensor wanted = model.forward({x}).at(0);
  std::atomic<int> different = 0;
  std::vector<std::thread> clients;
  for (int client = 0; client < 8; ++client)
    clients.emplace_back([&] {
      const torch::NoGradGuard no_grad;
      for (int call = 0; call < 200; ++call) different += !net->forward(x).equal(wanted);
    });
  for (std::thread& client : clients) client.join();
  REQUIRE(different == 0);
}

namespace {

std::int64_t resident_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmRSS:")) return std::stoll(line.substr(6));
  return 0;
}

}  // namespace

TEST_CASE("rounds of wrapping, pruning and quantizing do not grow memory", "[in_place]") {
  torch::manual_seed(21);
  const torch::Tensor x = torch::randn({4, 24});
  const auto round = [&] {
    auto net = eager::mlp();
    torch::optim::Adam adam(net->parameters(), 1e-3);
    Model model = Model::wrap(net, x);
    model.follow(adam);
    Pipeline{prune::L1{.amount = 0.5}, prune::Structured{.amount = 0.25}, quantize::Dynamic{.targets = {"Linear"}}}.run(
        model);
    net->forward(x);
  };
  for (int i = 0; i < 50; ++i) round();
  const std::int64_t before = resident_kib();
  for (int i = 0; i < 1000; ++i) round();
  // A network is 20 KiB and its capture some 100 KiB: a leak of either would show as megabytes.
  REQUIRE(resident_kib() - before < 2048);
}

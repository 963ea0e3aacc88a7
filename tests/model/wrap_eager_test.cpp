#include "catch.hpp"

#include <torch/csrc/jit/serialization/import.h>
#include <torch/optim/sgd.h>

#include "eager/networks.hpp"
#include "io/temporary.hpp"
#include "tersor/model/wrap.hpp"

using namespace tersor;

namespace {

std::string message_of(const std::function<void()>& what) {
  try {
    what();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace

TEST_CASE("a wrapped module shows its layers and computes what the module does", "[wrap]") {
  torch::manual_seed(1);
  auto net = eager::mlp();
  const torch::Tensor x = torch::randn({4, 24});
  const Model model = Model::wrap(net, {x});
  REQUIRE(model.backend() == Backend::module);
  std::vector<std::string> names;
  for (const Layer& layer : model.layers()) names.push_back(layer.name);
  REQUIRE(names == std::vector<std::string>{"0", "2", "4"});
  REQUIRE(model.layer("0").shape == std::vector<std::int64_t>{64, 24});
  REQUIRE(model.tensor_names() ==
          std::vector<std::string>{"0.bias", "0.weight", "2.bias", "2.weight", "4.bias", "4.weight"});
  REQUIRE(model.forward({x}).at(0).equal(net->forward(x)));
  REQUIRE(net->is_training());
  REQUIRE(model.graph().inputs.size() == 1);
}

TEST_CASE("the saved file computes what the module does, for any batch", "[wrap]") {
  torch::manual_seed(2);
  const TemporaryDirectory folder;
  const auto check_saved = [&](auto net, const Example& example, const std::vector<std::vector<at::Tensor>>& others) {
    const Model model = Model::wrap(net, example);
    const auto path = folder / "net.pt";
    model.save(path, {.overwrite = true});
    torch::jit::Module read = torch::jit::load(path.string());
    net->eval();
    for (const auto& inputs : others) {
      const std::vector<at::Tensor> wanted = model.forward(inputs);
      read.eval();
      const c10::IValue got = read.forward({inputs.begin(), inputs.end()});
      if (wanted.size() == 1) {
        REQUIRE(torch::allclose(got.toTensor(), wanted[0], 1e-5, 1e-6));
      } else {
        for (std::size_t i = 0; i < wanted.size(); ++i)
          REQUIRE(torch::allclose(got.toTupleRef().elements()[i].toTensor(), wanted[i], 1e-5, 1e-6));
      }
    }
  };
  check_saved(eager::mlp(), {torch::randn({4, 24})}, {{torch::randn({1, 24})}, {torch::randn({9, 24})}});
  check_saved(eager::ResNet(), {torch::randn({2, 3, 8, 8})}, {{torch::randn({5, 3, 8, 8})}});
  check_saved(eager::Transformer(), {torch::randn({2, 6, 16})},
              {{torch::randn({5, 6, 16})}, {torch::randn({1, 6, 16})}});
  check_saved(eager::Tagger(), {torch::randint(50, {2, 7})},
              {{torch::randint(50, {5, 7})}, {torch::randint(50, {1, 7})}});
  check_saved(eager::Shared(), {torch::randn({2, 8})}, {{torch::randn({5, 8})}});
  check_saved(eager::Bare(), {torch::randn({2, 10})}, {{torch::randn({5, 10})}});
  check_saved(eager::HardCoded(), {torch::randn({2, 1, 8, 8})}, {{torch::randn({5, 1, 8, 8})}});
  check_saved(eager::TwoInputs(), {torch::randn({2, 6}), torch::randn({2, 4})},
              {{torch::randn({5, 6}), torch::randn({5, 4})}});
  check_saved(eager::Dictionary(), {{"a", torch::randn({2, 6})}, {"b", torch::randn({2, 4})}},
              {{torch::randn({5, 6}), torch::randn({5, 4})}});
}

TEST_CASE("other dimensions vary when a second example says so", "[wrap]") {
  torch::manual_seed(3);
  const TemporaryDirectory folder;
  eager::Transformer net;
  const Model model = Model::wrap(net, {torch::randn({2, 6, 16})}, {.other_example = {torch::randn({3, 9, 16})}});
  model.save(folder / "net.pt");
  torch::jit::Module read = torch::jit::load((folder / "net.pt").string());
  net->eval();
  const torch::Tensor x = torch::randn({5, 4, 16});
  REQUIRE(torch::allclose(read.forward({x}).toTensor(), net->forward(x), 1e-5, 1e-6));
}

TEST_CASE("a callable stands for another method", "[wrap]") {
  eager::TwoInputs net;
  const torch::Tensor a = torch::randn({3, 6});
  const Model model =
      Model::wrap(net, [](eager::TwoInputsImpl& self, const torch::Tensor& x) { return self.encode(x); }, {a});
  REQUIRE(model.forward({a}).at(0).equal(net->encode(a)));
}

namespace {

struct FollowsBatchImpl : torch::nn::Module {
  FollowsBatchImpl() : fc(4, 4) { register_module("fc", fc); }
  torch::Tensor forward(const torch::Tensor& x) { return fc(x) / std::sqrt(double(x.size(0))); }
  torch::nn::Linear fc;
};
TORCH_MODULE(FollowsBatch);

struct BranchesImpl : torch::nn::Module {
  BranchesImpl() : fc(4, 4) { register_module("fc", fc); }
  torch::Tensor forward(const torch::Tensor& x) { return x.sum().item<double>() > 0 ? fc(x) : -fc(x) * 2; }
  torch::nn::Linear fc;
};
TORCH_MODULE(Branches);

struct FixedBatchImpl : torch::nn::Module {
  FixedBatchImpl() : fc(4, 4) { register_module("fc", fc); }
  torch::Tensor forward(const torch::Tensor& x) { return fc(x).view({2, 3, 4}); }
  torch::nn::Linear fc;
};
TORCH_MODULE(FixedBatch);

struct HalfBatchImpl : torch::nn::Module {
  HalfBatchImpl() : fc(4, 4) { register_module("fc", fc); }
  torch::Tensor forward(const torch::Tensor& x) { return fc(x.view({x.size(0) / 2, 2, 4})).sum(1) + double(x.size(0)); }
  torch::nn::Linear fc;
};
TORCH_MODULE(HalfBatch);

}  // namespace

namespace {

struct PairsImpl : torch::nn::Module {
  PairsImpl() : fc(4, 3) { register_module("fc", fc); }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::cat({fc(x.view({x.size(0) / 2, 2, 4})).sum(1), torch::zeros({x.size(0) + 1, 3})});
  }
  torch::nn::Linear fc;
};
TORCH_MODULE(Pairs);

struct InPlaceImpl : torch::nn::Module {
  InPlaceImpl() : fc(4, 3) { register_module("fc", fc); }
  torch::Tensor forward(torch::Tensor x) { return fc(x.mul_(2)); }
  torch::nn::Linear fc;
};
TORCH_MODULE(InPlace);

}  // namespace

TEST_CASE("sizes that are computed from the batch are computed in the file", "[wrap]") {
  const TemporaryDirectory folder;
  Pairs net;
  Model::wrap(net, torch::randn({6, 4}), {.other_example = {torch::randn({10, 4})}}).save(folder / "net.pt");
  const torch::Tensor x = torch::randn({16, 4});
  torch::jit::Module read = torch::jit::load((folder / "net.pt").string());
  REQUIRE(torch::allclose(read.forward({x}).toTensor(), net->forward(x), 1e-5, 1e-6));
}

TEST_CASE("a module that works in place leaves the caller's inputs alone", "[wrap]") {
  InPlace net;
  const torch::Tensor x = torch::ones({2, 4});
  const Model model = Model::wrap(net, x);
  const torch::Tensor once = model.forward({x}).at(0);
  REQUIRE(x.eq(1).all().item<bool>());
  REQUIRE(model.forward({x}).at(0).equal(once));
}

TEST_CASE("what a capture bakes in is refused with its place", "[wrap]") {
  const torch::Tensor x = torch::ones({6, 4});
  const std::string root = message_of([&] { Model::wrap(FollowsBatch(), {x}); });
  INFO(root);
  REQUIRE(root.find("floating-point number") != std::string::npos);
  REQUIRE(root.find("aten::div") != std::string::npos);
  REQUIRE(root.find("fc.") != std::string::npos);
  const std::string branch = message_of([&] { Model::wrap(Branches(), {x}); });
  INFO(branch);
  REQUIRE(branch.find("depends on values") != std::string::npos);
  const std::string fixed = message_of([&] { Model::wrap(FixedBatch(), {x}); });
  INFO(fixed);
  REQUIRE(fixed.find("batch_dims") != std::string::npos);
  REQUIRE(message_of([&] { Model::wrap(FixedBatch(), {x}, {.batch_dims = {-1}}); }).empty());
  REQUIRE(message_of([&] {
            Model::wrap(HalfBatch(), {x}, {.other_example = {torch::ones({10, 4})}});
          }).find("floating-point number") != std::string::npos);
  REQUIRE_FALSE(message_of([&] { Model::wrap(eager::mlp(), Example(std::vector<at::Tensor>{})); }).empty());
}

namespace {

/// Counts its calls, in eval mode too.
struct CountsImpl : torch::nn::Module {
  CountsImpl() : fc(4, 3), calls(register_buffer("calls", torch::zeros({1}))) { register_module("fc", fc); }
  torch::Tensor forward(const torch::Tensor& x) {
    calls.add_(1);
    return fc(x);
  }
  torch::nn::Linear fc;
  torch::Tensor calls;
};
TORCH_MODULE(Counts);

/// A quarter of a sequence, which is the same for 16 and 17 words.
struct QuarterImpl : torch::nn::Module {
  QuarterImpl() : fc(4, 3) { register_module("fc", fc); }
  torch::Tensor forward(const torch::Tensor& x) { return fc(x.narrow(1, 0, x.size(1) / 4)); }
  torch::nn::Linear fc;
};
TORCH_MODULE(Quarter);

/// Has no output in one place.
struct HalfDefinedImpl : torch::nn::Module {
  HalfDefinedImpl() : fc(4, 3) { register_module("fc", fc); }
  std::tuple<torch::Tensor, torch::Tensor> forward(const torch::Tensor& x) { return {fc(x), torch::Tensor()}; }
  torch::nn::Linear fc;
};
TORCH_MODULE(HalfDefined);

/// Of one layer and one buffer under given names.
struct NamedImpl : torch::nn::Module {
  NamedImpl(const std::string& layer, const std::string& buffer)
      : fc(4, 3), shift(register_buffer(buffer, torch::ones({3}))) {
    register_module(layer, fc);
  }
  torch::Tensor forward(const torch::Tensor& x) { return fc(x) + shift; }
  torch::nn::Linear fc;
  torch::Tensor shift;
};
TORCH_MODULE(Named);

}  // namespace

TEST_CASE("a buffer that forward writes to is refused and put back", "[wrap]") {
  Counts net;
  const std::string message = message_of([&] { Model::wrap(net, torch::ones({2, 4})); });
  INFO(message);
  REQUIRE(message.find("'calls'") != std::string::npos);
  REQUIRE(net->calls.item<float>() == 0);
  REQUIRE(net->is_training());
}

TEST_CASE("an integer that two sizes have in common is not taken for a constant", "[wrap]") {
  const torch::Tensor x = torch::ones({2, 16, 4});
  const std::string message = message_of([&] {
    Model::wrap(Quarter(), x, {.other_example = {torch::ones({3, 17, 4})}});
  });
  INFO(message);
  REQUIRE(message.find("an integer at aten::") != std::string::npos);
  REQUIRE(message.find("(4, 4 and 9)") != std::string::npos);
  // Where the sizes tell, it is computed.
  const TemporaryDirectory folder;
  Quarter net;
  Model::wrap(net, x, {.other_example = {torch::ones({3, 24, 4})}}).save(folder / "net.pt");
  torch::jit::Module read = torch::jit::load((folder / "net.pt").string());
  for (const std::int64_t length : {8, 41, 64}) {
    const torch::Tensor y = torch::randn({2, length, 4});
    REQUIRE(torch::allclose(read.forward({y}).toTensor(), net->forward(y), 1e-5, 1e-6));
  }
}

TEST_CASE("names and outputs that no file can hold are named when wrapped", "[wrap]") {
  const torch::Tensor x = torch::ones({2, 4});
  const std::string undefined = message_of([&] { Model::wrap(HalfDefined(), x); });
  INFO(undefined);
  REQUIRE(undefined.find("output 1 of forward is an undefined tensor") != std::string::npos);
  for (const char* name : {"in", "None", "training", "forward"}) {
    const std::string layer = message_of([&] { Model::wrap(Named(name, "shift"), x); });
    const std::string buffer = message_of([&] { Model::wrap(Named("fc", name), x); });
    INFO(layer);
    INFO(buffer);
    for (const std::string& message : {layer, buffer})
      REQUIRE(message.find("Model::wrap: '" + std::string(name) + "'") != std::string::npos);
  }
  const TemporaryDirectory folder;
  for (const char* name : {"from", "layer-1", "1x", "self", "lambda"}) {
    CAPTURE(name);
    Named net(name, "shift");
    Model::wrap(net, x).save(folder / "net.pt", {.overwrite = true});
    REQUIRE(Model::load(folder / "net.pt").forward({x}).at(0).equal(net->forward(x)));
  }
}

TEST_CASE("masks of another network are refused by name", "[wrap]") {
  const torch::Tensor x = torch::ones({2, 24});
  auto net = eager::mlp();
  Model model = Model::wrap(net, x);
  model.mask("2.weight", torch::ones({32, 64}, at::kBool));
  torch::nn::Sequential shorter(torch::nn::Linear(24, 8));
  torch::nn::Sequential other(torch::nn::Linear(24, 64), torch::nn::ReLU(), torch::nn::Linear(64, 8));
  const std::string unknown = message_of([&] { Model::wrap(shorter, x, {.masks = model.masks()}); });
  const std::string shape = message_of([&] { Model::wrap(other, x, {.masks = model.masks()}); });
  INFO(unknown);
  INFO(shape);
  REQUIRE(unknown.find("no parameter '2.weight'") != std::string::npos);
  REQUIRE(shape.find("the mask of '2.weight' is [32, 64], but the parameter is [8, 64]") != std::string::npos);
}

// Weights of codes in modules of torch::nn, whose headers include all of ATen.
#undef TORCH_ASSERT_ONLY_METHOD_OPERATORS

#include <functional>
#include <sstream>

#include <ATen/autocast_mode.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "catch.hpp"
#include "tersor/core/error.hpp"
#include "tersor/runtime/weight_tensor.hpp"

using namespace tersor;

namespace {

const ActivationQuant kNone{};
const ActivationQuant kPerToken{ActivationMode::per_token, 1.0F, 0};
const ActivationQuant kPerTensor{ActivationMode::per_tensor, 0.03F, -9};

struct Registry : torch::nn::Module {
  static torch::OrderedDict<std::string, at::Tensor>& of(torch::nn::Module& module) {
    return module.*(&Registry::parameters_);
  }
};

// Puts `weight` in the place of a module's own.
template <typename Module>
void hold(Module& module, const at::Tensor& weight) {
  Registry::of(module)["weight"] = weight;
  module.weight = weight;
}

c10::intrusive_ptr<PackedLinear> pack(const torch::nn::LinearImpl& layer, const ActivationQuant& activation,
                                      const QuantScheme& scheme = {}) {
  const std::optional<at::Tensor> bias =
      layer.bias.defined() ? std::optional(layer.bias.detach().clone()) : std::nullopt;
  return c10::make_intrusive<PackedLinear>(LayerQuantization{quantize_weight(layer.weight, scheme), activation}, bias);
}

}  // namespace

TEST_CASE("a Linear module runs the integer operator", "[weight_tensor]") {
  for (const bool with_bias : {true, false})
    for (const ActivationQuant& activation : {kNone, kPerToken, kPerTensor})
      for (const QuantScheme& scheme : {QuantScheme{}, QuantScheme{4, false, Granularity::per_group, 8}}) {
        torch::nn::Linear layer(torch::nn::LinearOptions(40, 21).bias(with_bias));
        const auto packed = pack(*layer, activation, scheme);
        hold(*layer, make_weight_tensor(packed, "block.1.weight"));
        for (const at::Tensor& x :
             {at::randn({5, 40}), at::randn({2, 3, 40}), at::randn({40}), at::randn({70, 40}), at::randn({0, 40})}) {
          const c10::NoGradGuard no_grad;
          const at::Tensor y = layer(x);
          REQUIRE(at::equal(y, packed->forward(x, false)));
          const c10::InferenceMode inference;
          REQUIRE(at::equal(layer(x.clone()), y));
        }
      }
}

TEST_CASE("a changed bias counts", "[weight_tensor]") {
  torch::nn::Linear layer(12, 7);
  const auto packed = pack(*layer, kPerToken);
  hold(*layer, make_weight_tensor(packed, "w"));
  const at::Tensor x = at::randn({3, 12});
  {
    const c10::NoGradGuard no_grad;
    layer->bias.add_(1);
  }
  const PackedLinear want({packed->weight(), packed->activation()}, layer->bias.detach());
  REQUIRE(at::equal(layer(x), want.forward(x, false)));
}

TEST_CASE("gradients of a module are those of its dequantized twin", "[weight_tensor]") {
  for (const bool with_bias : {true, false})
    for (const ActivationQuant& activation : {kNone, kPerToken, kPerTensor})
      for (const at::Tensor& x : {at::randn({5, 12}), at::randn({2, 3, 12}), at::randn({12})}) {
        torch::nn::Linear layer(torch::nn::LinearOptions(12, 7).bias(with_bias));
        const auto packed = pack(*layer, activation);
        torch::nn::Linear twin(torch::nn::LinearOptions(12, 7).bias(with_bias));
        twin->weight.set_data(dequantize(packed->weight()));
        if (with_bias) twin->bias.set_data(layer->bias.detach().clone());
        hold(*layer, make_weight_tensor(packed, "w"));

        const at::Tensor a = x.clone().requires_grad_(true);
        const at::Tensor b = x.clone().requires_grad_(true);
        const at::Tensor y = layer(a);
        REQUIRE(at::equal(y, packed->forward(x, false)));
        const at::Tensor weights = at::randn_like(y);
        (y * weights).sum().backward();
        (twin(b) * weights).sum().backward();
        REQUIRE(at::equal(a.grad(), b.grad()));
        if (with_bias) REQUIRE(at::equal(layer->bias.grad(), twin->bias.grad()));
        REQUIRE_FALSE(layer->weight.grad().defined());
      }
}

TEST_CASE("training leaves the codes alone", "[weight_tensor]") {
  torch::nn::Sequential net(torch::nn::Linear(6, 5), torch::nn::Linear(5, 3));
  auto& quantized = *net[1]->as<torch::nn::LinearImpl>();
  hold(quantized, make_weight_tensor(pack(quantized, kPerToken), "1.weight"));
  for (const bool asked : {false, true}) {
    for (const at::Tensor& parameter : net->parameters()) parameter.requires_grad_(asked || parameter.requires_grad());
    const at::Tensor codes = quantization_of(quantized.weight).weight.codes.clone();
    const at::Tensor first = net[0]->as<torch::nn::LinearImpl>()->weight.detach().clone();
    const at::Tensor bias = quantized.bias.detach().clone();
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
    torch::optim::Adam adam(net->parameters());
    net->forward(at::randn({4, 6})).square().sum().backward();
    sgd.step();
    adam.step();
    REQUIRE_FALSE(quantized.weight.grad().defined());
    REQUIRE(at::equal(quantization_of(quantized.weight).weight.codes, codes));
    REQUIRE_FALSE(at::equal(net[0]->as<torch::nn::LinearImpl>()->weight, first));
    REQUIRE_FALSE(at::equal(quantized.bias, bias));
    sgd.zero_grad();
    net->zero_grad();
  }
}

namespace {

/// Inputs of other types are quantized as floats, and the result becomes that type: the same bits.
at::Tensor through_float(const PackedLinear& packed, const at::Tensor& x, const at::Tensor& bias) {
  const LayerQuantization quantization{packed.weight(), packed.activation()};
  return PackedLinear(quantization, bias.detach().to(at::kFloat)).forward(x.to(at::kFloat), false).to(x.scalar_type());
}

}  // namespace

TEST_CASE("a module with a weight of codes is moved, copied and listed", "[weight_tensor]") {
  torch::nn::Linear layer(8, 5);
  const auto packed = pack(*layer, kPerToken);
  hold(*layer, make_weight_tensor(packed, "w"));
  const at::Tensor x = at::randn({3, 8});
  const at::Tensor y = layer(x).detach();

  layer->to(at::kCPU);
  REQUIRE(at::equal(layer(x), y));
  layer->eval();
  const auto parameters = layer->named_parameters();
  REQUIRE(parameters["weight"].is_same(layer->weight));
  REQUIRE(parameters["weight"].numel() == 40);
  REQUIRE(parameters["weight"].sizes() == at::IntArrayRef({5, 8}));

  // A clone is a float module of its own.
  const auto clone = std::dynamic_pointer_cast<torch::nn::LinearImpl>(layer->clone());
  REQUIRE_FALSE(is_weight_tensor(clone->weight));
  REQUIRE(clone->named_parameters()["weight"].is_same(clone->weight));
  REQUIRE(at::equal(clone->weight, dequantize(packed->weight())));
  {
    const c10::NoGradGuard no_grad;
    clone->weight.zero_();
  }
  REQUIRE(at::equal(layer(x), y));

  const at::Tensor handle = layer->weight;
  layer->to(at::kHalf);
  REQUIRE(handle.is_same(layer->weight));
  REQUIRE(is_weight_tensor(layer->weight));
  REQUIRE(layer->weight.scalar_type() == at::kHalf);
  const at::Tensor half = x.to(at::kHalf);
  REQUIRE(at::equal(layer(half), through_float(*packed, half, layer->bias)));
  layer->to(at::kCPU, at::kFloat);
  layer->bias.set_data(packed->bias().value().clone());  // what half has rounded
  REQUIRE(at::equal(layer(x), y));

  std::string message;
  try {
    layer->to(at::kDouble);
  } catch (const Error& e) {
    message = e.what();
  }
  REQUIRE(message.find("UnsupportedLayer") == 0);
  REQUIRE(message.find("tersor::dequantize(model)") != std::string::npos);
  REQUIRE(at::equal(layer(x), y));
}

TEST_CASE("torch::save refuses a weight of codes", "[weight_tensor]") {
  torch::nn::Sequential net(torch::nn::Linear(4, 3));
  auto& layer = *net[0]->as<torch::nn::LinearImpl>();
  hold(layer, make_weight_tensor(pack(layer, kPerToken), "0.weight"));
  for (const bool whole : {true, false}) {
    std::string message;
    std::ostringstream file;
    try {
      whole ? torch::save(net, file) : torch::save(layer.weight, file);
    } catch (const c10::Error& e) {
      message = e.what_without_backtrace();
    }
    REQUIRE(message.find("'0.weight'") != std::string::npos);
    REQUIRE(message.find("tersor::dequantize(model)") != std::string::npos);
    REQUIRE(message.find("tersor::Model::save") != std::string::npos);
  }
}

TEST_CASE("convolution and embedding modules", "[weight_tensor]") {
  torch::nn::Conv2d conv(torch::nn::Conv2dOptions(4, 6, 3).stride(2).padding(1).groups(2));
  const auto packed = c10::make_intrusive<PackedConv>(quantize_weight(conv->weight, {}), conv->bias.detach().clone());
  hold(*conv, make_weight_tensor(packed, "conv.weight"));
  const at::Tensor x = at::randn({2, 4, 9, 9});
  REQUIRE(at::equal(conv(x), packed->forward(x, {2, 2}, {1, 1}, {1, 1}, 2)));

  const auto options = torch::nn::Conv1dOptions(4, 6, 3).padding(torch::kSame).padding_mode(torch::kReflect);
  torch::nn::Conv1d line(options);
  const at::Tensor line_x = at::randn({2, 4, 9});
  const auto line_packed = c10::make_intrusive<PackedConv>(quantize_weight(line->weight, {}), std::nullopt);
  torch::nn::Conv1d line_twin(options);
  line_twin->weight.set_data(line_packed->dense().clone());
  line_twin->bias.set_data(line->bias.detach().clone());
  hold(*line, make_weight_tensor(line_packed, "line.weight"));
  REQUIRE(at::equal(line(line_x), line_twin(line_x)));

  torch::nn::Embedding table(torch::nn::EmbeddingOptions(10, 6).padding_idx(2));
  const auto rows = c10::make_intrusive<PackedEmbedding>(quantize_weight(table->weight, {}));
  hold(*table, make_weight_tensor(rows, "table.weight"));
  const at::Tensor ids = at::randint(0, 10, {3, 4}, at::kLong);
  REQUIRE(at::equal(table(ids), rows->forward(ids)));
  const auto clone = std::dynamic_pointer_cast<torch::nn::EmbeddingImpl>(table->clone());
  REQUIRE(at::equal(clone->weight, dequantize(rows->weight())));
}

TEST_CASE("the tracer records calls with a weight of codes", "[weight_tensor]") {
  torch::nn::Linear layer(4, 3);
  hold(*layer, make_weight_tensor(pack(*layer, kPerToken), "w"));
  const at::Tensor x = at::randn({2, 4});
  const auto trace = [&](torch::jit::Module* self) {
    return torch::jit::tracer::trace(
        {x}, [&](torch::jit::Stack inputs) { return torch::jit::Stack{layer(inputs.at(0).toTensor())}; },
        [](const at::Tensor&) { return std::string(); }, true, false, self);
  };
  torch::jit::Module mirror("mirror");
  mirror.register_parameter("weight", layer->weight, false);
  mirror.register_parameter("bias", layer->bias, false);
  const auto [state, outputs] = trace(&mirror);
  REQUIRE(at::equal(outputs.at(0).toTensor(), layer(x)));
  const std::string graph = state->graph->toString();
  INFO(graph);
  REQUIRE(graph.find("GetAttr[name=\"weight\"]") != std::string::npos);
  REQUIRE(graph.find("aten::addmm") != std::string::npos);
  // It has no memory to make a constant of.
  REQUIRE_THROWS_AS(trace(nullptr), c10::Error);
  REQUIRE(at::equal(layer(x), outputs.at(0).toTensor()));
}

TEST_CASE("autocast reaches a weight of codes", "[weight_tensor]") {
  torch::nn::Linear layer(6, 4);
  const auto packed = pack(*layer, kPerToken);
  hold(*layer, make_weight_tensor(packed, "w"));
  const at::Tensor x = at::randn({2, 6});
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::Tensor y = layer(x);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  REQUIRE(y.scalar_type() == at::kBFloat16);
  REQUIRE(at::equal(y, through_float(*packed, x.to(at::kBFloat16), layer->bias.to(at::kBFloat16))));
}

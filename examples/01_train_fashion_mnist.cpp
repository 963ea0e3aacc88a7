// Trains a small convolutional network on Fashion-MNIST in C++ and saves it as TorchScript, with the data that
// compression and evaluation need beside it.
//
//   01_train_fashion_mnist [DIRECTORY] [--steps N] [--data-only]
//
// Writes cnn.pt, calibration.safetensors (1024 training images) and test.safetensors (10000 images) into DIRECTORY.
// The network is built as a TorchScript module whose submodules hold the parameters, so the saved file carries
// readable layer names (conv1, bn1, …) and needs no Python anywhere.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <string>

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/optim/adam.h>

#include "fashion_mnist.hpp"

namespace {

using torch::jit::Module;

// Weights and bias uniform in ±1/√fan_in, as torch::nn does it.
Module with_parameters(const char* type, at::IntArrayRef shape) {
  Module m(type);
  const at::Tensor weight = at::empty(shape);
  const double bound = 1.0 / std::sqrt(static_cast<double>(weight[0].numel()));
  m.register_parameter("weight", weight.uniform_(-bound, bound).set_requires_grad(true), false);
  m.register_parameter("bias", at::empty({shape[0]}).uniform_(-bound, bound).set_requires_grad(true), false);
  return m;
}

Module conv3x3(std::int64_t in, std::int64_t out) {
  Module m = with_parameters("Conv2d", {out, in, 3, 3});
  m.define("def forward(self, x):\n  return torch.conv2d(x, self.weight, self.bias, [1, 1], [1, 1])\n");
  return m;
}

Module linear(std::int64_t in, std::int64_t out) {
  Module m = with_parameters("Linear", {out, in});
  m.define("def forward(self, x):\n  return torch.linear(x, self.weight, self.bias)\n");
  return m;
}

Module batch_norm(std::int64_t channels) {
  Module m("BatchNorm2d");
  m.register_parameter("weight", at::ones({channels}).set_requires_grad(true), false);
  m.register_parameter("bias", at::zeros({channels}).set_requires_grad(true), false);
  m.register_buffer("running_mean", at::zeros({channels}));
  m.register_buffer("running_var", at::ones({channels}));
  m.register_attribute("training", c10::BoolType::get(), true);
  m.define(R"(
def forward(self, x):
  return torch.batch_norm(x, self.weight, self.bias, self.running_mean, self.running_var, self.training, 0.1, 1e-05, True)
)");
  return m;
}

Module network() {
  Module m("FashionCNN");
  m.register_module("conv1", conv3x3(1, 16));
  m.register_module("bn1", batch_norm(16));
  m.register_module("conv2", conv3x3(16, 32));
  m.register_module("bn2", batch_norm(32));
  m.register_module("conv3", conv3x3(32, 64));
  m.register_module("bn3", batch_norm(64));
  m.register_module("fc1", linear(64 * 7 * 7, 64));
  m.register_module("fc2", linear(64, 10));
  m.define(R"(
def forward(self, x):
  x = torch.max_pool2d(torch.relu(self.bn1.forward(self.conv1.forward(x))), [2, 2])
  x = torch.max_pool2d(torch.relu(self.bn2.forward(self.conv2.forward(x))), [2, 2])
  x = torch.relu(self.bn3.forward(self.conv3.forward(x)))
  x = torch.relu(self.fc1.forward(torch.flatten(x, 1)))
  return self.fc2.forward(x)
)");
  return m;
}

double accuracy(Module& model, const tersor::Dataset& data) {
  c10::InferenceMode guard;
  model.eval();
  std::int64_t right = 0;
  for (std::int64_t i = 0; i < data.size(); i += 1000) {
    const tersor::Dataset part = data.slice(i, 1000);
    const at::Tensor answer = model.forward({part.inputs[0]}).toTensor().argmax(1);
    right += answer.eq(*part.labels).sum().item<std::int64_t>();
  }
  return 100.0 * static_cast<double>(right) / static_cast<double>(data.size());
}

void train(Module& model, const tersor::Dataset& data, std::int64_t steps) {
  constexpr std::int64_t batch = 128;
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& p : model.parameters()) parameters.push_back(p);
  torch::optim::Adam adam(parameters, torch::optim::AdamOptions(1e-3));
  model.train();
  at::Tensor order;
  const std::int64_t per_epoch = (data.size() + batch - 1) / batch;
  for (std::int64_t step = 0; step < steps; ++step) {
    const std::int64_t at = step % per_epoch;
    if (at == 0) order = at::randperm(data.size(), at::kLong);
    const at::Tensor index = order.slice(0, at * batch, std::min((at + 1) * batch, data.size()));
    const at::Tensor output = model.forward({data.inputs[0].index_select(0, index)}).toTensor();
    const at::Tensor loss = at::cross_entropy_loss(output, data.labels->index_select(0, index));
    adam.zero_grad();
    loss.backward();
    adam.step();
    if ((step + 1) % 100 == 0 || step + 1 == steps)
      std::cout << fmt::format("step {:4} of {}  loss {:.3f}\n", step + 1, steps, loss.item<double>()) << std::flush;
  }
}

}  // namespace

int main(int argc, char** argv) try {
  std::filesystem::path out = ".";
  std::int64_t steps = 2 * 469;  // two epochs
  bool data_only = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--data-only")
      data_only = true;
    else if (argument == "--steps" && i + 1 < argc)
      steps = std::stoll(argv[++i]);
    else
      out = argument;
  }
  std::filesystem::create_directories(out);
  for (const char* name : {"calibration.safetensors", "test.safetensors"}) std::filesystem::remove(out / name);

  const tersor::Dataset training = fashion_mnist::train();
  const tersor::Dataset test = fashion_mnist::test();
  tersor::write_dataset(out / "calibration.safetensors", training.slice(0, 1024));
  tersor::write_dataset(out / "test.safetensors", test);
  if (data_only) return 0;

  at::manual_seed(0);
  Module model = network();
  train(model, training, steps);
  std::cout << fmt::format("test accuracy {:.2f} %\n", accuracy(model, test));
  model.eval();
  model.save((out / "cnn.pt").string());
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}

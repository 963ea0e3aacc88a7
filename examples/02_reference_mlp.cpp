// Writes a fully connected network, 768-512-256-128 with random weights, as TorchScript, and data for it: the network
// on which speed is compared.
//
//   02_reference_mlp [DIRECTORY]
//
// Writes mlp.pt, calibration.safetensors (512 random samples) and test.safetensors (1000 random samples).
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <iostream>

#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/jit/api/module.h>

#include "tersor/io/dataset.hpp"

namespace {

// Uniform in ±1/√in, as torch::nn::Linear starts.
torch::jit::Module linear(std::int64_t in, std::int64_t out) {
  torch::jit::Module m("Linear");
  const double bound = 1.0 / std::sqrt(static_cast<double>(in));
  m.register_parameter("weight", at::empty({out, in}).uniform_(-bound, bound).set_requires_grad(true), false);
  m.register_parameter("bias", at::empty({out}).uniform_(-bound, bound).set_requires_grad(true), false);
  m.define("def forward(self, x):\n  return torch.linear(x, self.weight, self.bias)\n");
  return m;
}

}  // namespace

int main(int argc, char** argv) try {
  const std::filesystem::path out = argc > 1 ? argv[1] : ".";
  std::filesystem::create_directories(out);
  for (const char* name : {"mlp.pt", "calibration.safetensors", "test.safetensors"})
    std::filesystem::remove(out / name);
  at::manual_seed(0);

  torch::jit::Module model("MLP");
  model.register_module("fc1", linear(768, 512));
  model.register_module("fc2", linear(512, 256));
  model.register_module("fc3", linear(256, 128));
  model.define(
      "def forward(self, x):\n  return "
      "self.fc3.forward(torch.relu(self.fc2.forward(torch.relu(self.fc1.forward(x)))))\n");
  model.eval();
  model.save((out / "mlp.pt").string());
  tersor::write_dataset(out / "calibration.safetensors", {{at::randn({512, 768})}, {}});
  tersor::write_dataset(out / "test.safetensors", {{at::randn({1000, 768})}, {}});
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}

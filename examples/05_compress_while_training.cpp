// Compresses a network inside the program that trained it: its own modules become smaller in place, training goes on
// with the same optimizer, then the same modules hold INT8 weights.
#include <iostream>

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include "tersor/model/wrap.hpp"
#include "tersor/tersor.hpp"

namespace nn = torch::nn;

int main() try {
  torch::manual_seed(0);
  const torch::Tensor inputs = torch::randn({512, 64}), labels = inputs.narrow(1, 0, 10).argmax(1);
  nn::Sequential net(nn::Linear(64, 256), nn::ReLU(), nn::Linear(256, 256), nn::ReLU(), nn::Linear(256, 10));
  torch::optim::Adam optimizer(net->parameters(), 1e-3);
  const auto train = [&](int steps) {
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      nn::functional::cross_entropy(net->forward(inputs), labels).backward();
      optimizer.step();
    }
  };
  const auto accuracy = [&] {
    const torch::NoGradGuard no_grad;
    return net->forward(inputs).argmax(1).eq(labels).to(torch::kDouble).mean().item<double>();
  };

  train(60);
  std::cout << "trained:        accuracy " << accuracy() << '\n';
  // [README]
  tersor::Model model = tersor::Model::wrap(net, {inputs.narrow(0, 0, 8)});
  model.follow(optimizer);  // its momentum is cut with the weights
  std::cout << tersor::Pipeline{tersor::prune::Structured{.amount = 0.5}}.run(model).table();

  train(60);  // the same net, the same optimizer, half as wide
  tersor::Pipeline{tersor::quantize::Dynamic{}}.run(model);
  const torch::Tensor y = net->forward(inputs);  // the same call, integer products
  // [/README]
  std::cout << "small and INT8: accuracy " << accuracy() << ", outputs " << y.sizes() << '\n';
  return accuracy() > 0.5 ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}

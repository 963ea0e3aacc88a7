// Gradual magnitude pruning in a training loop: every round masks more weights, training between the rounds lets the
// others make up for it, and no optimizer brings a masked weight back.
#include <iostream>

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include "tersor/model/wrap.hpp"
#include "tersor/passes/masked.hpp"
#include "tersor/tersor.hpp"

namespace nn = torch::nn;

int main() try {
  torch::manual_seed(0);
  const torch::Tensor inputs = torch::randn({512, 64}), labels = inputs.narrow(1, 0, 10).argmax(1);
  nn::Sequential net(nn::Linear(64, 128), nn::ReLU(), nn::Linear(128, 10));

  // [README]
  tersor::Model model = tersor::Model::wrap(net, {inputs.narrow(0, 0, 8)});
  tersor::prune::Masked<torch::optim::Adam> optimizer(model.masks(), net->parameters(), 2e-3);
  for (int round = 0; round < 3; ++round) {
    tersor::Pipeline{tersor::prune::L1{.amount = 0.5}}.run(model);  // half of what is left
    for (int step = 0; step < 40; ++step) {
      optimizer.zero_grad();
      nn::functional::cross_entropy(net->forward(inputs), labels).backward();
      optimizer.step();
    }
    const torch::Tensor weight = net->parameters().front();
    std::cout << "round " << round + 1 << ": " << weight.eq(0).sum().item<int64_t>() << " of " << weight.numel()
              << " weights of the first layer are zero\n";
  }
  model.permanent();  // masks end, zeros stay
  // [/README]
  const auto zeros = net->parameters().front().eq(0).sum().item<int64_t>();
  return zeros == 64 * 128 * 7 / 8 ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}

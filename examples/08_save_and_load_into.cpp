// A pruned and quantized network goes into a file, and from there into a module that the program constructs at its full
// size: load_into resizes it and fills it, codes included.
//
//   08_save_and_load_into [DIRECTORY]     writes net-small.pt
#include <filesystem>
#include <iostream>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "tersor/model/load_into.hpp"
#include "tersor/tersor.hpp"

namespace nn = torch::nn;

nn::Sequential make_net() {
  return nn::Sequential(nn::Linear(64, 256), nn::ReLU(), nn::Linear(256, 256), nn::ReLU(), nn::Linear(256, 10));
}

int main(int argc, char** argv) try {
  if (argc > 1) {
    std::filesystem::create_directories(argv[1]);
    std::filesystem::current_path(argv[1]);
  }
  torch::manual_seed(0);
  const torch::Tensor x = torch::randn({8, 64});

  // [README]
  nn::Sequential net = make_net();
  tersor::Model model = tersor::Model::wrap(net, {x});
  tersor::Pipeline{tersor::prune::Structured{.amount = 0.5}, tersor::quantize::Dynamic{}}.run(model);
  model.save("net-small.pt", {.overwrite = true});

  nn::Sequential fresh = make_net();
  tersor::load_into(fresh, "net-small.pt");
  // [/README]
  const bool same = fresh->forward(x).equal(net->forward(x));
  std::cout << "the loaded network " << (same ? "gives the same bits" : "differs") << '\n';
  return same ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}

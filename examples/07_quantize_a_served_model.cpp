// Quantizes a model that is being served, in place: the handler goes on calling the same module, from several threads,
// and gets the same bits from each of them.
#include <atomic>
#include <iostream>
#include <thread>
#include <vector>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "tersor/model/wrap.hpp"
#include "tersor/tersor.hpp"

namespace nn = torch::nn;

int main() try {
  torch::manual_seed(0);
  nn::Sequential net(nn::Linear(768, 512), nn::ReLU(), nn::Linear(512, 256), nn::ReLU(), nn::Linear(256, 128));
  net->eval();
  const torch::Tensor request = torch::randn({1, 768});
  const auto serve = [&] {
    const torch::InferenceMode inference;
    return net->forward(request);
  };
  const torch::Tensor before = serve();

  // [README]
  tersor::Model model = tersor::Model::wrap(net, {request});
  tersor::Pipeline{tersor::quantize::Dynamic{}}.run(model);
  std::cout << "weights: " << model.nbytes() << " bytes\n";
  const torch::Tensor after = serve();
  // [/README]

  std::atomic<int> different = 0;
  std::vector<std::thread> clients;
  for (int client = 0; client < 4; ++client)
    clients.emplace_back([&] {
      for (int call = 0; call < 50; ++call) different += !serve().equal(after);
    });
  for (std::thread& client : clients) client.join();
  const double error = (after - before).norm().item<double>() / before.norm().item<double>();
  std::cout << "relative difference to float: " << error << ", calls that differ from one another: " << different
            << '\n';

  dequantize(model);  // float weights again, with the values of the codes
  return different == 0 && error < 0.05 ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}

// What a module pays for calling: the reference MLP (768-512-256-128, ReLU) as float, and quantized in place, both
// through the module's own forward; and its three packed layers called directly, with nothing between. One thread.
#include <benchmark/benchmark.h>

#include <deque>

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "tersor/model/wrap.hpp"
#include "tersor/passes/quantize.hpp"
#include "tersor/pipeline/pipeline.hpp"
#include "tersor/runtime/packed.hpp"
#include "tersor/runtime/weight_tensor.hpp"

namespace {

torch::nn::Sequential make_mlp() {
  torch::manual_seed(1);
  using torch::nn::Linear;
  using torch::nn::ReLU;
  return torch::nn::Sequential(Linear(768, 512), ReLU(), Linear(512, 256), ReLU(), Linear(256, 128));
}

void call(benchmark::State& state, torch::nn::Sequential net) {
  const c10::InferenceMode inference;
  const at::Tensor x = torch::randn({state.range(0), 768});
  for (auto _ : state) benchmark::DoNotOptimize(net->forward(x));
}

void module_float(benchmark::State& state) { call(state, make_mlp()); }

void module_int8(benchmark::State& state) {
  torch::nn::Sequential net = make_mlp();
  tersor::Model model = tersor::Model::wrap(net, torch::randn({2, 768}));
  tersor::Pipeline{tersor::quantize::Dynamic{}}.run(model);
  call(state, net);
}

void packed_int8(benchmark::State& state) {
  torch::nn::Sequential net = make_mlp();
  tersor::Model model = tersor::Model::wrap(net, torch::randn({2, 768}));
  tersor::Pipeline{tersor::quantize::Dynamic{}}.run(model);
  std::deque<tersor::PackedLinear> layers;
  for (const tersor::Layer& layer : model.layers()) layers.emplace_back(*layer.quantized, model.tensor(layer.bias));
  const c10::InferenceMode inference;
  const at::Tensor x = torch::randn({state.range(0), 768});
  for (auto _ : state) {
    at::Tensor y = x;
    for (std::size_t i = 0; i < layers.size(); ++i) y = layers[i].forward(y, i + 1 < layers.size());
    benchmark::DoNotOptimize(y);
  }
}

BENCHMARK(module_float)->Arg(1)->Arg(4)->Arg(8)->Arg(16);
BENCHMARK(module_int8)->Arg(1)->Arg(4)->Arg(8)->Arg(16);
BENCHMARK(packed_int8)->Arg(1)->Arg(4)->Arg(8)->Arg(16);

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

// Speed of the integer kernels alone, per instruction set: quantization of the activations, product and float stage.
// Items are multiply-adds. Run with --benchmark_filter=avx2 and the like.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tersor/kernels/linear.hpp"

namespace {

using namespace tersor;

std::vector<std::int8_t> random_codes(std::int64_t count, int low, int high) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> draw(low, high);
  std::vector<std::int8_t> codes(static_cast<std::size_t>(count));
  for (auto& c : codes) c = static_cast<std::int8_t>(draw(random));
  return codes;
}

std::vector<float> random_floats(std::int64_t count) {
  std::mt19937 random(2);
  std::normal_distribution<float> draw;
  std::vector<float> x(static_cast<std::size_t>(count));
  for (float& v : x) v = draw(random);
  return x;
}

void set_items(benchmark::State& state, std::int64_t products) {
  state.SetItemsProcessed(state.iterations() * products);
}

// Three layers with ReLU between them, as a whole: the reference MLP and the same with 30 % of the hidden units
// removed.
void mlp(benchmark::State& state, Isa isa, std::vector<std::int64_t> widths) {
  const std::int64_t rows = state.range(0);
  std::vector<Int8Weights> layers;
  std::int64_t products = 0;
  for (std::size_t l = 0; l + 1 < widths.size(); ++l) {
    const std::int64_t k = widths[l];
    const std::int64_t n = widths[l + 1];
    layers.emplace_back(random_codes(n * k, -127, 127), n, k, std::vector<float>(static_cast<std::size_t>(n), 1e-3F),
                        std::vector<float>(static_cast<std::size_t>(n), 0.1F));
    products += rows * n * k;
  }
  const std::vector<float> input = random_floats(rows * widths[0]);
  std::vector<float> from(static_cast<std::size_t>(rows * widths[0]));
  std::vector<float> to(from.size());
  QuantizedRows codes;
  for (auto _ : state) {
    const float* x = input.data();
    for (std::size_t l = 0; l < layers.size(); ++l) {
      quantize_per_token(isa, x, rows, widths[l], codes);
      linear(isa, codes, layers[l], l + 1 < layers.size(), to.data(), {0, layers[l].blocks()});
      std::swap(from, to);
      x = from.data();
    }
    benchmark::DoNotOptimize(from.data());
  }
  set_items(state, products);
}

// `lowest` -128 takes the path that widens to 16 bits.
void int8(benchmark::State& state, Isa isa, int lowest) {
  const std::int64_t rows = state.range(0);
  const std::int64_t n = state.range(1);
  const Int8Weights w(random_codes(n * n, lowest, 127), n, n, random_floats(n), {});
  const std::vector<float> x = random_floats(rows * n);
  std::vector<float> y(static_cast<std::size_t>(rows * n));
  QuantizedRows codes;
  quantize_per_token(isa, x.data(), rows, n, codes);
  for (auto _ : state) {
    linear(isa, codes, w, false, y.data(), {0, w.blocks()});
    benchmark::DoNotOptimize(y.data());
  }
  set_items(state, rows * n * n);
}

void int4(benchmark::State& state, Isa isa, std::int64_t group_size) {
  const std::int64_t rows = state.range(0);
  const std::int64_t n = state.range(1);
  const Int4Weights w(random_codes(n * n, -8, 7), n, n, group_size, random_floats(n * (n / group_size)), {}, {});
  const std::vector<float> x = random_floats(rows * n);
  std::vector<float> y(static_cast<std::size_t>(rows * n));
  QuantizedRows codes;
  quantize_per_token(isa, x.data(), rows, n, codes);
  sum_groups(codes, group_size);
  for (auto _ : state) {
    linear(isa, codes, w, false, y.data(), {0, w.blocks()});
    benchmark::DoNotOptimize(y.data());
  }
  set_items(state, rows * n * n);
}

// Items are activations here.
void activations(benchmark::State& state, Isa isa, bool per_token) {
  const std::int64_t k = state.range(0);
  const std::vector<float> x = random_floats(k);
  QuantizedRows codes;
  for (auto _ : state) {
    per_token ? quantize_per_token(isa, x.data(), 1, k, codes)
              : quantize_per_tensor(isa, x.data(), 1, k, 0.03F, 5, codes);
    benchmark::DoNotOptimize(codes.codes.data());
  }
  set_items(state, k);
}

}  // namespace

int main(int argc, char** argv) {
  for (const Isa isa : available_isas()) {
    const std::string word(name(isa));
    for (const std::int64_t rows : {1, 4, 8, 16}) {
      benchmark::RegisterBenchmark((word + "/mlp").c_str(), mlp, isa, std::vector<std::int64_t>{768, 512, 256, 128})
          ->Arg(rows);
      benchmark::RegisterBenchmark((word + "/mlp_pruned").c_str(), mlp, isa,
                                   std::vector<std::int64_t>{768, 360, 184, 128})
          ->Arg(rows);
      for (const std::int64_t n : {512, 2048}) {
        benchmark::RegisterBenchmark((word + "/int8").c_str(), int8, isa, -127)->Args({rows, n});
        benchmark::RegisterBenchmark((word + "/int8_widened").c_str(), int8, isa, -128)->Args({rows, n});
        benchmark::RegisterBenchmark((word + "/int4_g32").c_str(), int4, isa, 32)->Args({rows, n});
        benchmark::RegisterBenchmark((word + "/int4_g128").c_str(), int4, isa, 128)->Args({rows, n});
      }
    }
    benchmark::RegisterBenchmark((word + "/per_token").c_str(), activations, isa, true)->Arg(768)->Arg(4096);
    benchmark::RegisterBenchmark((word + "/per_tensor").c_str(), activations, isa, false)->Arg(768)->Arg(4096);
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}

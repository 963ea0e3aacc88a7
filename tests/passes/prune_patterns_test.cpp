#include <limits>
#include <numeric>

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "support.hpp"
#include "tersor/passes/prune.hpp"
#include "tersor/pipeline/pipeline.hpp"

using namespace tersor;

namespace {

Model with(const std::map<std::string, at::Tensor>& tensors) { return Model::from_tensors(tensors); }

template <typename P>
PassReport run(Model& model, const P& pass) {
  return Pipeline{pass}.run(model).passes.front();
}

std::int64_t zeros(const at::Tensor& x) { return x.eq(0).sum().item<std::int64_t>(); }

std::vector<float> numbers(const at::Tensor& x) {
  const at::Tensor flat = x.to(at::kFloat).contiguous();
  return {flat.const_data_ptr<float>(), flat.const_data_ptr<float>() + flat.numel()};
}

/// What stays of `rows` [R, K] when the groups are found with a sort of their own: K is a multiple of m.
at::Tensor by_top_k(const at::Tensor& rows, std::int64_t n, std::int64_t m) {
  const at::Tensor groups = rows.reshape({-1, m});
  const at::Tensor index = std::get<1>(groups.abs().topk(n, -1));
  return groups.mul(at::zeros(groups.sizes()).scatter(1, index, 1.0)).view(rows.sizes());
}

}  // namespace

TEST_CASE("prune_nm: of every m at most n stay, those of greatest magnitude") {
  for (const auto& [n, m] : {std::pair(2, 4), std::pair(4, 8), std::pair(1, 4), std::pair(3, 16), std::pair(0, 2)}) {
    const at::Tensor linear = at::randn({6, 48}), conv = at::randn({5, 32, 3, 3});
    Model model = with({{"fc.weight", linear}, {"conv.weight", conv}});
    const PassReport report = run(model, prune::NM{.n = n, .m = m});
    CHECK(report.changed == Changed::weights);
    CHECK(model.tensor("fc.weight").equal(by_top_k(linear, n, m)));
    // A row of a Conv runs along its input channels.
    const at::Tensor rows = conv.permute({0, 2, 3, 1}).contiguous();
    CHECK(model.tensor("conv.weight").equal(by_top_k(rows, n, m).permute({0, 3, 1, 2})));
    Model stored = with({{"conv.weight", conv}});
    run(stored, prune::NM{.n = n, .m = m, .along = prune::Along::row});
    CHECK(stored.tensor("conv.weight").equal(by_top_k(conv.flatten(1), n, m).view(conv.sizes())));
    CHECK(zeros(model.tensor("fc.weight")) == linear.numel() * (m - n) / m);
    // Again: there is nothing left to do.
    CHECK(run(model, prune::NM{.n = n, .m = m}).changed == Changed::nothing);
  }
}

TEST_CASE("prune_nm: ties, tails, types, and what is refused") {
  Model model = with({{"fc.weight", at::tensor({1.f, -1.f, 1.f, 1.f, -2.f, 3.f, 0.5f}).view({1, 7})}});
  const PassReport report = run(model, prune::NM{});
  CHECK(report.changed == Changed::nothing);
  CHECK(report.rows.at(0).details.at(0).second == "its rows of 7 are no multiple of m=4");
  run(model, prune::NM{.targets = {"fc"}});
  CHECK(numbers(model.tensor("fc.weight")) == std::vector<float>{0, 0, 1, 1, -2, 3, 0});

  Model half = with({{"fc.weight", at::tensor({1.f, -4.f, 2.f, 3.f}).view({1, 4}).to(at::kHalf)}});
  run(half, prune::NM{.n = 1, .m = 2});
  CHECK(half.tensor("fc.weight").scalar_type() == at::kHalf);
  CHECK(numbers(half.tensor("fc.weight")) == std::vector<float>{0, -4, 0, 3});

  check_error(ErrorCode::BadOption, {"n=3", "2"}, [&] { run(model, prune::NM{.n = 3, .m = 2}); });
  Model sick = with({{"a.weight", at::ones({2, 4})}, {"b.weight", at::ones({2, 4})}});
  at::Tensor values = at::ones({2, 4});
  values[1][2] = std::numeric_limits<float>::infinity();
  sick = with({{"a.weight", at::ones({2, 4})}, {"b.weight", values}});
  check_error(ErrorCode::NonFiniteWeight, {"b.weight"}, [&] { run(sick, prune::NM{}); });
  CHECK(zeros(sick.tensor("a.weight")) == 0);
}

TEST_CASE("prune_block: the blocks of least mean magnitude, exactly so many") {
  // Blocks of 2 x 3 in a 4 x 7 matrix: the last column of blocks is one wide.
  const at::Tensor w = at::arange(1, 29, at::kFloat).view({4, 7});
  Model model = with({{"fc.weight", w}});
  run(model, prune::Block{.amount = 0.5, .rows = 2, .columns = 3});
  at::Tensor wanted = w.clone();
  wanted.slice(0, 0, 2).zero_();  // means grow row by row: the three upper blocks are the least
  CHECK(model.tensor("fc.weight").equal(wanted));
  // Of the three that are left, one more.
  run(model, prune::Block{.amount = 1, .rows = 2, .columns = 3});
  wanted.slice(0, 2, 4).slice(1, 0, 3).zero_();
  CHECK(model.tensor("fc.weight").equal(wanted));
  CHECK(run(model, prune::Block{.amount = 0.0, .rows = 2, .columns = 3}).changed == Changed::nothing);
  check_error(ErrorCode::BadOption, {"3", "2"},
              [&] { run(model, prune::Block{.amount = 3, .rows = 2, .columns = 3}); });

  // Equal ones: the first in row order.
  Model even = with({{"fc.weight", at::ones({2, 4})}});
  run(even, prune::Block{.amount = 0.5, .rows = 1, .columns = 2});
  CHECK(numbers(even.tensor("fc.weight")) == std::vector<float>{0, 0, 0, 0, 1, 1, 1, 1});
}

TEST_CASE("prune_block: scope=global ranks all layers, a Conv's row is its channels and kernel") {
  const at::Tensor small = at::ones({2, 2, 1, 4}).mul(0.5), large = at::ones({2, 16});
  Model model = with({{"a.weight", small}, {"b.weight", large}});
  run(model, prune::Block{.amount = 3, .scope = prune::Scope::global});
  CHECK(zeros(model.tensor("a.weight")) == 16);
  CHECK(zeros(model.tensor("b.weight")) == 8);
  CHECK(zeros(model.tensor("b.weight")[0].slice(0, 0, 8)) == 8);
}

TEST_CASE("prune_nm and prune_block: zeros are remembered as masks, and survive the file") {
  Model model = Model::load(TERSOR_TEST_DATA "/fashion/mlp_fp32.ts.pt");
  Pipeline{prune::NM{}, prune::Block{.amount = 0.25}}.run(model);
  const auto path = std::filesystem::temp_directory_path() / "tersor-prune-patterns.pt";
  model.save(path, {.overwrite = true});
  const Model again = Model::load(path);
  std::filesystem::remove(path);
  for (const Layer& layer : model.layers()) {
    const at::Tensor w = again.tensor(layer.weight);
    CHECK(w.equal(model.tensor(layer.weight)));
    CHECK(zeros(w) * 8 >= w.numel() * 5 - 8 * 16);  // half, and a quarter of what was left
  }
}

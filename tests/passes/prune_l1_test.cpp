#include <limits>

#include <unistd.h>

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "support.hpp"
#include "tersor/passes/prune.hpp"
#include "tersor/passes/quantize.hpp"
#include "tersor/pipeline/pipeline.hpp"

using namespace tersor;
using prune::L1;

namespace {

Model load_case(const std::string& file) { return Model::load(TERSOR_TEST_DATA "/cases/" + file); }

PassReport run(Model& model, const L1& pass) { return Pipeline{pass}.run(model).passes.front(); }

std::int64_t zeros(const at::Tensor& x) { return x.eq(0).sum().item<std::int64_t>(); }

/// Every zero is +0.0.
bool clean(const at::Tensor& x) { return x.masked_select(x.eq(0)).signbit().logical_not().all().item<bool>(); }

std::string detail_of(const PassReport& report, const std::string& layer, const std::string& key) {
  for (const ReportRow& row : report.rows)
    if (row.layer == layer)
      for (const auto& [name, value] : row.details)
        if (name == key) return value;
  return "";
}

Model reloaded(const Model& model) {
  const auto path = std::filesystem::temp_directory_path() / fmt::format("tersor-prune-l1-{}.safetensors", getpid());
  model.save(path, {.overwrite = true});
  Model again = Model::load(path);
  std::filesystem::remove(path);
  return again;
}

}  // namespace

TEST_CASE("prune_l1: ties and signs (us-ties-sign)") {
  Model model = load_case("us-ties-sign/weights.safetensors");
  const at::Tensor before = model.tensor("fc.weight").clone(), bias = model.tensor("fc.bias").clone();
  run(model, {.amount = 0.5});
  const at::Tensor w = model.tensor("fc.weight");
  CHECK(zeros(w) == 6);
  CHECK(clean(w));
  CHECK(w[2][2].item<float>() == 0.0F);  // 0.5
  CHECK(w[1][2].item<float>() == -5.0F);
  CHECK(w[2][3].item<float>() == -4.0F);
  CHECK(zeros(w[0]) == 4);  // of the ones the lowest indices go
  CHECK(w[1][0].item<float>() == 0.0F);
  CHECK(at::equal(model.tensor("fc.bias"), bias));
  CHECK(w.eq(0).logical_or(w.eq(before)).all().item<bool>());

  Model again = load_case("us-ties-sign/weights.safetensors");
  run(again, {.amount = 0.5});
  CHECK(at::equal(again.tensor("fc.weight"), w));
}

TEST_CASE("prune_l1: counts and fractions (us-amount)") {
  const auto expected = read_tensors("cases/us-amount/expected.safetensors");
  const std::vector<std::pair<Amount, std::string>> rows{
      {Amount(0), "count0"}, {Amount(1), "count1"}, {Amount(0.5), "frac05"}, {Amount(1.0), "frac1"}};
  for (const auto& [amount, name] : rows) {
    for (int repeat = 0; repeat < 2; ++repeat) {
      INFO(name);
      Model model = load_case("us-amount/weights.safetensors");
      const PassReport report = run(model, {.amount = amount});
      CHECK(at::equal(model.tensor("fc.weight"), expected.at(name)));
      CHECK(detail_of(report, "fc", "zeros") == std::to_string(zeros(expected.at(name))));
      CHECK(detail_of(report, "fc", "of") == "5");
      CHECK((report.changed == Changed::nothing) == (name == "count0"));
      CHECK(report.warnings.empty() == (name != "frac1"));
    }
  }
  for (const Amount amount :
       {Amount(6), Amount(1.2), Amount(-0.1), Amount(-1), Amount(std::numeric_limits<double>::quiet_NaN())}) {
    INFO(amount.text());
    Model model = load_case("us-amount/weights.safetensors");
    check_error(ErrorCode::BadOption, {"amount"}, [&] { run(model, {.amount = amount}); });
    CHECK(at::equal(model.tensor("fc.weight"), expected.at("count0")));
  }
}

TEST_CASE("prune_l1: again after a reload (us-iterative)") {
  const auto expected = read_tensors("cases/us-iterative/expected.safetensors");
  Model model = load_case("us-iterative/weights.safetensors");
  run(model, {.amount = 0.5});
  CHECK(at::equal(model.tensor("fc.weight"), expected.at("after_round1")));

  Model of_rest = reloaded(model);
  const PassReport report = run(of_rest, {.amount = 0.5});
  CHECK(at::equal(of_rest.tensor("fc.weight"), expected.at("after_round2")));
  CHECK(detail_of(report, "fc", "zeros_before") == "8");
  CHECK(detail_of(report, "fc", "zeros") == "12");

  Model of_total = reloaded(model);
  CHECK(run(of_total, {.amount = 0.5, .of = prune::Of::total}).changed == Changed::nothing);
  CHECK(at::equal(of_total.tensor("fc.weight"), expected.at("after_round1")));
  run(of_total, {.amount = 0.75, .of = prune::Of::total});
  CHECK(at::equal(of_total.tensor("fc.weight"), expected.at("after_round2")));
}

TEST_CASE("prune_l1: stored masks are applied when loading (us-mask-file)") {
  const auto expected = read_tensors("cases/us-mask-file/expected.safetensors");
  Model model = load_case("us-mask-file/pruned_with_masks.safetensors");
  CHECK_FALSE(model.has_tensor("fc.weight_orig"));
  CHECK_FALSE(model.has_tensor("fc.weight_mask"));
  CHECK(at::equal(model.tensor("fc.weight"), expected.at("fc.weight")));
  CHECK(clean(model.tensor("fc.weight")));
  const std::int64_t before = zeros(expected.at("fc.weight"));
  Pipeline{quantize::Weights{.targets = {"fc"}}}.run(model);
  CHECK(zeros(reloaded(model).tensor("fc.weight")) >= before);
}

TEST_CASE("prune_l1: global rank over all layers, ties by layer and index") {
  const auto make = [] {
    return Model::from_tensors({{"a.weight", at::tensor({3.0F, -1.0F, 0.0F, 8.0F}).reshape({2, 2})},
                                {"b.weight", at::tensor({1.0F, 0.5F, -1.0F, 9.0F}).reshape({2, 2})}});
  };
  Model model = make();
  run(model, {.amount = 2, .scope = prune::Scope::global});
  CHECK(at::equal(model.tensor("a.weight"), at::tensor({3.0F, 0.0F, 0.0F, 8.0F}).reshape({2, 2})));
  CHECK(at::equal(model.tensor("b.weight"), at::tensor({1.0F, 0.0F, -1.0F, 9.0F}).reshape({2, 2})));

  Model total = make();
  run(total, {.amount = 0.5, .scope = prune::Scope::global, .of = prune::Of::total});
  CHECK(zeros(total.tensor("a.weight")) == 2);
  CHECK(zeros(total.tensor("b.weight")) == 2);
  CHECK(total.tensor("b.weight")[1][0].item<float>() == -1.0F);
}

TEST_CASE("prune_l1: -0.0 and subnormals become +0.0 and count as zeros") {
  const float tiny = std::numeric_limits<float>::denorm_min();
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kDouble}) {
    INFO(c10::toString(type));
    const double subnormal = type == at::kDouble     ? std::numeric_limits<double>::denorm_min()
                             : type == at::kBFloat16 ? 0x1p-130
                                                     : tiny;
    Model model = Model::from_tensors(
        {{"fc.weight",
          at::tensor({-0.0, 1.0, subnormal, -2.0, -subnormal, 3.0}, at::kDouble).to(type).reshape({2, 3})}});
    const PassReport report = run(model, {.amount = 1});
    const at::Tensor w = model.tensor("fc.weight");
    CHECK(w.scalar_type() == type);
    CHECK(detail_of(report, "fc", "zeros_before") == "3");
    CHECK(at::equal(w, at::tensor({0.0, 0.0, 0.0, -2.0, 0.0, 3.0}, at::kDouble).to(type).reshape({2, 3})));
    CHECK(clean(w));
  }
  // A half below 2^-14 is an ordinary number of float arithmetic.
  Model half =
      Model::from_tensors({{"fc.weight", at::tensor({0x1p-24, 1.0, 2.0}, at::kDouble).to(at::kHalf).reshape({1, 3})}});
  CHECK(detail_of(run(half, {.amount = 1}), "fc", "zeros_before") == "0");
  CHECK(zeros(half.tensor("fc.weight")) == 1);
}

TEST_CASE("prune_l1: doubles rank by their own digits") {
  Model model = Model::from_tensors({{"fc.weight", at::tensor({1.0 + 1e-12, 1.0, 2.0}, at::kDouble).reshape({1, 3})}});
  run(model, {.amount = 1});
  CHECK(model.tensor("fc.weight")[0][1].item<double>() == 0.0);
}

TEST_CASE("prune_l1: NaN and infinities are named and nothing changes") {
  at::Tensor bad = at::randn({4, 5});
  bad[1][2].fill_(std::numeric_limits<float>::quiet_NaN());
  bad[3][0].fill_(-std::numeric_limits<float>::infinity());
  const at::Tensor good = at::randn({3, 3});
  Model model = Model::from_tensors({{"a.weight", good.clone()}, {"b.weight", bad}});
  check_error(ErrorCode::NonFiniteWeight, {"b.weight", "2 values", "index 7"}, [&] { run(model, {.amount = 0.5}); });
  CHECK(at::equal(model.tensor("a.weight"), good));
}

TEST_CASE("prune_l1: what is left alone, and what targets override") {
  const auto make = [] {
    return Model::from_tensors({{"embed_tokens.weight", at::randn({10, 4})},
                                {"fc.weight", at::randn({6, 4})},
                                {"lm_head.weight", at::randn({10, 4})},
                                {"norm.weight", at::randn({4})}});
  };
  Model model = make();
  const PassReport report = run(model, {.amount = 0.5});
  CHECK(zeros(model.tensor("fc.weight")) == 12);
  for (const std::string name : {"embed_tokens", "lm_head", "norm"}) {
    CHECK(zeros(model.tensor(name + ".weight")) == 0);
    CHECK_FALSE(detail_of(report, name, "why").empty());
  }
  Model targeted = make();
  run(targeted, {.amount = 0.5, .targets = {"lm_head", "re:f"}, .ignore = {"fc"}});
  CHECK(zeros(targeted.tensor("lm_head.weight")) == 20);
  CHECK(zeros(targeted.tensor("fc.weight")) == 0);
  Model none = make();
  check_error(ErrorCode::NoSuchTarget, {"fcc"}, [&] { run(none, {.targets = {"fcc"}}); });

  Model quantized = make();
  Pipeline{quantize::Weights{.targets = {"fc"}}}.run(quantized);
  check_error(ErrorCode::AlreadyQuantized, {"'fc'"}, [&] { run(quantized, {.targets = {"fc"}}); });
}

TEST_CASE("prune_l1: a weight that two layers share is pruned once") {
  for (const prune::Scope scope : {prune::Scope::layer, prune::Scope::global}) {
    Model model = Model::load(TERSOR_TEST_DATA "/passes/shared.pt");
    const PassReport report = run(model, {.amount = 0.5, .scope = scope, .targets = {"words", "scores"}});
    CHECK(zeros(model.tensor("words.weight")) == 10);
    CHECK(at::equal(model.tensor("words.weight"), model.tensor("scores.weight")));
    CHECK(detail_of(report, "scores", "why").find("shares its weight") != std::string::npos);
  }
}

TEST_CASE("prune_l1: a TorchScript network, with any number of threads") {
  const int threads = at::get_num_threads();
  std::vector<Model> models;
  for (const int n : {1, 2}) {
    at::set_num_threads(n);
    models.push_back(Model::load(TERSOR_TEST_DATA "/fashion/cnn_fp32.ts.pt"));
    run(models.back(), {.amount = 0.7, .scope = prune::Scope::global});
  }
  at::set_num_threads(threads);
  std::int64_t pruned = 0, total = 0;
  for (const Layer& layer : models[0].layers()) {
    if (layer.kind == LayerKind::batch_norm) continue;
    const at::Tensor w = models[0].tensor(layer.weight);
    pruned += zeros(w);
    total += w.numel();
    CHECK(at::equal(w, models[1].tensor(layer.weight)));
  }
  CHECK(pruned == Amount(0.7).of(total));
}

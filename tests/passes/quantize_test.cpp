#include "tersor/passes/quantize.hpp"

#include <limits>

#include <unistd.h>

#include <ATen/Parallel.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include "model/made.hpp"
#include "support.hpp"
#include "tersor/calibrate/observer.hpp"
#include "tersor/passes/registry.hpp"
#include "tersor/pipeline/pipeline.hpp"
#include "tersor/runtime/packed.hpp"

using namespace tersor;

namespace {

Model load_case(const std::string& file) { return Model::load(TERSOR_TEST_DATA "/cases/" + file); }
Model mlp() { return Model::load(TERSOR_TEST_DATA "/fashion/mlp_fp32.ts.pt"); }

PassReport run(Model& model, const Pass& pass, const RunOptions& options = {}) {
  return Pipeline{pass}.run(model, options).passes.front();
}

const QTensor& quantized(const Model& model, const std::string& layer) {
  REQUIRE(model.layer(layer).quantized.has_value());
  return model.layer(layer).quantized->weight;
}

std::string detail_of(const PassReport& report, const std::string& layer, const std::string& key) {
  for (const ReportRow& row : report.rows)
    if (row.layer == layer)
      for (const auto& [name, value] : row.details)
        if (name == key) return value;
  return "";
}

Model reloaded(const Model& model) {
  const auto path = std::filesystem::temp_directory_path() / fmt::format("tersor-quantize-{}.safetensors", getpid());
  model.save(path, {.overwrite = true});
  Model again = Model::load(path);
  std::filesystem::remove(path);
  return again;
}

double largest(const at::Tensor& x) { return x.abs().max().item<double>(); }

/// |w - decoded| <= scale / 2 for every element, up to the rounding of the decoded value itself; codes inside the
/// range.
void check_half_step(const at::Tensor& w, const QTensor& q) {
  const std::int64_t columns = q.columns(), groups = q.groups();
  const std::int64_t group = q.scheme.granularity == Granularity::per_group ? q.scheme.group_size : columns;
  const at::Tensor error = dequantize(q).sub(w).abs().reshape({q.rows(), columns});
  for (std::int64_t g = 0; g < groups; ++g) {
    const at::Tensor part = error.slice(1, g * group, std::min((g + 1) * group, columns));
    CHECK(part.le(q.scale.slice(1, g, g + 1).mul(0.5 * (1 + 1e-5))).all().item<bool>());
  }
  const at::Tensor codes = unpacked_codes(q);
  CHECK(codes.min().item<int>() >= q.scheme.qmin());
  CHECK(codes.max().item<int>() <= q.scheme.qmax());
}

}  // namespace

TEST_CASE("quantize: rows of zeros and sparse rows (q-zero-row)") {
  const auto expected = read_tensors("cases/q-zero-row/expected.safetensors");
  Model model = load_case("q-zero-row/weights.safetensors");
  const at::Tensor w = model.tensor("fc.weight").clone();
  run(model, quantize::Weights{.targets = {"fc"}});
  const QTensor& q = quantized(model, "fc");
  CHECK(at::equal(unpacked_codes(q), expected.at("q")));
  const at::Tensor scale = q.scale.reshape({-1}), known = expected.at("scale_nonzero_rows");
  CHECK(scale.gt(0).logical_and(scale.isfinite()).all().item<bool>());
  for (const std::int64_t row : {0, 2, 3}) CHECK(scale[row].item<float>() == known[row].item<float>());
  CHECK(at::equal(model.tensor("fc.weight"), expected.at("dequant")));

  for (const std::int64_t bits : {8, 4})
    for (const bool symmetric : {true, false}) {
      Model other = load_case("q-zero-row/weights.safetensors");
      run(other, quantize::Weights{.bits = bits, .symmetric = symmetric, .targets = {"fc"}});
      CHECK(other.tensor("fc.weight").masked_select(w.eq(0)).eq(0).all().item<bool>());
      check_half_step(w, quantized(other, "fc"));
    }
}

TEST_CASE("quantize: group tails (q-group-tail)") {
  const auto expected = read_tensors("cases/q-group-tail/expected.safetensors");
  const at::Tensor w = read_tensors("cases/q-group-tail/weights.safetensors").at("fc.weight");
  const QTensor tails = quantize_weight(w, {.bits = 4, .granularity = Granularity::per_group, .group_size = 4});
  CHECK(at::equal(unpacked_codes(tails), expected.at("q")));
  CHECK(at::equal(tails.scale, expected.at("scale")));
  CHECK(at::equal(dequantize(tails), expected.at("dequant")));

  // A checkpoint has no tails: per channel, and the report says so.
  Model model = load_case("q-group-tail/weights.safetensors");
  const PassReport report = run(model, quantize::Weights{.bits = 4, .group_size = 4, .targets = {"fc"}});
  const std::string why = detail_of(report, "fc", "why");
  CHECK(why.find("10") != std::string::npos);
  CHECK(why.find("group_size=4") != std::string::npos);
  const at::Tensor row_scale = w.abs().amax(1).div(7);
  CHECK(at::equal(quantized(model, "fc").scale.reshape({-1}), row_scale));
  CHECK(at::equal(reloaded(model).tensor("fc.weight"), model.tensor("fc.weight")));

  for (const std::int64_t group : {10, 128}) {
    Model whole = load_case("q-group-tail/weights.safetensors");
    const PassReport said = run(whole, quantize::Weights{.bits = 4, .group_size = group, .targets = {"fc"}});
    CHECK(detail_of(said, "fc", "why").empty());
    CHECK(quantized(whole, "fc").groups() == 1);
    CHECK(at::equal(quantized(whole, "fc").scale.reshape({-1}), row_scale));
  }

  // TorchScript holds tails: 784 = 7 * 100 + 84.
  Model script = mlp();
  const at::Tensor dense = script.tensor("1.weight").clone();
  run(script, quantize::Weights{.bits = 4, .group_size = 100, .targets = {"1"}});
  CHECK(quantized(script, "1").groups() == 8);
  check_half_step(dense, quantized(script, "1"));
}

TEST_CASE("quantize: affine groups of 4 bits (q-int4-asym)") {
  const auto expected = read_tensors("cases/q-int4-asym/expected.safetensors");
  const auto data = read_tensors("cases/q-int4-asym/weights.safetensors");
  const at::Tensor w = data.at("fc.weight");
  Model model = load_case("q-int4-asym/weights.safetensors");
  run(model, quantize::Weights{.bits = 4, .symmetric = false, .group_size = 4, .targets = {"fc"}});
  const Model again = reloaded(model);
  for (const Model& one : {model, again}) {
    const QTensor& q = quantized(one, "fc");
    // The case counts codes from 0, ours start at -8.
    const at::Tensor codes = unpacked_codes(q).to(at::kLong).add(8), zero_point = q.zero_point.to(at::kLong).add(8);
    for (std::int64_t row = 0; row < 3; ++row)
      for (std::int64_t g = 0; g < 2; ++g) {
        INFO("row " << row << " group " << g);
        const at::Tensor group = w[row].slice(0, g * 4, g * 4 + 4);
        if (group.eq(0).all().item<bool>()) continue;
        CHECK(q.scale[row][g].item<float>() == Approx(expected.at("scale")[row][g].item<float>()).epsilon(1e-6));
        CHECK(zero_point[row][g].item<int>() == expected.at("zp")[row][g].item<int>());
        for (std::int64_t j = 4 * g; j < 4 * g + 4; ++j) {
          const double steps = w[row][j].item<double>() / expected.at("scale")[row][g].item<double>();
          const bool tie = std::abs(std::abs(steps - std::floor(steps)) - 0.5) < 1e-5;
          CHECK(std::abs(codes[row][j].item<int>() - expected.at("q_u4")[row][j].item<int>()) <= (tie ? 1 : 0));
        }
      }
    check_half_step(w, q);
    const at::Tensor decoded = dequantize(q);
    CHECK(decoded.masked_select(w.eq(0)).eq(0).all().item<bool>());
    for (std::int64_t j = 0; j < 4; ++j) CHECK(decoded[2][j].item<float>() == Approx(3.0F).epsilon(1.2e-7));
    CHECK(q.scale.gt(0).all().item<bool>());
  }
  CHECK(at::equal(unpacked_codes(quantized(model, "fc")), unpacked_codes(quantized(again, "fc"))));

  const QuantScheme odd{.bits = 4, .symmetric = false};
  QTensor seven;
  seven.scheme = odd;
  seven.shape = {2, 7};
  seven.codes = packed_codes(data.at("codes_odd"), odd);
  CHECK(seven.codes.sizes() == at::IntArrayRef({2, 4}));
  CHECK(at::equal(unpacked_codes(seven), data.at("codes_odd")));
}

TEST_CASE("quantize: products do not saturate (q-saturate)") {
  const auto ints = read_tensors("cases/q-saturate/ints.safetensors");
  const at::Tensor a = ints.at("a_u8").to(at::kFloat), b = ints.at("b_s8");
  QTensor weight;
  weight.shape = {3, 8};
  weight.codes = b.t().contiguous();
  weight.scale = at::ones({3, 1});
  // Code 0 of an unsigned byte is our -128.
  const PackedLinear layer({weight, {ActivationMode::per_tensor, 1.0F, -128}}, std::nullopt);
  const at::Tensor expected = read_tensors("cases/q-saturate/expected.safetensors").at("c_i32");
  CHECK(at::equal(layer.forward(a, false), expected.to(at::kFloat)));  // below 2^24: exact
}

TEST_CASE("quantize: NaN in a weight is named and nothing changes") {
  at::Tensor bad = at::randn({8, 8});
  bad[2][3].fill_(std::numeric_limits<float>::quiet_NaN());
  Model model = Model::from_tensors({{"a.weight", at::randn({8, 8})}, {"b.weight", bad}});
  for (const Pass& pass : {Pass(quantize::Weights{}), Pass(quantize::Dynamic{.targets = {"Linear"}})}) {
    check_error(ErrorCode::NonFiniteWeight, {"b.weight", "1 NaN", "[2, 3]"}, [&] { run(model, pass); });
    CHECK_FALSE(model.layer("a").quantized);
  }
}

TEST_CASE("quantize: bits are 8 or 4") {
  Model model = Model::from_tensors({{"fc.weight", at::randn({8, 8})}});
  check_error(ErrorCode::BadOption, {"bits=5", "8 or 4"}, [&] { run(model, quantize::Weights{.bits = 5}); });
  check_error(ErrorCode::BadOption, {"weight_bits=6"}, [&] { run(model, quantize::Dynamic{.weight_bits = 6}); });
  check_error(ErrorCode::BadOption, {"weight_bits=7"},
              [&] { parse_pipeline("quantize_static(weight_bits=7)", registry()); });
  check_error(ErrorCode::BadOption, {"group_size"}, [&] { run(model, quantize::Weights{.group_size = -1}); });
  CHECK_FALSE(model.layer("fc").quantized);
}

TEST_CASE("quantize: what stays in float, and what targets override") {
  const auto make = [] {
    return Model::from_tensors({{"column.weight", at::randn({64, 1})},
                                {"embed_tokens.weight", at::randn({100, 16})},
                                {"fc.weight", at::randn({32, 16})},
                                {"lm_head.weight", at::randn({100, 16})},
                                {"norm.weight", at::randn({16})},
                                {"wide.weight", at::randn({128, 64})}});
  };
  Model weights = make();
  const PassReport report = run(weights, quantize::Weights{});
  CHECK(detail_of(report, "embed_tokens", "why") == "embedding");
  CHECK(detail_of(report, "norm", "why") == "norm");
  CHECK(detail_of(report, "lm_head", "why").find("head") != std::string::npos);
  CHECK(detail_of(report, "column", "why").find("grow from 256 to 320") != std::string::npos);
  CHECK(weights.layer("fc").quantized);
  CHECK(weights.layer("wide").quantized);
  CHECK(detail_of(report, "fc", "bytes_before") == "2048");
  CHECK(detail_of(report, "fc", "bytes") == "640");

  Model dynamic = make();
  const PassReport tiny = run(dynamic, quantize::Dynamic{});
  CHECK(detail_of(tiny, "fc", "why").find("small") != std::string::npos);
  CHECK(dynamic.layer("wide").quantized->activation.mode == ActivationMode::per_token);

  Model grouped = make();
  const PassReport slow = run(grouped, quantize::Dynamic{.weight_bits = 4, .group_size = 20});
  CHECK(detail_of(slow, "wide", "scales") == "per channel");  // 64 is no multiple of 20: nor is there a group of 20
  Model no_kernel = make();
  const PassReport none = run(no_kernel, quantize::Dynamic{.group_size = 32});
  CHECK(detail_of(none, "wide", "why").find("no fast kernel") != std::string::npos);
  CHECK_FALSE(no_kernel.layer("wide").quantized);

  Model targeted = make();
  const PassReport all = run(targeted, quantize::Dynamic{.targets = {"Linear"}, .ignore = {"wide"}});
  CHECK(targeted.layer("fc").quantized);
  CHECK(targeted.layer("lm_head").quantized);
  CHECK(targeted.layer("column").quantized);
  CHECK_FALSE(targeted.layer("wide").quantized);
  REQUIRE(all.warnings.size() == 1);
  CHECK(all.warnings[0].find("'column' grew") != std::string::npos);
  check_error(ErrorCode::AlreadyQuantized, {"'fc'"}, [&] { run(targeted, quantize::Weights{.targets = {"fc"}}); });
  check_error(ErrorCode::UnsupportedLayer, {"'norm'"}, [&] { run(targeted, quantize::Weights{.targets = {"norm"}}); });
  CHECK(detail_of(run(targeted, quantize::Weights{}), "fc", "why") == "already quantized");
}

TEST_CASE("quantize: half-precision weights keep their dtype for scales") {
  for (const at::ScalarType type : {at::kHalf, at::kBFloat16}) {
    const at::Tensor w = at::randn({16, 32}).to(type);
    Model model = Model::from_tensors({{"fc.weight", w}});
    run(model, quantize::Weights{});
    CHECK(quantized(model, "fc").scale.scalar_type() == type);
    CHECK(model.tensor("fc.weight").scalar_type() == type);
    // Half a step, and a rounding to the dtype of the scale and of the result.
    const double step = largest(quantized(model, "fc").scale);
    const double rounding = type == at::kHalf ? 0x1p-10 : 0x1p-7;
    CHECK(largest(model.tensor("fc.weight").sub(w)) <= 0.5 * step + 128 * step * rounding);
  }
}

TEST_CASE("quantize: dynamic and static networks stay near the original") {
  Model original = mlp(), dynamic = mlp(), fixed = mlp();
  const at::Tensor x = at::rand({64, 784}).mul(3).sub(0.8);
  run(dynamic, quantize::Dynamic{});
  const PassReport report = run(fixed, quantize::Static{}, {.calibration = Dataset{{x}, {}}, .samples = 40});
  for (const std::string layer : {"1", "3"}) {
    CHECK(dynamic.layer(layer).quantized->activation.mode == ActivationMode::per_token);
    CHECK(fixed.layer(layer).quantized->activation.mode == ActivationMode::per_tensor);
  }
  const at::Tensor seen = x.slice(0, 0, 40);
  CHECK(fixed.layer("1").quantized->activation ==
        calibrate::activation_of({seen.min().item<float>(), seen.max().item<float>()}));
  CHECK(detail_of(report, "5", "why").find("small") != std::string::npos);  // 10 x 128

  const at::Tensor expected = original.forward({x})[0];
  // 8-bit weights and inputs of two layers: an SQNR above 30 dB; a wrong scale or zero point gives less than 20.
  const double signal = expected.square().sum().item<double>();
  for (const Model& model : {dynamic, fixed}) {
    const double noise = model.forward({x})[0].sub(expected).square().sum().item<double>();
    CHECK(10 * std::log10(signal / noise) > 30);
  }

  Model averaged = mlp();
  run(averaged, quantize::Static{.observer = quantize::ObserverKind::moving_average, .averaging = 0.5},
      {.calibration = Dataset{{x}, {}}, .samples = 2, .batch_size = 1});
  const auto middle = [&](const at::Tensor& extremes) {
    return static_cast<float>(0.5 * (extremes[0].item<double>() + extremes[1].item<double>()));
  };
  const at::Tensor two = x.slice(0, 0, 2);
  const ActivationQuant half = calibrate::activation_of({middle(two.amin(1)), middle(two.amax(1))});
  CHECK(averaged.layer("1").quantized->activation.scale == Approx(half.scale).epsilon(1e-6));
  CHECK(averaged.layer("1").quantized->activation.zero_point == half.zero_point);
}

TEST_CASE("quantize: calibration data with NaN stops the pass (q-nonfinite)") {
  Model model = mlp();
  at::Tensor x = at::rand({8, 784});
  x[1][2].fill_(std::numeric_limits<float>::quiet_NaN());
  x[4][0].fill_(std::numeric_limits<float>::infinity());
  x[4][1].fill_(-std::numeric_limits<float>::infinity());
  check_error(ErrorCode::NonFiniteActivation, {"'1'", "1 NaN", "2 Inf"}, [&] {
    run(model, quantize::Static{}, {.calibration = Dataset{{x}, {}}, .batch_size = 2});
  });
  for (const Layer& layer : model.layers()) CHECK_FALSE(layer.quantized);

  const PassReport zeros = run(model, quantize::Static{}, {.calibration = Dataset{{at::zeros({4, 784})}, {}}});
  REQUIRE_FALSE(zeros.warnings.empty());
  CHECK(zeros.warnings[0].find("'1'") != std::string::npos);
  CHECK(model.forward({at::zeros({1, 784})})[0].isfinite().all().item<bool>());
}

TEST_CASE("quantize: weight-only codes are the same for any number of threads") {
  const int threads = at::get_num_threads();
  std::vector<Model> models;
  for (const int n : {1, 2}) {
    at::set_num_threads(n);
    models.push_back(Model::load(TERSOR_TEST_DATA "/fashion/cnn_fp32.ts.pt"));
    run(models.back(), quantize::Weights{.bits = 4, .symmetric = false, .group_size = 32});
  }
  at::set_num_threads(threads);
  int compared = 0;
  for (const Layer& layer : models[0].layers()) {
    if (!layer.quantized) continue;
    const QTensor &a = quantized(models[0], layer.name), &b = quantized(models[1], layer.name);
    CHECK(at::equal(a.codes, b.codes));
    CHECK(at::equal(a.scale, b.scale));
    CHECK(at::equal(a.zero_point, b.zero_point));
    ++compared;
  }
  CHECK(compared == 5);
}

TEST_CASE("quantize: what cannot become codes is skipped with its reason, and an error when it is targeted") {
  Model model = Model::load(made("stays_float"));
  PassReport report = Pipeline{quantize::Weights{}}.run(model).passes.front();
  std::map<std::string, std::string> skipped;
  for (const ReportRow& row : report.rows)
    if (row.action == "skipped") skipped[row.layer] = row.details.at(0).second;
  CHECK(skipped["one"].find("two different biases") != std::string::npos);
  CHECK(skipped["doubled"].find("computed") != std::string::npos);
  CHECK(skipped["stride"].find("computed") != std::string::npos);
  CHECK(skipped["even"].find("two sides") != std::string::npos);
  CHECK(model.layer("product").quantized.has_value());
  check_error(ErrorCode::UnsupportedLayer, {"'even'", "two sides"},
              [&] { Pipeline{quantize::Weights{.targets = {"even"}}}.run(model); });
}

// Which channels prune_structured chooses, and what it does about those that left.

#include <cmath>
#include <numbers>
#include <set>

#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>

#include "model/importance_net.hpp"
#include "support.hpp"
#include "tersor/analysis/cost.hpp"
#include "tersor/passes/prune.hpp"
#include "tersor/pipeline/pipeline.hpp"

using namespace tersor;

namespace {

const ImportanceNet& net() {
  static const ImportanceNet one;
  return one;
}

RunOptions options() { return {.calibration = net().data, .samples = 100, .batch_size = 4}; }

PassReport prune_it(Model& model, const prune::Structured& pass) {
  return Pipeline{pass}.run(model, options()).passes.front();
}

std::vector<std::int64_t> kept(const Model& model, const std::string& tensor) {
  const auto found = model.kept().find(tensor + ":0");
  return found == model.kept().end() ? std::vector<std::int64_t>{} : found->second;
}

/// The `n` positions of the greatest values, ascending.
std::vector<std::int64_t> greatest(const at::Tensor& scores, std::int64_t n) {
  std::vector<std::int64_t> all;
  const at::Tensor indices = std::get<0>(std::get<1>(scores.topk(n)).sort());
  for (std::int64_t i = 0; i < n; ++i) all.push_back(indices[i].item<std::int64_t>());
  return all;
}

std::int64_t number(const PassReport& report, const std::string& key) {
  for (const ReportRow& row : report.rows)
    for (const auto& [name, value] : row.details)
      if (row.layer == "(model)" && name == key) return std::stoll(value);
  FAIL("the report has no " << key);
  return 0;
}

}  // namespace

TEST_CASE("prune_structured: each importance keeps what PyTorch scores highest") {
  const std::string importance =
      GENERATE(as<std::string>{}, "l1", "l2", "geometric_median", "bn_scale", "taylor", "activation");
  DYNAMIC_SECTION(importance) {
    prune::Structured pass{.amount = 0.5};
    for (const auto& [value, word] : EnumNames<Importance>::names)
      if (word == importance) pass.importance = value;
    Model model = net().load(net().scripted);
    const PassReport report = prune_it(model, pass);
    for (const auto& [layer, width] : {std::pair("conv1", 4), std::pair("conv2", 3), std::pair("fc1", 5)}) {
      if (importance == "bn_scale" && std::string(layer) == "fc1") {
        CHECK(model.layer("fc1").shape[0] == 10);
        CHECK(std::any_of(report.rows.begin(), report.rows.end(), [](const ReportRow& row) {
          return row.layer == "fc1" && row.action == "skipped" &&
                 row.details[0].second == "no BatchNorm stands behind it";
        }));
        continue;
      }
      INFO(layer);
      CHECK(kept(model, std::string(layer) + ".weight") ==
            greatest(net().expected.at(importance + "." + layer), width));
    }
  }
}

TEST_CASE("prune_structured: random importance follows the seed") {
  const auto chosen = [&](std::uint64_t seed) {
    Model model = net().load(net().traced);
    RunOptions run = options();
    run.seed = seed;
    Pipeline{prune::Structured{.amount = 0.5, .importance = Importance::random}}.run(model, run);
    return model.kept();
  };
  CHECK(chosen(1) == chosen(1));
  CHECK(chosen(1) != chosen(2));
}

TEST_CASE("prune_structured: scope=global takes the least important of all layers") {
  Model model = net().load(net().scripted);
  prune_it(model, {.amount = 7, .scope = prune::Scope::global, .normalize = Normalization::max});
  // The ranking by hand: every layer's L1 norms divided by the greatest of them.
  std::vector<std::pair<double, std::string>> all;
  for (const char* layer : {"conv1", "conv2", "fc1"}) {
    const at::Tensor scores = net().expected.at(std::string("l1.") + layer);
    for (std::int64_t i = 0; i < scores.size(0); ++i)
      all.emplace_back(scores[i].item<double>() / scores.max().item<double>(), layer);
  }
  std::sort(all.begin(), all.end());
  std::map<std::string, std::int64_t> width{{"conv1", 8}, {"conv2", 6}, {"fc1", 10}};
  for (std::size_t i = 0; i < 7; ++i) --width[all[i].second];
  for (const auto& [layer, left] : width) {
    INFO(layer);
    CHECK(model.layer(layer).shape[0] == left);
  }

  Model bounded = net().load(net().scripted);
  prune_it(bounded, {.amount = 0.9, .scope = prune::Scope::global, .max_amount = 0.5});
  CHECK(bounded.layer("conv1").shape[0] == 4);
  CHECK(bounded.layer("conv2").shape[0] == 3);
  CHECK(bounded.layer("fc1").shape[0] == 5);
}

TEST_CASE("prune_structured: amounts of single layers") {
  Model model = net().load(net().scripted);
  prune_it(model, {.amount = 0.5, .amounts = {"re:conv.*=0.25", "conv2=0.5", "fc1=3"}});
  CHECK(model.layer("conv1").shape[0] == 6);
  CHECK(model.layer("conv2").shape[0] == 4);  // 1.5 rounded to even is 2; the first entry counts
  CHECK(model.layer("fc1").shape[0] == 7);
  check_error(ErrorCode::BadOption, {"conv1", "PATTERN=AMOUNT"}, [&] { prune_it(model, {.amounts = {"conv1"}}); });
  check_error(ErrorCode::BadOption, {"1.5"}, [&] { prune_it(model, {.amounts = {"conv1=1.5"}}); });
  check_error(ErrorCode::NoSuchTarget, {"conv9"}, [&] { prune_it(model, {.amounts = {"conv9=0.5"}}); });
  check_error(ErrorCode::BadOption, {"amounts"},
              [&] { prune_it(model, {.amounts = {"conv1=0.5"}, .scope = prune::Scope::global}); });
}

TEST_CASE("prune_structured: a target is met, and not by more than one channel of each layer") {
  for (const prune::Scope scope : {prune::Scope::layer, prune::Scope::global}) {
    for (const double target : {0.75, 0.4}) {
      INFO(target << (scope == prune::Scope::layer ? " layer" : " global"));
      Model model = net().load(net().scripted);
      const std::int64_t before = macs(model.graph());
      const PassReport report = prune_it(model, {.target_macs = target, .scope = scope});
      CHECK(number(report, "macs_before") == before);
      CHECK(number(report, "macs_after") == macs(model.graph()));
      const double left = static_cast<double>(macs(model.graph())) / static_cast<double>(before);
      CHECK(left <= target);
      // One channel of conv1 (8 of them) and of conv2 (6) and fc1 (10) is less than a third of the whole.
      CHECK(left > target - (1.0 / 8 + 1.0 / 6 + 1.0 / 10));
      CHECK(report.warnings.empty());

      Model smaller = net().load(net().scripted);
      const auto elements = [](const Model& of) {
        std::int64_t count = 0;
        for (const std::string& name : of.tensor_names())
          if (name.find("num_batches") == std::string::npos) count += of.tensor(name).numel();
        return static_cast<double>(count);
      };
      const double whole = elements(smaller);
      prune_it(smaller, {.target_params = target, .scope = scope});
      CHECK(elements(smaller) / whole <= target);
      CHECK(elements(smaller) / whole > target - (1.0 / 8 + 1.0 / 6 + 1.0 / 10));
    }
  }
  Model model = net().load(net().scripted);
  const PassReport report = prune_it(model, {.target_macs = 0.0001});
  REQUIRE(report.warnings.size() == 1);
  CHECK(report.warnings[0].find("target_macs=0.0001 cannot be reached") == 0);
  check_error(ErrorCode::BadOption, {"target_params"},
              [&] { prune_it(model, {.target_macs = 0.5, .target_params = 0.5}); });
}

TEST_CASE("prune_structured: rounds end where one would when scores stay, and rank again when they change") {
  for (const prune::Structured& pass : {prune::Structured{.amount = 0.6, .importance = Importance::bn_scale},
                                        prune::Structured{.amount = 0.6,
                                        .scope = prune::Scope::global,
                                        .importance = Importance::bn_scale,
                                        .normalize = Normalization::none},
                                        prune::Structured{.amount = 3, .importance = Importance::bn_scale}}) {
    Model at_once = net().load(net().scripted), in_rounds = net().load(net().scripted);
    prune_it(at_once, pass);
    prune::Structured slow = pass;
    slow.steps = 3;
    slow.verify = true;
    const PassReport report = prune_it(in_rounds, slow);
    CHECK(at_once.kept() == in_rounds.kept());
    for (const std::string& name : at_once.tensor_names()) CHECK(at_once.tensor(name).equal(in_rounds.tensor(name)));
    CHECK(report.rows.front().details[0].second == std::to_string(report.rows.front().layer == "conv1" ? 8 : 6));
  }
  Model halves = net().load(net().scripted);
  prune_it(halves, {.amount = 0.5, .steps = 4});
  CHECK(halves.layer("conv1").shape[0] == 4);
  CHECK(halves.layer("conv2").shape[0] == 3);
  CHECK(halves.layer("fc1").shape[0] == 5);
  Model target = net().load(net().scripted);
  const PassReport report = prune_it(target, {.target_macs = 0.4, .steps = 3});
  CHECK(number(report, "macs_after") <= 0.4 * static_cast<double>(number(report, "macs_before")));
}

TEST_CASE("prune_structured: a channel that is constant can leave without a trace when it is compensated") {
  const prune::Compensate how = GENERATE(prune::Compensate::constant, prune::Compensate::calibrated);
  Model model = net().load(net().scripted);
  // Two filters of every layer compute nothing but a constant, behind a BatchNorm or a bias of their own.
  const auto silence = [&](const std::string& name, std::int64_t first, std::int64_t last) {
    at::Tensor values = model.tensor(name).clone();
    values.slice(0, first, last).zero_();
    model.rewrite(name, values);
  };
  silence("conv2.weight", 1, 3);
  silence("bn2.weight", 1, 3);
  silence("fc1.weight", 4, 6);
  at::Tensor bias = model.tensor("fc1.bias").clone();
  bias.slice(0, 4, 6).fill_(0.75);
  model.rewrite("fc1.bias", bias);
  at::Tensor beta = model.tensor("bn2.bias").clone();
  beta.slice(0, 1, 3).fill_(1.25);
  model.rewrite("bn2.bias", beta);

  const std::vector<at::Tensor> x{net().data.inputs[0]};
  const at::Tensor wanted = model.forward(x)[0];
  Model plain = model.clone();
  const prune::Structured pass{.amount = 2, .targets = {"conv2", "fc1"}};
  prune_it(plain, pass);
  prune::Structured compensated = pass;
  compensated.compensate = how;
  compensated.verify = true;
  const PassReport report = prune_it(model, compensated);
  CHECK(number(report, "compensated") == 2);
  CHECK(model.layer("conv2").shape[0] == 4);
  CHECK(model.layer("fc1").shape[0] == 8);
  CHECK(relative_difference(plain.forward(x)[0], wanted) > 0.01);
  CHECK(relative_difference(model.forward(x)[0], wanted) < 1e-5);
}

TEST_CASE("prune_structured: compensate=constant takes channels as normally distributed, into BatchNorm means too") {
  Model model = net().load(net().scripted), before = model.clone();
  prune_it(model, {.amount = 3, .targets = {"conv1"}, .compensate = prune::Compensate::constant});
  // conv2 has no bias: the mean of its BatchNorm takes what relu of a normal variable gives on average.
  const std::vector<std::int64_t> stay = kept(model, "conv1.weight");
  const at::Tensor w = before.tensor("conv2.weight").to(at::kDouble).sum({2, 3});
  at::Tensor shift = w.select(1, 0).mul(0);
  double largest = 0;
  for (std::int64_t c = 0; c < 8; ++c) {
    if (std::find(stay.begin(), stay.end(), c) != stay.end()) continue;
    const double mean = before.tensor("bn1.bias")[c].item<double>(),
                 deviation = std::abs(before.tensor("bn1.weight")[c].item<double>()), t = mean / deviation;
    const double expected = mean * 0.5 * std::erfc(-t / std::numbers::sqrt2) +
                            deviation * std::exp(-t * t / 2) / std::sqrt(2 * std::numbers::pi);
    shift.add_(w.select(1, c), expected);
    largest += 0.01 * deviation * w.select(1, c).abs().max().item<double>();
  }
  const at::Tensor got = before.tensor("bn2.running_mean").sub(model.tensor("bn2.running_mean")).to(at::kDouble);
  CHECK(got.sub(shift).abs().max().item<double>() < largest);
  CHECK(shift.abs().max().item<double>() > 10 * largest);
}

TEST_CASE("prune_structured: reestimate leaves the statistics of what is left") {
  Model model = net().load(net().scripted), by_hand = net().load(net().scripted);
  const PassReport report = prune_it(model, {.amount = 0.5, .reestimate = true});
  CHECK(number(report, "reestimated") == 2);
  prune_it(by_hand, {.amount = 0.5});
  CHECK_FALSE(model.tensor("bn2.running_var").equal(by_hand.tensor("bn2.running_var")));
  // bn1 follows the first layer, whose channels are those of the unpruned network.
  const at::Tensor stay = at::tensor(kept(model, "conv1.weight"));
  CHECK(relative_difference(model.tensor("bn1.running_mean"),
                            net().expected.at("bn1.running_mean").index_select(0, stay)) < 1e-4);
  CHECK(relative_difference(model.tensor("bn1.running_var"),
                            net().expected.at("bn1.running_var").index_select(0, stay)) < 1e-4);
}

TEST_CASE("prune_structured: what it needs is asked for before anything changes") {
  Model model = net().load(net().scripted);
  const auto without = [&](const prune::Structured& pass) { return [&model, pass] { Pipeline{pass}.run(model); }; };
  check_error(ErrorCode::MissingData, {"calibration"}, without({.importance = Importance::taylor}));
  check_error(ErrorCode::MissingData, {"calibration"}, without({.importance = Importance::activation}));
  check_error(ErrorCode::MissingData, {"calibration"}, without({.compensate = prune::Compensate::calibrated}));
  check_error(ErrorCode::MissingData, {"calibration"}, without({.reestimate = true}));
  CHECK(model.kept().empty());
}

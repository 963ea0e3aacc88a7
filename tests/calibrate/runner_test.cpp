#include "tersor/calibrate/runner.hpp"

#include <limits>

#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>

#include "support.hpp"

using namespace tersor;
using tersor::calibrate::activation_of;
using tersor::calibrate::calibrate_inputs;
using tersor::calibrate::Calibration;
using tersor::calibrate::Observer;
using tersor::calibrate::RunnerOptions;

namespace {

Model mlp() { return Model::load(TERSOR_TEST_DATA "/fashion/mlp_fp32.ts.pt"); }

std::unique_ptr<Observer> make_min_max() { return std::make_unique<calibrate::MinMax>(); }

}  // namespace

TEST_CASE("runner: every layer's input has the range that the layers before it give") {
  const Model model = mlp();
  const Dataset data{{at::rand({10, 784}).mul(3).sub(1)}, {}};
  std::vector<std::int64_t> progress;
  const RunnerOptions options{.samples = 7, .batch_size = 3, .progress = [&](std::int64_t done, std::int64_t of) {
                                progress.push_back(done);
                                CHECK(of == 7);
                              }};
  const Calibration result = calibrate_inputs(model, {"1", "3"}, data, make_min_max, options);
  CHECK(progress == std::vector<std::int64_t>{3, 6, 7});
  CHECK(result.warnings.empty());

  const at::Tensor x = data.inputs[0].slice(0, 0, 7);
  REQUIRE(result.inputs.size() == 2);
  CHECK(result.inputs.at("1") == activation_of({x.min().item<float>(), x.max().item<float>()}));
  const at::Tensor hidden = x.matmul(model.tensor("1.weight").t()).add(model.tensor("1.bias")).relu();
  const ActivationQuant expected = activation_of({0.0F, hidden.max().item<float>()});
  CHECK(result.inputs.at("3").scale == Approx(expected.scale).epsilon(1e-5));  // sums of 784 terms in another order
  CHECK(result.inputs.at("3").zero_point == -128);
}

TEST_CASE("runner: says which layer saw NaN, infinities, only zeros") {
  const Model model = mlp();
  const float inf = std::numeric_limits<float>::infinity();
  at::Tensor x = at::rand({6, 784});
  x[0][5].fill_(std::numeric_limits<float>::quiet_NaN());
  x[2][7].fill_(inf);
  x[5][0].fill_(-inf);
  check_error(ErrorCode::NonFiniteActivation, {"'1'", "1 NaN", "2 Inf"}, [&] {
    calibrate_inputs(model, {"3", "1"}, {{x}, {}}, make_min_max, {.batch_size = 2});
  });

  const Calibration zeros = calibrate_inputs(model, {"1"}, {{at::zeros({4, 784})}, {}}, make_min_max);
  REQUIRE(zeros.warnings.size() == 1);
  CHECK(zeros.warnings[0].find("'1'") != std::string::npos);
  CHECK(zeros.inputs.at("1").scale > 0.0F);

  check_error(ErrorCode::MissingData, {"no samples"}, [&] {
    calibrate_inputs(model, {"1"}, {{at::zeros({0, 784})}, {}}, make_min_max);
  });
}

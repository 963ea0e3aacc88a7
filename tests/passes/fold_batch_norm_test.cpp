#include <limits>

#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>

#include "model/made.hpp"
#include "support.hpp"
#include "tersor/passes/fold.hpp"
#include "tersor/pipeline/pipeline.hpp"

using namespace tersor;

namespace {

/// tests/python/make_pass_cases.py describes it.
struct Net {
  std::map<std::string, at::Tensor> io = read_tensors("passes/fold_io.safetensors");
  Model model = Model::load(TERSOR_TEST_DATA "/passes/fold.pt");

  Net() { model.set_example(inputs()); }
  std::vector<at::Tensor> inputs() const { return {io.at("input0"), io.at("input1")}; }
};

double largest(const at::Tensor& x) { return x.abs().max().item<double>(); }

/// The pass's word on each layer: `folded into X` or why not.
std::map<std::string, std::string> verdicts(const PassReport& report) {
  std::map<std::string, std::string> out;
  for (const ReportRow& row : report.rows)
    out[row.layer] = (row.action == "folded" ? "folded into " : "") + row.details.at(0).second;
  return out;
}

}  // namespace

TEST_CASE("fold_batch_norm: the same function with fewer layers, and why others stay") {
  Net net;
  const PassReport report = Pipeline{fold::BatchNorm{}}.run(net.model).passes.front();
  CHECK(report.changed == Changed::structure);
  auto verdict = verdicts(report);
  CHECK(verdict.size() == 7);
  CHECK(verdict["conv_bn"] == "folded into conv");
  CHECK(verdict["up_bn"] == "folded into up");
  CHECK(verdict["fc_bn"] == "folded into fc");
  CHECK(verdict["twice_bn"].find("used elsewhere") != std::string::npos);
  CHECK(verdict["relu_bn"].find("aten::relu") != std::string::npos);
  CHECK(verdict["input_bn"].find("input of the model") != std::string::npos);
  CHECK(verdict["tokens_bn"].find("dimension 1") != std::string::npos);

  const auto outputs = net.model.forward(net.inputs());
  REQUIRE(outputs.size() == 3);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor expected = net.io.at("output" + std::to_string(i));
    // A few hundred float32 roundings of values up to the largest.
    CHECK(largest(outputs[i].sub(expected)) <= 2e-5 * largest(expected));
  }
  std::size_t norms = 0;
  for (const GraphNode& node : net.model.graph().nodes) norms += node.op == "aten::batch_norm";
  CHECK(norms == 4);

  // A second run finds nothing more.
  CHECK(Pipeline{fold::BatchNorm{}}.run(net.model).passes.front().changed == Changed::nothing);
}

TEST_CASE("fold_batch_norm: weights by the formula") {
  Net net;
  const double eps = 1e-5;
  const auto parameter = [&](const char* name) { return net.model.tensor(name).to(at::kDouble); };
  const at::Tensor factor = parameter("fc_bn.weight").div(parameter("fc_bn.running_var").add(eps).sqrt());
  const at::Tensor weight = parameter("fc.weight").mul(factor.unsqueeze(1)).to(at::kFloat);
  const at::Tensor bias =
      parameter("fc.bias").sub(parameter("fc_bn.running_mean")).mul(factor).add(parameter("fc_bn.bias")).to(at::kFloat);
  Pipeline{fold::BatchNorm{.targets = {"fc_bn"}}}.run(net.model);
  CHECK(at::equal(net.model.tensor("fc.weight"), weight));
  CHECK(at::equal(net.model.tensor("fc.bias"), bias));
  CHECK(net.model.has_tensor("conv_bn.weight"));
}

TEST_CASE("fold_batch_norm: an impossible variance is named and changes nothing") {
  for (const double bad : {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    Net net;
    at::Tensor variance = net.model.tensor("up_bn.running_var").clone();
    variance[2].fill_(bad);
    net.model.rewrite("up_bn.running_var", variance);
    const at::Tensor before = net.model.tensor("conv.weight").clone();
    check_error(ErrorCode::NonFiniteWeight, {"up_bn", "channel 2"},
                [&] { Pipeline{fold::BatchNorm{}}.run(net.model); });
    CHECK(at::equal(net.model.tensor("conv.weight"), before));
  }
}

TEST_CASE("fold_batch_norm: only BatchNorm layers can be named") {
  Net net;
  check_error(ErrorCode::UnsupportedLayer, {"'fc'", "Linear"},
              [&] { Pipeline{fold::BatchNorm{.targets = {"fc"}}}.run(net.model); });
}

TEST_CASE("fold_batch_norm: what another call or another course needs stays, and every BatchNorm is named") {
  Model model = Model::load(made("folds"));
  const std::vector<at::Tensor> few{at::randn({2, 3, 8, 8})}, many{at::randn({8, 3, 8, 8})};
  model.set_example(few);
  const at::Tensor wanted = model.forward(few)[0], other = model.forward(many)[0];
  auto verdict = verdicts(Pipeline{fold::BatchNorm{}}.run(model).passes.front());
  const std::map<std::string, std::string> reasons{{"doubled_bn", "computed"},
                                                   {"first_bn", "bias of 'first' is used more than once"},
                                                   {"second_bn", "bias of 'second' is used more than once"},
                                                   {"plain_bn", "no weight and no bias"},
                                                   {"scale", "not a parameter of its own"},
                                                   {"branch_bn", "another course at prim::If"},
                                                   {"last_bn", "folded into last"}};
  CHECK(verdict.size() == reasons.size());
  for (const auto& [layer, why] : reasons) {
    INFO(layer << ": " << verdict[layer]);
    CHECK(verdict[layer].find(why) != std::string::npos);
  }
  CHECK(largest(model.forward(few)[0].sub(wanted)) <= 2e-5 * largest(wanted));
  CHECK(largest(model.forward(many)[0].sub(other)) <= 2e-5 * largest(other));
}

TEST_CASE("fold_into refuses a producer whose bias is computed") {
  Model model = Model::load(made("folds"));
  model.set_example({at::randn({2, 3, 8, 8})});
  check_error(ErrorCode::UnsupportedLayer, {"'doubled'", "computed"}, [&] {
    model.fold_into("doubled_bn", "doubled", model.tensor("doubled.weight"), model.tensor("doubled_bn.bias"));
  });
}

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <unistd.h>

#include "catch.hpp"
#include "model/made.hpp"
#include "tersor/core/error.hpp"
#include "tersor/io/safetensors.hpp"
#include "tersor/passes/prune.hpp"
#include "tersor/pipeline/pipeline.hpp"

using namespace tersor;
namespace fs = std::filesystem;

namespace {

/// A case of tests/data/cases: its network with the example set, and what should come out.
struct Case {
  explicit Case(const std::string& id)
      : expected(SafetensorsFile::open(fs::path(TERSOR_TEST_DATA) / "cases" / id / "expected.safetensors")),
        model(Model::load(fs::path(TERSOR_TEST_DATA) / "cases" / id / "model.pt")) {
    model.set_example({expected.read("input0")});
  }
  SafetensorsFile expected;
  Model model;
};

PassReport run_on(Model& model, const prune::Structured& pass) { return Pipeline{pass}.run(model).passes.front(); }

/// Largest difference; shapes must agree.
double difference(const at::Tensor& a, const at::Tensor& b) {
  REQUIRE(a.sizes() == b.sizes());
  return a.numel() == 0 ? 0.0 : a.sub(b).abs().max().item().toDouble();
}

Model reloaded(const Model& model) {
  const fs::path path = fs::temp_directory_path() / ("prune_structured_test_" + std::to_string(::getpid()) + ".pt");
  SaveOptions options;
  options.overwrite = true;
  model.save(path, options);
  Model again = Model::load(path);
  again.set_example(model.example());
  fs::remove(path);
  return again;
}

/// Every tensor has the shape and value of `pruned.*`, and the network gives `expected*`, before and after a reload.
void check_pruned(const Case& c, const Model& model) {
  for (const SafetensorsEntry& entry : c.expected.entries()) {
    if (!entry.name.starts_with("pruned.")) continue;
    const std::string name = entry.name.substr(7);
    INFO(name);
    const at::Tensor want = c.expected.read(entry), got = model.tensor(name);
    CHECK(got.sizes() == want.sizes());
    CHECK(got.equal(want));
  }
  const Model again = reloaded(model);
  for (int i = 0; c.expected.find("input" + std::to_string(i)); ++i) {
    const at::Tensor input = c.expected.read("input" + std::to_string(i));
    for (const Model& one : {model, again}) {
      const std::vector<at::Tensor> got = one.forward({input});
      for (std::size_t k = 0; k < got.size(); ++k) {
        const std::string name = "expected" + std::to_string(i) + "." + std::to_string(k);
        INFO(name);
        REQUIRE(c.expected.find(name));
        CHECK(difference(got[k], c.expected.read(name)) <= 1e-4);
      }
    }
  }
}

const ReportRow* row_of(const PassReport& report, const std::string& layer, const std::string& action) {
  for (const ReportRow& row : report.rows)
    if (row.layer == layer && row.action == action) return &row;
  return nullptr;
}

std::string said(const ReportRow* row, const std::string& key) {
  REQUIRE(row != nullptr);
  for (const auto& [name, value] : row->details)
    if (name == key) return value;
  return "";
}

std::vector<std::int64_t> kept(const Model& model, const std::string& tensor, std::int64_t dim) {
  const auto found = model.kept().find(tensor + ":" + std::to_string(dim));
  return found == model.kept().end() ? std::vector<std::int64_t>{} : found->second;
}

std::vector<std::int64_t> numbers(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kLong).contiguous();
  return {flat.const_data_ptr<std::int64_t>(), flat.const_data_ptr<std::int64_t>() + flat.numel()};
}

}  // namespace

TEST_CASE("prune_structured: cases give exactly the expected tensors and outputs") {
  const std::string id =
      GENERATE(as<std::string>{}, "sp-flatten-pool", "sp-two-heads", "sp-bn-beta", "sp-layernorm", "sp-cat-self",
               "sp-depthwise", "sp-grouped-balance", "sp-glu-chunk", "sp-mha-fused", "sp-pixelshuffle");
  DYNAMIC_SECTION(id) {
    Case c(id);
    prune::Structured pass{.amount = 0.5, .verify = true};
    if (id == "sp-cat-self") pass.amount = 0.25;
    const PassReport report = run_on(c.model, pass);
    check_pruned(c, c.model);
    CHECK(report.changed == Changed::structure);
    std::set<std::string> verified;
    for (const ReportRow& row : report.rows)
      if (row.action == "pruned") verified.insert(said(&row, "verified"));
    CHECK(verified == std::set<std::string>{id == "sp-layernorm" ? "no: statistics over the channels change" : "yes"});
  }
}

TEST_CASE("prune_structured: sp-residual-once: a trunk is cut once, however many layers add to it") {
  Case c("sp-residual-once");
  const PassReport report = run_on(c.model, {.amount = 0.25, .verify = true});
  check_pruned(c, c.model);
  CHECK(kept(c.model, "stem.weight", 0) == numbers(c.expected.read("kept.trunk")));
  CHECK(kept(c.model, "c1.weight", 0) == numbers(c.expected.read("kept.inner")));
  const ReportRow* row = row_of(report, "stem, c2, c3", "pruned");
  CHECK(said(row, "before") == "8");
  CHECK(said(row, "after") == "6");
  CHECK(said(row, "verified") == "yes");
}

TEST_CASE("prune_structured: sp-param-buffer: parameters, buffers and PReLU follow their channel") {
  Case c("sp-param-buffer");
  run_on(c.model, {.amount = 1.0 / 3.0, .verify = true});
  check_pruned(c, c.model);
}

TEST_CASE("prune_structured: sp-deconv: only the targeted layer is cut") {
  Case c("sp-deconv");
  run_on(c.model, {.amount = 0.5, .targets = {"t1"}, .verify = true});
  check_pruned(c, c.model);
}

TEST_CASE("prune_structured: sp-two-heads: outputs of the model are found and named") {
  Case c("sp-two-heads");
  const PassReport report = run_on(c.model, {.amount = 0.5});
  for (const char* head : {"cls", "box", "box2"})
    CHECK(said(row_of(report, head, "skipped"), "why") == "it makes an output of the model");
  CHECK(said(row_of(report, "trunk", "pruned"), "weights_before") == "40");
  CHECK(said(row_of(report, "trunk", "pruned"), "weights_after") == "20");
  // Batch 4: 4 * (8 * 5 + 14 * 8) multiply-accumulates, half of them afterwards.
  CHECK(said(row_of(report, "(model)", "counted"), "macs_before") == "608");
  CHECK(said(row_of(report, "(model)", "counted"), "macs_after") == "304");
}

TEST_CASE("prune_structured: sp-empty-layer: every width keeps a channel, a wrong amount is refused") {
  for (const double amount : {0.95, 1.0}) {
    Case c("sp-empty-layer");
    run_on(c.model, {.amount = amount, .verify = true});
    const at::Tensor out = reloaded(c.model).forward({c.expected.read("input0")}).at(0);
    CHECK(out.sizes() == c.expected.read("original").sizes());
    CHECK(out.isfinite().all().item().toBool());
    for (const Layer& layer : c.model.layers()) CHECK(layer.shape[0] >= 1);
    CHECK(c.model.layers()[0].shape[0] == 1);
  }
  for (const double amount : {-0.1, 1.5}) {
    Case c("sp-empty-layer");
    const at::Tensor before = c.model.forward({c.expected.read("input0")}).at(0);
    try {
      run_on(c.model, {.amount = amount});
      FAIL("no error");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::BadOption);
      CHECK(error.message().find(amount < 0 ? "-0.1" : "1.5") != std::string::npos);
    }
    CHECK(c.model.forward({c.expected.read("input0")}).at(0).equal(before));
  }
}

TEST_CASE("prune_structured: what cannot be followed stays whole and is named") {
  const std::string id = GENERATE(as<std::string>{}, "sp-branch", "sp-lstm");
  DYNAMIC_SECTION(id) {
    Case c(id);
    const at::Tensor before = c.model.forward({c.expected.read("input0")}).at(0);
    const PassReport report = run_on(c.model, {.amount = 0.5, .verify = true});
    if (report.changed == Changed::structure) {
      check_pruned(c, c.model);
    } else {
      CHECK(std::any_of(report.rows.begin(), report.rows.end(),
                        [](const ReportRow& row) { return row.action == "skipped"; }));
      CHECK(c.model.forward({c.expected.read("input0")}).at(0).equal(before));
    }
  }
}

TEST_CASE("prune_structured: a family whose removal the code does not follow is rolled back, the others stay cut") {
  const fs::path path = fs::temp_directory_path() / ("prune_structured_width_" + std::to_string(::getpid()) + ".pt");
  const std::string code = R"(
import sys, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = torch.nn.Linear(4, 8), torch.nn.Linear(8, 6), torch.nn.Linear(6, 3)
    def forward(self, x):
        h = torch.relu(self.a(x))
        h = torch.relu(self.b(h / h.size(1)))
        return self.c(h)
torch.manual_seed(1)
torch.jit.script(Net()).eval().save(sys.argv[1])
)";
  const std::string source = path.string() + ".py";
  std::ofstream(source) << code;
  REQUIRE(std::system((TERSOR_TEST_PYTHON " '" + source + "' '" + path.string() + "'").c_str()) == 0);
  fs::remove(source);
  Model model = Model::load(path);
  fs::remove(path);
  model.set_example({at::ones({2, 4})});
  const at::Tensor a = model.tensor("a.weight").clone(), b = model.tensor("b.weight").clone();

  const PassReport report = run_on(model, {.amount = 0.5, .verify = true});
  CHECK(report.changed == Changed::structure);
  CHECK(said(row_of(report, "a", "skipped"), "why").find("aten::div computes 'other' from a width") == 0);
  CHECK(model.tensor("a.weight").equal(a));
  CHECK(model.layer("b").shape == std::vector<std::int64_t>{3, 8});
  CHECK(model.layer("c").shape == std::vector<std::int64_t>{3, 3});
  const std::vector<std::int64_t> stay = kept(model, "b.weight", 0);
  REQUIRE(stay.size() == 3);
  for (std::size_t i = 0; i < stay.size(); ++i)
    CHECK(model.tensor("b.weight").select(0, static_cast<std::int64_t>(i)).equal(b.select(0, stay[i])));
  CHECK(said(row_of(report, "b", "pruned"), "verified") == "yes");
}

TEST_CASE("prune_structured: nothing to remove changes no tensor") {
  for (const Amount amount : {Amount(0), Amount(0.0)}) {
    Case c("sp-residual-once");
    std::vector<at::Tensor> before;
    for (const std::string& name : c.model.tensor_names()) before.push_back(c.model.tensor(name).clone());
    CHECK(run_on(c.model, {.amount = amount, .verify = true}).changed == Changed::nothing);
    for (std::size_t i = 0; i < before.size(); ++i) CHECK(c.model.tensor(c.model.tensor_names()[i]).equal(before[i]));
    CHECK(c.model.kept().empty());
  }
}

TEST_CASE("prune_structured: twice by counts is once by their sum") {
  Case at_once("sp-two-heads"), twice("sp-two-heads");
  run_on(at_once.model, {.amount = 5});
  run_on(twice.model, {.amount = 2});
  run_on(twice.model, {.amount = 3});
  for (const std::string& name : at_once.model.tensor_names())
    CHECK(at_once.model.tensor(name).equal(twice.model.tensor(name)));
  CHECK(at_once.model.kept() == twice.model.kept());
  CHECK(kept(at_once.model, "trunk.weight", 0).size() == 3);
}

TEST_CASE("prune_structured: round_to rounds what stays up, min_channels holds, targets and ignore choose") {
  const auto width = [](const prune::Structured& pass, const char* layer) {
    Case c("sp-residual-once");
    run_on(c.model, pass);
    return c.model.layer(layer).shape[0];
  };
  CHECK(width({.amount = 0.6}, "stem") == 3);
  CHECK(width({.amount = 0.6, .round_to = 4}, "stem") == 4);
  CHECK(width({.amount = 0.6, .round_to = 3}, "stem") == 3);
  CHECK(width({.amount = 0.6, .round_to = 5}, "stem") == 5);
  CHECK(width({.amount = 0.25, .round_to = 16}, "stem") == 8);
  CHECK(width({.amount = 0.9, .min_channels = 3}, "stem") == 3);
  CHECK(width({.amount = 100}, "stem") == 1);
  CHECK(width({.amount = 0.5, .targets = {"c1"}}, "stem") == 8);
  CHECK(width({.amount = 0.5, .targets = {"c1"}}, "c1") == 4);
  CHECK(width({.amount = 0.5, .targets = {"c3"}}, "stem") == 4);
  CHECK(width({.amount = 0.5, .ignore = {"c3"}}, "stem") == 8);
  CHECK(width({.amount = 0.5, .ignore = {"c3"}}, "c1") == 4);
}

TEST_CASE("prune_structured: what another course of the network reads stays whole and is named") {
  Model model = Model::load(made("other_course"));
  const std::vector<at::Tensor> few{at::randn({2, 8})}, many{at::randn({8, 8})};
  model.set_example(few);
  const PassReport report = Pipeline{prune::Structured{.amount = 0.5}}.run(model).passes.front();
  std::set<std::string> skipped;
  for (const ReportRow& row : report.rows)
    if (row.action == "skipped" && row.details.at(0).second.find("another course at prim::If") != std::string::npos)
      skipped.insert(row.layer);
  CHECK(skipped == std::set<std::string>{"stem", "small"});
  CHECK(model.tensor("free.weight").size(0) == 6);  // before the branch, and free to go
  CHECK(model.tensor("stem.weight").size(0) == 8);
  CHECK(model.forward(few)[0].sizes() == at::IntArrayRef({2, 3}));
  CHECK(model.forward(many)[0].sizes() == at::IntArrayRef({8, 3}));
}

#include "tersor/pipeline/pipeline.hpp"

#include <ATen/ops/arange.h>

#include "catch.hpp"
#include "fake_passes.hpp"
#include "tersor/version.hpp"

using namespace tersor;

namespace {

at::Tensor numbers(const std::vector<std::int64_t>& shape) {
  std::int64_t n = 1;
  for (const std::int64_t size : shape) n *= size;
  return at::arange(1, n + 1, at::kFloat).reshape(shape);
}

Model small_model() {
  return Model::from_tensors({{"a.weight", numbers({2, 3})}, {"a.bias", numbers({2})}}, {{"author", "someone"}});
}

float first_value(const Model& model, const std::string& tensor = "a.weight") {
  return model.tensor(tensor).const_data_ptr<float>()[0];
}

template <typename F>
std::string error_of(F f) {
  try {
    f();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

/// What a run says when it fails; the model must be as it was.
std::string failure(const Pipeline& pipeline, const RunOptions& options = {}) {
  Model model = small_model();
  const std::string message = error_of([&] { pipeline.run(model, options); });
  CHECK(model.tensor("a.weight").equal(numbers({2, 3})));
  CHECK(model.tensor("a.bias").equal(numbers({2})));
  CHECK(model.metadata() == std::map<std::string, std::string>{{"author", "someone"}});
  return message;
}

struct Watcher final : Progress {
  int begun = 0, ended = 0;
  void begin(std::string_view, std::int64_t) override { ++begun; }
  void end() override { ++ended; }
};

}  // namespace

TEST_CASE("passes run in order and say what they did", "[pipeline]") {
  Model model = small_model();
  const Report report = Pipeline{fake::Scale{3}, fake::Plain{}, fake::Scale{}}.run(model);
  CHECK(first_value(model) == 6.0F);
  CHECK(report.recipe == "scale(by=3), plain, scale");
  REQUIRE(report.passes.size() == 3);
  CHECK(report.passes[0].pass == "scale(by=3)");
  CHECK(report.passes[0].changed == Changed::weights);
  CHECK(report.passes[0].seconds > 0.0);
  CHECK(report.passes[0].rows.size() == 2);
  CHECK(report.passes[1].changed == Changed::nothing);
  CHECK(report.passes[1].rows.empty());
  CHECK(report.parameters_before == 8);
  CHECK(report.parameters_after == 8);
  CHECK(report.bytes_before == 32);
  CHECK(report.bytes_after == 32);
}

TEST_CASE("a run writes its history into the model", "[pipeline]") {
  Model model = small_model();
  Pipeline{fake::Scale{3}, fake::Plain{}}.run(model);
  CHECK(model.metadata().at("tersor.recipe") == "scale(by=3), plain");
  CHECK(model.metadata().at("tersor.version") == version);
  Pipeline{fake::Scale{}}.run(model);
  CHECK(model.metadata().at("tersor.recipe") == "scale(by=3), plain, scale");
  CHECK(model.metadata().at("author") == "someone");
}

TEST_CASE("an empty pipeline runs and changes nothing", "[pipeline]") {
  Model model = small_model();
  const Report report = Pipeline{}.run(model);
  CHECK(report.passes.empty());
  CHECK(report.recipe.empty());
  CHECK(report.parameters_before == 8);
  CHECK(report.parameters_after == 8);
  CHECK(model.metadata() == std::map<std::string, std::string>{{"author", "someone"}});
  CHECK(Pipeline{}.needs() == Need::weights);
}

TEST_CASE("a pipeline is a pass and nests", "[pipeline]") {
  const Pipeline inner{fake::Scale{3}, fake::Needy{.what = 2}};
  const Pipeline outer{fake::Plain{}, inner, Pipeline{}, fake::Scale{}};
  CHECK(outer.text() == "plain, scale(by=3), needy(what=2), scale");
  CHECK(outer.needs() == Need::forward);
  CHECK(Pass(inner).text() == "scale(by=3), needy(what=2)");

  Model model = small_model();
  const Report report = Pipeline{fake::Plain{}, Pipeline{fake::Scale{3}, Pipeline{fake::Scale{5}}}}.run(model);
  CHECK(first_value(model) == 15.0F);
  CHECK(report.passes.size() == 3);
  CHECK(model.metadata().at("tersor.recipe") == "plain, scale(by=3), scale(by=5)");
}

TEST_CASE("a pipeline run as one pass of something else gathers the rows of all", "[pipeline]") {
  Model model = small_model();
  const RunOptions options;
  PassReport report;
  Progress silent;
  PassContext context{options, report, nullptr, silent};
  const Pass pass = Pipeline{fake::Plain{}, fake::Scale{3}, fake::Scale{}};
  CHECK(pass.run(model, context) == Changed::weights);
  CHECK(report.rows.size() == 4);
  CHECK(first_value(model) == 6.0F);
}

TEST_CASE("a failure names the pass and leaves the model as it was", "[pipeline]") {
  CHECK(failure(Pipeline{fake::Scale{3}, fake::Fails{}}) ==
        "NonFiniteWeight: pass 2 (fails): layer 'a.bias' has 1 NaN");
  CHECK(failure(Pipeline{fake::Plain{}, Pipeline{fake::Scale{3}, fake::Fails{}}}) ==
        "NonFiniteWeight: pass 2 (pipeline): pass 2 (fails): layer 'a.bias' has 1 NaN");
  CHECK(failure(Pipeline{fake::Scale{3}, fake::Fails{.foreign = true}}) == "something else");
}

TEST_CASE("a failure ends the progress line", "[pipeline]") {
  Watcher watcher;
  failure(Pipeline{fake::Fails{}}, {.progress = &watcher});
  CHECK(watcher.begun == 1);
  CHECK(watcher.ended == 1);
}

TEST_CASE("options are checked before anything is changed", "[pipeline]") {
  CHECK(failure(Pipeline{fake::Scale{3}, fake::Scale{2e6}}) ==
        "BadOption: pass 2 (scale): by=2000000 is outside [-1000000, 1000000]");
  CHECK(failure(Pipeline{fake::Scale{3}, Pipeline{fake::Scale{0}}}) ==
        "BadOption: pass 2 (pipeline): pass 1 (scale): by=0 would clear every weight");
  CHECK(failure(Pipeline{fake::Scale{3}}, {.samples = 0}) ==
        "BadOption: samples=0 (RunOptions::samples) is not positive");
  CHECK(failure(Pipeline{fake::Scale{3}}, {.batch_size = -1}) ==
        "BadOption: batch_size=-1 (RunOptions::batch_size) is not positive");
  CHECK(error_of([] { Pass(Pipeline{fake::Scale{0}}).validate(); }) ==
        "BadOption: pass 1 (scale): by=0 would clear every weight");
}

TEST_CASE("needs are checked for every pass before anything is changed", "[pipeline]") {
  const auto needs = [](Need need) {
    return Pipeline{fake::Scale{3}, Pipeline{fake::Needy{.what = std::int64_t(need)}}};
  };
  const std::string weights_only = "NeedUnmet: needy needs a runnable model; this checkpoint holds only weights";
  const std::string no_data =
      "MissingData: needy needs calibration data: give --calibration FILE (RunOptions::calibration)";
  CHECK(failure(needs(Need::forward)) == weights_only);
  CHECK(failure(needs(Need::graph)) == weights_only);
  CHECK(failure(needs(Need::forward | Need::data)) == weights_only);
  CHECK(failure(needs(Need::data)) == no_data);
  CHECK(failure(needs(Need::labels)) == no_data);
  CHECK(failure(needs(Need::data), {.calibration = Dataset{}}) == no_data);
  const Dataset unlabelled{{numbers({4, 3})}, std::nullopt};
  CHECK(failure(needs(Need::labels), {.calibration = unlabelled}) ==
        "MissingData: needy needs labels: add a tensor 'label' to the calibration file (Dataset::labels)");

  Model model = small_model();
  needs(Need::data).run(model, {.calibration = unlabelled});
  CHECK(first_value(model) == 3.0F);
  CHECK_NOTHROW(needs(Need::labels).check_needs(model, {.calibration = Dataset{{numbers({4, 3})}, numbers({4})}}));
}

TEST_CASE("a pass that asks for the original gets it as it was before the first pass", "[pipeline]") {
  Model model = small_model();
  const Report report =
      Pipeline{fake::Scale{3}, fake::Needy{.what = std::int64_t(Need::original)}, fake::Needy{}}.run(model);
  REQUIRE(report.passes[1].rows.size() == 1);
  CHECK(report.passes[1].rows[0].details[0].second == "no");
  CHECK(report.passes[2].rows.empty());  // did not ask
}

#ifndef NDEBUG
TEST_CASE("a pass is held to what it claims to have changed", "[pipeline]") {
  CHECK(failure(Pipeline{fake::Liar{}}) ==
        "Internal: pass 1 (liar): claims to have changed nothing, but 'a.bias' has other values");
  // Only a runnable model lets a pass change shapes.
  Model model = Model::load(TERSOR_TEST_DATA "/cases/sp-bn-beta/model.pt");
  CHECK(error_of([&] { Pipeline{fake::Liar{.shapes = true}}.run(model); }) ==
        "Internal: pass 1 (liar): claims to have kept every shape, but 'bn.bias' is another one");
  CHECK(model.tensor("bn.bias").size(0) == 6);
}
#endif

TEST_CASE("the reference knows the C++ name of a pass", "[pipeline]") {
  CHECK(pass_info<fake::Scale>().type == "fake::Scale");
  CHECK(pass_info<fake::Plain>().type == "fake::Plain");
}

TEST_CASE("a tensor with two names counts once", "[pipeline]") {
  const at::Tensor shared = at::arange(6, at::kFloat);
  Model model = Model::from_tensors({{"a.weight", shared}, {"b.weight", shared}, {"c.weight", shared.clone()}});
  CHECK(Pipeline{}.run(model).parameters_before == 12);
}

// TorchScript forms that the case files lack; Python writes them (tests/python/make_models.py).
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include "catch.hpp"
#include "io/temporary.hpp"
#include "model/made.hpp"
#include "tersor/model/model.hpp"

using namespace tersor;
using Catch::Matchers::Contains;
namespace fs = std::filesystem;

namespace {

LayerQuantization int8(const Model& model, const std::string& layer, ActivationQuant activation = {}) {
  return {quantize_weight(model.tensor(model.layer(layer).weight), QuantScheme{}), activation};
}

std::vector<std::string> names(const Model& model) {
  std::vector<std::string> names;
  for (const Layer& layer : model.layers()) names.push_back(layer.name);
  return names;
}

Model reloaded(const Model& model, const SaveOptions& options = {}) {
  const TemporaryDirectory directory;
  model.save(directory / "model.pt", options);
  return Model::load(directory / "model.pt");
}

}  // namespace

TEST_CASE("a tied head is a head, and its codes leave the embedding alone", "[script]") {
  for (const char* file : {"tied", "traced_tied"}) {
    INFO(file);
    Model model = Model::load(made(file));
    CHECK(model.layer("embed").kind == LayerKind::embedding);
    const Layer head = model.layer("lm_head");
    CHECK(head.is_head);
    CHECK(head.weight == "lm_head.weight");
    CHECK_FALSE(model.layer("mix").is_head);

    const std::vector<at::Tensor> ids{at::arange(3).view({1, 3})};
    model.set_example(ids);
    const at::Tensor before = model.forward(ids)[0];
    const at::Tensor embedding = model.tensor("embed.weight").clone();
    Model loaded = reloaded(model);
    const std::int64_t bytes = model.nbytes();
    CHECK(loaded.nbytes() == bytes);  // still one tensor

    Model cut = model.clone();
    cut.keep("embed.weight", 1, {0, 2, 3});
    CHECK(cut.tensor("lm_head.weight").sizes() == at::IntArrayRef({11, 3}));
    CHECK(cut.kept().at("lm_head.weight:1") == cut.kept().at("embed.weight:1"));
    CHECK(model.tensor("embed.weight").size(1) == 6);

    model.quantize_layer("lm_head", {quantize_weight(embedding, QuantScheme{}), {}});
    CHECK(at::equal(model.tensor("embed.weight"), embedding));
    const at::Tensor after = model.forward(ids)[0];
    CHECK_FALSE(at::equal(after, before));
    CHECK(at::allclose(after, before, 0.05, 0.05));
    const Model again = reloaded(model);
    CHECK(at::equal(again.forward(ids)[0], after));
    CHECK(again.layer("lm_head").quantized.has_value());
    CHECK(again.layer("embed").kind == LayerKind::embedding);
  }
}

TEST_CASE("a submodule that is reached twice is one layer", "[script]") {
  Model model = Model::load(made("twice"));
  CHECK(names(model) == std::vector<std::string>{"first"});
  CHECK(model.nbytes() == (16 + 4) * 4);
  const std::vector<at::Tensor> x{at::randn({2, 4})};
  int seen = 0;
  model.observe(x, [&](const Layer&, const at::Tensor&, const at::Tensor&) { ++seen; });
  CHECK(seen == 2);
  const at::Tensor before = model.forward(x)[0];
  model.quantize_layer("first", int8(model, "first", {ActivationMode::per_token}));
  const at::Tensor after = model.forward(x)[0];
  CHECK(after.sub(before).abs().max().item<float>() < 0.05F);
  const Model again = reloaded(model);
  CHECK(at::equal(again.forward(x)[0], after));
  CHECK(names(again) == std::vector<std::string>{"first"});
}

TEST_CASE("two instances of one class are edited apart", "[script]") {
  Model model = Model::load(made("two_blocks"));
  model.set_example({at::randn({3, 4})});
  // Block a loses every other hidden unit: its view sizes change, those of b do not.
  const std::vector<std::int64_t> half{0, 2, 4, 6};
  const Graph& graph = model.graph();
  std::vector<NodeId> views, reshapes;
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    if (graph.nodes[i].op == "aten::view") views.push_back(static_cast<NodeId>(i));
    if (graph.nodes[i].op == "aten::reshape") reshapes.push_back(static_cast<NodeId>(i));
  }
  REQUIRE(views.size() == 2);
  CHECK(graph.nodes[static_cast<std::size_t>(views[0])].scope == "a");
  CHECK(graph.nodes[static_cast<std::size_t>(views[1])].scope == "b");
  Model expected = model.clone();
  at::Tensor mask = at::zeros({8, 4}).to(at::kBool);
  for (const std::int64_t i : half) mask[i].fill_(true);
  expected.mask("a.up.weight", mask);
  expected.mask("a.up.bias", mask.select(1, 0));
  model.set_argument(views[0], 1, std::vector<std::int64_t>{3, 2, 2});
  model.set_argument(reshapes[0], 1, std::vector<std::int64_t>{-1, 4});
  model.keep("a.up.weight", 0, half);
  model.keep("a.up.bias", 0, half);
  model.keep("a.down.weight", 1, half);
  model.refresh();
  CHECK(at::allclose(model.forward(model.example())[0], expected.forward(model.example())[0], 1e-5, 1e-6));
  CHECK(model.tensor("b.up.weight").size(0) == 8);
  const Model again = reloaded(model);
  CHECK(at::equal(again.forward(model.example())[0], model.forward(model.example())[0]));
  CHECK(again.forward({at::randn({5, 4})})[0].size(0) == 5);
}

TEST_CASE("a Linear is one in every spelling", "[script]") {
  Model model = Model::load(made("bare"));
  CHECK(names(model) == std::vector<std::string>{"w1", "w2", "w3"});
  CHECK(model.layer("w1").bias.empty());
  CHECK(model.layer("w2").bias == "b2");
  CHECK(model.layer("w3").bias == "b3");
  const std::vector<at::Tensor> x{at::randn({4, 3})};
  const at::Tensor before = model.forward(x)[0];
  model.observe(x, [&](const Layer& layer, const at::Tensor&, const at::Tensor& output) {
    if (layer.name == "w3") CHECK(at::allclose(output, before, 1e-5, 1e-6));
  });
  for (const char* layer : {"w1", "w2", "w3"}) model.quantize_layer(layer, int8(model, layer));
  CHECK(model.forward(x)[0].sub(before).norm().item<float>() < 0.03F * before.norm().item<float>());
  CHECK_FALSE(model.has_tensor("b2"));
  SaveOptions stock;
  stock.lowering = Lowering::aten;
  CHECK(at::allclose(reloaded(model, stock).forward(x)[0], model.forward(x)[0], 1e-4, 1e-5));
}

TEST_CASE("tuples, dictionaries, options, loops and in-place operators", "[script]") {
  Model model = Model::load(made("containers"));
  const std::vector<at::Tensor> two{at::randn({2, 3}), at::randn({2, 3})};
  CHECK(model.forward(two).size() == 2);
  std::vector<at::Tensor> three = two;
  three.push_back(at::ones({1}));
  CHECK(model.forward(three).size() == 3);
  CHECK(model.forward(two)[0].sizes() == at::IntArrayRef({2, 1}));  // "a" before "b"
  CHECK_THROWS_WITH(model.forward({two[0]}), Contains("MissingData"));
  CHECK_THROWS_WITH(model.forward({two[0], two[1], two[0], two[1]}), Contains("BadUsage"));

  model.set_example(two);
  const Graph& graph = model.graph();
  CHECK(graph.inputs.size() == 2);
  CHECK(graph.outputs.size() == 2);
  CHECK(graph.data_dependent.empty());
  const std::vector<at::Tensor> outputs = model.forward(two);
  for (std::size_t i = 0; i < 2; ++i)
    CHECK(at::allclose(graph.values[static_cast<std::size_t>(graph.outputs[i])].value, outputs[i]));
  std::vector<std::string> ops;
  for (const GraphNode& node : graph.nodes) ops.push_back(node.op);
  CHECK(ops == std::vector<std::string>{"aten::add", "aten::linear", "aten::add_", "aten::linear", "aten::add_",
                                        "aten::mul", "aten::mul", "aten::split", "aten::cat"});
  // The second linear reads what add_ left, and cat reads the parts of the split.
  CHECK(std::get<ValueId>(graph.nodes[3].arguments[0]) == graph.nodes[2].outputs[0]);
  CHECK(std::get<std::vector<ValueId>>(graph.nodes[8].arguments[0]) == graph.nodes[7].outputs);
  CHECK(reloaded(model).forward(three).size() == 3);
}

TEST_CASE("writing through a view is seen", "[script]") {
  Model model = Model::load(made("through_view"));
  model.set_example({at::randn({2, 3})});
  const Graph& graph = model.graph();
  REQUIRE(graph.nodes.back().op == "tersor::written_through");
  CHECK(graph.outputs == graph.nodes.back().outputs);
}

TEST_CASE("convolutions become codes with their geometry", "[script]") {
  Model model = Model::load(made("convolutions"));
  const std::vector<at::Tensor> x{at::randn({2, 3, 9, 8})};
  const at::Tensor before = model.forward(x)[0];
  for (const char* layer : {"same", "strided", "one"}) model.quantize_layer(layer, int8(model, layer));
  CHECK(model.layer("one").kind == LayerKind::conv1d);
  CHECK(model.layer("strided").groups == 2);
  const at::Tensor after = model.forward(x)[0];
  CHECK(after.sub(before).norm().item<float>() < 0.03F * before.norm().item<float>());
  CHECK(at::equal(reloaded(model).forward(x)[0], after));
  SaveOptions stock;
  stock.lowering = Lowering::aten;
  CHECK(at::allclose(reloaded(model, stock).forward(x)[0], after, 1e-4, 1e-5));
}

TEST_CASE("training flags and foreign extra files come back", "[script]") {
  const Model model = Model::load(made("mixed"));
  const std::vector<at::Tensor> x{at::randn({1, 3})};
  CHECK(at::equal(model.forward(x)[0], model.forward(x)[0]));  // dropout is off here
  const TemporaryDirectory directory;
  model.save(directory / "again.pt");
  const std::string said =
      output_of(fmt::format("'{}' -W ignore '{}/tests/python/training_flags.py' '{}'", TERSOR_TEST_PYTHON,
                            TERSOR_SOURCE_DIR, (directory / "again.pt").string()));
  CHECK(said == "=True fc=True norm=False drop=True cat\ndog\n");
}

TEST_CASE("bfloat16 weights keep their dtype", "[script]") {
  Model model = Model::load(made("half"));
  const std::vector<at::Tensor> x{at::randn({2, 4}).to(at::kBFloat16)};
  const at::Tensor before = model.forward(x)[0];
  CHECK(model.layer("first").dtype == at::kBFloat16);
  model.quantize_layer("first", int8(model, "first"));
  CHECK(model.tensor("first.weight").scalar_type() == at::kBFloat16);
  const at::Tensor after = model.forward(x)[0];
  CHECK(after.scalar_type() == at::kBFloat16);
  CHECK(at::allclose(after.to(at::kFloat), before.to(at::kFloat), 0.1, 0.1));
  SaveOptions stock;
  stock.lowering = Lowering::aten;
  CHECK(at::allclose(reloaded(model, stock).forward(x)[0].to(at::kFloat), after.to(at::kFloat), 0.02, 0.02));
}

TEST_CASE("what would be lost is refused by name", "[script]") {
  CHECK_THROWS_WITH(Model::load(made("exported")), Contains("UnsupportedModel") && Contains("'other'"));
  CHECK_THROWS_WITH(Model::load(made("frozen")), Contains("UnsupportedModel") && Contains("torch.jit.freeze"));
}

TEST_CASE("attributes of the network's own are never taken for scales or codes", "[script]") {
  Model model = Model::load(made("own_names"));
  const std::vector<at::Tensor> input{at::randn({4, 8})};
  model.set_example(input);
  model.quantize_layer("weight", int8(model, "weight", {ActivationMode::per_token}));
  const at::Tensor wanted = model.forward(input)[0];
  const Model stock = reloaded(model, {.lowering = Lowering::aten});
  CHECK(at::allclose(stock.forward(input)[0], wanted, 1e-4, 1e-4));
  CHECK(stock.tensor("weight_scale").eq(3).all().item<bool>());

  CHECK_THAT(model.layer("inner").float_only, Contains("weight_packed"));
  CHECK_THROWS_WITH(model.quantize_layer("inner", int8(model, "inner")),
                    Contains("UnsupportedLayer") && Contains("weight_packed"));
  CHECK(at::equal(model.forward(input)[0], wanted));
}

TEST_CASE("a layer says why its weight cannot become codes", "[script]") {
  Model model = Model::load(made("stays_float"));
  const std::map<std::string, std::string> reasons{{"one", "two different biases"},
                                                   {"doubled", "computed and not a parameter"},
                                                   {"even", "pads its two sides differently"},
                                                   {"stride", "computed while the network runs"}};
  for (const auto& [layer, why] : reasons) {
    INFO(layer);
    CHECK_THAT(model.layer(layer).float_only, Contains(why));
    CHECK_THROWS_WITH(model.quantize_layer(layer, int8(model, layer)), Contains("UnsupportedLayer") && Contains(why));
  }
  // An addend that is no bias is left alone.
  CHECK(model.layer("product").float_only.empty());
  CHECK(model.layer("product").bias.empty());
  const std::vector<at::Tensor> input{at::randn({2, 3, 8})};
  const at::Tensor before = model.forward(input)[0];
  model.quantize_layer("product", int8(model, "product"));
  CHECK(model.forward(input)[0].sub(before).norm().item<float>() < 0.02F * before.norm().item<float>());
}

TEST_CASE("a saved network in stock operators is checked layer by layer", "[script]") {
  for (const char* file : {"own_names", "half_linear"}) {
    INFO(file);
    Model model = Model::load(made(file));
    const std::string layer = model.layers().front().name;
    const at::ScalarType type = model.layers().front().dtype;
    const std::int64_t width = model.layers().front().shape[1];
    const std::vector<at::Tensor> input{at::randn({4, width}).to(type)};
    model.set_example(input);
    for (const ActivationQuant& mode : {ActivationQuant{}, ActivationQuant{ActivationMode::per_token},
                                        ActivationQuant{ActivationMode::per_tensor, 0.05F, -3}}) {
      Model codes = model.clone();
      codes.quantize_layer(layer, int8(codes, layer, mode));
      const at::Tensor wanted = codes.forward(input)[0].to(at::kFloat);
      const at::Tensor stock = reloaded(codes, {.lowering = Lowering::aten}).forward(input)[0].to(at::kFloat);
      const double step = type == at::kHalf ? 0x1p-9 : 1e-4;  // a few roundings to the type of the outputs
      CHECK(at::allclose(stock, wanted, step, step));
    }
  }
}

TEST_CASE("what examines a written file can refuse it", "[script]") {
  const TemporaryDirectory scratch;
  const Model model = Model::load(made("root_linear"));
  bool seen = false;
  model.save(scratch / "a.pt", {.examine = [&](const fs::path& file) {
               seen = true;
               CHECK(Model::load(file).layers().size() == 1);
             }});
  CHECK(seen);
  SaveOptions refuse;
  refuse.examine = [](const fs::path&) { throw Error(ErrorCode::VerificationFailed, "no"); };
  CHECK_THROWS_WITH(model.save(scratch / "b.pt", refuse), Contains("VerificationFailed"));
  CHECK(scratch.files() == 1);
}

TEST_CASE("a network that changes its input in place leaves the caller's alone", "[script]") {
  const Model model = Model::load(made("changes_input"));
  const at::Tensor x = at::ones({2, 4});
  const at::Tensor once = model.forward({x})[0];
  CHECK(x.eq(1).all().item<bool>());
  CHECK(at::equal(model.forward({x})[0], once));
}

TEST_CASE("a network that changes its own buffer is refused by the buffer's name", "[script]") {
  Model model = Model::load(made("counts"));
  model.set_example({at::ones({2, 4})});
  const TemporaryDirectory scratch;
  CHECK_THROWS_WITH(model.save(scratch / "a.pt"), Contains("UnsupportedModel") && Contains("'calls'"));
  CHECK_THROWS_WITH(model.graph(), Contains("UnsupportedModel") && Contains("'calls'"));
}

TEST_CASE("operators with any number of arguments are interpreted; exceptions speak for themselves", "[script]") {
  Model model = Model::load(made("talks"));
  model.set_example({at::ones({2, 4})});
  CHECK(model.graph().outputs.size() == 2);
  model.set_example({at::ones({2, 2, 4})});
  CHECK_THROWS_WITH(model.graph(), Contains("two dimensions, please") && !Contains("INTERNAL"));
  CHECK_THROWS_WITH(model.forward(model.example()), Contains("two dimensions, please") && !Contains("INTERNAL"));
}

TEST_CASE("the graph tells what another course reads", "[script]") {
  Model model = Model::load(made("other_course"));
  model.set_example({at::ones({2, 8})});
  const Graph& graph = model.graph();
  CHECK(graph.data_dependent.empty());
  CHECK(graph.other_courses.contains(graph.find("large.weight")));
  CHECK(graph.other_courses.contains(graph.find("large.bias")));
  CHECK_FALSE(graph.other_courses.contains(graph.find("small.weight")));
  CHECK_FALSE(graph.other_courses.contains(graph.inputs[0]));  // a way that only raises is none
  // What stem hands on, and what comes out of the branch.
  CHECK(graph.other_courses.size() == 4);
}

TEST_CASE("symbolic links are followed only where that is allowed", "[script]") {
  const TemporaryDirectory scratch;
  fs::create_symlink(made("root_linear"), scratch / "link.pt");
  CHECK(Model::load(scratch / "link.pt").runnable());
  CHECK_THROWS_WITH(Model::load(scratch / "link.pt", {.follow_symlinks = false}), Contains("NotRegularFile"));
}

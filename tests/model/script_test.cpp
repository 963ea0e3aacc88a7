#include <algorithm>
#include <cstdlib>

#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include "catch.hpp"
#include "io/temporary.hpp"
#include "tersor/io/safetensors.hpp"
#include "tersor/model/model.hpp"

using namespace tersor;
namespace fs = std::filesystem;

namespace {

const fs::path data = TERSOR_TEST_DATA;

// As a bool, since a failing comparison would print both files.
bool equal_bytes(const fs::path& a, const fs::path& b) { return read_bytes(a) == read_bytes(b); }

struct Case {
  std::string file;
  std::vector<std::int64_t> input;
};

const std::vector<Case> cases{{"cases/sp-flatten-pool/model.pt", {2, 3, 5, 7}},
                              {"cases/sp-two-heads/model.pt", {4, 5}},
                              {"cases/sp-empty-layer/model.pt", {2, 4}},
                              {"cases/sp-residual-once/model.pt", {2, 3, 6, 6}},
                              {"cases/sp-bn-beta/model.pt", {2, 2, 5, 5}},
                              {"cases/sp-cat-self/model.pt", {1, 3, 4, 4}},
                              {"cases/sp-depthwise/model.pt", {2, 3, 6, 6}},
                              {"cases/sp-grouped-balance/model.pt", {1, 4, 4, 4}},
                              {"cases/sp-deconv/model.pt", {2, 5}},
                              {"cases/sp-pixelshuffle/model.pt", {1, 3, 3, 4}},
                              {"cases/sp-glu-chunk/model.pt", {2, 3, 3, 3}},
                              {"cases/sp-mha-fused/model.pt", {2, 5, 8}},
                              {"cases/sp-layernorm/model.pt", {3, 4}},
                              {"cases/sp-lstm/model.pt", {2, 5, 3}},
                              {"cases/sp-param-buffer/model.pt", {1, 3, 3, 3}},
                              {"cases/sp-branch/model.pt", {2, 3}},
                              {"cases/q-deconv-axis/model.pt", {1, 2, 3, 3}},
                              {"good/cnn_script.pt", {2, 3, 16, 16}},
                              {"good/cnn_trace.pt", {2, 3, 16, 16}},
                              {"fashion/cnn_fp32.ts.pt", {2, 1, 28, 28}},
                              {"fashion/mlp_fp32.ts.pt", {2, 784}}};

Model load(const Case& c) {
  Model model = Model::load(data / c.file);
  model.set_example({at::randn(c.input)});
  return model;
}

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return at::equal(x, y); });
}

std::map<std::string, at::Tensor> read_all(const fs::path& path) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  std::map<std::string, at::Tensor> tensors;
  for (const SafetensorsEntry& entry : file.entries()) tensors[entry.name] = file.read(entry);
  return tensors;
}

/// Does Python load the file and compute what the model computes here?
bool python_agrees(const fs::path& file, const Model& model, const std::vector<at::Tensor>& inputs,
                   const std::string& options) {
  const TemporaryDirectory scratch;
  std::map<std::string, at::Tensor> tensors;
  for (std::size_t i = 0; i < inputs.size(); ++i) tensors[fmt::format("input{}", i)] = inputs[i];
  const std::vector<at::Tensor> outputs = model.forward(inputs);
  for (std::size_t i = 0; i < outputs.size(); ++i) tensors[fmt::format("output{}", i)] = outputs[i];
  write_safetensors(scratch / "io.safetensors", tensors);
  const std::string command =
      fmt::format("'{}' -W ignore '{}/tests/python/load_and_compare.py' '{}' '{}' {}", TERSOR_TEST_PYTHON,
                  TERSOR_SOURCE_DIR, file.string(), (scratch / "io.safetensors").string(), options);
  return std::system(command.c_str()) == 0;
}

NodeId only_node(const Graph& graph, std::string_view op) {
  NodeId found = -1;
  for (std::size_t i = 0; i < graph.nodes.size(); ++i)
    if (graph.nodes[i].op == op) {
      REQUIRE(found == -1);
      found = static_cast<NodeId>(i);
    }
  REQUIRE(found >= 0);
  return found;
}

std::size_t argument_index(const GraphNode& node, std::string_view name) {
  return static_cast<std::size_t>(std::find(node.argument_names.begin(), node.argument_names.end(), name) -
                                  node.argument_names.begin());
}

LayerQuantization int8_per_channel(const Model& model, const std::string& layer, ActivationQuant activation = {}) {
  return {quantize_weight(model.tensor(model.layer(layer).weight), QuantScheme{}), activation};
}

}  // namespace

TEST_CASE("every model runs, is written and comes back", "[script]") {
  for (const Case& c : cases) {
    INFO(c.file);
    const Model model = load(c);
    const std::vector<at::Tensor> outputs = model.forward(model.example());
    CHECK_FALSE(model.layers().empty());

    const Graph& graph = model.graph();
    REQUIRE(graph.outputs.size() == outputs.size());
    for (std::size_t i = 0; i < outputs.size(); ++i)
      CHECK(at::allclose(graph.values[static_cast<std::size_t>(graph.outputs[i])].value, outputs[i], 1e-5, 1e-6));

    const TemporaryDirectory scratch;
    model.save(scratch / "a.pt");
    model.save(scratch / "b.pt");
    CHECK(equal_bytes(scratch / "a.pt", scratch / "b.pt"));
    const Model again = Model::load(scratch / "a.pt");
    for (int run = 0; run < 3; ++run) CHECK(same(again.forward(model.example()), outputs));
    CHECK(again.tensor_names() == model.tensor_names());
    again.save(scratch / "c.pt");
    CHECK(equal_bytes(scratch / "a.pt", scratch / "c.pt"));
  }
}

TEST_CASE("the outputs are those that the network gave where it was made", "[script]") {
  for (const char* name :
       {"sp-flatten-pool", "sp-two-heads", "sp-residual-once", "sp-mha-fused", "sp-lstm", "sp-branch"}) {
    INFO(name);
    const auto expected = read_all(data / "cases" / name / "expected.safetensors");
    const Model model = Model::load(data / "cases" / name / "model.pt");
    const std::vector<at::Tensor> outputs = model.forward({expected.at("input0")});
    for (std::size_t i = 0; i < outputs.size(); ++i)
      CHECK(at::allclose(outputs[i], expected.at(fmt::format("original0.{}", i)), 1e-5, 1e-6));
  }
}

TEST_CASE("layers have their submodule's name, whatever the file was made with", "[script]") {
  for (const char* file : {"good/cnn_script.pt", "good/cnn_trace.pt"}) {
    INFO(file);
    const Model model = Model::load(data / file);
    CHECK(model.backend() == Backend::script);
    CHECK(model.runnable());
    const Layer& stem = model.layer("stem");
    CHECK(stem.kind == LayerKind::conv2d);
    CHECK(stem.weight == "stem.weight");
    CHECK(stem.bias == "stem.bias");
    CHECK(stem.shape == model.tensor("stem.weight").sizes().vec());
    CHECK(model.layer("l1.c1").bias.empty());
    CHECK(model.layer("l1.b1").kind == LayerKind::batch_norm);
    CHECK(model.layer("fc").kind == LayerKind::linear);
    CHECK_FALSE(model.layer("fc").is_head);
    CHECK_THROWS_WITH(model.layer("l1.c3"),
                      Catch::Matchers::Contains("NoSuchTarget") && Catch::Matchers::Contains("l1.c1"));
  }
  CHECK(Model::load(data / "cases/sp-lstm/model.pt").layer("rnn").weight == "rnn.weight_ih_l0");
  CHECK(Model::load(data / "cases/sp-depthwise/model.pt").layer("dw").groups == 8);
  CHECK(Model::load(data / "cases/sp-deconv/model.pt").layer("t1").kind == LayerKind::conv_transpose);
}

TEST_CASE("the graph is flat and names parameters", "[script]") {
  const Model model = load(cases[0]);
  const Graph& graph = model.graph();
  std::vector<std::string> ops;
  for (const GraphNode& node : graph.nodes) ops.push_back(node.op);
  CHECK(ops == std::vector<std::string>{"aten::conv2d", "aten::relu", "aten::adaptive_avg_pool2d", "aten::flatten",
                                        "aten::linear"});
  const GraphNode& conv = graph.nodes[0];
  CHECK(std::get<ValueId>(*graph.argument(conv, "input")) == graph.inputs[0]);
  CHECK(std::get<ValueId>(*graph.argument(conv, "weight")) == graph.find("conv.weight"));
  CHECK(std::get<c10::IValue>(*graph.argument(conv, "padding")).toIntVector() == std::vector<std::int64_t>{1, 1});
  CHECK(graph.users(graph.find("fc.weight")) == std::vector<NodeId>{4});
  CHECK(graph.find("nothing") == -1);
  CHECK(graph.data_dependent.empty());
  CHECK(load(cases[15]).graph().data_dependent.size() == 1);  // sp-branch

  Model weightless = Model::load(data / cases[0].file);
  CHECK_THROWS_WITH(weightless.graph(), Catch::Matchers::Contains("MissingData"));
  weightless.set_example({at::randn({2, 4, 5, 7})});
  CHECK_THROWS_WITH(weightless.graph(),
                    Catch::Matchers::Contains("UnsupportedGraph") && Catch::Matchers::Contains("aten::conv2d"));
}

TEST_CASE("every layer is observed with its bias, in order", "[script]") {
  for (const Case& c : cases) {
    INFO(c.file);
    const Model model = load(c);
    std::vector<std::string> seen;
    model.observe(model.example(), [&](const Layer& layer, const at::Tensor&, const at::Tensor& output) {
      seen.push_back(layer.name);
      if (layer.kind == LayerKind::linear) CHECK(output.size(-1) == layer.shape[0]);
    });
    CHECK(seen.size() + (c.file.find("sp-branch") != std::string::npos ? 1 : 0) == model.layers().size());
  }
  const Model model = load(cases[0]);
  model.observe(model.example(), [&](const Layer& layer, const at::Tensor&, const at::Tensor& output) {
    if (layer.name == "fc") CHECK(at::allclose(output, model.forward(model.example())[0], 1e-5, 1e-6));
  });
}

TEST_CASE("channels leave by hand: conv, pool, flatten, linear", "[script]") {
  const auto expected = read_all(data / "cases/sp-flatten-pool/expected.safetensors");
  Model model = Model::load(data / "cases/sp-flatten-pool/model.pt");
  model.set_example({expected.at("input0")});
  const Model before = model.clone();
  const std::vector<std::int64_t> channels{0, 3, 5, 6};
  std::vector<std::int64_t> columns;
  for (const std::int64_t c : channels)
    for (std::int64_t i = 0; i < 6; ++i) columns.push_back(6 * c + i);
  model.keep("conv.weight", 0, channels);
  model.keep("conv.bias", 0, channels);
  CHECK_THROWS_WITH(model.refresh(), Catch::Matchers::Contains("UnsupportedGraph"));  // fc still has all columns
  model.keep("fc.weight", 1, columns);
  model.refresh();
  for (const char* name : {"conv.weight", "conv.bias", "fc.weight", "fc.bias"})
    CHECK(at::equal(model.tensor(name), expected.at(fmt::format("pruned.{}", name))));
  CHECK(at::allclose(model.forward(model.example())[0], expected.at("expected0.0"), 1e-5, 1e-5));
  CHECK(model.kept().at("conv.weight:0") == channels);

  const TemporaryDirectory scratch;
  model.save(scratch / "small.pt");
  CHECK(python_agrees(scratch / "small.pt", model, model.example(), ""));
  Model again = Model::load(scratch / "small.pt");
  CHECK(again.kept() == model.kept());
  again.keep("conv.weight", 0, {1, 2});
  CHECK(again.kept().at("conv.weight:0") == std::vector<std::int64_t>{3, 5});

  CHECK(at::allclose(before.forward(model.example())[0], expected.at("original0.0"), 1e-5, 1e-5));
  model.assign(before);
  CHECK(model.tensor("conv.weight").size(0) == 8);
  CHECK(model.kept().empty());
  CHECK(at::allclose(model.forward(model.example())[0], expected.at("original0.0"), 1e-5, 1e-5));
}

TEST_CASE("literals of one of two calls change alone", "[script]") {
  // Groups and channels of the depthwise case by hand.
  const auto expected = read_all(data / "cases/sp-depthwise/expected.safetensors");
  Model model = Model::load(data / "cases/sp-depthwise/model.pt");
  model.set_example({expected.at("input0")});
  const at::Tensor kept = expected.at("kept.c1").to(at::kLong);
  const std::vector<std::int64_t> channels(kept.const_data_ptr<std::int64_t>(),
                                           kept.const_data_ptr<std::int64_t>() + kept.numel());
  const Graph& graph = model.graph();
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    const GraphNode& node = graph.nodes[i];
    if (node.op != "aten::conv2d") continue;
    const std::size_t groups = argument_index(node, "groups");
    if (std::get<c10::IValue>(node.arguments[groups]).toInt() == 8)
      model.set_argument(static_cast<NodeId>(i), groups, std::int64_t{4});
  }
  for (const char* name : {"c1.weight", "b1.weight", "b1.bias", "b1.running_mean", "b1.running_var", "dw.weight",
                           "b2.weight", "b2.bias", "b2.running_mean", "b2.running_var"})
    model.keep(name, 0, channels);
  model.keep("pw.weight", 1, channels);
  model.refresh();
  CHECK(model.layer("dw").groups == 4);
  CHECK(at::allclose(model.forward(model.example())[0], expected.at("expected0.0"), 1e-4, 1e-5));
  const TemporaryDirectory scratch;
  model.save(scratch / "small.pt");
  CHECK(python_agrees(scratch / "small.pt", model, model.example(), ""));
}

TEST_CASE("a literal that is an attribute of the module becomes a constant", "[script]") {
  // Two of four heads, by hand: view sizes come from module attributes, one of them as a product.
  const auto expected = read_all(data / "cases/sp-mha-fused/expected.safetensors");
  Model model = Model::load(data / "cases/sp-mha-fused/model.pt");
  model.set_example({expected.at("input0")});
  const Graph& graph = model.graph();
  const NodeId view = only_node(graph, "aten::view");
  const NodeId merge = only_node(graph, "aten::reshape");
  model.set_argument(view, 1, std::vector<std::int64_t>{2, 5, 3, 2, 2});
  model.set_argument(merge, 1, std::vector<std::int64_t>{2, 5, 4});
  const at::Tensor rows = expected.at("kept.qkv_rows").to(at::kLong),
                   columns = expected.at("kept.proj_cols").to(at::kLong);
  const std::vector<std::int64_t> kept_rows(rows.const_data_ptr<std::int64_t>(),
                                            rows.const_data_ptr<std::int64_t>() + rows.numel());
  model.keep("qkv.weight", 0, kept_rows);
  model.keep("qkv.bias", 0, kept_rows);
  model.keep("proj.weight", 1,
             std::vector<std::int64_t>(columns.const_data_ptr<std::int64_t>(),
                                       columns.const_data_ptr<std::int64_t>() + columns.numel()));
  model.refresh();
  CHECK(at::allclose(model.forward(model.example())[0], expected.at("expected0.0"), 1e-4, 1e-5));
  // Sizes that follow the input still do.
  CHECK(model.forward({at::randn({3, 7, 8})})[0].sizes() == at::IntArrayRef({3, 7, 8}));
}

TEST_CASE("what the network computes itself cannot be set", "[script]") {
  Model model = load(cases[11]);  // sp-mha-fused
  const NodeId view = only_node(model.graph(), "aten::view");
  model.set_argument(view, 1, std::vector<std::int64_t>{1, 10, 3, 4, 2});  // sizes 0 and 1 come from the input
  CHECK_THROWS_WITH(model.refresh(),
                    Catch::Matchers::Contains("UnsupportedGraph") && Catch::Matchers::Contains("aten::view"));
}

TEST_CASE("new values are flushed and masks are remembered", "[script]") {
  Model model = load(cases[0]);
  at::Tensor values = at::zeros({5});
  values[0] = 1e-40F;
  values[1] = -0.0F;
  values[2] = 2.5F;
  model.rewrite("fc.bias", values);
  CHECK(model.tensor("fc.bias").ne(0).sum().item<std::int64_t>() == 1);
  CHECK_THROWS_WITH(model.rewrite("fc.bias", at::zeros({4})), Catch::Matchers::Contains("BadUsage"));
  const at::Tensor before = model.tensor("fc.weight");
  const at::Tensor keep = before.gt(0);
  model.mask("fc.weight", keep);
  CHECK(at::equal(model.tensor("fc.weight"), before.clamp_min(0)));
  CHECK_THROWS_WITH(model.tensor("fc.wieght"), Catch::Matchers::Contains("fc.weight"));
  const TemporaryDirectory scratch;
  model.save(scratch / "masked.pt");
  const Model again = Model::load(scratch / "masked.pt");
  CHECK(again.metadata().at("tersor.masked") == R"(["fc.weight"])");
  CHECK(at::equal(again.tensor("fc.weight"), model.tensor("fc.weight")));
}

TEST_CASE("quantized layers run, are written and come back", "[script]") {
  const std::vector<ActivationQuant> modes{{}, {ActivationMode::per_token}, {ActivationMode::per_tensor, 0.05F, -3}};
  for (const Case& c : {cases[0], cases[1], cases[6], cases[17], cases[18], cases[19], cases[20]})
    for (const ActivationQuant& mode : modes) {
      INFO(c.file << " mode " << static_cast<int>(mode.mode));
      Model model = load(c);
      const std::vector<at::Tensor> original = model.forward(model.example());
      std::vector<std::string> done;
      for (const Layer& layer : model.layers())
        if (layer.kind == LayerKind::linear || layer.kind == LayerKind::conv2d) {
          model.quantize_layer(
              layer.name,
              int8_per_channel(model, layer.name, layer.kind == LayerKind::linear ? mode : ActivationQuant{}));
          done.push_back(layer.name);
        }
      REQUIRE_FALSE(done.empty());
      for (const std::string& name : done) {
        CHECK(model.layer(name).quantized.has_value());
        CHECK(model.has_tensor(model.layer(name).weight));
        CHECK_THROWS_WITH(model.quantize_layer(name, *model.layer(name).quantized),
                          Catch::Matchers::Contains("AlreadyQuantized"));
      }
      const std::vector<at::Tensor> outputs = model.forward(model.example());
      if (mode.mode != ActivationMode::per_tensor)  // whose scale here is not calibrated
        for (std::size_t i = 0; i < outputs.size(); ++i)
          CHECK(outputs[i].sub(original[i]).norm().item<float>() < 0.05F * original[i].norm().item<float>());

      const TemporaryDirectory scratch;
      model.save(scratch / "codes.pt");
      Model again = Model::load(scratch / "codes.pt");
      CHECK(same(again.forward(model.example()), outputs));
      CHECK(again.layer(done[0]).quantized->activation == model.layer(done[0]).quantized->activation);
      again.set_example(model.example());
      again.save(scratch / "again.pt");
      CHECK(equal_bytes(scratch / "codes.pt", scratch / "again.pt"));

      SaveOptions stock;
      stock.lowering = Lowering::aten;
      model.save(scratch / "stock.pt", stock);
      const std::vector<at::Tensor> plain = Model::load(scratch / "stock.pt").forward(model.example());
      for (std::size_t i = 0; i < outputs.size(); ++i) CHECK(at::allclose(plain[i], outputs[i], 1e-4, 1e-4));
      if (c.file == "good/cnn_script.pt" && mode.mode != ActivationMode::none) {
        CHECK(python_agrees(scratch / "codes.pt", model, model.example(),
                            fmt::format("--library '{}'", TERSOR_OPS_LIBRARY)));
        CHECK(python_agrees(scratch / "stock.pt", model, model.example(), "--tolerance 1e-4"));
      }
    }
}

TEST_CASE("the stock lowering dequantizes like we do", "[script]") {
  for (const QuantScheme scheme :
       {QuantScheme{4, true, Granularity::per_group, 4}, QuantScheme{4, false, Granularity::per_group, 16},
        QuantScheme{8, false, Granularity::per_channel, 0}, QuantScheme{8, true, Granularity::per_tensor, 0},
        QuantScheme{4, true, Granularity::per_channel, 0}}) {
    Model model = Model::load(data / "fashion/mlp_fp32.ts.pt");
    model.set_example({at::randn({3, 784})});
    for (const Layer& layer : model.layers())
      if (layer.kind == LayerKind::linear)
        model.quantize_layer(layer.name, {quantize_weight(model.tensor(layer.weight), scheme), {}});
    const TemporaryDirectory scratch;
    SaveOptions stock;
    stock.lowering = Lowering::aten;
    model.save(scratch / "stock.pt", stock);
    CHECK(at::allclose(Model::load(scratch / "stock.pt").forward(model.example())[0], model.forward(model.example())[0],
                       1e-4, 1e-4));
  }
}

TEST_CASE("a batch norm is folded away with its bookkeeping", "[script]") {
  for (const char* file : {"good/cnn_script.pt", "good/cnn_trace.pt"}) {
    INFO(file);
    Model model = Model::load(data / file);
    model.set_example({at::randn({2, 3, 16, 16})});
    const std::vector<at::Tensor> before = model.forward(model.example());
    const auto fold = [&](const std::string& norm, const std::string& conv) {
      const at::Tensor inverse =
          model.tensor(norm + ".weight").div(model.tensor(norm + ".running_var").add(1e-5).sqrt());
      const at::Tensor weight = model.tensor(conv + ".weight").mul(inverse.view({-1, 1, 1, 1}));
      at::Tensor bias = model.tensor(norm + ".bias").sub(model.tensor(norm + ".running_mean").mul(inverse));
      if (model.has_tensor(conv + ".bias")) bias = bias.add(model.tensor(conv + ".bias").mul(inverse));
      model.fold_into(norm, conv, weight, bias);
    };
    fold("bn", "stem");
    fold("l1.b1", "l1.c1");
    fold("l1.b2", "l1.c2");
    model.refresh();
    CHECK(at::allclose(model.forward(model.example())[0], before[0], 1e-4, 1e-5));
    CHECK_FALSE(model.has_tensor("l1.b1.running_mean"));
    CHECK_FALSE(model.has_tensor("l1.b1.num_batches_tracked"));
    CHECK(model.layer("l1.c1").bias == "l1.c1.bias");
    CHECK(model.has_tensor("l2.b1.running_mean"));
    const TemporaryDirectory scratch;
    model.save(scratch / "folded.pt");
    CHECK(python_agrees(scratch / "folded.pt", model, model.example(), ""));
    CHECK(Model::load(scratch / "folded.pt").layer("l1.c1").bias == "l1.c1.bias");
  }
}

TEST_CASE("what cannot be read is refused by class", "[script]") {
  CHECK_THROWS_AS(Model::load(data / "good/cnn_state_dict.pt"), Error);
  CHECK_THROWS_AS(Model::load(data / "no such file.pt"), Error);
  const Model model = load(cases[0]);
  CHECK_THROWS_WITH(model.forward({at::randn({2, 4, 5, 7})}), Catch::Matchers::Contains("UnsupportedModel"));
  CHECK_THROWS_WITH(model.forward({}), Catch::Matchers::Contains("MissingData"));
  const TemporaryDirectory scratch;
  model.save(scratch / "a.pt");
  CHECK_THROWS_WITH(model.save(scratch / "a.pt"), Catch::Matchers::Contains("OutputExists"));
  SaveOptions same_file;
  same_file.overwrite = true;
  same_file.source = scratch / "a.pt";
  CHECK_THROWS_WITH(model.save(scratch / "a.pt", same_file), Catch::Matchers::Contains("OutputIsInput"));
}

TEST_CASE("kept indices of a foreign file must fit its tensors", "[script]") {
  const TemporaryDirectory scratch;
  Model model = load(cases[0]);
  SaveOptions options;
  options.overwrite = true;
  for (const char* kept : {R"({"conv.weight:0": [7]})", R"({"conv.weight:9": [0, 1]})", R"({"conv.weight": [0]})",
                           R"({"conv.weight:0": [-1, 0, 1, 2, 3, 4, 5, 6]})", R"({"gone.weight:0": [2, 1]})",
                           R"({"conv.weight:0": [0, 1, 2, 3, 4, 4, 5, 6]})", R"({"conv.weight:0x": [0]})"}) {
    INFO(kept);
    model.metadata()["tersor.kept"] = kept;
    model.save(scratch / "foreign.pt", options);
    CHECK_THROWS_WITH(Model::load(scratch / "foreign.pt"), Catch::Matchers::Contains("BadMetadata") &&
                                                               Catch::Matchers::Contains("weight") &&
                                                               Catch::Matchers::Contains("foreign.pt"));
  }
  // A tensor that has left the file may be spoken of; when it comes back, its list is not trusted.
  model.metadata()["tersor.kept"] = R"({"conv.weight:0": [1, 2, 3, 4, 5, 6, 7, 9], "gone.weight:0": [2]})";
  model.save(scratch / "foreign.pt", options);
  CHECK(Model::load(scratch / "foreign.pt").kept().size() == 2);
}

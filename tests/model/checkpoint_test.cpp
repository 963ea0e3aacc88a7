
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "io/temporary.hpp"
#include "tersor/io/compressed_tensors.hpp"
#include "tersor/io/safetensors.hpp"
#include "tersor/model/model.hpp"

using namespace tersor;

namespace {

using Tensors = std::map<std::string, at::Tensor>;

at::Tensor values(at::IntArrayRef shape) {
  std::int64_t n = 1;
  for (const std::int64_t d : shape) n *= d;
  return at::arange(n, at::kFloat).mul(0.37).sin().view(shape);
}

Model model_of(const Tensors& tensors) { return Model::from_tensors(tensors); }

LayerQuantization quantized(const at::Tensor& weight, const QuantScheme& scheme) {
  return {quantize_weight(weight, scheme), {}};
}

constexpr QuantScheme kInt8{8, true, Granularity::per_channel, 0};
constexpr QuantScheme kInt4{4, false, Granularity::per_group, 4};

}  // namespace

TEST_CASE("layers are inferred from names and shapes") {
  const Model model = model_of({
      {"fc.weight", values({3, 4})},
      {"fc.bias", values({3})},
      {"conv1.weight", values({2, 3, 3})},
      {"conv2.weight", values({2, 3, 3, 3})},
      {"conv3.weight", values({2, 3, 3, 3, 3})},
      {"bn.weight", values({2})},
      {"bn.running_mean", values({2})},
      {"ln.weight", values({2})},
      {"model.embed_tokens.weight", values({7, 4})},
      {"bert.embeddings.word.weight", values({5, 4})},
      {"transformer.wte.weight", values({6, 4})},
      {"lm_head.weight", values({9, 4})},
      {"classifier.weight", values({7, 4})},
      {"embed_out.weight", values({8, 4})},
      {"counts.weight", at::ones({2, 2}, at::kLong)},
      {"position_ids", at::arange(3)},
  });
  std::map<std::string, LayerKind> kinds;
  std::vector<std::string> heads;
  for (const Layer& layer : model.layers()) {
    kinds[layer.name] = layer.kind;
    if (layer.is_head) heads.push_back(layer.name);
  }
  const std::map<std::string, LayerKind> expected{{"fc", LayerKind::linear},
                                                  {"conv1", LayerKind::conv1d},
                                                  {"conv2", LayerKind::conv2d},
                                                  {"conv3", LayerKind::conv3d},
                                                  {"bn", LayerKind::batch_norm},
                                                  {"ln", LayerKind::layer_norm},
                                                  {"model.embed_tokens", LayerKind::embedding},
                                                  {"bert.embeddings.word", LayerKind::embedding},
                                                  {"transformer.wte", LayerKind::embedding},
                                                  {"lm_head", LayerKind::linear},
                                                  {"classifier", LayerKind::linear},
                                                  {"embed_out", LayerKind::linear},
                                                  {"counts", LayerKind::other}};
  CHECK((kinds == expected));
  CHECK(heads == std::vector<std::string>{"classifier", "embed_out", "lm_head"});
  CHECK(model.layer("fc").bias == "fc.bias");
  CHECK(model.layer("ln").bias.empty());
  CHECK(model.backend() == Backend::checkpoint);
  CHECK_FALSE(model.runnable());
}

TEST_CASE("masks kept beside the weights are folded into them") {
  const Model model = Model::load(test_data("cases/us-mask-file/pruned_with_masks.safetensors"));
  const SafetensorsFile expected = SafetensorsFile::open(test_data("cases/us-mask-file/expected.safetensors"));
  CHECK(model.tensor_names() == std::vector<std::string>{"fc.bias", "fc.weight", "head.weight"});
  for (const SafetensorsEntry& entry : expected.entries()) CHECK(model.tensor(entry.name).equal(expected.read(entry)));
  const at::Tensor weight = model.tensor("fc.weight");
  CHECK_FALSE(weight.signbit().logical_and(weight.eq(0)).any().item<bool>());

  const TemporaryDirectory dir;
  model.save(dir / "out");
  const SafetensorsFile written = SafetensorsFile::open(dir / "out");
  CHECK(written.metadata().at("tersor.masked") == R"(["fc.weight"])");
  CHECK(written.find("fc.weight_mask") == nullptr);
}

TEST_CASE("a mask without its weight, or of another shape, is refused by name") {
  const auto error = [](const Tensors& tensors) { return error_of([&] { model_of(tensors); }); };
  const Error lone_mask = error({{"fc.weight_mask", values({2, 2})}, {"fc.weight", values({2, 2})}});
  CHECK(lone_mask.code() == ErrorCode::UnsupportedModel);
  CHECK(lone_mask.message().find("fc.weight_mask") != std::string::npos);
  CHECK(error({{"fc.weight_orig", values({2, 2})}}).code() == ErrorCode::UnsupportedModel);
  CHECK(error({{"fc.weight_orig", values({2, 2})}, {"fc.weight_mask", values({2})}}).code() == ErrorCode::BadData);
  CHECK(error({{"w_orig", values({2})}, {"w_mask", values({2})}, {"w", values({2})}}).code() == ErrorCode::BadData);
  CHECK(model_of({{"attention_mask", values({2})}}).has_tensor("attention_mask"));
}

TEST_CASE("a file whose tensors are not touched comes out as it went in") {
  const TemporaryDirectory dir;
  const SafetensorsFile in = SafetensorsFile::open(test_data("good/all_dtypes.safetensors"));
  Model::load(test_data("good/all_dtypes.safetensors")).save(dir / "out");
  const SafetensorsFile out = SafetensorsFile::open(dir / "out");
  CHECK(out.metadata().at("note") == in.metadata().at("note"));
  REQUIRE(out.entries().size() == in.entries().size());
  for (const SafetensorsEntry& entry : in.entries()) {
    CHECK(out.find(entry.name)->dtype == entry.dtype);
    const at::Tensor a = in.read(entry), b = out.read(entry.name);
    CHECK(std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
  }
}

TEST_CASE("sub-byte tensors are carried through a model unchanged") {
  const TemporaryDirectory dir;
  write_safetensors(dir / "in", std::vector<SafetensorsItem>{{"a", at::arange(3).to(at::kByte), "F4", {2, 3}},
                                                             {"fc.weight", values({2, 2})}});
  Model model = Model::load(dir / "in");
  model.quantize_layer("fc", quantized(model.tensor("fc.weight"), kInt8));
  model.save(dir / "out");
  const SafetensorsFile out = SafetensorsFile::open(dir / "out");
  CHECK(out.find("a")->dtype == "F4");
  CHECK(out.find("a")->shape == std::vector<std::int64_t>{2, 3});
  CHECK(out.read("a").equal(at::arange(3).to(at::kByte)));
  CHECK(error_of([&] { model.rewrite("a", at::zeros({3}, at::kByte)); }).code() == ErrorCode::UnsupportedDtype);
}

TEST_CASE("quantized layers are saved as compressed-tensors, come back and are not quantized twice") {
  const TemporaryDirectory dir;
  const Tensors tensors{{"a.weight", values({6, 8})},
                        {"a.bias", values({6})},
                        {"c.weight", values({4, 2, 3, 3})},
                        {"lm_head.weight", values({5, 8})},
                        {"norm.weight", values({8})}};
  Model model = model_of(tensors);
  model.quantize_layer("a", quantized(tensors.at("a.weight"), kInt4));
  model.quantize_layer("c", quantized(tensors.at("c.weight"), kInt8));
  const std::int64_t bytes = model.nbytes();
  CHECK(bytes == (6 * 4 + 6 * 2 * 5) + 6 * 4 + (72 + 4 * 4) + 5 * 8 * 4 + 8 * 4);
  model.save(dir / "out");

  const SafetensorsFile file = SafetensorsFile::open(dir / "out");
  CHECK(file.find("a.weight") == nullptr);
  CHECK(file.find("a.weight_packed")->dtype == "I32");
  CHECK(file.find("a.weight_zero_point")->shape == std::vector<std::int64_t>{1, 2});
  CHECK(file.find("c.weight_shape")->shape == std::vector<std::int64_t>{4});
  CHECK(file.metadata().at("quantization_config").find(R"("ignore":["lm_head"])") != std::string::npos);

  Model back = Model::load(dir / "out");
  CHECK(back.tensor_names() == model.tensor_names());
  CHECK(back.nbytes() == bytes);
  for (const std::string& name : model.tensor_names()) CHECK(back.tensor(name).equal(model.tensor(name)));
  REQUIRE(back.layer("a").quantized);
  CHECK(back.layer("a").quantized->weight.scheme == kInt4);
  CHECK(back.layer("a").kind == LayerKind::linear);
  CHECK(back.layer("c").kind == LayerKind::conv2d);
  CHECK(error_of([&] { back.quantize_layer("a", quantized(tensors.at("a.weight"), kInt8)); }).code() ==
        ErrorCode::AlreadyQuantized);
  CHECK(error_of([&] { back.rewrite("a.weight", tensors.at("a.weight")); }).code() == ErrorCode::AlreadyQuantized);

  back.save(dir / "again");
  CHECK(read_bytes(dir / "again") == read_bytes(dir / "out"));
}

TEST_CASE("files of compressed-tensors load as quantized layers") {
  const TemporaryDirectory dir;
  const SafetensorsFile file = SafetensorsFile::open(test_data("ct/w4a16_asym_g32.safetensors"));
  const Model model = Model::load(test_data("ct/w4a16_asym_g32.safetensors"));
  int layers = 0;
  for (const Layer& layer : model.layers()) layers += layer.quantized.has_value();
  CHECK(layers == 2);
  model.save(dir / "out");
  const SafetensorsFile out = SafetensorsFile::open(dir / "out");
  for (const SafetensorsEntry& entry : file.entries()) CHECK(out.read(entry.name).equal(file.read(entry)));
  CHECK(out.entries().size() == file.entries().size());

  Tensors without_config;
  for (const SafetensorsEntry& entry : file.entries()) without_config[entry.name] = file.read(entry);
  CHECK(error_of([&] { model_of(without_config); }).code() == ErrorCode::UnsupportedFormat);
}

TEST_CASE("a layer whose columns leave a shorter last group is refused when it is quantized") {
  const at::Tensor weight =
      SafetensorsFile::open(test_data("cases/q-group-tail/weights.safetensors")).read("fc.weight");
  Model model = model_of({{"fc.weight", weight}});
  const Error error = error_of([&] {
    model.quantize_layer("fc", quantized(weight, {4, true, Granularity::per_group, 4}));
  });
  CHECK(error.code() == ErrorCode::UnsupportedLayer);
  CHECK_FALSE(model.layer("fc").quantized);
}

TEST_CASE("what needs the network is refused: a checkpoint holds only weights") {
  Model model = model_of({{"fc.weight", values({3, 4})}});
  const auto code = [](auto&& f) { return error_of(f).code(); };
  CHECK(code([&] { model.keep("fc.weight", 0, {0, 2}); }) == ErrorCode::NeedUnmet);
  CHECK(code([&] { model.forward({values({1, 4})}); }) == ErrorCode::NeedUnmet);
  CHECK(model.tensor("fc.weight").size(0) == 3);
}

TEST_CASE("clones share nothing, and assign rolls a model back") {
  const at::Tensor weight = values({3, 4});
  Model model = model_of({{"fc.weight", weight}});
  const Model before = model.clone();
  model.quantize_layer("fc", quantized(weight, kInt8));
  const Model codes = model.clone();
  model.assign(before);
  CHECK_FALSE(model.layer("fc").quantized);
  model.tensor("fc.weight").zero_();
  CHECK(before.tensor("fc.weight").equal(weight));
  CHECK(codes.layer("fc").quantized.has_value());
}

TEST_CASE("a save never touches an existing output or the input") {
  const TemporaryDirectory dir;
  write_safetensors(dir / "in", {{"fc.weight", values({2, 2})}});
  const std::string bytes = read_bytes(dir / "in");
  const Model model = Model::load(dir / "in");
  CHECK(error_of([&] { model.save(dir / "in"); }).code() == ErrorCode::OutputExists);
  SaveOptions options;
  options.overwrite = true;
  options.source = dir / "in";
  CHECK(error_of([&] { model.save(dir / "in", options); }).code() == ErrorCode::OutputIsInput);
  CHECK(read_bytes(dir / "in") == bytes);
  CHECK(dir.files() == 1);
}

TEST_CASE("broken files are refused with the class of the reader") {
  CHECK(error_of([] { Model::load(test_data("bad/st23_duplicate_key.safetensors")); }).code() ==
        ErrorCode::DuplicateKey);
  CHECK(error_of([] { Model::load(test_data("cases/c-dup-key/dup_escaped.safetensors")); }).code() ==
        ErrorCode::DuplicateKey);
}

TEST_CASE("dequantize gives back the values of the codes") {
  const at::Tensor weight = values({3, 4});
  Model model = model_of({{"fc.weight", weight}});
  model.quantize_layer("fc", quantized(weight, kInt8));
  const at::Tensor codes = model.tensor("fc.weight");
  dequantize(model);
  CHECK_FALSE(model.layer("fc").quantized);
  CHECK(model.tensor("fc.weight").equal(codes));
  CHECK(model.nbytes() == 3 * 4 * 4);
}

TEST_CASE("a bare layer is called by its weight and stays in float") {
  Model model = Model::from_tensors({{"weight", at::ones({4, 8})}, {"bias", at::ones({4})}});
  REQUIRE(model.layers().size() == 1);
  const Layer layer = model.layer("weight");
  CHECK(layer.kind == LayerKind::linear);
  CHECK(layer.bias == "bias");
  CHECK_FALSE(layer.float_only.empty());
  model.mask("weight", at::zeros({4, 8}).eq(1));
  CHECK(model.tensor("weight").eq(0).all().item<bool>());
}

TEST_CASE("thousands of layers are edited one by one in a moment") {
  std::map<std::string, at::Tensor> tensors;
  for (int i = 0; i < 20000; ++i) tensors[fmt::format("layers.{}.weight", i)] = at::ones({2, 16});
  Model model = Model::from_tensors(std::move(tensors));
  for (const Layer& layer : model.layers())
    model.quantize_layer(layer.name, {quantize_weight(model.tensor(layer.weight), QuantScheme{}), {}});
  CHECK(model.layer("layers.19999").quantized.has_value());
}

#include "tersor/io/compressed_tensors.hpp"

#include <cmath>

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <nlohmann/json.hpp>

#include "temporary.hpp"
#include "tersor/io/safetensors.hpp"

using namespace tersor;

namespace {

using Tensors = std::map<std::string, at::Tensor>;

Tensors read_all(const SafetensorsFile& file) {
  Tensors out;
  for (const SafetensorsEntry& entry : file.entries()) out[entry.name] = file.read(entry);
  return out;
}

void check_equal(const QTensor& a, const QTensor& b) {
  CHECK(a.scheme == b.scheme);
  CHECK(a.shape == b.shape);
  CHECK(a.dtype == b.dtype);
  CHECK(a.codes.equal(b.codes));
  CHECK(a.scale.equal(b.scale));
  CHECK(a.scale.sizes() == b.scale.sizes());
  REQUIRE(a.zero_point.defined() == b.zero_point.defined());
  if (a.zero_point.defined()) {
    CHECK(a.zero_point.equal(b.zero_point));
  }
}

/// Some weights of both signs.
at::Tensor weights(at::IntArrayRef shape) {
  std::int64_t n = 1;
  for (const std::int64_t d : shape) n *= d;
  return at::arange(n, at::kFloat).mul(0.37).sin().view(shape);
}

ErrorCode decompress_error(Tensors tensors, const std::string& config) {
  return error_of([&] { decompress_layers(tensors, config); }).code();
}

}  // namespace

TEST_CASE("files written by compressed-tensors decode to the same codes and values") {
  for (const char* name : {"w4a16_g32", "w4a16_asym_g32", "w8a8"}) {
    const SafetensorsFile file = SafetensorsFile::open(test_data("ct") / (std::string(name) + ".safetensors"));
    Tensors tensors = read_all(file);
    CHECK(has_compressed_layers(tensors));
    const auto layers = decompress_layers(tensors, file.metadata().at("quantization_config"));
    REQUIRE(layers.size() == 2);
    for (const auto& [layer, quantization] : layers) {
      INFO(name << ' ' << layer);
      const QTensor& q = quantization.weight;
      CHECK(unpacked_codes(q).equal(tensors.at("expected." + layer + ".codes")));
      CHECK(q.dtype == at::kBFloat16);
      CHECK(dequantize(q).equal(tensors.at("expected." + layer + ".dequant").to(at::kBFloat16)));
      CHECK((quantization.activation.mode == ActivationMode::per_token) == (std::string_view(name) == "w8a8"));
      // Written again, they are the tensors of the file.
      for (const auto& [part, tensor] : compress_layer(layer, quantization)) {
        INFO(part);
        const at::Tensor original = file.read(part);
        CHECK(tensor.scalar_type() == original.scalar_type());
        CHECK(tensor.equal(original));
      }
    }
    // Nothing of the layers is left, and nothing else is gone.
    CHECK_FALSE(has_compressed_layers(tensors));
    CHECK(tensors.size() == 5);
  }
}

TEST_CASE("what tersor cannot hold is refused") {
  for (const char* name : {"w3a16_g32", "fp8_dyn"}) {
    const SafetensorsFile file = SafetensorsFile::open(test_data("ct") / (std::string(name) + ".safetensors"));
    CHECK(decompress_error(read_all(file), file.metadata().at("quantization_config")) == ErrorCode::UnsupportedFormat);
  }
}

TEST_CASE("every scheme survives the format") {
  std::map<std::string, LayerQuantization> layers;
  Tensors tensors{{"other.weight", weights({2, 2})}, {"l0.bias", weights({5})}};
  int n = 0;
  for (const int bits : {4, 8}) {
    for (const bool symmetric : {true, false}) {
      for (const Granularity granularity :
           {Granularity::per_tensor, Granularity::per_channel, Granularity::per_group}) {
        for (const ActivationMode mode :
             {ActivationMode::none, ActivationMode::per_token, ActivationMode::per_tensor}) {
          for (const bool conv : {false, true}) {
            QuantScheme scheme{bits, symmetric, granularity, granularity == Granularity::per_group ? 6 : 0};
            const at::Tensor weight = conv ? weights({5, 3, 2, 3}) : weights({5, 18});
            LayerQuantization layer{quantize_weight(weight, scheme), {mode}};
            if (mode == ActivationMode::per_tensor) layer.activation = {mode, 0.125F, n % 2 == 0 ? 0 : -3};
            const std::string name = "l" + std::to_string(n++);
            layers[name] = layer;
            tensors.merge(compress_layer(name, layer));
          }
        }
      }
    }
  }
  const std::string config = quantization_config(layers, {});
  const auto back = decompress_layers(tensors, config);
  CHECK(tensors.size() == 2);
  REQUIRE(back.size() == layers.size());
  for (const auto& [name, layer] : layers) {
    INFO(name);
    check_equal(back.at(name).weight, layer.weight);
    CHECK(back.at(name).activation == layer.activation);
  }
}

TEST_CASE("an odd number of columns and of rows survives the packing") {
  const SafetensorsFile file = SafetensorsFile::open(test_data("cases/q-int4-asym/weights.safetensors"));
  QTensor q;
  q.scheme = {4, true, Granularity::per_channel, 0};
  q.shape = {2, 7};
  q.codes = packed_codes(file.read("codes_odd"), q.scheme);
  q.scale = at::zeros({2, 1}).add(0.5);
  Tensors tensors = compress_layer("l", {q, {}});
  CHECK(tensors.at("l.weight_packed").sizes() == at::IntArrayRef({2, 1}));
  const auto back = decompress_layers(tensors, quantization_config({{"l", {q, {}}}}, {}));
  CHECK(unpacked_codes(back.at("l").weight).equal(file.read("codes_odd")));
}

TEST_CASE("quantization_config has the form that compressed-tensors writes") {
  const QTensor q4 = quantize_weight(weights({4, 8}), {4, true, Granularity::per_group, 4});
  const QTensor q8 = quantize_weight(weights({4, 8}), {8, true, Granularity::per_channel, 0});
  CHECK(quantization_config({{"a", {q4, {}}}, {"b", {q4, {}}}}, {"lm_head"}) ==
        R"({"quant_method":"compressed-tensors","format":"pack-quantized","quantization_status":"compressed",)"
        R"("config_groups":{"group_0":{"targets":["a","b"],"weights":{"num_bits":4,"type":"int","symmetric":true,)"
        R"("strategy":"group","group_size":4,"dynamic":false},"input_activations":null,"output_activations":null,)"
        R"("format":"pack-quantized"}},"ignore":["lm_head"],"kv_cache_scheme":null,"global_compression_ratio":null,)"
        R"("sparsity_config":{},"transform_config":{},"version":"0.20.1"})");
  const auto mixed = nlohmann::json::parse(
      quantization_config({{"a", {q4, {}}}, {"b", {q8, {ActivationMode::per_token}}}, {"c", {q4, {}}}}, {}));
  CHECK(mixed["format"] == "mixed-precision");
  CHECK(mixed["config_groups"]["group_0"]["targets"] == nlohmann::json({"a", "c"}));
  CHECK(mixed["config_groups"]["group_1"]["format"] == "int-quantized");
  CHECK(mixed["config_groups"]["group_1"]["input_activations"]["strategy"] == "token");
}

TEST_CASE("a shorter last group has no place in the format") {
  const Error error = error_of([] {
    compress_layer("fc", {quantize_weight(weights({3, 10}), {4, true, Granularity::per_group, 4}), {}});
  });
  CHECK(error.code() == ErrorCode::UnsupportedLayer);
  for (const char* word : {"fc", "10", "4"}) CHECK(error.message().find(word) != std::string::npos);
}

TEST_CASE("tensors that contradict each other or the config are refused") {
  const LayerQuantization layer{quantize_weight(weights({4, 8}), {4, false, Granularity::per_group, 4}), {}};
  const Tensors good = compress_layer("l", layer);
  const std::string config = quantization_config({{"l", layer}}, {});
  const auto with = [&](const std::string& name, const at::Tensor& tensor) {
    Tensors changed = good;
    changed[name] = tensor;
    return decompress_error(changed, config);
  };
  for (const auto& [name, tensor] : good) {
    INFO(name);
    Tensors less = good;
    less.erase(name);
    if (name != "l.weight_packed") {
      CHECK(decompress_error(less, config) == ErrorCode::BadData);
    }
    CHECK(with(name, tensor.to(at::kDouble)) == ErrorCode::BadData);
    CHECK(with(name, at::zeros({7}, tensor.scalar_type())) == ErrorCode::BadData);
  }
  CHECK(with("l.weight_shape", at::arange(4, 6).mul(std::int64_t{1} << 40)) == ErrorCode::BadData);
  CHECK(with("l.weight_shape", at::arange(4, 6).neg()) == ErrorCode::BadData);
  CHECK(with("l.weight_scale", at::zeros({4, 2})) == ErrorCode::BadData);
  CHECK(with("l.weight_scale", at::zeros({4, 2}).add(NAN)) == ErrorCode::BadData);
  CHECK(with("l.weight_g_idx", at::arange(8)) == ErrorCode::UnsupportedFormat);
  CHECK(decompress_error(good, quantization_config({{"m", layer}}, {})) == ErrorCode::BadConfig);

  const Tensors ints = compress_layer(
      "l", {quantize_weight(weights({4, 8}), {4, true, Granularity::per_channel, 0}), {ActivationMode::per_token}});
  Tensors wide = ints;
  wide["l.weight"] = at::zeros({4, 8}, at::kChar).add(9);
  const std::string int_config = quantization_config(
      {{"l", {quantize_weight(weights({4, 8}), {4, true, Granularity::per_channel, 0}), {ActivationMode::per_token}}}},
      {});
  CHECK(decompress_error(wide, int_config) == ErrorCode::BadData);
}

TEST_CASE("a broken or hostile quantization_config is BadConfig or UnsupportedFormat") {
  const LayerQuantization layer{quantize_weight(weights({4, 8}), {8, true, Granularity::per_channel, 0}), {}};
  const Tensors tensors = compress_layer("layer.aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", layer);
  const auto config = [&](const std::string& target) {
    auto json = nlohmann::json::parse(quantization_config({{"x", layer}}, {}));
    json["config_groups"]["group_0"]["targets"] = {target};
    return json;
  };
  Tensors copy = tensors;
  CHECK(decompress_layers(copy, config("Linear").dump()).size() == 1);
  copy = tensors;
  CHECK(decompress_layers(copy, config("re:layer.*").dump()).size() == 1);
  CHECK(decompress_error(tensors, config("re:ayer.*").dump()) == ErrorCode::BadConfig);
  CHECK(decompress_error(tensors, config("Conv2d").dump()) == ErrorCode::BadConfig);
  CHECK(decompress_error(tensors, config("re:(").dump()) == ErrorCode::BadConfig);
  CHECK(decompress_error(tensors, config("re:layer[.](a+)+$x").dump()) == ErrorCode::BadConfig);
  CHECK(decompress_error(tensors, config("re:" + std::string(100'000, '(')).dump()) == ErrorCode::BadConfig);
  for (const char* text : {"", "{", "[]", "{}", R"({"quant_method":"compressed-tensors"})",
                           R"({"quant_method":"compressed-tensors","config_groups":{"g":{"targets":1}}})"}) {
    INFO(text);
    CHECK(decompress_error(tensors, text) == ErrorCode::BadConfig);
  }
  auto json = config("Linear");
  json["quant_method"] = "gptq";
  CHECK(decompress_error(tensors, json.dump()) == ErrorCode::UnsupportedFormat);
  json = config("Linear");
  json["quantization_status"] = "frozen";
  CHECK(decompress_error(tensors, json.dump()) == ErrorCode::UnsupportedFormat);
}

#include "tersor/io/compressed_tensors.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <regex>
#include <span>

#include <ATen/ops/empty.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "tersor/core/checked.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/core/packing.hpp"

namespace tersor {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kVersion = "0.20.1";  // of compressed-tensors, whose form this is
constexpr std::size_t kMaxPattern = 1000;

bool weight_only(const LayerQuantization& q) { return q.activation.mode == ActivationMode::none; }

/// codes [rows, columns] int8 → [rows, words] int32
at::Tensor pack_rows(const at::Tensor& codes, int bits) {
  const std::int64_t rows = codes.size(0), columns = codes.size(1), words = packed_words(columns, bits);
  const at::Tensor in = codes.contiguous();
  const at::Tensor out = at::empty({rows, words}, at::kInt);
  const std::int8_t* from = in.const_data_ptr<std::int8_t>();
  auto* to = reinterpret_cast<std::uint32_t*>(out.mutable_data_ptr<std::int32_t>());
  for (std::int64_t r = 0; r < rows; ++r) {
    pack_codes({from + r * columns, static_cast<std::size_t>(columns)}, bits,
               {to + r * words, static_cast<std::size_t>(words)});
  }
  return out;
}

at::Tensor unpack_rows(const at::Tensor& packed, int bits, std::int64_t columns) {
  const std::int64_t rows = packed.size(0), words = packed.size(1);
  const at::Tensor in = packed.contiguous();
  const at::Tensor out = at::empty({rows, columns}, at::kChar);
  const auto* from = reinterpret_cast<const std::uint32_t*>(in.const_data_ptr<std::int32_t>());
  std::int8_t* to = out.mutable_data_ptr<std::int8_t>();
  for (std::int64_t r = 0; r < rows; ++r) {
    unpack_codes({from + r * words, static_cast<std::size_t>(words)}, bits,
                 {to + r * columns, static_cast<std::size_t>(columns)});
  }
  return out;
}

template <typename T>
at::Tensor one_element(T value, at::ScalarType type) {
  const at::Tensor out = at::empty({1}, type);
  *out.mutable_data_ptr<T>() = value;
  return out;
}

std::string_view strategy(Granularity granularity) {
  switch (granularity) {
    case Granularity::per_tensor:
      return "tensor";
    case Granularity::per_channel:
      return "channel";
    case Granularity::per_group:
      return "group";
  }
  throw fail(ErrorCode::Internal, "granularity without a name");
}

Json arguments(int bits, bool symmetric, std::string_view strategy, Json group_size, bool dynamic) {
  return Json{{"num_bits", bits},
              {"type", "int"},
              {"symmetric", symmetric},
              {"strategy", strategy},
              {"group_size", std::move(group_size)},
              {"dynamic", dynamic}};
}

/// Everything of a group but its targets.
Json group_of(const LayerQuantization& q) {
  const QuantScheme& scheme = q.weight.scheme;
  Json inputs = nullptr;
  if (q.activation.mode == ActivationMode::per_token) inputs = arguments(8, true, "token", nullptr, true);
  if (q.activation.mode == ActivationMode::per_tensor)
    inputs = arguments(8, q.activation.zero_point == 0, "tensor", nullptr, false);
  const Json size = scheme.granularity == Granularity::per_group ? Json(scheme.group_size) : Json(nullptr);
  return Json{{"weights", arguments(scheme.bits, scheme.symmetric, strategy(scheme.granularity), size, false)},
              {"input_activations", std::move(inputs)},
              {"output_activations", nullptr},
              {"format", weight_only(q) ? "pack-quantized" : "int-quantized"}};
}

// --- reading ---

struct Group {
  std::vector<std::string> targets;
  QuantScheme scheme;
  ActivationMode activation = ActivationMode::none;
  bool activation_symmetric = true;
};

Error bad_config(std::string_view what) { return fail(ErrorCode::BadConfig, "quantization_config: {}", what); }

Group read_group(const Json& json) {
  Group group;
  group.targets = json.at("targets").get<std::vector<std::string>>();
  const Json& weights = json.at("weights");
  const auto text = [](const Json& object, const char* key) {
    const auto it = object.find(key);
    return it == object.end() || it->is_null() ? std::string() : it->get<std::string>();
  };
  const auto unsupported = [](bool ok, std::string_view what) {
    check(ok, ErrorCode::UnsupportedFormat, "quantization_config: {} is not supported", what);
  };
  unsupported(!weights.is_null(), "a group without weights");
  group.scheme.bits = weights.at("num_bits").get<int>();
  unsupported(group.scheme.bits == 4 || group.scheme.bits == 8, fmt::format("num_bits {}", group.scheme.bits));
  unsupported(weights.value("type", "int") == "int", "a floating-point type");
  group.scheme.symmetric = weights.value("symmetric", true);
  const Json size = weights.value("group_size", Json(nullptr));
  const std::int64_t group_size = size.is_null() ? 0 : size.get<std::int64_t>();
  std::string by = text(weights, "strategy");
  if (by.empty()) by = group_size > 0 ? "group" : group_size == -1 ? "channel" : "tensor";
  if (by == "group") {
    if (group_size <= 0) throw bad_config("strategy 'group' without a group_size");
    group.scheme.granularity = Granularity::per_group;
    group.scheme.group_size = group_size;
  } else {
    unsupported(by == "channel" || by == "tensor", fmt::format("the strategy '{}'", escaped(by)));
    group.scheme.granularity = by == "channel" ? Granularity::per_channel : Granularity::per_tensor;
  }

  const Json inputs = json.value("input_activations", Json(nullptr));
  if (!inputs.is_null()) {
    unsupported(inputs.at("num_bits").get<int>() == 8 && inputs.value("type", "int") == "int",
                "an input that is not quantized to int8");
    const std::string how = text(inputs, "strategy");
    const Json dynamic = inputs.value("dynamic", Json(false));
    group.activation_symmetric = inputs.value("symmetric", true);
    if (how == "token" && dynamic == true && group.activation_symmetric) {
      group.activation = ActivationMode::per_token;
    } else {
      unsupported(how == "tensor" && dynamic == false, "this way of quantizing inputs");
      group.activation = ActivationMode::per_tensor;
    }
  }
  unsupported(json.value("output_activations", Json(nullptr)).is_null(), "quantizing outputs");
  return group;
}

std::vector<Group> read_groups(std::string_view config) {
  try {
    const Json json = Json::parse(config);
    const std::string method = json.at("quant_method").get<std::string>();
    check(method == "compressed-tensors", ErrorCode::UnsupportedFormat,
          "quantization_config: quant_method '{}' is not supported; expected compressed-tensors", escaped(method));
    const std::string status = json.value("quantization_status", "compressed");
    check(status == "compressed", ErrorCode::UnsupportedFormat,
          "quantization_config: quantization_status '{}' is not supported; expected compressed", escaped(status));
    std::vector<Group> groups;
    for (const auto& [key, group] : json.at("config_groups").items()) groups.push_back(read_group(group));
    return groups;
  } catch (const Json::exception& error) {
    throw bad_config(escaped(error.what()));
  }
}

bool matches(const std::string& name, const std::string& target) {
  if (!target.starts_with("re:")) return name == target;
  check(target.size() <= kMaxPattern, ErrorCode::BadConfig, "quantization_config: an expression of {} characters",
        target.size());
  try {
    // The breadth-first matcher: no exponential time, no recursion over a long name.
    const std::regex pattern(target.substr(3), std::regex::ECMAScript | std::regex_constants::__polynomial);
    return std::regex_search(name, pattern, std::regex_constants::match_continuous);
  } catch (const std::regex_error&) {
    throw bad_config(fmt::format("'{}' is no regular expression that is supported", escaped(target)));
  }
}

/// By name first, then by class, as compressed-tensors resolves it.
const Group& find_group(const std::vector<Group>& groups, const std::string& layer, std::size_t dims) {
  static constexpr std::array<std::string_view, 6> classes{"", "", "Linear", "Conv1d", "Conv2d", "Conv3d"};
  for (const Group& group : groups)
    if (std::any_of(group.targets.begin(), group.targets.end(), [&](const auto& t) { return matches(layer, t); }))
      return group;
  for (const Group& group : groups)
    if (dims < classes.size() &&
        std::find(group.targets.begin(), group.targets.end(), classes[dims]) != group.targets.end())
      return group;
  throw bad_config(fmt::format("no group has the layer '{}'", escaped(layer)));
}

/// The tensors of one layer, each taken out of the map when it is used.
class Parts {
 public:
  Parts(std::map<std::string, at::Tensor>& tensors, std::string layer) : tensors_(tensors), layer_(std::move(layer)) {}

  std::optional<at::Tensor> take(const std::string& part) {
    auto node = tensors_.extract(layer_ + part);
    return node ? std::optional(node.mapped()) : std::nullopt;
  }
  bool has(const std::string& part) const { return tensors_.contains(layer_ + part); }

  /// BadData unless the tensor exists with one of the types and the shape.
  at::Tensor expect(const std::string& part, std::initializer_list<at::ScalarType> types, at::IntArrayRef shape) {
    std::optional<at::Tensor> tensor = take(part);
    check(tensor.has_value(), ErrorCode::BadData, "quantized layer '{}' has no tensor '{}'", escaped(layer_),
          escaped(layer_ + part));
    const bool type_fits = std::find(types.begin(), types.end(), tensor->scalar_type()) != types.end();
    check(type_fits && tensor->sizes() == shape, ErrorCode::BadData, "'{}' is {} [{}]; expected {} [{}]",
          escaped(layer_ + part), c10::toString(tensor->scalar_type()), fmt::join(tensor->sizes(), ", "),
          c10::toString(*types.begin()), fmt::join(shape, ", "));
    return *tensor;
  }

 private:
  std::map<std::string, at::Tensor>& tensors_;
  std::string layer_;
};

constexpr auto kFloats = {at::kFloat, at::kHalf, at::kBFloat16};

/// The original shape of a packed weight, checked against the words it is packed into.
std::vector<std::int64_t> read_shape(Parts& parts, const std::string& layer) {
  const std::optional<at::Tensor> stored = parts.take(".weight_shape");
  check(stored && stored->dim() == 1 && stored->numel() >= 1 && stored->numel() <= 8 &&
            (stored->scalar_type() == at::kLong || stored->scalar_type() == at::kInt),
        ErrorCode::BadData, "quantized layer '{}' has no usable weight_shape", escaped(layer));
  const at::Tensor wide = stored->to(at::kLong).contiguous();
  const std::int64_t* first = wide.const_data_ptr<std::int64_t>();
  std::vector<std::int64_t> shape(first, first + wide.numel());
  const bool positive = std::all_of(shape.begin(), shape.end(), [](std::int64_t d) { return d > 0; });
  // Room for the bits of every element, which packed_words multiplies by.
  std::vector<std::int64_t> bits = shape;
  bits.push_back(8);
  const auto size = checked_product(std::span<const std::int64_t>(bits));
  check(positive && size && checked_add<std::int64_t>(*size, 31), ErrorCode::BadData,
        "weight_shape of layer '{}' is [{}]", escaped(layer), fmt::join(shape, ", "));
  return shape;
}

void check_scale(const at::Tensor& scale, const std::string& name) {
  const at::Tensor wide = scale.to(at::kFloat).contiguous();
  const float* s = wide.const_data_ptr<float>();
  const bool fine = std::all_of(s, s + wide.numel(), [](float x) { return x > 0 && std::isfinite(x); });
  check(fine, ErrorCode::BadData, "'{}' holds a scale that is not positive and finite", escaped(name));
}

LayerQuantization read_layer(std::map<std::string, at::Tensor>& tensors, const std::string& layer,
                             const std::vector<Group>& groups) {
  Parts parts(tensors, layer);
  check(!parts.has(".weight_g_idx"), ErrorCode::UnsupportedFormat,
        "layer '{}' has its columns in another order (weight_g_idx), which is not supported", escaped(layer));
  const bool packed = parts.has(".weight_packed");
  const std::vector<std::int64_t> shape =
      packed ? read_shape(parts, layer) : tensors.at(layer + ".weight").sizes().vec();
  check(!shape.empty(), ErrorCode::BadData, "the weight of layer '{}' has no dimensions", escaped(layer));

  const Group& group = find_group(groups, layer, shape.size());
  LayerQuantization out;
  QTensor& q = out.weight;
  q.scheme = group.scheme;
  q.shape = shape;
  const std::int64_t rows = q.rows(), columns = q.columns();
  const int bits = q.scheme.bits;
  const bool per_tensor = q.scheme.granularity == Granularity::per_tensor;
  check(q.scheme.granularity != Granularity::per_group || columns % q.scheme.group_size == 0, ErrorCode::BadData,
        "layer '{}' has {} columns, no multiple of group_size {}", escaped(layer), columns, q.scheme.group_size);
  const std::int64_t count = q.groups();

  at::Tensor codes;
  if (packed) {
    codes = unpack_rows(parts.expect(".weight_packed", {at::kInt}, {rows, packed_words(columns, bits)}), bits, columns);
    codes = codes.view(shape);
  } else {
    codes = parts.expect(".weight", {at::kChar}, shape);
    if (bits == 4) {
      const bool fits = codes.numel() == 0 || (codes.min().item<int>() >= -8 && codes.max().item<int>() <= 7);
      check(fits, ErrorCode::BadData, "'{}.weight' holds codes of more than 4 bits", escaped(layer));
    }
  }
  q.codes = packed_codes(codes, q.scheme);
  q.scale = parts.expect(".weight_scale", kFloats, per_tensor ? at::IntArrayRef{1} : at::IntArrayRef{rows, count});
  check_scale(q.scale, layer + ".weight_scale");
  q.dtype = q.scale.scalar_type();
  if (!q.scheme.symmetric) {
    if (packed && !per_tensor) {
      const at::Tensor words = parts.expect(".weight_zero_point", {at::kInt}, {packed_words(rows, bits), count});
      q.zero_point = unpack_rows(words.t(), bits, rows).t().contiguous();
    } else {
      q.zero_point = parts.expect(".weight_zero_point", {at::kChar},
                                  per_tensor ? at::IntArrayRef{1} : at::IntArrayRef{rows, count});
    }
  }
  if (per_tensor) {
    q.scale = q.scale.view({1, 1});
    if (q.zero_point.defined()) q.zero_point = q.zero_point.view({1, 1});
  }

  out.activation.mode = group.activation;
  if (group.activation == ActivationMode::per_tensor) {
    const at::Tensor scale = parts.expect(".input_scale", kFloats, {1});
    check_scale(scale, layer + ".input_scale");
    out.activation.scale = scale.to(at::kFloat).item<float>();
    if (!group.activation_symmetric)
      out.activation.zero_point = parts.expect(".input_zero_point", {at::kChar}, {1}).item<std::int8_t>();
  }
  return out;
}

/// Layers with a packed weight, or with a weight and its scale.
std::vector<std::string> compressed_names(const std::map<std::string, at::Tensor>& tensors) {
  std::vector<std::string> out;
  for (const auto& [name, tensor] : tensors) {
    const std::size_t dot = name.rfind('.');
    if (dot == std::string::npos) continue;
    const std::string layer = name.substr(0, dot);
    const std::string part = name.substr(dot);
    if (part == ".weight_packed" || (part == ".weight_scale" && tensors.contains(layer + ".weight")))
      out.push_back(layer);
  }
  return out;
}

}  // namespace

std::map<std::string, at::Tensor> compress_layer(const std::string& layer, const LayerQuantization& quantization) {
  const QTensor& q = quantization.weight;
  const bool per_tensor = q.scheme.granularity == Granularity::per_tensor;
  check(q.scheme.granularity != Granularity::per_group || q.columns() % q.scheme.group_size == 0,
        ErrorCode::UnsupportedLayer,
        "layer '{}' has {} columns, no multiple of group_size {}; the compressed-tensors format has no shorter last "
        "group: "
        "quantize it per channel",
        escaped(layer), q.columns(), q.scheme.group_size);
  const at::Tensor codes = unpacked_codes(q);
  check(codes.numel() > 0, ErrorCode::UnsupportedLayer, "layer '{}' has an empty weight and cannot be quantized",
        escaped(layer));
  std::map<std::string, at::Tensor> out;
  out[layer + ".weight_scale"] = per_tensor ? q.scale.reshape({1}) : q.scale;
  if (weight_only(quantization)) {
    out[layer + ".weight_packed"] = pack_rows(codes.reshape({q.rows(), q.columns()}), q.scheme.bits);
    const at::Tensor shape = at::empty({static_cast<std::int64_t>(q.shape.size())}, at::kLong);
    std::copy(q.shape.begin(), q.shape.end(), shape.mutable_data_ptr<std::int64_t>());
    out[layer + ".weight_shape"] = shape;
  } else {
    out[layer + ".weight"] = codes;
  }
  if (q.zero_point.defined()) {
    const bool packed = weight_only(quantization) && !per_tensor;
    out[layer + ".weight_zero_point"] = packed       ? pack_rows(q.zero_point.t(), q.scheme.bits).t().contiguous()
                                        : per_tensor ? q.zero_point.reshape({1})
                                                     : q.zero_point;
  }
  if (quantization.activation.mode == ActivationMode::per_tensor) {
    out[layer + ".input_scale"] = one_element(quantization.activation.scale, at::kFloat);
    if (quantization.activation.zero_point != 0) {
      out[layer + ".input_zero_point"] =
          one_element(static_cast<std::int8_t>(quantization.activation.zero_point), at::kChar);
    }
  }
  return out;
}

std::string quantization_config(const std::map<std::string, LayerQuantization>& layers,
                                const std::vector<std::string>& ignore) {
  std::vector<std::pair<Json, Json>> groups;  // what they share, their targets
  for (const auto& [name, quantization] : layers) {
    const Json group = group_of(quantization);
    auto it = std::find_if(groups.begin(), groups.end(), [&](const auto& known) { return known.first == group; });
    if (it == groups.end()) it = groups.emplace(groups.end(), group, Json::array());
    it->second.push_back(name);
  }
  Json config_groups = Json::object();
  std::string format;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const std::string own = groups[i].first.at("format");
    format = format.empty() || format == own ? own : "mixed-precision";
    Json group{{"targets", groups[i].second}};
    group.update(groups[i].first);
    config_groups[fmt::format("group_{}", i)] = std::move(group);
  }
  return Json{{"quant_method", "compressed-tensors"},
              {"format", format},
              {"quantization_status", "compressed"},
              {"config_groups", std::move(config_groups)},
              {"ignore", ignore},
              {"kv_cache_scheme", nullptr},
              {"global_compression_ratio", nullptr},
              {"sparsity_config", Json::object()},
              {"transform_config", Json::object()},
              {"version", kVersion}}
      .dump();
}

bool has_compressed_layers(const std::map<std::string, at::Tensor>& tensors) {
  return !compressed_names(tensors).empty();
}

std::map<std::string, LayerQuantization> decompress_layers(std::map<std::string, at::Tensor>& tensors,
                                                           std::string_view config) {
  const std::vector<Group> groups = read_groups(config);
  std::map<std::string, LayerQuantization> out;
  for (const std::string& layer : compressed_names(tensors)) out[layer] = read_layer(tensors, layer, groups);
  return out;
}

}  // namespace tersor

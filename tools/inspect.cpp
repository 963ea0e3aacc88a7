#include <cctype>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <fmt/ranges.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "commands.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/io/safetensors.hpp"
#include "tersor/model/model.hpp"
#include "text.hpp"

namespace tersor::cli {
namespace {

using Json = nlohmann::ordered_json;

/// One line of the listing: a layer with its weight, or a tensor that belongs to none.
struct Entry {
  std::string name, kind;
  std::vector<std::int64_t> shape;
  std::string storage;  ///< `f32`, `int8 per channel`, `int4 per group of 128, input int8 per token`
  int bits = 0;         ///< of one weight
  std::int64_t elements = 0, zeros = 0;
  std::int64_t bytes = 0;  ///< of everything the layer owns
};

std::string dtype_name(at::ScalarType dtype) {
  if (at::isQIntType(dtype) || dtype == at::kComplexDouble) return c10::toString(dtype);  // not in safetensors
  std::string name(safetensors_dtype(dtype));
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

std::string storage_text(const LayerQuantization& quantization) {
  const QuantScheme& scheme = quantization.weight.scheme;
  std::string s = fmt::format("int{} per ", scheme.bits);
  switch (scheme.granularity) {
    case Granularity::per_tensor:
      s += "tensor";
      break;
    case Granularity::per_channel:
      s += "channel";
      break;
    case Granularity::per_group:
      s += fmt::format("group of {}", scheme.group_size);
      break;
  }
  if (!scheme.symmetric) s += ", affine";
  switch (quantization.activation.mode) {
    case ActivationMode::none:
      break;
    case ActivationMode::per_token:
      s += "; input int8 per token";
      break;
    case ActivationMode::per_tensor:
      s += "; input int8 calibrated";
      break;
  }
  return s;
}

std::int64_t count_zeros(const at::Tensor& t) {
  const at::ScalarType type = t.scalar_type();
  // LibTorch cannot count in its 8-bit floats and wide unsigned integers.
  const bool plain = type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16 ||
                     type == at::kBool || at::isComplexType(type) ||
                     (at::isIntegralType(type, false) && !at::isBarebonesUnsignedType(type));
  return t.numel() - (plain ? t : t.to(at::kDouble)).count_nonzero().item<std::int64_t>();
}

std::string owner(const std::string& tensor) {
  const std::size_t dot = tensor.rfind('.');
  return dot == std::string::npos ? "" : tensor.substr(0, dot);
}

std::vector<Entry> entries_of(const Model& model) {
  std::vector<Entry> entries;
  std::map<std::string, std::size_t> of_layer;
  std::map<std::string, std::size_t> of_weight;
  for (const Layer& layer : model.layers()) {
    of_layer[layer.name] = entries.size();
    of_weight[layer.weight] = entries.size();
    Entry e{layer.name, std::string(class_name(layer.kind)), layer.shape, "", 0, 0, 0, 0};
    if (layer.quantized) {
      e.storage = storage_text(*layer.quantized);
      e.bits = layer.quantized->weight.scheme.bits;
      e.bytes = layer.quantized->weight.nbytes();
    } else {
      e.storage = dtype_name(layer.dtype);
      e.bits = static_cast<int>(8 * c10::elementSize(layer.dtype));
    }
    const at::Tensor weight = model.tensor(layer.weight);
    e.elements = weight.numel();
    e.zeros = count_zeros(weight);
    if (!layer.quantized) e.bytes = static_cast<std::int64_t>(weight.nbytes());
    entries.push_back(std::move(e));
  }
  for (const std::string& name : model.tensor_names()) {
    if (of_weight.contains(name)) continue;
    const at::Tensor t = model.tensor(name);
    const auto layer = of_layer.find(owner(name));
    if (layer != of_layer.end()) {
      entries[layer->second].bytes += static_cast<std::int64_t>(t.nbytes());
      continue;
    }
    entries.push_back({name, "-", t.sizes().vec(), dtype_name(t.scalar_type()), static_cast<int>(8 * t.element_size()),
                       t.numel(), count_zeros(t), static_cast<std::int64_t>(t.nbytes())});
  }
  return entries;
}

std::string sparsity_text(const Entry& e) {
  return e.elements == 0
             ? "-"
             : fmt::format("{:.1f} %", 100.0 * static_cast<double>(e.zeros) / static_cast<double>(e.elements));
}

void run_inspect(const std::string& file, bool json) {
  const Model model = Model::load(file);
  const std::vector<Entry> entries = entries_of(model);
  const std::string_view format = model.backend() == Backend::checkpoint ? "safetensors" : "TorchScript";
  const auto file_bytes = static_cast<std::int64_t>(std::filesystem::file_size(file));
  Entry total;
  for (const Entry& e : entries) {
    total.elements += e.elements;
    total.zeros += e.zeros;
    total.bytes += e.bytes;
  }

  if (json) {
    Json j{{"file", file},
           {"format", format},
           {"file_bytes", file_bytes},
           {"layers", Json::array()},
           {"tensors", Json::array()}};
    for (const Entry& e : entries) {
      Json entry{{"name", e.name},         {"shape", e.shape}, {"storage", e.storage}, {"bits", e.bits},
                 {"elements", e.elements}, {"zeros", e.zeros}, {"bytes", e.bytes}};
      if (e.kind != "-") entry["kind"] = e.kind;
      j[e.kind == "-" ? "tensors" : "layers"].push_back(std::move(entry));
    }
    j["total"] = {{"elements", total.elements}, {"zeros", total.zeros}, {"bytes", total.bytes}};
    j["kept"] = model.kept();
    j["metadata"] = model.metadata();
    fmt::print("{}\n", j.dump(2, ' ', false, Json::error_handler_t::replace));
    return;
  }

  fmt::print("{}: {}, {} bytes\n", escaped(file), format, grouped(file_bytes));
  const auto say = [&](const char* key, const char* title) {
    if (const auto entry = model.metadata().find(key); entry != model.metadata().end())
      fmt::print("{} {}\n", title, printable(entry->second));
  };
  say("tersor.version", "made by tersor");
  say("tersor.recipe", "with");
  say("tersor.source", "from");
  Table table(
      {{"name"}, {"kind"}, {"shape"}, {"stored as"}, {"zeros", Table::Align::right}, {"bytes", Table::Align::right}});
  for (const Entry& e : entries)
    table.row({escaped(e.name), e.kind, by_shape(e.shape), e.storage, sparsity_text(e), grouped(e.bytes)});
  table.row({"total", "", grouped(total.elements) + " weights", "", sparsity_text(total), grouped(total.bytes)});
  fmt::print("\n{}", table.text());

  if (!model.kept().empty()) {
    std::set<std::string> weights;
    for (const Layer& layer : model.layers()) weights.insert(layer.weight);
    Table kept({{"kept of the original"}, {"dimension", Table::Align::right}, {"indices"}});
    constexpr std::size_t shown = 12;
    for (const auto& [where, indices] : model.kept()) {
      const std::size_t colon = where.rfind(':');
      if (!weights.contains(where.substr(0, colon))) continue;  // biases and statistics follow their weight
      const std::size_t n = std::min(shown, indices.size());
      kept.row({escaped(where.substr(0, colon)), where.substr(colon + 1),
                fmt::format("{} left: {}{}", indices.size(),
                            fmt::join(indices.begin(), indices.begin() + static_cast<std::ptrdiff_t>(n), " "),
                            n < indices.size() ? " ..." : "")});
    }
    fmt::print("\n{}", kept.text());
  }
  Table other({{"metadata"}, {"value"}});
  for (const auto& [key, value] : model.metadata())
    if (!key.starts_with("tersor."))
      other.row({escaped(key), printable(value.substr(0, 200)) + (value.size() > 200 ? " ..." : "")});
  if (!other.empty()) fmt::print("\n{}", other.text());
}

}  // namespace

void add_inspect(CLI::App& app) {
  struct Options {
    std::string file;
    bool json = false;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("inspect", "Show layers, shapes, bits, zeros, bytes, and how a file was made");
  command->add_option("FILE", options->file, "A TorchScript or safetensors file")->required();
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options] { run_inspect(options->file, options->json); });
}

}  // namespace tersor::cli

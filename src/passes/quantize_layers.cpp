#include "quantize_layers.hpp"

#include "default_skips.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/model/targets.hpp"
#include "worth.hpp"

namespace tersor::quantize {
namespace {

/// The format of a checkpoint holds Linear and Conv weights only.
bool supported(LayerKind kind, Backend backend) {
  return kind == LayerKind::linear || kind == LayerKind::conv1d || kind == LayerKind::conv2d ||
         (kind == LayerKind::embedding && backend != Backend::checkpoint);
}

std::int64_t rows_of(const Layer& layer) { return layer.shape.at(0); }

std::int64_t columns_of(const Layer& layer) {
  std::int64_t columns = 1;
  for (std::size_t i = 1; i < layer.shape.size(); ++i) columns *= layer.shape[i];
  return columns;
}

QuantScheme scheme_of(const Plan& plan, const Layer& layer, Backend backend) {
  QuantScheme scheme{.bits = static_cast<int>(plan.bits), .symmetric = plan.symmetric};
  const std::int64_t columns = columns_of(layer);
  // The format of a checkpoint has no shorter last group.
  const bool tail = backend == Backend::checkpoint && plan.group_size != 0 && columns % plan.group_size != 0;
  if (plan.group_size != 0 && plan.group_size < columns && !tail) {
    scheme.granularity = Granularity::per_group;
    scheme.group_size = plan.group_size;
  }
  return scheme;
}

std::int64_t bytes_before(const Layer& layer) {
  return rows_of(layer) * columns_of(layer) * static_cast<std::int64_t>(c10::elementSize(layer.dtype));
}

/// Bytes of codes, scales and zero points.
std::int64_t bytes_after(const QuantScheme& scheme, const Layer& layer) {
  const std::int64_t columns = columns_of(layer);
  const std::int64_t groups =
      scheme.granularity == Granularity::per_group ? (columns + scheme.group_size - 1) / scheme.group_size : 1;
  const std::int64_t codes = scheme.bits == 8 ? columns : (columns + 1) / 2;
  const auto scale = static_cast<std::int64_t>(c10::elementSize(layer.dtype));
  return rows_of(layer) * (codes + groups * (scale + (scheme.symmetric ? 0 : 1)));
}

/// Why a layer stays in float unless it is targeted; empty when it does not.
std::string skip_reason(const Plan& plan, const Layer& layer, Backend backend) {
  const std::string_view why = default_skip(layer);
  if (!why.empty()) return std::string(why);
  if (!layer.float_only.empty()) return layer.float_only;
  if (!supported(layer.kind, backend)) return fmt::format("{} weights are not quantized yet", class_name(layer.kind));
  if (layer.dtype == at::kDouble) return "its weight is double precision";
  const QuantScheme scheme = scheme_of(plan, layer, backend);
  if (bytes_after(scheme, layer) >= bytes_before(layer))
    return fmt::format("it would grow from {} to {} bytes", bytes_before(layer), bytes_after(scheme, layer));
  if (plan.activation != ActivationMode::none && layer.kind == LayerKind::linear) {
    const std::int64_t columns = columns_of(layer);
    if (!has_fast_kernel(scheme.bits, scheme.group_size, columns))
      return fmt::format("{}-bit groups of {} have no fast kernel", scheme.bits, scheme.group_size);
    if (rows_of(layer) * columns < least_weights) return "too small to become faster";
  }
  return {};
}

void check_supported(const Layer& layer, Backend backend) {
  check(!layer.quantized, ErrorCode::AlreadyQuantized, "layer '{}' is quantized already", escaped(layer.name));
  check(supported(layer.kind, backend), ErrorCode::UnsupportedLayer,
        "layer '{}' is {}; only the weights of Linear, Conv1d{} can be quantized", escaped(layer.name),
        class_name(layer.kind), backend == Backend::checkpoint ? " and Conv2d" : ", Conv2d and Embedding");
  check(layer.float_only.empty(), ErrorCode::UnsupportedLayer, "layer '{}' cannot be quantized: {}",
        escaped(layer.name), layer.float_only);
}

}  // namespace

void check_bits(std::string_view option, std::int64_t bits, std::int64_t group_size) {
  check(bits == 4 || bits == 8, ErrorCode::BadOption, "{}={} is not supported; expected 8 or 4", option, bits);
  check(group_size >= 0, ErrorCode::BadOption,
        "group_size={} is negative; expected a number of weights, or 0 for one scale per output channel", group_size);
}

std::vector<Layer> choose_layers(const Model& model, const Plan& plan, PassContext& context) {
  const std::vector<Layer> layers = select_layers(
      model, plan.targets, plan.ignore,
      [&](const Layer& layer) {
        const std::string why = skip_reason(plan, layer, model.backend());
        if (!why.empty()) context.report.skip(layer.name, why);
        return why.empty();
      },
      context.report.warnings);
  for (const Layer& layer : layers) check_supported(layer, model.backend());
  return layers;
}

Changed quantize_layers(Model& model, const Plan& plan, const std::vector<Layer>& layers,
                        const std::map<std::string, ActivationQuant>& inputs, PassContext& context) {
  context.progress.begin(plan.pass, static_cast<std::int64_t>(layers.size()));
  std::int64_t done = 0;
  bool changed = false;
  for (const Layer& layer : layers) {
    LayerQuantization quantization;
    if (layer.kind == LayerKind::linear && plan.activation != ActivationMode::none) {
      quantization.activation.mode = plan.activation;
      if (plan.activation == ActivationMode::per_tensor) {
        const auto calibrated = inputs.find(layer.name);
        if (calibrated == inputs.end()) {
          context.report.skip(layer.name, "it did not run during calibration");
          continue;
        }
        quantization.activation = calibrated->second;
      }
    }

    const QuantScheme scheme = scheme_of(plan, layer, model.backend());
    try {
      quantization.weight = quantize_weight(model.tensor(layer.weight), scheme);
    } catch (Error& error) {
      throw error.in(fmt::format("tensor '{}'", escaped(layer.weight)));
    }
    const std::int64_t before = bytes_before(layer), after = quantization.weight.nbytes();
    model.quantize_layer(layer.name, quantization);
    changed = true;

    auto& details = context.report.row(layer.name, "quantized").details;
    details.emplace_back("bits", std::to_string(scheme.bits));
    details.emplace_back("scales", scheme.granularity == Granularity::per_group
                                       ? fmt::format("per group of {}", scheme.group_size)
                                       : "per channel");
    if (!scheme.symmetric) details.emplace_back("affine", "true");
    const ActivationQuant& activation = quantization.activation;
    if (activation.mode == ActivationMode::per_token) details.emplace_back("inputs", "per token");
    if (activation.mode == ActivationMode::per_tensor)
      details.emplace_back("inputs",
                           fmt::format("scale {:.6g}, zero point {}", activation.scale, activation.zero_point));
    details.emplace_back("bytes_before", std::to_string(before));
    details.emplace_back("bytes", std::to_string(after));
    if (plan.group_size != 0 && plan.group_size < columns_of(layer) && scheme.granularity != Granularity::per_group)
      details.emplace_back("why",
                           fmt::format("{} inputs are no multiple of group_size={}, which this file format cannot hold",
                                       columns_of(layer), plan.group_size));
    if (after >= before)
      context.report.warnings.push_back(
          fmt::format("layer '{}' grew from {} to {} bytes", escaped(layer.name), before, after));
    context.progress.step(++done);
  }
  context.progress.end();
  // A module's own code must take the codes too.
  if (changed && model.backend() == Backend::module) model.refresh();
  return changed ? Changed::weights : Changed::nothing;
}

}  // namespace tersor::quantize

#include "tersor/calibrate/channels.hpp"

#include <algorithm>
#include <cmath>

#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor::calibrate {
namespace {

void each_batch(const Dataset& data, const RunnerOptions& options, const std::function<void(const Dataset&)>& run) {
  check(options.batch_size > 0, ErrorCode::BadOption, "batch_size={} must be at least 1", options.batch_size);
  const std::int64_t samples = std::min(options.samples, data.size());
  check(samples > 0, ErrorCode::MissingData, "the calibration data holds no samples");
  for (std::int64_t begin = 0; begin < samples; begin += options.batch_size) {
    run(data.slice(begin, std::min(options.batch_size, samples - begin)));
    if (options.progress) options.progress(std::min(begin + options.batch_size, samples), samples);
  }
}

/// One row of double values for each channel; undefined for layers without a channel axis that is known.
at::Tensor by_channel(const Layer& layer, const at::Tensor& x) {
  if (!x.is_floating_point() || x.dim() == 0) return {};
  std::int64_t axis = x.dim() - 1;
  switch (layer.kind) {
    case LayerKind::linear:
    case LayerKind::embedding:
      break;
    case LayerKind::conv1d:
    case LayerKind::conv2d:
    case LayerKind::conv3d:
    case LayerKind::conv_transpose:  // without a batch the channels come first
      axis = x.dim() - static_cast<std::int64_t>(layer.shape.size()) + 1;
      break;
    default:
      return {};
  }
  return x.detach().to(at::kDouble).movedim(axis, 0).flatten(1);
}

void add(at::Tensor& sum, const at::Tensor& more) { sum = sum.defined() ? sum.add(more) : more; }

}  // namespace

std::map<std::string, ChannelMeans> channel_means(const Model& model, const Dataset& data,
                                                  const RunnerOptions& options) {
  std::map<std::string, ChannelMeans> sums;
  std::map<std::string, std::pair<std::int64_t, std::int64_t>> counts;  // values of a channel, in and out
  each_batch(data, options, [&](const Dataset& batch) {
    model.observe(batch.inputs, [&](const Layer& layer, const at::Tensor& input, const at::Tensor& output) {
      const at::Tensor x = by_channel(layer, input), y = by_channel(layer, output);
      if (x.defined()) {
        add(sums[layer.name].input, x.sum(1));
        counts[layer.name].first += x.size(1);
      }
      if (y.defined()) {
        add(sums[layer.name].output_absolute, y.abs().sum(1));
        counts[layer.name].second += y.size(1);
      }
    });
  });
  for (auto& [name, means] : sums) {
    const auto [in, out] = counts.at(name);
    if (means.input.defined()) means.input = means.input.div(static_cast<double>(in));
    if (means.output_absolute.defined()) means.output_absolute = means.output_absolute.div(static_cast<double>(out));
  }
  return sums;
}

std::map<std::pair<std::string, std::int64_t>, std::vector<double>> taylor_scores(
    const Model& model, const std::vector<std::pair<std::string, std::int64_t>>& dims, const Dataset& data,
    const RunnerOptions& options) {
  check(data.labels.has_value(), ErrorCode::MissingData,
        "importance=taylor needs labels in the calibration data (a tensor 'label')");
  std::vector<std::string> parameters;
  for (const auto& [name, dim] : dims) parameters.push_back(name);
  std::sort(parameters.begin(), parameters.end());
  parameters.erase(std::unique(parameters.begin(), parameters.end()), parameters.end());
  std::map<std::pair<std::string, std::int64_t>, std::vector<double>> scores;
  double batches = 0;
  each_batch(data, options, [&](const Dataset& batch) {
    const auto gradients = model.gradients(batch.inputs, *batch.labels, parameters);
    for (const auto& [name, dim] : dims) {
      const at::Tensor product = model.tensor(name).to(at::kDouble).mul(gradients.at(name).to(at::kDouble));
      const at::Tensor squares = product.movedim(dim, 0).reshape({product.size(dim), -1}).sum(1).square();
      std::vector<double>& sums = scores[{name, dim}];
      sums.resize(static_cast<std::size_t>(squares.numel()), 0.0);
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += squares.const_data_ptr<double>()[i];
    }
    ++batches;
  });
  for (auto& [place, sums] : scores)
    for (double& sum : sums) sum /= batches;
  return scores;
}

namespace {

/// A BatchNorm with statistics of its own.
struct Norm {
  std::string mean_name, variance_name;
  double eps = 0;
  at::Tensor mean = {}, variance = {};  ///< sums over batches
  double batches = 0;
};

/// By weight.
std::map<std::string, Norm> norms_of(const Graph& graph) {
  std::map<std::string, Norm> norms;
  for (const GraphNode& node : graph.nodes) {
    if (node.op != "aten::batch_norm") continue;
    const auto name = [&](std::string_view argument) {
      const GraphArgument* given = graph.argument(node, argument);
      const ValueId* id = given ? std::get_if<ValueId>(given) : nullptr;
      return id && *id >= 0 ? graph.values[static_cast<std::size_t>(*id)].parameter : std::string();
    };
    Norm norm{.mean_name = name("running_mean"), .variance_name = name("running_var")};
    if (norm.mean_name.empty() || norm.variance_name.empty()) continue;
    norm.eps = std::get<c10::IValue>(*graph.argument(node, "eps")).toDouble();
    norms.emplace(name("weight"), std::move(norm));
  }
  return norms;
}

}  // namespace

std::vector<std::string> reestimate_batch_norms(Model& model, const Dataset& data, const RunnerOptions& options) {
  std::map<std::string, Norm> norms = norms_of(model.graph());
  std::vector<std::string> order;
  each_batch(data, options, [&](const Dataset& batch) {
    model.observe(batch.inputs, [&](const Layer& layer, const at::Tensor& input, const at::Tensor& output) {
      const auto found = layer.kind == LayerKind::batch_norm ? norms.find(layer.weight) : norms.end();
      if (found == norms.end() || input.numel() <= input.size(1)) return;
      Norm& norm = found->second;
      const at::Tensor x = input.to(at::kDouble), rows = x.transpose(0, 1).flatten(1);
      const at::Tensor mean = rows.mean(1), variance = rows.var(1, /*unbiased=*/false);
      // What comes behind sees the batch normalized by its own statistics, as in training.
      std::vector<std::int64_t> along(static_cast<std::size_t>(x.dim()), 1);
      along[1] = -1;
      const at::Tensor weight = model.tensor(layer.weight).to(at::kDouble);
      at::Tensor y = x.sub(mean.view(along)).mul(weight.div(variance.add(norm.eps).sqrt()).view(along));
      if (!layer.bias.empty()) y = y.add(model.tensor(layer.bias).to(at::kDouble).view(along));
      output.copy_(y);
      if (norm.batches == 0) order.push_back(layer.name);
      const double n = static_cast<double>(rows.size(1));
      add(norm.mean, mean);
      add(norm.variance, variance.mul(n / (n - 1)));
      ++norm.batches;
    });
  });
  for (const auto& [weight, norm] : norms) {
    if (norm.batches == 0) continue;
    model.rewrite(norm.mean_name, norm.mean.div(norm.batches));
    model.rewrite(norm.variance_name, norm.variance.div(norm.batches));
  }
  return order;
}

}  // namespace tersor::calibrate

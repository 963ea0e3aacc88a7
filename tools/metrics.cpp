#include "metrics.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include <nlohmann/json.hpp>

#include "tersor/core/error.hpp"
#include "text.hpp"

namespace tersor::cli {
namespace {

/// Sums over batches of what the comparison needs.
struct Comparison {
  double signal = 0, noise = 0, cosines = 0, worst = 0;
  std::int64_t samples = 0;

  void add(const std::vector<at::Tensor>& original, const std::vector<at::Tensor>& outputs, std::int64_t batch) {
    check(original.size() == outputs.size(), ErrorCode::UnsupportedModel,
          "the networks have {} and {} outputs and cannot be compared", original.size(), outputs.size());
    std::vector<double> dot(batch), left(batch), right(batch);
    for (std::size_t k = 0; k < outputs.size(); ++k) {
      check(original[k].sizes() == outputs[k].sizes(), ErrorCode::UnsupportedModel,
            "output {} is {} in one network and {} in the other; they cannot be compared", k,
            by_shape(original[k].sizes().vec()), by_shape(outputs[k].sizes().vec()));
      // An output without the batch in front counts for all samples alike.
      const bool per_sample = outputs[k].dim() > 0 && outputs[k].size(0) == batch;
      const at::Tensor x = original[k].to(at::kDouble).reshape({per_sample ? batch : 1, -1}).contiguous();
      const at::Tensor y = outputs[k].to(at::kDouble).reshape({per_sample ? batch : 1, -1}).contiguous();
      const double* px = x.const_data_ptr<double>();
      const double* py = y.const_data_ptr<double>();
      const std::int64_t width = x.size(1);
      for (std::int64_t i = 0; i < x.numel(); ++i) {
        const std::int64_t sample = per_sample ? i / width : 0;
        const double difference = px[i] == py[i] ? 0.0 : px[i] - py[i];  // equal infinities do not differ
        signal += px[i] * px[i];
        noise += difference * difference;
        if (!(std::abs(difference) <= worst)) worst = std::abs(difference);
        dot[sample] += px[i] * py[i];
        left[sample] += px[i] * px[i];
        right[sample] += py[i] * py[i];
      }
    }
    for (std::int64_t i = 0; i < batch; ++i) {
      const double lengths = std::sqrt(left[i]) * std::sqrt(right[i]);
      cosines += lengths > 0 ? dot[i] / lengths : (left[i] == right[i] ? 1.0 : 0.0);
    }
    samples += batch;
  }
};

std::int64_t count_non_finite(const std::vector<at::Tensor>& outputs) {
  std::int64_t count = 0;
  for (const at::Tensor& output : outputs) count += output.isfinite().logical_not().sum().item<std::int64_t>();
  return count;
}

/// Labels must be class numbers: anything else would only look like a wrong prediction.
void check_labels(const at::Tensor& labels, std::int64_t classes) {
  check(at::isIntegralType(labels.scalar_type(), /*includeBool=*/false), ErrorCode::BadData,
        "labels are {}; expected integers in [0, {})", c10::toString(labels.scalar_type()), classes);
  const at::Tensor outside = labels.lt(0).logical_or(labels.ge(classes));
  if (!outside.any().item<bool>()) return;
  throw fail(ErrorCode::BadData, "there is a label {}; the network's {} scores need one in [0, {})",
             labels.masked_select(outside)[0].item<std::int64_t>(), classes, classes);
}

std::string percent(double share) { return fmt::format("{:.2f} %", 100 * share); }

}  // namespace

void check_inputs(const Model& model, const std::vector<at::Tensor>& inputs, ErrorCode code, std::string_view what) {
  try {
    model.forward(inputs);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::UnsupportedModel && error.code() != ErrorCode::UnsupportedGraph) throw;
    throw fail(code, "the network does not run on {}: {}", what, error.message());
  }
}

Evaluation evaluate(const Model& model, const Model* original, const Dataset& data, std::int64_t batch_size,
                    Progress* progress, const std::function<void(const std::vector<at::Tensor>&)>& see) {
  check(model.runnable() && (original == nullptr || original->runnable()), ErrorCode::UnsupportedModel,
        "a checkpoint that holds only weights cannot be evaluated; give a TorchScript file");
  check(data.size() > 0, ErrorCode::BadData, "there are no samples to evaluate on");
  Progress silent;
  Progress& shown = progress != nullptr ? *progress : silent;
  Evaluation result;
  Comparison comparison;
  std::int64_t right = 0, right_original = 0, agree = 0, predictions = 0;

  shown.begin("evaluating", data.size());
  for (std::int64_t begin = 0; begin < data.size(); begin += batch_size) {
    const Dataset batch = data.slice(begin, batch_size);
    const std::vector<at::Tensor> outputs = model.forward(batch.inputs);
    check(!outputs.empty(), ErrorCode::UnsupportedModel, "the network gives no tensor that could be evaluated");
    const std::vector<at::Tensor> reference =
        original != nullptr ? original->forward(batch.inputs) : std::vector<at::Tensor>{};
    if (see) see(outputs);
    result.non_finite += count_non_finite(outputs);
    if (original != nullptr)
      result.non_finite_original = result.non_finite_original.value_or(0) + count_non_finite(reference);
    if (original != nullptr) comparison.add(reference, outputs, batch.size());

    // One number per prediction has no argmax; such networks are compared, not scored.
    const bool scores = outputs[0].dim() > 1 && outputs[0].size(-1) > 1;
    check(!batch.labels || scores, ErrorCode::BadData,
          "the data has labels, but the first output is {}; accuracy needs one score per class in its last dimension",
          by_shape(outputs[0].sizes().vec()));
    if (scores) {
      const at::Tensor predicted = outputs[0].argmax(-1);
      const at::Tensor expected = original != nullptr ? reference[0].argmax(-1) : at::Tensor();
      if (batch.labels) {
        check(batch.labels->sizes() == predicted.sizes(), ErrorCode::BadData,
              "labels of shape {} do not fit the network's predictions of shape {}",
              by_shape(batch.labels->sizes().vec()), by_shape(predicted.sizes().vec()));
        check_labels(*batch.labels, outputs[0].size(-1));
        right += predicted.eq(*batch.labels).sum().item<std::int64_t>();
        if (original != nullptr) right_original += expected.eq(*batch.labels).sum().item<std::int64_t>();
      }
      if (original != nullptr) agree += predicted.eq(expected).sum().item<std::int64_t>();
      predictions += predicted.numel();
    }
    result.samples += batch.size();
    shown.step(result.samples);
  }
  shown.end();

  const auto share = [&](std::int64_t n) { return static_cast<double>(n) / static_cast<double>(predictions); };
  if (data.labels) result.accuracy = share(right);
  if (original != nullptr) {
    if (data.labels) result.accuracy_original = share(right_original);
    if (predictions > 0) result.agreement = share(agree);
    result.sqnr_db = comparison.noise == 0 ? std::numeric_limits<double>::infinity()
                                           : 10 * std::log10(comparison.signal / comparison.noise);
    result.cosine = comparison.cosines / static_cast<double>(comparison.samples);
    result.max_difference = comparison.worst;
  }
  return result;
}

nlohmann::ordered_json Evaluation::json() const {
  nlohmann::ordered_json j;
  j["samples"] = samples;
  const auto put = [&](const char* key, const std::optional<double>& value) {
    if (value && !std::isnan(*value)) j[key] = *value;  // JSON has no infinity: nlohmann writes null
  };
  put("accuracy", accuracy);
  put("accuracy_original", accuracy_original);
  put("agreement", agreement);
  put("sqnr_db", sqnr_db);
  put("cosine", cosine);
  put("max_difference", max_difference);
  j["non_finite"] = non_finite;
  if (non_finite_original) j["non_finite_original"] = *non_finite_original;
  return j;
}

std::string Evaluation::text() const {
  std::string s;
  if (accuracy) {
    s += fmt::format("accuracy        {}", percent(*accuracy));
    if (accuracy_original)
      s += fmt::format("  (original {}, {:+.2f} points)", percent(*accuracy_original),
                       100 * (*accuracy - *accuracy_original));
    s += "\n";
  }
  if (agreement) s += fmt::format("agreement       {}  of predictions are the original's\n", percent(*agreement));
  if (sqnr_db)
    s += std::isinf(*sqnr_db) && *sqnr_db > 0 ? "SQNR            infinite: the outputs are equal\n"
                                              : fmt::format("SQNR            {:.2f} dB\n", *sqnr_db);
  if (cosine) s += fmt::format("cosine          {:.6f}\n", *cosine);
  if (max_difference) s += fmt::format("max difference  {:.3g}\n", *max_difference);
  if (non_finite > 0 || non_finite_original.value_or(0) > 0) {
    s += fmt::format("warning         {} output values are NaN or infinite", grouped(non_finite));
    if (non_finite_original) s += fmt::format("  (original {})", grouped(*non_finite_original));
    s += "; the figures above mean nothing\n";
  }
  s += fmt::format("samples         {}\n", grouped(samples));
  return s;
}

}  // namespace tersor::cli

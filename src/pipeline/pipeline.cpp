#include "tersor/pipeline/pipeline.hpp"

#include <chrono>
#include <functional>
#include <map>
#include <set>
#include <tuple>

#include <c10/util/Exception.h>

#include "tersor/core/names.hpp"
#include "tersor/version.hpp"

namespace tersor {
namespace {

/// A pass of a pipeline or of one inside it, and where it stands: `pass 2 (pipeline): pass 1 (prune_l1)`.
struct Leaf {
  const Pass* pass;
  std::string place;
};

void collect(const Pipeline& pipeline, const std::string& outer, std::vector<Leaf>& out) {
  std::size_t number = 0;
  for (const Pass& pass : pipeline.passes()) {
    const std::string place = fmt::format("{}pass {} ({})", outer, ++number, pass.name());
    if (const auto* nested = pass.as<Pipeline>()) {
      collect(*nested, place + ": ", out);
    } else {
      out.push_back({&pass, place});
    }
  }
}

std::vector<Leaf> leaves(const Pipeline& pipeline) {
  std::vector<Leaf> out;
  collect(pipeline, "", out);
  return out;
}

void validate(const std::vector<Leaf>& leaves) {
  for (const Leaf& leaf : leaves) {
    try {
      leaf.pass->validate();
    } catch (Error& e) {
      e.in(leaf.place);
      throw;
    }
  }
}

/// Elements of all tensors; one that has several names counts once.
std::int64_t parameter_count(const Model& model) {
  std::map<std::string, std::int64_t> of_codes;  // Model::tensor would dequantize these
  for (const Layer& layer : model.layers()) {
    if (!layer.quantized) continue;
    std::int64_t n = 1;
    for (const std::int64_t size : layer.shape) n *= size;
    of_codes[layer.weight] = n;
  }
  std::int64_t total = 0;
  std::set<std::tuple<const void*, std::int64_t>> counted;
  for (const std::string& name : model.tensor_names()) {
    if (const auto known = of_codes.find(name); known != of_codes.end()) {
      total += known->second;
      continue;
    }
    const at::Tensor tensor = model.tensor(name);
    const bool fresh = tensor.numel() > 0 && counted.emplace(tensor.const_data_ptr(), tensor.numel()).second;
    if (fresh) total += tensor.numel();
  }
  return total;
}

#ifndef NDEBUG
/// What a pass may not touch behind the back of its claim.
struct Fingerprint {
  struct Entry {
    std::vector<std::int64_t> shape;
    std::size_t values;
  };
  std::map<std::string, Entry> tensors;

  explicit Fingerprint(const Model& model) {
    for (const std::string& name : model.tensor_names()) {
      const at::Tensor t = model.tensor(name).cpu().contiguous();
      const std::string_view bytes(static_cast<const char*>(t.const_data_ptr()), t.nbytes());
      tensors[name] = {t.sizes().vec(), std::hash<std::string_view>{}(bytes)};
    }
  }
};

void check_claim(Changed claim, const Fingerprint& before, const Fingerprint& after) {
  if (claim == Changed::structure) return;
  for (const auto& [name, entry] : after.tensors) {
    const auto old = before.tensors.find(name);
    check(old != before.tensors.end() && old->second.shape == entry.shape, ErrorCode::Internal,
          "claims to have kept every shape, but '{}' is another one", escaped(name));
    check(claim == Changed::weights || old->second.values == entry.values, ErrorCode::Internal,
          "claims to have changed nothing, but '{}' has other values", escaped(name));
  }
  check(before.tensors.size() == after.tensors.size(), ErrorCode::Internal,
        "claims to have kept every shape, but removed {} tensors", before.tensors.size() - after.tensors.size());
}
#endif

/// Runs one pass, times it, adds its place to errors and, in debug builds, holds it to its claim.
void run_leaf(const Leaf& leaf, Model& model, PassContext& context) {
  const auto begin = std::chrono::steady_clock::now();
  PassReport& report = context.report;
  report.pass = leaf.pass->text();
  try {
#ifndef NDEBUG
    const Fingerprint before(model);
#endif
    report.changed = leaf.pass->run(model, context);
#ifndef NDEBUG
    check_claim(report.changed, before, Fingerprint(model));
#endif
  } catch (Error& e) {
    e.in(leaf.place);
    throw;
  } catch (c10::Error& e) {
    e.add_context(leaf.place);
    throw;
  }
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void add_to_history(std::map<std::string, std::string>& metadata, const std::string& recipe) {
  std::string& history = metadata["tersor.recipe"];
  history += (history.empty() ? "" : ", ") + recipe;
  metadata["tersor.version"] = version;
}

}  // namespace

Need Pipeline::needs() const {
  Need all = Need::weights;
  for (const Pass& pass : passes_) all = all | pass.needs();
  return all;
}

std::string Pipeline::text() const {
  std::string out;
  for (const Leaf& leaf : leaves(*this)) out += (out.empty() ? "" : ", ") + leaf.pass->text();
  return out;
}

void Pipeline::validate() const { tersor::validate(leaves(*this)); }

void Pipeline::check_needs(const Model& model, const RunOptions& options) const {
  validate();
  check(options.samples > 0, ErrorCode::BadOption, "samples={} (RunOptions::samples) is not positive", options.samples);
  check(options.batch_size > 0, ErrorCode::BadOption, "batch_size={} (RunOptions::batch_size) is not positive",
        options.batch_size);
  for (const Leaf& leaf : leaves(*this)) {
    const std::string_view name = leaf.pass->name();
    const Need needs = leaf.pass->needs();
    check(model.runnable() || !(has(needs, Need::graph) || has(needs, Need::forward)), ErrorCode::NeedUnmet,
          "{} needs a runnable model; this checkpoint holds only weights", name);
    check(!has(needs, Need::graph) || !model.example().empty(), ErrorCode::MissingData,
          "{} needs an example input: give --example or --input-shape (Model::set_example)", name);
    if (has(needs, Need::data) || has(needs, Need::labels)) {
      check(options.calibration && options.calibration->size() > 0, ErrorCode::MissingData,
            "{} needs calibration data: give --calibration FILE (RunOptions::calibration)", name);
    }
    check(!has(needs, Need::labels) || options.calibration->labels, ErrorCode::MissingData,
          "{} needs labels: add a tensor 'label' to the calibration file (Dataset::labels)", name);
  }
}

Report Pipeline::run(Model& model, const RunOptions& options) const {
  check_needs(model, options);
  Report report;
  report.recipe = text();
  report.bytes_before = report.bytes_after = model.nbytes();
  report.parameters_before = report.parameters_after = parameter_count(model);
  const std::vector<Leaf> all = leaves(*this);
  if (all.empty()) return report;

  Progress silent;
  Progress& progress = options.progress == nullptr ? silent : *options.progress;
  const Model before = model.clone();
  try {
    for (const Leaf& leaf : all) {
      const bool wants_original = has(leaf.pass->needs(), Need::original);
      PassContext context{options, report.passes.emplace_back(), wants_original ? &before : nullptr, progress};
      run_leaf(leaf, model, context);
    }
    add_to_history(model.metadata(), report.recipe);
  } catch (...) {
    progress.end();
    model.assign(before);
    throw;
  }
  report.bytes_after = model.nbytes();
  report.parameters_after = parameter_count(model);
  return report;
}

Changed Pipeline::run(Model& model, PassContext& context) const {
  Changed most = Changed::nothing;
  for (const Leaf& leaf : leaves(*this)) {
    PassReport report;
    PassContext inner{context.options, report, context.original, context.progress};
    run_leaf(leaf, model, inner);
    most = std::max(most, report.changed);
    context.report.rows.insert(context.report.rows.end(), report.rows.begin(), report.rows.end());
    context.report.warnings.insert(context.report.warnings.end(), report.warnings.begin(), report.warnings.end());
  }
  return most;
}

}  // namespace tersor

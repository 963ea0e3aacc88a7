// A pass of one's own: an options struct with a name, a field list, its needs and one verb. It runs between the passes
// of the library, in C++ and as text.
//
//   04_write_a_pass
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include <ATen/ops/randn.h>

#include "tersor/model/targets.hpp"
#include "tersor/passes/prune.hpp"
#include "tersor/passes/registry.hpp"

// [PASS]
/// Limits outliers: weights further than `sigmas` standard deviations from zero are moved to that limit.
struct Clip {
  double sigmas = 3.0;
  std::vector<std::string> targets = {};

  static constexpr std::string_view name = "clip";
  static constexpr std::string_view summary = "Limits weights to a number of standard deviations.";
  static constexpr auto fields() {
    return std::tuple{tersor::Field{"sigmas", &Clip::sigmas, "Limit, in standard deviations.", 0.1, 100.0},
                      tersor::Field{"targets", &Clip::targets, "Layers to limit. Default: every Linear."}};
  }
  tersor::Need needs() const { return tersor::Need::weights; }

  tersor::Changed run(tersor::Model& model, tersor::PassContext& context) const {
    const auto is_linear = [](const tersor::Layer& layer) { return layer.kind == tersor::LayerKind::linear; };
    bool changed = false;
    for (const tersor::Layer& layer : tersor::select_layers(model, targets, {}, is_linear, context.report.warnings)) {
      const at::Tensor weight = model.tensor(layer.weight);
      const double limit = sigmas * weight.std().item<double>();
      const auto outside = weight.abs().gt(limit).sum().item<std::int64_t>();
      if (outside == 0) {
        context.report.skip(layer.name, "no weight is outside the limit");
        continue;
      }
      model.rewrite(layer.weight, weight.clamp(-limit, limit));
      context.report.row(layer.name, "clipped").details = {{"weights", std::to_string(outside)},
                                                           {"limit", fmt::format("{:.3f}", limit)}};
      changed = true;
    }
    return changed ? tersor::Changed::weights : tersor::Changed::nothing;
  }
};
// [/PASS]

int main() try {
  tersor::Model model = tersor::Model::from_tensors(
      {{"fc1.weight", at::randn({64, 32})}, {"fc1.bias", at::randn({64})}, {"fc2.weight", at::randn({10, 64})}});
  // [USE]
  const tersor::Pipeline pipeline{Clip{.sigmas = 2.5}, tersor::prune::L1{.amount = 0.5}};
  const tersor::Report report = pipeline.run(model);
  std::cout << report.table();
  // [/USE]

  // [TEXT]
  std::vector<tersor::PassInfo> passes(tersor::registry().begin(), tersor::registry().end());
  passes.push_back(tersor::pass_info<Clip>());
  const tersor::Pipeline same = tersor::parse_pipeline("clip(sigmas=2.5), prune_l1", passes);
  // [/TEXT]
  std::cout << '\n' << same.yaml();
  return same.text() == pipeline.text() ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}

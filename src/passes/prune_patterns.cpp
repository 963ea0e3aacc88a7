// Masks with a pattern: N:M and blocks.

#include <algorithm>
#include <numeric>

#include <ATen/ops/empty.h>

#include "prunable_layers.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/passes/prune.hpp"

namespace tersor::prune {
namespace {

/// |w| in double, which orders every weight type exactly; NaN and infinities are refused.
at::Tensor magnitudes(const Model& model, const Layer& layer) {
  const at::Tensor w = model.tensor(layer.weight).detach().cpu().to(at::kDouble).abs();
  check(w.isfinite().all().item<bool>(), ErrorCode::NonFiniteWeight,
        "tensor '{}' holds values that are NaN or infinite; nothing was pruned", escaped(layer.weight));
  return w;
}

/// Masks the weight and says so. Returns whether a weight that was not zero became zero.
bool apply(Model& model, const Layer& layer, const at::Tensor& keep, PassReport& report) {
  const at::Tensor before = model.tensor(layer.weight);
  const std::int64_t zeros = before.eq(0).sum().item<std::int64_t>();
  model.mask(layer.weight, keep.logical_and(before.detach().cpu().ne(0)));
  const std::int64_t now = model.tensor(layer.weight).eq(0).sum().item<std::int64_t>();
  auto& details = report.row(layer.name, "pruned").details;
  details.emplace_back("zeros_before", std::to_string(zeros));
  details.emplace_back("zeros", std::to_string(now));
  details.emplace_back("of", std::to_string(before.numel()));
  return now > zeros;
}

/// One block of a layer that is not all zero.
struct Candidate {
  double score;
  std::size_t layer;
  std::int64_t row, column;
};

}  // namespace

void NM::validate() const { check(n <= m, ErrorCode::BadOption, "n={} is more than the {} of a group", n, m); }

Changed NM::run(Model& model, PassContext& context) const {
  validate();
  std::vector<Layer> layers = prunable_layers(model, targets, ignore, context.report);
  std::erase_if(layers, [&](const Layer& layer) {
    const at::Tensor w = model.tensor(layer.weight);
    const std::int64_t length = along == Along::row ? w.flatten(1).size(1) : w.size(1);
    if (!targets.empty() || length % m == 0) return false;
    context.report.skip(layer.name, fmt::format("its rows of {} are no multiple of m={}", length, m));
    return true;
  });
  std::vector<at::Tensor> masks;  // all before anything changes
  for (const Layer& layer : layers) {
    at::Tensor w = magnitudes(model, layer);
    w = along == Along::row ? w.flatten(1).contiguous() : w.movedim(1, -1).contiguous();
    const at::Tensor keep = at::empty(w.sizes(), at::kBool);
    const std::int64_t length = w.size(-1), count = length == 0 ? 0 : w.numel() / length;
    std::vector<std::int64_t> order;
    for (std::int64_t row = 0; row < count; ++row) {
      for (std::int64_t begin = 0; begin < length; begin += m) {
        const double* group = w.const_data_ptr<double>() + row * length + begin;
        bool* out = keep.mutable_data_ptr<bool>() + row * length + begin;
        order.resize(static_cast<std::size_t>(std::min(m, length - begin)));
        std::iota(order.begin(), order.end(), std::int64_t{0});
        std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return group[a] < group[b]; });
        const auto leave = std::max<std::int64_t>(static_cast<std::int64_t>(order.size()) - n, 0);
        for (std::size_t i = 0; i < order.size(); ++i) out[order[i]] = static_cast<std::int64_t>(i) >= leave;
      }
    }
    masks.push_back(along == Along::row ? keep.view(layer.shape) : keep.movedim(-1, 1).contiguous());
  }
  bool changed = false;
  for (std::size_t i = 0; i < layers.size(); ++i) changed |= apply(model, layers[i], masks[i], context.report);
  return changed ? Changed::weights : Changed::nothing;
}

Changed Block::run(Model& model, PassContext& context) const {
  amount.validate();
  const std::vector<Layer> layers = prunable_layers(model, targets, ignore, context.report);
  std::vector<std::vector<Candidate>> candidates(scope == Scope::global ? 1 : layers.size());
  std::vector<at::Tensor> masks;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const at::Tensor w = magnitudes(model, layers[i]).flatten(1).contiguous();
    masks.push_back(w.ne(0));
    const std::int64_t height = w.size(0), width = w.size(1);
    const double* values = w.const_data_ptr<double>();
    for (std::int64_t row = 0; row < height; row += rows) {
      for (std::int64_t column = 0; column < width; column += columns) {
        const std::int64_t bottom = std::min(row + rows, height), right = std::min(column + columns, width);
        double sum = 0;
        for (std::int64_t r = row; r < bottom; ++r)
          for (std::int64_t c = column; c < right; ++c) sum += values[r * width + c];
        const double score = sum / static_cast<double>((bottom - row) * (right - column));
        if (score > 0) candidates[scope == Scope::global ? 0 : i].push_back({score, i, row, column});
      }
    }
  }
  std::vector<std::int64_t> counts;  // all before anything changes
  for (const auto& of : candidates) counts.push_back(amount.of(static_cast<std::int64_t>(of.size())));
  for (std::size_t k = 0; k < candidates.size(); ++k) {
    std::stable_sort(candidates[k].begin(), candidates[k].end(), [](auto& a, auto& b) { return a.score < b.score; });
    for (std::int64_t j = 0; j < counts[k]; ++j) {
      const Candidate& block = candidates[k][static_cast<std::size_t>(j)];
      masks[block.layer].slice(0, block.row, block.row + rows).slice(1, block.column, block.column + columns).zero_();
    }
  }
  bool changed = false;
  for (std::size_t i = 0; i < layers.size(); ++i)
    changed |= apply(model, layers[i], masks[i].view(layers[i].shape), context.report);
  return changed ? Changed::weights : Changed::nothing;
}

}  // namespace tersor::prune

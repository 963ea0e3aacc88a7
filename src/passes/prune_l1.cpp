#include <algorithm>
#include <limits>

#include <ATen/ops/empty.h>

#include "prunable_layers.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"
#include "tersor/core/select.hpp"
#include "tersor/passes/prune.hpp"

namespace tersor::prune {
namespace {

/// Weights of one layer, read again for every look at them: a large model need not be held as float.
/// T is float, or double when a targeted weight is.
template <typename T>
struct Target {
  using Key = decltype(magnitude_key(T{}));

  Layer layer;
  Key smallest_normal = 0;  ///< of the weight's own arithmetic; what is below counts as zero
  std::int64_t total = 0, zeros = 0;
  bool unclean = false;     ///< some zeros are -0.0 or subnormal
  std::int64_t pruned = 0;  ///< to become zero

  std::int64_t nonzeros() const { return total - zeros; }
};

/// Calls f(key, value) for every weight in order; key 0 is a zero.
template <typename T, typename F>
void for_each_weight(const Model& model, const Target<T>& target, F f) {
  const at::Tensor w =
      model.tensor(target.layer.weight).detach().cpu().to(c10::CppTypeToScalarType<T>::value).contiguous();
  const T* values = w.const_data_ptr<T>();
  for (std::int64_t i = 0; i < w.numel(); ++i) {
    const auto key = magnitude_key(values[i]);
    f(key < target.smallest_normal ? 0 : key, values[i]);
  }
}

template <typename T>
Target<T> inspect(const Model& model, const Layer& layer) {
  // Half has no subnormals in float arithmetic; bfloat16 has those of float.
  const T normal = layer.dtype == at::kDouble ? static_cast<T>(std::numeric_limits<double>::min())
                                              : static_cast<T>(std::numeric_limits<float>::min());
  Target<T> target{layer, magnitude_key(normal)};
  std::int64_t bad = 0, first = 0;
  for_each_weight(model, target, [&](auto key, T value) {
    if (!std::isfinite(value) && bad++ == 0) first = target.total;
    if (key == 0) {
      ++target.zeros;
      target.unclean |= value != 0 || std::signbit(value);
    }
    ++target.total;
  });
  check(bad == 0, ErrorCode::NonFiniteWeight,
        "tensor '{}' holds {} values that are NaN or infinite, the first at index {}; nothing was pruned",
        escaped(layer.weight), bad, first);
  return target;
}

/// How many of the non-zero weights are to go.
std::int64_t count_of(const L1& pass, std::int64_t total, std::int64_t zeros) {
  if (pass.of == Of::nonzero) return pass.amount.of(total - zeros);
  return std::max<std::int64_t>(pass.amount.of(total) - zeros, 0);
}

template <typename T>
Smallest<typename Target<T>::Key> find_cut(const Model& model, const std::vector<Target<T>>& targets, std::int64_t k) {
  return find_smallest<typename Target<T>::Key>(k, [&](auto see) {
    for (const Target<T>& target : targets)
      for_each_weight(model, target, [&](auto key, T) {
        if (key != 0) see(key);
      });
  });
}

/// Masks what the cut takes, and with it zeros that are not +0.0. Returns whether anything changed.
template <typename T>
bool apply(Model& model, Target<T>& target, Smallest<typename Target<T>::Key>& cut) {
  const at::Tensor keep = at::empty(target.layer.shape, at::kBool);
  bool* out = keep.mutable_data_ptr<bool>();
  for_each_weight(model, target, [&](auto key, T) {
    const bool taken = key != 0 && cut.take(key);
    target.pruned += taken;
    *out++ = key != 0 && !taken;
  });
  if (target.pruned == 0 && !target.unclean) return false;
  model.mask(target.layer.weight, keep);
  return true;
}

template <typename T>
Changed prune(const L1& pass, Model& model, PassContext& context, const std::vector<Layer>& layers) {
  std::vector<Target<T>> targets;
  for (const Layer& layer : layers) targets.push_back(inspect<T>(model, layer));

  // Every count is checked before anything changes.
  std::vector<std::int64_t> counts;
  std::int64_t total = 0, zeros = 0;
  for (const Target<T>& target : targets) {
    total += target.total;
    zeros += target.zeros;
    if (pass.scope == Scope::global) continue;
    try {
      counts.push_back(count_of(pass, target.total, target.zeros));
    } catch (Error& error) {
      throw error.in(fmt::format("layer '{}'", escaped(target.layer.name)));
    }
  }
  std::optional<Smallest<typename Target<T>::Key>> cut;
  if (pass.scope == Scope::global) cut = find_cut(model, targets, count_of(pass, total, zeros));

  const bool none_asked = pass.amount == Amount(0) || pass.amount == Amount(0.0);
  bool changed = false;
  context.progress.begin("prune_l1", static_cast<std::int64_t>(targets.size()));
  for (std::size_t i = 0; i < targets.size(); ++i) {
    Target<T>& target = targets[i];
    if (pass.scope == Scope::layer) cut = find_cut(model, std::vector{target}, counts[i]);
    if (!none_asked) changed |= apply(model, target, *cut);
    auto& details = context.report.row(target.layer.name, "pruned").details;
    details.emplace_back("zeros_before", std::to_string(target.zeros));
    details.emplace_back("zeros", std::to_string(target.zeros + target.pruned));
    details.emplace_back("of", std::to_string(target.total));
    if (target.total > 0 && target.pruned > 0 && target.pruned == target.nonzeros())
      context.report.warnings.push_back(
          fmt::format("every weight of layer '{}' is zero now", escaped(target.layer.name)));
    context.progress.step(static_cast<std::int64_t>(i) + 1);
  }
  context.progress.end();
  return changed ? Changed::weights : Changed::nothing;
}

}  // namespace

Changed L1::run(Model& model, PassContext& context) const {
  amount.validate();
  const std::vector<Layer> layers = prunable_layers(model, targets, ignore, context.report);
  const bool wide = std::any_of(layers.begin(), layers.end(), [](const Layer& l) { return l.dtype == at::kDouble; });
  return wide ? prune<double>(*this, model, context, layers) : prune<float>(*this, model, context, layers);
}

}  // namespace tersor::prune

#include "tersor/model/masks.hpp"

#include <map>
#include <optional>

#include <ATen/TensorIndexing.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <fmt/ranges.h>

#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor {
namespace {

/// One masked parameter. The parameter's hook knows this object by a weak reference only, for it holds the parameter.
struct MaskedParameter {
  MaskedParameter(std::string its_name, at::Tensor masked_parameter)
      : name(std::move(its_name)), parameter(std::move(masked_parameter)) {}
  ~MaskedParameter() {
    if (hook) parameter.remove_hook(*hook);
  }
  MaskedParameter(const MaskedParameter&) = delete;
  MaskedParameter& operator=(const MaskedParameter&) = delete;

  /// `dropped` for a tensor of this shape and place.
  const at::Tensor& dropped_of(const at::Tensor& tensor) {
    check(tensor.sizes() == dropped.sizes(), ErrorCode::BadUsage,
          "the mask of '{}' is [{}], but the parameter is [{}] now; cut the mask with it (Masks::keep) or set it anew",
          escaped(name), fmt::join(dropped.sizes(), ", "), fmt::join(tensor.sizes(), ", "));
    if (dropped.device() != tensor.device()) dropped = dropped.to(tensor.device());
    return dropped;
  }

  std::string name;
  at::Tensor parameter;
  at::Tensor dropped;  ///< bool, true where an element is masked
  std::optional<unsigned> hook;
};

at::Tensor masked_gradient(const at::Tensor& gradient, const at::Tensor& dropped) {
  if (!gradient.is_sparse()) return gradient.masked_fill(dropped, 0);
  // Of an embedding with sparse gradients: the rows that were looked up.
  const at::Tensor rows = gradient.coalesce();
  std::vector<at::indexing::TensorIndex> places;
  for (const at::Tensor& index : rows.indices().unbind(0)) places.emplace_back(index);
  const at::Tensor values = rows.values().masked_fill(dropped.index(places), 0);
  return at::sparse_coo_tensor(rows.indices(), values, rows.sizes());
}

void install_hook(const std::shared_ptr<MaskedParameter>& masked) {
  if (masked->hook || !masked->parameter.requires_grad()) return;
  masked->hook = masked->parameter.register_hook([weak = std::weak_ptr(masked)](const at::Tensor& gradient) {
    const std::shared_ptr<MaskedParameter> now = weak.lock();
    if (!now) return at::Tensor();  // leaves the gradient as it is
    return masked_gradient(gradient, now->dropped_of(gradient));
  });
}

void zero(const std::shared_ptr<MaskedParameter>& masked) {
  const at::NoGradGuard no_grad;
  masked->parameter.masked_fill_(masked->dropped_of(masked->parameter), 0);
}

}  // namespace

struct Masks::State {
  std::map<std::string, std::shared_ptr<MaskedParameter>> masked;
};

Masks::Masks() : state_(std::make_shared<State>()) {}

void Masks::set(const std::string& name, const at::Tensor& parameter, const at::Tensor& keep) {
  check(parameter.defined() && parameter.is_leaf(), ErrorCode::BadUsage,
        "Masks::set: '{}' is no parameter: expected a leaf tensor", escaped(name));
  check(keep.defined() && keep.scalar_type() == at::kBool && keep.sizes() == parameter.sizes(), ErrorCode::BadUsage,
        "Masks::set: '{}' is [{}]; expected a bool mask of that shape", escaped(name),
        fmt::join(parameter.sizes(), ", "));
  const at::NoGradGuard no_grad;
  auto& all = state_->masked;
  std::shared_ptr<MaskedParameter> masked;
  for (const auto& [known, entry] : all)
    if (entry->parameter.is_same(parameter)) masked = entry;
  if (masked) {
    all.erase(masked->name);
    masked->name = name;
  } else {
    masked = std::make_shared<MaskedParameter>(name, parameter);
  }
  masked->dropped = keep.logical_not().to(parameter.device());
  all[name] = masked;
  install_hook(masked);
  zero(masked);
  // Another tensor: who holds today's, to put it back, keeps its values.
  if (at::Tensor& gradient = masked->parameter.mutable_grad(); gradient.defined())
    gradient = masked_gradient(gradient, masked->dropped);
}

void Masks::apply() const {
  for (const auto& [name, masked] : state_->masked) {
    install_hook(masked);
    zero(masked);
  }
}

void Masks::keep(const std::string& name, std::int64_t dim, const at::Tensor& indices) {
  const auto found = state_->masked.find(name);
  if (found == state_->masked.end()) return;
  at::Tensor& dropped = found->second->dropped;
  dropped = dropped.index_select(dim, indices.to(dropped.device()));
}

void Masks::forget(const std::string& name) { state_->masked.erase(name); }

void Masks::release() { state_->masked.clear(); }

bool Masks::empty() const { return state_->masked.empty(); }

std::vector<std::string> Masks::names() const {
  std::vector<std::string> names;
  for (const auto& [name, masked] : state_->masked) names.push_back(name);
  return names;
}

at::Tensor Masks::mask(const std::string& name) const {
  const auto found = state_->masked.find(name);
  check(found != state_->masked.end(), ErrorCode::NoSuchTarget, "'{}' has no mask", escaped(name));
  return found->second->dropped.logical_not();
}

Masks Masks::rebound(const Lookup& parameter) const {
  Masks copy;
  for (const std::string& name : names()) copy.set(name, parameter(name), mask(name));
  return copy;
}

Masks Masks::of_zeros(const std::vector<std::string>& names, const Lookup& parameter) {
  Masks masks;
  for (const std::string& name : names) {
    const at::Tensor values = parameter(name);
    check(values.defined(), ErrorCode::NoSuchTarget, "there is no parameter '{}' to take a mask from", escaped(name));
    masks.set(name, values, values.detach().ne(0));
  }
  return masks;
}

}  // namespace tersor

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tersor {

/// Masks of parameters, kept while a network is trained. Copies are handles of the same masks.
///
/// A hook on each masked parameter masks every gradient that reaches it; what else moves a weight (momentum, moments)
/// is undone by `apply` after each step, as prune::Masked does. Masks end with their last handle: hold one, or the
/// optimizer or Model that does, as long as the zeros shall stay.
///
/// A mask belongs to the tensor, whatever its memory, device or dtype (Module::to, set_data). Where a program puts a
/// new tensor in the place of the old one, `set` the mask again.
class Masks {
 public:
  Masks();

  /// Zeroes the elements of `parameter`, and of its gradient, where `keep` is false, now and whenever masks are
  /// applied.
  ///
  /// `keep` is bool, of the parameter's shape, and is copied. It replaces an earlier mask of this name, and one of the
  /// same tensor under another name. `parameter` is a leaf; while it requires no gradient it has no hook.
  void set(const std::string& name, const at::Tensor& parameter, const at::Tensor& keep);
  /// Masked elements become exactly +0.0 again.
  void apply() const;
  /// The parameter was cut to these indices of dimension `dim`: so is its mask. Nothing where there is no mask.
  void keep(const std::string& name, std::int64_t dim, const at::Tensor& indices);
  /// Ends this mask; nothing where there is none.
  void forget(const std::string& name);
  /// Ends all masks. The zeros stay as they are, and training may change them.
  void release();

  bool empty() const;
  std::vector<std::string> names() const;          ///< sorted
  at::Tensor mask(const std::string& name) const;  ///< bool, true where an element is kept; NoSuchTarget

  /// Finds the parameter of another network by its name.
  using Lookup = std::function<at::Tensor(const std::string& name)>;
  /// The same masks, copied, on the parameters of another network: after Module::clone.
  Masks rebound(const Lookup& parameter) const;
  /// What is zero stays zero: after a reload.
  static Masks of_zeros(const std::vector<std::string>& names, const Lookup& parameter);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tersor

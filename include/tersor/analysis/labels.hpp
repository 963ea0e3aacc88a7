#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tersor {

/// One removable unit of a network, or what stands for several of them.
using Label = std::int32_t;
using LabelVector = std::vector<Label>;

/// The label universe of channel_groups.hpp: a union-find whose classes are atoms or composites.
///
/// An atom leaves or stays as a whole. A composite stands for several labels and leaves when any of them leaves. A
/// fixed atom never leaves. Label 0 (`pinned`) is fixed and stands for whatever has no label.
class Labels {
 public:
  static constexpr Label pinned = 0;

  Labels();

  LabelVector fresh(std::int64_t count);  ///< consecutive new atoms
  std::int64_t size() const { return static_cast<std::int64_t>(parent_.size()); }

  Label find(Label label) const;  ///< representative of the class
  /// Both leave together. Composites of equal length are united part by part; others become one atom.
  void unite(Label a, Label b);
  void unite(const LabelVector& a, const LabelVector& b);  ///< position by position
  /// `label` becomes the composite of `parts`.
  void substitute(Label label, const LabelVector& parts);

  std::int32_t reason(std::string text);  ///< for `fix`; the same text gives the same number
  void fix(Label label, std::int32_t reason);
  bool composite(Label label) const { return parts_of_[static_cast<std::size_t>(find(label))] >= 0; }
  bool fixed(Label label) const;                    ///< some atom of it is fixed
  const std::string& why_fixed(Label label) const;  ///< of its first fixed atom; empty if none is

  LabelVector atoms(Label label) const;  ///< representatives; a composite's in the order of its parts

 private:
  void collect(Label label, LabelVector& out) const;
  void melt(const LabelVector& labels);  ///< all become one

  mutable LabelVector parent_;
  std::vector<std::int32_t> parts_of_;  ///< of a representative: index into parts_, -1 for an atom
  std::vector<std::int32_t> fixed_;     ///< of a representative: index into reasons_, -1 if it may leave
  std::vector<LabelVector> parts_;
  std::vector<std::string> reasons_;
};

}  // namespace tersor

#include "tersor/analysis/labels.hpp"

#include <algorithm>
#include <utility>

namespace tersor {
namespace {
constexpr std::size_t at(Label label) { return static_cast<std::size_t>(label); }
}  // namespace

Labels::Labels() : parent_{pinned}, parts_of_{-1}, fixed_{0}, reasons_{"it has no label"} {}

LabelVector Labels::fresh(std::int64_t count) {
  LabelVector labels;
  labels.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    labels.push_back(static_cast<Label>(parent_.size()));
    parent_.push_back(labels.back());
  }
  parts_of_.resize(parent_.size(), -1);
  fixed_.resize(parent_.size(), -1);
  return labels;
}

Label Labels::find(Label label) const {
  while (parent_[at(label)] != label) {
    parent_[at(label)] = parent_[at(parent_[at(label)])];
    label = parent_[at(label)];
  }
  return label;
}

void Labels::melt(const LabelVector& labels) {
  for (const Label label : labels) unite(labels.front(), label);
}

void Labels::unite(Label a, Label b) {
  a = find(a);
  b = find(b);
  if (a == b) return;
  if (composite(a) && composite(b)) {
    LabelVector as = atoms(a), bs = atoms(b);
    if (as.size() == bs.size()) {
      parent_[at(b)] = a;
      unite(as, bs);
    } else {
      as.insert(as.end(), bs.begin(), bs.end());
      melt(as);
    }
    return;
  }
  if (composite(b)) std::swap(a, b);
  // From here on b is an atom.
  const std::int32_t reason = std::max(composite(a) ? -1 : fixed_[at(a)], fixed_[at(b)]);
  if (reason >= 0) {
    // Neither can leave, which is all that uniting them could say.
    fix(a, reason);
    fix(b, reason);
    return;
  }
  if (composite(a)) {
    LabelVector parts = atoms(a);
    if (std::find(parts.begin(), parts.end(), b) != parts.end()) {
      melt(parts);
    } else {
      parent_[at(b)] = a;
    }
    return;
  }
  parent_[at(std::max(a, b))] = std::min(a, b);
}

void Labels::unite(const LabelVector& a, const LabelVector& b) {
  for (std::size_t i = 0; i < a.size(); ++i) unite(a[i], b[i]);
}

void Labels::substitute(Label label, const LabelVector& parts) {
  label = find(label);
  LabelVector inner;
  for (const Label part : parts) collect(part, inner);
  if (composite(label)) {
    LabelVector outer = atoms(label);
    if (outer.size() == inner.size()) {
      unite(outer, inner);
    } else {
      outer.insert(outer.end(), inner.begin(), inner.end());
      melt(outer);
    }
  } else if (fixed_[at(label)] >= 0) {
    for (const Label part : inner) fix(part, fixed_[at(label)]);
  } else if (std::find(inner.begin(), inner.end(), label) != inner.end()) {
    melt(inner);
  } else {
    parts_of_[at(label)] = static_cast<std::int32_t>(parts_.size());
    parts_.push_back(parts);
  }
}

std::int32_t Labels::reason(std::string text) {
  const auto found = std::find(reasons_.begin(), reasons_.end(), text);
  if (found != reasons_.end()) return static_cast<std::int32_t>(found - reasons_.begin());
  reasons_.push_back(std::move(text));
  return static_cast<std::int32_t>(reasons_.size() - 1);
}

void Labels::fix(Label label, std::int32_t reason) {
  label = find(label);
  if (!composite(label)) {
    if (fixed_[at(label)] < 0) fixed_[at(label)] = reason;
    return;
  }
  for (const Label atom : atoms(label))
    if (fixed_[at(atom)] < 0) fixed_[at(atom)] = reason;
}

bool Labels::fixed(Label label) const {
  const LabelVector all = atoms(label);
  return std::any_of(all.begin(), all.end(), [&](Label atom) { return fixed_[at(atom)] >= 0; });
}

const std::string& Labels::why_fixed(Label label) const {
  static const std::string none;
  for (const Label atom : atoms(label))
    if (fixed_[at(atom)] >= 0) return reasons_[at(fixed_[at(atom)])];
  return none;
}

LabelVector Labels::atoms(Label label) const {
  LabelVector out;
  collect(label, out);
  return out;
}

void Labels::collect(Label label, LabelVector& out) const {
  label = find(label);
  if (!composite(label)) {
    out.push_back(label);
    return;
  }
  for (const Label part : parts_[at(parts_of_[at(label)])]) collect(part, out);
}

}  // namespace tersor

#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tersor/model/model.hpp"

namespace tersor {

/// The layers that `targets` and `ignore` choose, in the order of `layers`.
///
/// An entry is an exact layer name, `re:` and a regular expression (ECMAScript) that must match from the start of the
/// name, or a class name such as `Linear`. Without targets, `by_default` decides; explicit targets override it; ignore
/// wins over both. Throws NoSuchTarget with the nearest names for a targets entry that matches no layer, and BadOption
/// for a broken expression; an ignore entry that matches nothing becomes a sentence in `warnings`.
std::vector<Layer> select_layers(const std::vector<Layer>& layers, const std::vector<std::string>& targets,
                                 const std::vector<std::string>& ignore,
                                 const std::function<bool(const Layer&)>& by_default,
                                 std::vector<std::string>& warnings);

/// The same for the layers of a model.
std::vector<Layer> select_layers(const Model& model, const std::vector<std::string>& targets,
                                 const std::vector<std::string>& ignore,
                                 const std::function<bool(const Layer&)>& by_default,
                                 std::vector<std::string>& warnings);

}  // namespace tersor

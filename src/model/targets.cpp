#include "tersor/model/targets.hpp"

#include <optional>
#include <regex>

#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor {
namespace {

/// One entry of `targets` or `ignore`.
class Matcher {
 public:
  explicit Matcher(const std::string& entry) : text_(entry) {
    if (!entry.starts_with("re:")) return;
    try {
      pattern_.emplace(entry.substr(3), std::regex::ECMAScript);
    } catch (const std::regex_error& error) {
      throw fail(ErrorCode::BadOption, "'{}' is no regular expression ({}); expected re: and an ECMAScript pattern",
                 escaped(entry), error.what());
    }
  }

  bool operator()(const Layer& layer) const {
    if (!pattern_) return layer.name == text_ || class_name(layer.kind) == text_;
    // std::regex recurses once per character; names this long come from hostile files only.
    constexpr std::size_t longest = 4096;
    return layer.name.size() <= longest &&
           std::regex_search(layer.name, *pattern_, std::regex_constants::match_continuous);
  }

  const std::string& text() const { return text_; }

 private:
  std::string text_;
  std::optional<std::regex> pattern_;
};

/// For every layer, whether one of the entries matches it; `unmatched` hears of entries that match none.
std::vector<bool> matches(const std::vector<Layer>& layers, const std::vector<std::string>& entries,
                          const std::function<void(const std::string&)>& unmatched) {
  std::vector<bool> hit(layers.size(), false);
  for (const std::string& entry : entries) {
    const Matcher matcher(entry);
    bool any = false;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      if (!matcher(layers[i])) continue;
      hit[i] = any = true;
    }
    if (!any) unmatched(entry);
  }
  return hit;
}

}  // namespace

std::vector<Layer> select_layers(const std::vector<Layer>& layers, const std::vector<std::string>& targets,
                                 const std::vector<std::string>& ignore,
                                 const std::function<bool(const Layer&)>& by_default,
                                 std::vector<std::string>& warnings) {
  std::vector<std::string> names;
  for (const Layer& layer : layers) names.push_back(layer.name);
  const std::vector<bool> wanted = matches(layers, targets, [&](const std::string& entry) {
    throw fail(ErrorCode::NoSuchTarget, "targets entry '{}' matches no layer{}", escaped(entry),
               did_you_mean(entry, names));
  });
  const std::vector<bool> ignored = matches(layers, ignore, [&](const std::string& entry) {
    warnings.push_back(fmt::format("ignore entry '{}' matches no layer{}", escaped(entry), did_you_mean(entry, names)));
  });

  std::vector<Layer> chosen;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (!ignored[i] && (targets.empty() ? by_default(layers[i]) : wanted[i])) chosen.push_back(layers[i]);
  }
  if (!targets.empty() && chosen.empty()) warnings.emplace_back("every layer in targets is in ignore too, which wins");
  return chosen;
}

std::vector<Layer> select_layers(const Model& model, const std::vector<std::string>& targets,
                                 const std::vector<std::string>& ignore,
                                 const std::function<bool(const Layer&)>& by_default,
                                 std::vector<std::string>& warnings) {
  return select_layers(model.layers(), targets, ignore, by_default, warnings);
}

}  // namespace tersor

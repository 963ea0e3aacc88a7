#pragma once

#include <cstddef>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tersor/pipeline/pass.hpp"

namespace tersor {

/// One pass as the registry knows it.
struct PassInfo {
  std::string_view name;
  std::string_view summary;
  Need needs;  ///< with default options
  std::vector<OptionInfo> (*options)();
  Pass (*make)(const std::vector<std::pair<std::string, OptionValue>>& options);
  std::string_view type;  ///< of the struct: `tersor::prune::L1`
};

namespace detail {

template <typename T>
constexpr std::string_view type_name() {
  constexpr std::string_view function = __PRETTY_FUNCTION__;  // "… [with T = tersor::prune::L1; …" or "… [T = …]"
  constexpr std::size_t begin = function.find("T = ") + 4;
  return function.substr(begin, function.find_first_of(";]", begin) - begin);
}

}  // namespace detail

/// The row of a pass for the list in `passes/registry.cpp`.
template <PassType P>
constexpr PassInfo pass_info() {
  return {P::name,
          P::summary,
          P{}.needs(),
          [] { return describe_options<P>(); },
          [](const std::vector<std::pair<std::string, OptionValue>>& options) -> Pass {
            P pass;
            for (const auto& [key, value] : options) set_option(pass, key, value);
            Pass made = std::move(pass);
            made.validate();
            return made;
          },
          detail::type_name<P>()};
}

/// Passes in order; itself a pass, so it nests.
class Pipeline {
 public:
  static constexpr std::string_view name = "pipeline";
  static constexpr std::string_view summary = "Several passes in order.";
  static constexpr auto fields() { return std::tuple<>{}; }

  Pipeline() = default;
  Pipeline(std::initializer_list<Pass> passes) : passes_(passes) {}
  explicit Pipeline(std::vector<Pass> passes) : passes_(std::move(passes)) {}

  const std::vector<Pass>& passes() const { return passes_; }
  Need needs() const;

  /// Checks the options and needs of every pass, then runs them. On an error the model is as it was before the first
  /// pass, and the error says which pass and layer. The recipe is added to the model's metadata.
  Report run(Model& model, const RunOptions& options = {}) const;
  /// The same without running: throws what `run` would throw before its first change.
  void check_needs(const Model& model, const RunOptions& options) const;
  /// As one pass of something larger: no checks, no roll-back, all rows in the report of the context.
  Changed run(Model& model, PassContext& context) const;
  /// Throws what `run` throws for wrong options.
  void validate() const;

  /// Nested pipelines are written flat: `prune_l1(amount=0.5), quantize_dynamic`; `parse_pipeline` gives the same
  /// pipeline back.
  std::string text() const;
  /// The recipe as YAML; `parse_recipe` gives the same pipeline back.
  std::string yaml() const;

 private:
  std::vector<Pass> passes_;
};

/// Grammar: `pass (',' pass)*`, `name ['(' key '=' value (',' …)* ')']`; see docs/reference/recipes.md. `passes` is
/// what may be named (`tersor::registry()` of passes/registry.hpp).
Pipeline parse_pipeline(std::string_view text, std::span<const PassInfo> passes);
/// A YAML recipe: `passes:` with names or one-key maps. Errors name the line and column.
Pipeline parse_recipe(std::string_view yaml, std::span<const PassInfo> passes);
/// docs/reference/passes.md.
std::string passes_markdown(std::span<const PassInfo> passes);

}  // namespace tersor

#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tersor/pipeline/pipeline.hpp"

namespace tersor {

/// A pass as it stands in a text or recipe, before anyone looked its name up.
struct PassCall {
  std::string name;
  std::vector<std::pair<std::string, OptionValue>> options;
};

/// Looks the pass up and sets its options. UnknownPass names the near misses; errors name the pass and its place.
Pass make_pass(const PassCall& call, std::size_t number, std::span<const PassInfo> passes);

}  // namespace tersor

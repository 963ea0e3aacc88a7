#include "tersor/pipeline/pass.hpp"

namespace tersor {

std::string Pass::pass_text(std::string_view name, const std::vector<std::pair<std::string, OptionValue>>& options) {
  std::string out(name);
  if (options.empty()) return out;
  for (const auto& [key, value] : options) {
    out += fmt::format("{}{}={}", &key == &options.front().first ? "(" : ", ", key, tersor::text(value));
  }
  return out + ")";
}

}  // namespace tersor

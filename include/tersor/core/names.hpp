#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tersor {

/// Whether all of `s` is well-formed UTF-8.
bool is_utf8(std::string_view s);

/// `name` with control characters, quotes, backslashes and bytes that are not UTF-8 as `\xNN`: safe on a terminal.
/// Other printable UTF-8 stays as it is.
std::string escaped(std::string_view name);

/// Up to `most` of `candidates` that look like `name` (edit distance, common start or end), nearest first; may be
/// empty.
std::vector<std::string> nearest_names(std::string_view name, const std::vector<std::string>& candidates,
                                       std::size_t most = 3);

/// "; did you mean 'a' or 'b'?" or "" when nothing is near.
std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace tersor

#include "tersor/core/names_inl.hpp"

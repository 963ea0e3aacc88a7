#pragma once

#include <string_view>

namespace tersor {

/// The release this header belongs to; written into every artifact.
inline constexpr std::string_view version = "0.1.0";

}  // namespace tersor

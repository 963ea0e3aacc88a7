#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include <fmt/format.h>

namespace tersor {

namespace detail {

/// Length in bytes of the well-formed UTF-8 sequence at the start of `s` (Unicode 15, table 3-7), 0 if there is none.
inline std::size_t utf8_length(std::string_view s) {
  const auto byte = [&](std::size_t i) { return i < s.size() ? static_cast<unsigned char>(s[i]) : 0U; };
  const auto continues = [&](std::size_t i) { return (byte(i) & 0xC0U) == 0x80U; };
  const unsigned b = byte(0);
  if (s.empty()) return 0;
  if (b < 0x80) return 1;
  if (b >= 0xC2 && b <= 0xDF) return continues(1) ? 2 : 0;
  if (b >= 0xE0 && b <= 0xEF) {
    const unsigned low = b == 0xE0 ? 0xA0 : 0x80, high = b == 0xED ? 0x9F : 0xBF;
    return byte(1) >= low && byte(1) <= high && continues(2) ? 3 : 0;
  }
  if (b >= 0xF0 && b <= 0xF4) {
    const unsigned low = b == 0xF0 ? 0x90 : 0x80, high = b == 0xF4 ? 0x8F : 0xBF;
    return byte(1) >= low && byte(1) <= high && continues(2) && continues(3) ? 4 : 0;
  }
  return 0;
}

/// The code point of a well-formed sequence.
inline std::uint32_t utf8_code_point(std::string_view s) {
  const auto bits = [&](std::size_t i, unsigned mask) {
    return static_cast<std::uint32_t>(static_cast<unsigned char>(s[i]) & mask);
  };
  switch (s.size()) {
    case 2:
      return bits(0, 0x1F) << 6 | bits(1, 0x3F);
    case 3:
      return bits(0, 0x0F) << 12 | bits(1, 0x3F) << 6 | bits(2, 0x3F);
    case 4:
      return bits(0, 0x07) << 18 | bits(1, 0x3F) << 12 | bits(2, 0x3F) << 6 | bits(3, 0x3F);
    default:
      return bits(0, 0x7F);
  }
}

/// Controls, and what reorders or hides text around it: line separators, zero-width and bidirectional marks, the BOM.
inline bool unsafe_on_terminal(std::uint32_t c) {
  return c < 0x20 || (c >= 0x7F && c < 0xA0) || c == 0xAD || (c >= 0x200B && c <= 0x200F) ||
         (c >= 0x2028 && c <= 0x202E) || (c >= 0x2060 && c <= 0x206F) || c == 0xFEFF || (c & 0xFFFE) == 0xFFFE;
}

/// Edit distance with swaps of neighbours (optimal string alignment), ASCII case ignored; `most + 1` when it is larger.
inline std::size_t edit_distance(std::string_view a, std::string_view b, std::size_t most) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  if (std::max(a.size(), b.size()) - std::min(a.size(), b.size()) > most) return most + 1;
  std::vector<std::size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const bool same = lower(a[i - 1]) == lower(b[j - 1]);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (same ? 0 : 1)});
      if (i > 1 && j > 1 && lower(a[i - 1]) == lower(b[j - 2]) && lower(a[i - 2]) == lower(b[j - 1])) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    if (*std::min_element(row.begin(), row.end()) > most) return most + 1;
    before.swap(last);
    last.swap(row);
  }
  return std::min(last[b.size()], most + 1);
}

}  // namespace detail

inline bool is_utf8(std::string_view s) {
  while (!s.empty()) {
    const std::size_t n = detail::utf8_length(s);
    if (n == 0) return false;
    s.remove_prefix(n);
  }
  return true;
}

inline std::string escaped(std::string_view name) {
  std::string out;
  out.reserve(name.size());
  while (!name.empty()) {
    const std::size_t n = std::max<std::size_t>(1, detail::utf8_length(name));
    const std::string_view c = name.substr(0, n);
    const bool plain = detail::utf8_length(name) > 0 && !detail::unsafe_on_terminal(detail::utf8_code_point(c)) &&
                       c != "'" && c != "\"" && c != "\\";
    if (plain) {
      out += c;
    } else {
      for (const char byte : c) out += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
    }
    name.remove_prefix(n);
  }
  return out;
}

inline std::vector<std::string> nearest_names(std::string_view name, const std::vector<std::string>& candidates,
                                              std::size_t most) {
  constexpr std::size_t longest = 512;  // names beyond this are no typing errors
  if (name.empty() || name.size() > longest) return {};
  const std::size_t limit = name.size() < 3 ? 1 : std::max<std::size_t>(2, name.size() / 4);
  std::vector<std::pair<std::size_t, std::size_t>> near;  // score, index
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const std::string& c = candidates[i];
    const std::size_t distance = detail::edit_distance(name, c, limit);
    if (distance <= limit && distance < std::max(name.size(), c.size())) {
      near.emplace_back(distance, i);
    } else if (name.size() >= 2 && (c.starts_with(name) || c.ends_with(name))) {
      near.emplace_back(limit + c.size() - name.size(), i);
    } else if (c.size() >= 2 && (name.starts_with(c) || name.ends_with(c))) {
      near.emplace_back(limit + name.size() - c.size(), i);
    }
  }
  std::sort(near.begin(), near.end());
  if (near.size() > most) near.resize(most);
  std::vector<std::string> out;
  for (const auto& [score, i] : near) out.push_back(candidates[i]);
  return out;
}

inline std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates) {
  const std::vector<std::string> near = nearest_names(name, candidates);
  std::string out;
  for (std::size_t i = 0; i < near.size(); ++i) {
    out += fmt::format("{}'{}'", i == 0 ? "; did you mean " : i + 1 == near.size() ? " or " : ", ", escaped(near[i]));
  }
  return out.empty() ? out : out + "?";
}

}  // namespace tersor

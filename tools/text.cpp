#include "text.hpp"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tersor/core/names.hpp"

namespace tersor::cli {
namespace {

std::size_t width(std::string_view s) {  // code points; names are escaped, so there are no control characters
  return static_cast<std::size_t>(std::count_if(s.begin(), s.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

}  // namespace

std::string Table::text() const {
  std::vector<std::size_t> widths;
  for (const Column& c : columns_) widths.push_back(width(c.title));
  for (const auto& row : rows_)
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width(row[i]));

  std::string out;
  const auto line = [&](auto&& cell) {
    std::string s;
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      const std::string_view text = cell(i);
      const std::string pad(widths[i] - width(text), ' ');
      if (i > 0) s += "  ";
      if (columns_[i].align == Align::right) s += pad;
      s += text;
      if (columns_[i].align == Align::left) s += pad;
    }
    s.erase(s.find_last_not_of(' ') + 1);
    out += s + "\n";
  };
  line([&](std::size_t i) -> std::string_view { return columns_[i].title; });
  for (const auto& row : rows_)
    line([&](std::size_t i) -> std::string_view { return i < row.size() ? std::string_view(row[i]) : ""; });
  return out;
}

std::string grouped(std::int64_t n) {
  const std::string digits = std::to_string(n);
  std::string s;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    s += digits[i];
    const std::size_t left = digits.size() - 1 - i;
    if (left > 0 && left % 3 == 0 && digits[i] != '-') s += ',';
  }
  return s;
}

std::string by_shape(const std::vector<std::int64_t>& shape) {
  return shape.empty() ? "scalar" : fmt::format("{}", fmt::join(shape, "x"));
}

std::string microseconds(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.2f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

std::string printable(std::string_view text) {
  std::string out;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find_first_of("'\"\\", begin), text.size());
    out += escaped(text.substr(begin, end - begin));
    if (end < text.size()) out += text[end];
    begin = end + 1;
  }
  return out;
}

std::string first_cause(std::string_view what) {
  const std::size_t raised = what.rfind("RuntimeError: ");
  std::string_view cause = raised == std::string_view::npos ? what : what.substr(raised + 14);
  cause.remove_prefix(std::min(cause.find_first_not_of(" \n"), cause.size()));
  return printable(cause.substr(0, cause.find('\n')));
}

}  // namespace tersor::cli

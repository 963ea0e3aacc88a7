#include "tersor/pipeline/report.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tersor/core/names.hpp"

namespace tersor {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t most_rows = 40;  // of one pass in the table

std::string_view word(Changed changed) {
  switch (changed) {
    case Changed::nothing:
      return "nothing";
    case Changed::weights:
      return "weights";
    case Changed::structure:
      return "structure";
  }
  return "";
}

template <typename Number>
std::optional<Number> read(const std::string& s) {
  Number x{};
  const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), x);
  if (s.empty() || error != std::errc{} || end != s.data() + s.size()) return std::nullopt;
  return x;
}

bool is_number(const std::string& s) {
  const auto x = read<double>(s);
  return x && std::isfinite(*x);
}

/// Free text on one line: quotes stay, what could move the cursor does not.
std::string printable(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::size_t n = std::max<std::size_t>(1, detail::utf8_length(text));
    const bool punctuation = text[0] == '\'' || text[0] == '"' || text[0] == '\\';
    out += punctuation ? std::string(1, text[0]) : escaped(text.substr(0, n));
    text.remove_prefix(n);
  }
  return out;
}

std::size_t width(const std::string& s) {
  return static_cast<std::size_t>(
      std::count_if(s.begin(), s.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; }));
}

/// Rows of cells under a heading; columns of numbers stand right.
class Columns {
 public:
  explicit Columns(std::vector<std::string> heading) : rows_{std::move(heading)} {}

  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

  std::string text() const {
    const std::size_t n = rows_.front().size();
    std::vector<std::size_t> widths(n, 0);
    std::vector<bool> right(n, true);
    for (std::size_t c = 0; c < n; ++c) {
      for (const auto& row : rows_) widths[c] = std::max(widths[c], width(row[c]));
      right[c] = std::all_of(rows_.begin() + 1, rows_.end(),
                             [&](const auto& row) { return row[c].empty() || is_number(row[c]); });
    }
    std::string out;
    for (const auto& row : rows_) {
      std::string line;
      for (std::size_t c = 0; c < n; ++c) {
        const std::string gap(widths[c] - width(row[c]), ' ');
        line += "  " + (right[c] ? gap + row[c] : row[c] + gap);
      }
      line.erase(line.find_last_not_of(' ') + 1);
      out += line + "\n";
    }
    return out;
  }

 private:
  std::vector<std::vector<std::string>> rows_;
};

/// Rows with the same action as one table; its columns are what these rows speak of, in order of appearance.
std::string group_table(const std::vector<const ReportRow*>& rows) {
  std::vector<std::string> keys;
  for (const ReportRow* row : rows) {
    for (const auto& [key, value] : row->details) {
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
    }
  }
  std::vector<std::string> heading{printable(rows.front()->action)};
  for (const std::string& key : keys) heading.push_back(printable(key));
  Columns columns(std::move(heading));
  for (const ReportRow* row : rows) {
    std::vector<std::string> cells{printable(row->layer)};
    for (const std::string& key : keys) {
      const auto detail =
          std::find_if(row->details.begin(), row->details.end(), [&](const auto& d) { return d.first == key; });
      cells.push_back(detail == row->details.end() ? std::string() : printable(detail->second));
    }
    columns.add(std::move(cells));
  }
  return columns.text();
}

std::string rows_text(const std::vector<ReportRow>& rows) {
  std::vector<std::string> actions;
  for (const ReportRow& row : rows) {
    if (std::find(actions.begin(), actions.end(), row.action) == actions.end()) actions.push_back(row.action);
  }
  std::string out;
  std::size_t shown = 0;
  for (const std::string& action : actions) {
    std::vector<const ReportRow*> group;
    for (const ReportRow& row : rows) {
      if (row.action == action && shown < most_rows) {
        group.push_back(&row);
        ++shown;
      }
    }
    if (!group.empty()) out += group_table(group);
  }
  if (shown < rows.size()) out += fmt::format("  … and {} more\n", rows.size() - shown);
  return out;
}

std::string bytes_text(std::int64_t bytes) {
  if (bytes < 1000) return fmt::format("{} B", bytes);
  double x = static_cast<double>(bytes);
  const char* unit = "B";
  for (const char* next : {"kB", "MB", "GB", "TB"}) {
    if (x < 999.5) break;
    x /= 1000;
    unit = next;
  }
  return fmt::format("{:.3g} {}", x, unit);
}

std::string count_text(std::int64_t n) {
  std::string digits = std::to_string(n);
  for (std::ptrdiff_t at = static_cast<std::ptrdiff_t>(digits.size()) - 3; at > (n < 0 ? 1 : 0); at -= 3) {
    digits.insert(static_cast<std::size_t>(at), 1, ' ');
  }
  return digits;
}

std::string ratio_text(std::int64_t before, std::int64_t after) {
  if (before <= 0 || after <= 0 || before == after) return "";
  return before > after ? fmt::format(" ({:.2f} times less)", static_cast<double>(before) / static_cast<double>(after))
                        : fmt::format(" ({:.2f} times more)", static_cast<double>(after) / static_cast<double>(before));
}

Json detail_json(const std::string& text) {
  if (const auto whole = read<std::int64_t>(text)) return *whole;
  if (is_number(text)) return *read<double>(text);
  return text;
}

Json pass_json(const PassReport& pass) {
  Json rows = Json::array();
  for (const ReportRow& row : pass.rows) {
    Json details = Json::object();
    for (const auto& [key, value] : row.details) details[key] = detail_json(value);
    rows.push_back({{"layer", row.layer}, {"action", row.action}, {"details", std::move(details)}});
  }
  return {{"pass", pass.pass},
          {"changed", word(pass.changed)},
          {"seconds", pass.seconds},
          {"rows", std::move(rows)},
          {"warnings", pass.warnings}};
}

}  // namespace

std::string Report::table() const {
  std::string out;
  for (const PassReport& pass : passes) {
    out += fmt::format("{}\n  changed {} in {:.2f} s\n", printable(pass.pass), word(pass.changed), pass.seconds);
    out += rows_text(pass.rows);
    for (const std::string& warning : pass.warnings) out += fmt::format("  warning: {}\n", printable(warning));
    out += "\n";
  }
  out += fmt::format("bytes       {} -> {}{}\n", bytes_text(bytes_before), bytes_text(bytes_after),
                     ratio_text(bytes_before, bytes_after));
  out += fmt::format("parameters  {} -> {}{}\n", count_text(parameters_before), count_text(parameters_after),
                     ratio_text(parameters_before, parameters_after));
  return out;
}

std::string Report::json() const {
  Json all_passes = Json::array();
  for (const PassReport& pass : passes) all_passes.push_back(pass_json(pass));
  const Json out{{"recipe", recipe},
                 {"passes", std::move(all_passes)},
                 {"bytes", {{"before", bytes_before}, {"after", bytes_after}}},
                 {"parameters", {{"before", parameters_before}, {"after", parameters_after}}}};
  return out.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace tersor

#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace tersor::cli {

/// A table for people: columns as wide as their widest cell, two spaces apart.
class Table {
 public:
  enum class Align { left, right };
  struct Column {
    std::string title;
    Align align = Align::left;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  bool empty() const { return rows_.empty(); }
  std::string text() const;  ///< header and rows, each with its newline

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

std::string grouped(std::int64_t n);                           ///< `1,234,567`
std::string by_shape(const std::vector<std::int64_t>& shape);  ///< `64x3136`; `scalar` without dimensions
std::string microseconds(double seconds);                      ///< `12.3 us`, `4.56 ms`, `1.23 s`
/// Free text on one line: quotes stay, what could move the cursor is escaped.
std::string printable(std::string_view text);
/// What an exception of LibTorch says, without its C++ stack: the last error line of a TorchScript traceback, or
/// else the first line.
std::string first_cause(std::string_view what);

}  // namespace tersor::cli

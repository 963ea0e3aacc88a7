#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tersor {

/// What one pass did to one layer (or tensor): a word and its numbers, in the order they were said.
struct ReportRow {
  std::string layer;
  std::string action;                                        ///< `pruned`, `quantized`, `folded`, `skipped`
  std::vector<std::pair<std::string, std::string>> details;  ///< `bits` `4`; `why` `…` for skipped ones
};

/// What a pass did to the model. `weights`: values, codes or masks, every shape as before.
enum class Changed { nothing, weights, structure };

/// What one pass did.
struct PassReport {
  std::string pass;  ///< text form with options
  Changed changed = Changed::nothing;
  std::vector<ReportRow> rows;
  std::vector<std::string> warnings;
  double seconds = 0;

  ReportRow& row(std::string layer, std::string action) {
    rows.push_back({std::move(layer), std::move(action), {}});
    return rows.back();
  }
  void skip(std::string layer, std::string why) {
    row(std::move(layer), "skipped").details.emplace_back("why", std::move(why));
  }
};

/// What a pipeline did: a table for people, JSON for programs.
struct Report {
  std::string recipe;  ///< text form of the pipeline
  std::vector<PassReport> passes;
  std::int64_t bytes_before = 0, bytes_after = 0;            ///< of all tensors
  std::int64_t parameters_before = 0, parameters_after = 0;  ///< elements of all tensors

  /// Aligned columns; at most 40 rows of a pass, then `… and N more`.
  std::string table() const;
  /// Every row. `{"recipe", "passes": [{"pass", "changed", "seconds", "rows": [{"layer", "action", "details"}],
  /// "warnings"}], "bytes": {"before", "after"}, "parameters": {…}}`; details that are numbers are JSON numbers.
  std::string json() const;
};

}  // namespace tersor

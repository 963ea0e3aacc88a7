#include "tersor/core/names.hpp"
#include "tersor/pipeline/pipeline.hpp"

namespace tersor {
namespace {

std::string needs_text(Need needs) {
  std::vector<std::string> words;
  if (has(needs, Need::graph)) {
    words.emplace_back("a runnable model and an example input");
  } else if (has(needs, Need::forward)) {
    words.emplace_back("a runnable model");
  }
  if (has(needs, Need::labels)) {
    words.emplace_back("calibration data with labels");
  } else if (has(needs, Need::data)) {
    words.emplace_back("calibration data");
  }
  if (has(needs, Need::original)) words.emplace_back("a copy of the original model, which the pipeline keeps");
  if (words.empty()) return "only weights";
  std::string out = words.front();
  for (std::size_t i = 1; i < words.size(); ++i) out += (i + 1 == words.size() ? " and " : ", ") + words[i];
  return out;
}

/// Text in a table cell: a bar would end it.
std::string cell(std::string_view text) {
  std::string out;
  for (const char c : text) out += c == '|' ? std::string("\\|") : std::string(1, c);
  return out;
}

std::string code_cell(std::string_view text) { return text.empty() ? std::string() : fmt::format("`{}`", cell(text)); }

std::string example(const PassInfo& pass, const std::vector<OptionInfo>& options) {
  for (const OptionInfo& option : options) {
    const bool shows_something =
        option.default_text != "[]" && option.default_text != "none" && option.default_text != "''";
    if (shows_something) return fmt::format("{}({}={})", pass.name, option.name, option.default_text);
  }
  return std::string(pass.name);
}

}  // namespace

std::string passes_markdown(std::span<const PassInfo> passes) {
  std::string out =
      "# Passes\n\n"
      "Generated from the option fields of each pass. How passes are written in one line and in a YAML file is in\n"
      "[recipes.md](recipes.md).\n\n";
  for (const PassInfo& pass : passes) out += fmt::format("- [`{0}`](#{0}): {1}\n", pass.name, pass.summary);
  for (const PassInfo& pass : passes) {
    const std::vector<OptionInfo> options = pass.options();
    out += fmt::format("\n## {}\n\n{}\n\n", pass.name, pass.summary);
    out += fmt::format("In C++: `{}`. Needs {}.\n\n", pass.type, needs_text(pass.needs));
    if (options.empty()) {
      out += "It has no options.\n";
    } else {
      out += "| Option | Type | Default | Range | Unit | |\n|---|---|---|---|---|---|\n";
      for (const OptionInfo& o : options) {
        out += fmt::format("| `{}` | {} | {} | {} | {} | {} |\n", o.name, code_cell(o.type), code_cell(o.default_text),
                           cell(o.range), cell(o.unit), cell(o.help));
      }
    }
    out += fmt::format("\nExample: `--passes '{}'`\n", example(pass, options));
  }
  return out;
}

}  // namespace tersor

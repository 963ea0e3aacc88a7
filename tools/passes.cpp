#include <memory>

#include <CLI/CLI.hpp>

#include "commands.hpp"
#include "tersor/core/names.hpp"
#include "tersor/passes/registry.hpp"
#include "text.hpp"

namespace tersor::cli {
namespace {

std::string needs_text(Need needs) {
  std::string s;
  const auto add = [&](Need one, std::string_view word) {
    if (has(needs, one)) s += fmt::format("{}{}", s.empty() ? "" : ", ", word);
  };
  add(Need::graph, "an example input");
  if (!has(needs, Need::graph)) add(Need::forward, "a runnable model");
  add(Need::data, "calibration data");
  add(Need::labels, "labels");
  return s;
}

void list() {
  Table table({{"pass"}, {"what it does"}, {"needs"}});
  for (const PassInfo& pass : registry())
    table.row({std::string(pass.name), std::string(pass.summary), needs_text(pass.needs)});
  fmt::print(
      "{}\n`tersor passes NAME` shows the options of one; a pipeline is written `name(option=value, ...), name`.\n",
      table.text());
}

void show(const PassInfo& pass) {
  fmt::print("{}: {}\n", pass.name, pass.summary);
  if (const std::string needs = needs_text(pass.needs); !needs.empty()) fmt::print("needs {}\n", needs);
  Table table({{"option"}, {"type"}, {"default"}, {"range"}, {"what it is"}});
  for (const OptionInfo& option : pass.options())
    table.row({option.name, option.type, option.default_text,
               option.unit.empty() || option.range.empty() ? option.range : option.range + " " + option.unit,
               option.help});
  if (!table.empty()) fmt::print("\n{}", table.text());
}

}  // namespace

void add_passes(CLI::App& app) {
  CLI::App* command = app.add_subcommand("passes", "List the passes, or show the options of one");
  const auto name = std::make_shared<std::string>();
  command->add_option("NAME", *name, "A pass");
  command->callback([name] {
    if (name->empty()) return list();
    std::vector<std::string> names;
    for (const PassInfo& pass : registry()) {
      if (pass.name == *name) return show(pass);
      names.emplace_back(pass.name);
    }
    throw fail(ErrorCode::UnknownPass, "there is no pass '{}'{}; `tersor passes` lists them", escaped(*name),
               did_you_mean(*name, names));
  });
}

}  // namespace tersor::cli

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "catch.hpp"
#include "tersor/passes/registry.hpp"

using namespace tersor;

TEST_CASE("docs/reference/passes.md is what the option fields say", "[reference]") {
  const std::filesystem::path file = std::filesystem::path(TERSOR_SOURCE_DIR) / "docs/reference/passes.md";
  const std::string fresh = passes_markdown(registry());
  const char* approve = std::getenv("TERSOR_APPROVE");
  if (approve != nullptr && std::string(approve) == "1") std::ofstream(file, std::ios::binary) << fresh;
  std::ifstream in(file, std::ios::binary);
  INFO(file.string() << " is missing or old; run this test with TERSOR_APPROVE=1 to write it");
  REQUIRE(in);
  std::stringstream stored;
  stored << in.rdbuf();
  CHECK(fresh == stored.str());
}

TEST_CASE("every pass of the registry has one name, a summary, and prints and parses with its defaults",
          "[reference]") {
  std::vector<std::string_view> names;
  for (const PassInfo& pass : registry()) {
    INFO(pass.name);
    CHECK(std::find(names.begin(), names.end(), pass.name) == names.end());
    names.push_back(pass.name);
    CHECK(pass.summary.ends_with('.'));
    const Pass made = pass.make({});
    CHECK(made.text() == pass.name);
    CHECK(parse_pipeline(made.text(), registry()).text() == pass.name);
    for (const OptionInfo& option : pass.options()) {
      INFO(option.name);
      CHECK(option.help.ends_with('.'));
      const std::string text = fmt::format("{}({}={})", pass.name, option.name, option.default_text);
      CHECK(parse_pipeline(text, registry()).text() == pass.name);  // the default, written out, is the default
    }
  }
}

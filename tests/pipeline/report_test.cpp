#include "tersor/pipeline/report.hpp"

#include <cstdio>

#include <nlohmann/json.hpp>

#include "catch.hpp"
#include "fake_passes.hpp"
#include "golden.hpp"
#include "tersor/version.hpp"

using namespace tersor;

namespace {

const std::filesystem::path golden = std::filesystem::path(TERSOR_SOURCE_DIR) / "tests/pipeline/golden";

Report sample() {
  Report report;
  report.recipe = "prune_structured(amount=0.3), quantize_static";
  PassReport prune;
  prune.pass = "prune_structured(amount=0.3)";
  prune.changed = Changed::structure;
  prune.seconds = 0.1234;
  prune.row("conv1", "pruned").details = {{"channels", "32"}, {"kept", "23"}};
  prune.row("block.1.größe", "pruned").details = {{"channels", "128"}, {"kept", "90"}};
  prune.skip("head", "its outputs are the model's");
  prune.row("fc", "pruned").details = {{"channels", "1024"}, {"note", "rounded up"}};
  prune.warnings = {"ignore entry 'conv9' matches nothing"};
  PassReport quantize;
  quantize.pass = "quantize_static";
  quantize.changed = Changed::weights;
  quantize.seconds = 12.5;
  for (int i = 0; i < 50; ++i) {
    quantize.row(fmt::format("layers.{}", i), "quantized").details = {{"bits", "8"},
                                                                      {"SQNR", fmt::format("{:.1f}", 30 + i / 4.0)}};
  }
  quantize.row("bad\nname", "quantized").details = {{"bits", "8"}};
  report.passes = {prune, quantize};
  report.bytes_before = 4'123'456;
  report.bytes_after = 612'000;
  report.parameters_before = 1'030'000;
  report.parameters_after = 600'123;
  return report;
}

/// What is written to a file by `draw`.
template <typename F>
std::string written(F draw) {
  std::FILE* file = std::tmpfile();
  REQUIRE(file != nullptr);
  draw(file);
  std::string out(static_cast<std::size_t>(std::ftell(file)), '\0');
  std::rewind(file);
  REQUIRE(std::fread(out.data(), 1, out.size(), file) == out.size());
  std::fclose(file);
  return out;
}

}  // namespace

TEST_CASE("the table for people", "[report]") { check_golden(golden / "report.txt", sample().table()); }
TEST_CASE("the JSON for programs", "[report]") { check_golden(golden / "report.json", sample().json()); }
TEST_CASE("the reference page of passes", "[reference]") {
  check_golden(golden / "passes.md", passes_markdown(fake::passes()));
}

TEST_CASE("the table shows at most forty rows of a pass and nothing that harms a terminal", "[report]") {
  const std::string table = sample().table();
  CHECK(table.find("layers.39\n") == std::string::npos);
  CHECK(table.find("… and 11 more") != std::string::npos);
  Report report;
  report.passes.emplace_back().pass = "plain";
  report.passes[0].row("a\x1b[31m\xff", "pr\runed").details = {{"k\n", "v\n"}};
  report.passes[0].warnings = {"layer \x1b[31m"};
  CHECK(report.table().find('\x1b') == std::string::npos);
  CHECK(report.table().find('\r') == std::string::npos);
}

TEST_CASE("the JSON holds every row and numbers as numbers", "[report]") {
  const auto json = nlohmann::json::parse(sample().json());
  CHECK(json["passes"][1]["rows"].size() == 51);
  CHECK(json["passes"][0]["rows"][0]["details"]["kept"] == 23);
  CHECK(json["passes"][1]["rows"][1]["details"]["SQNR"] == 30.2);
  CHECK(json["passes"][0]["rows"][2]["details"]["why"] == "its outputs are the model's");
  CHECK(json["bytes"]["after"] == 612000);
  CHECK(json["passes"][1]["rows"][50]["layer"] == "bad\nname");

  Report odd;
  odd.passes.emplace_back().row("\xff", "x").details = {{"a", "nan"}, {"b", "1e999"}, {"c", "007x"},
                                                        {"d", ""},    {"e", "-3"},    {"f", "inf"}};
  const auto details = nlohmann::json::parse(odd.json())["passes"][0]["rows"][0]["details"];
  CHECK(details["a"] == "nan");
  CHECK(details["b"] == "1e999");
  CHECK(details["c"] == "007x");
  CHECK(details["d"] == "");
  CHECK(details["e"] == -3);
  CHECK(details["f"] == "inf");
}

TEST_CASE("an empty report is whole", "[report]") {
  CHECK(Report{}.table() == "bytes       0 B -> 0 B\nparameters  0 -> 0\n");
  CHECK(nlohmann::json::parse(Report{}.json())["passes"].empty());
}

TEST_CASE("progress is one line that is drawn over and erased", "[progress]") {
  const std::string out = written([](std::FILE* file) {
    TerminalProgress bar(file, 60);
    bar.begin("calibrating", 4);
    bar.step(2);  // too soon after the last drawing
    bar.step(4);
    bar.end();
    bar.end();
  });
  CHECK(out ==
        "\rcalibrating [------------------------]   0 %\x1b[K"
        "\rcalibrating [########################] 100 %\x1b[K"
        "\r\x1b[K");
}

TEST_CASE("progress keeps within the terminal and says what is left", "[progress]") {
  const std::string narrow = written([](std::FILE* file) {
    TerminalProgress bar(file, 8);
    bar.begin("größe größe größe", 0);
  });
  CHECK(is_utf8(narrow));
  CHECK(narrow.size() <= std::string("\r\x1b[K").size() + 7);

  const std::string left = written([](std::FILE* file) {
    TerminalProgress bar(file, 80);
    bar.begin("x\x1b", 100);
    const auto begin = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(110)) {
    }
    bar.step(1);
  });
  CHECK(left.find("  1 %  0:") != std::string::npos);  // 99 times 110 ms and more
  CHECK(left.find("x\\x1b [") != std::string::npos);
}

TEST_CASE("a silent progress accepts everything", "[progress]") {
  Progress silent;
  silent.begin("x", 3);
  silent.step(3);
  silent.end();
  TerminalProgress off(nullptr, 80);
  off.begin("x", 3);
  off.step(3);
  off.end();
}

TEST_CASE("the version is the project's", "[version]") {
  std::ifstream in(std::filesystem::path(TERSOR_SOURCE_DIR) / "CMakeLists.txt");
  std::stringstream text;
  text << in.rdbuf();
  CHECK(text.str().find(fmt::format("project(tersor VERSION {} ", version)) != std::string::npos);
}

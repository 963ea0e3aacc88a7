#include <random>

#include "catch.hpp"
#include "fake_passes.hpp"

using namespace tersor;

namespace {

Pipeline parse(std::string_view yaml) { return parse_recipe(yaml, fake::passes()); }

std::string error_of(std::string_view yaml) {
  try {
    parse(yaml);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

fake::Everything everything(const std::string& options) {
  return *parse("passes:\n  - everything: {" + options + "}\n").passes().at(0).as<fake::Everything>();
}

}  // namespace

TEST_CASE("a recipe lists names and one-key maps", "[recipe]") {
  const Pipeline p = parse(R"(# made smaller
passes:
  - plain
  - scale:
      by: 3
  - everything:
      amount: 1
      targets: [conv1, 're:block\.[0-9]+']
      weights:
        - 1
        - 2.5
)");
  CHECK(p.text() ==
        "plain, scale(by=3), everything(amount=1, targets=[conv1, 're:block\\\\.[0-9]+'], weights=[1, 2.5])");
  CHECK(p.yaml() ==
        "passes:\n"
        "  - plain\n"
        "  - scale:\n"
        "      by: 3\n"
        "  - everything:\n"
        "      amount: 1\n"
        "      targets: [conv1, \"re:block\\\\.[0-9]+\"]\n"
        "      weights: [1, 2.5]\n");
  CHECK(parse("{passes: [plain, scale: {by: 3}]}").text() == "plain, scale(by=3)");
  CHECK(parse("passes: [scale: {}]").text() == "scale");
  CHECK(Pipeline{}.yaml() == "passes: []\n");
  CHECK(Pipeline{fake::Plain{}, Pipeline{fake::Plain{}, fake::Scale{3}}}.yaml() ==
        "passes:\n  - plain\n  - plain\n  - scale:\n      by: 3\n");
}

TEST_CASE("scalars keep their spelling and are read by the type of their field", "[recipe]") {
  CHECK(everything("amount: 1").amount == Amount(1));
  CHECK(everything("amount: 1.0").amount == Amount(1.0));
  CHECK(everything("amount: '0.25'").amount == Amount(0.25));
  CHECK(everything("targets: 12").targets == std::vector<std::string>{"12"});
  CHECK(everything("targets: [1.0, yes, \"null\"]").targets == std::vector<std::string>{"1.0", "yes", "null"});
  CHECK(everything("note: 0x1F").note == "0x1F");
  CHECK(everything("note: two words").note == "two words");
  CHECK(everything("verify: true").verify);
  CHECK(everything("path: none").path == std::nullopt);
  CHECK(everything("path: \"none\"").path == "none");
}

TEST_CASE("a wrong recipe says where and what was expected", "[recipe]") {
  CHECK(error_of("passes:\n  - plain\npases: 1\n") ==
        "BadRecipe: recipe line 3:1: unknown key 'pases'; did you mean 'passes'? The only key is 'passes'");
  CHECK(error_of("zzzzzz: 1\n") == "BadRecipe: recipe line 1:1: unknown key 'zzzzzz'. The only key is 'passes'");
  CHECK(error_of("- plain") == "BadRecipe: recipe line 1:1: expected a map with the key 'passes'");
  CHECK(error_of("{}") == "BadRecipe: recipe line 1:1: the key 'passes' is missing");
  CHECK(error_of("passes: plain") ==
        "BadRecipe: recipe line 1:9: 'passes' is not a list; write each pass on a line of its own, as '- name'");
  CHECK(error_of("passes: []") == "BadRecipe: recipe line 1:9: 'passes' is empty; name at least one pass");
  CHECK(error_of("passes: [plain]\npasses: [plain]") == "BadRecipe: recipe line 2:1: 'passes' is given twice");
  CHECK(error_of("passes:\n  - scale:\n") ==
        "BadRecipe: recipe line 2:5: 'scale:' has no options; leave the colon away, or give some");
  CHECK(error_of("passes:\n  - scale: 3\n") ==
        "BadRecipe: recipe line 2:12: expected the options of 'scale' as a map 'option: value'");
  CHECK(error_of("passes:\n  - scale: {by: 1}\n    plain: {}\n") ==
        "BadRecipe: recipe line 2:5: expected a pass: its name, or one key 'name:' with its options");
  CHECK(error_of("passes:\n  - ~\n").starts_with("BadRecipe: recipe line 2:5: expected a pass"));
  CHECK(error_of("passes:\n  - scale:\n      by: 1\n      by: 2\n") ==
        "BadRecipe: recipe line 4:7: option 'by' of scale is given twice");
  CHECK(error_of("passes:\n  - scale:\n      by:\n") ==
        "BadRecipe: recipe line 3:7: option 'by' is empty; expected a value or a list");
  CHECK(error_of("passes:\n  - scale: {by: null}\n") ==
        "BadRecipe: recipe line 2:13: option 'by' is empty; expected a value or a list");
  CHECK(error_of("passes:\n  - scale: {by: {x: 1}}\n") ==
        "BadRecipe: recipe line 2:17: option 'by' is a map; expected a value or a list");
  CHECK(error_of("passes:\n  - everything: {targets: [a, ~]}\n")
            .starts_with("BadRecipe: recipe line 2:31: option 'targets' is empty"));
  CHECK(error_of("passes:\n  - [plain]\n").starts_with("BadRecipe: recipe line 2:5: expected a pass"));
  CHECK(error_of("passes: [plain]\n---\npasses: [plain]\n") ==
        "BadRecipe: the recipe goes on after its first YAML document");
  CHECK(error_of("") == "BadRecipe: the recipe is empty");
  CHECK(error_of("passes: [\xff]") == "BadRecipe: the recipe is not UTF-8 text");
  CHECK(error_of("passes: [plain").starts_with("BadRecipe: recipe line 1:"));
  CHECK(error_of("passes:\n\t- plain").starts_with("BadRecipe: recipe line 2:"));
  CHECK(error_of("passes:\n  - scale: {by: *x}").starts_with("BadRecipe: recipe line 2:"));
  CHECK(error_of(std::string(2 << 20, ' ')) == "BadRecipe: the recipe is 2097152 bytes long; expected at most 1048576");
}

TEST_CASE("wrong passes and options of a recipe carry the line", "[recipe]") {
  CHECK(error_of("passes:\n  - plain\n  - scael\n")
            .starts_with("UnknownPass: recipe line 3:5: there is no pass 'scael'; did you mean 'scale'?"));
  CHECK(
      error_of("passes:\n  - plain\n  - scale: {bu: 3}\n")
          .starts_with("UnknownOption: recipe line 3:5: pass 2 (scale): scale has no option 'bu'; did you mean 'by'?"));
  CHECK(error_of("passes:\n  - scale: {by: 0}\n") ==
        "BadOption: recipe line 2:5: pass 1 (scale): by=0 would clear every weight");
}

TEST_CASE("aliases work, bombs and loops of them are refused", "[recipe]") {
  CHECK(parse("passes:\n  - everything: {targets: &t [a, b]}\n  - everything: {targets: *t}\n").text() ==
        "everything(targets=[a, b]), everything(targets=[a, b])");
  std::string bomb = "passes:\n  - everything:\n      note: &a0 x\n";
  for (int i = 1; i <= 12; ++i) {
    bomb += fmt::format("      o{0}: &a{0} [", i);
    for (int k = 0; k < 10; ++k) bomb += fmt::format("*a{}, ", i - 1);
    bomb += "]\n";
  }
  CHECK(error_of(bomb).find("the recipe has more than 100000 values") != std::string::npos);
  CHECK(error_of("passes:\n  - everything: {targets: &t [*t]}\n").starts_with("BadRecipe: recipe line 2:"));
  CHECK(error_of("passes:\n  - everything: {targets: " + std::string(100000, '[') + "}\n").starts_with("BadRecipe:"));
}

TEST_CASE("parse(yaml(x)) == x", "[recipe][property]") {
  std::mt19937 random(13);
  for (int round = 0; round < 1000; ++round) {
    const Pipeline p = fake::random_pipeline(random);
    const std::string yaml = p.yaml();
    INFO(yaml);
    const Pipeline again = parse(yaml);
    CHECK(fake::same(p, again));
    CHECK(again.yaml() == yaml);
  }
}

TEST_CASE("text that once kept the YAML library busy for ever", "[recipe][fuzz]") {
  CHECK(error_of(R"(,e"s",p"s#a!}|s@sp*~`}[e- e)").starts_with("BadRecipe: "));
  CHECK(error_of("passes: [plain]\n]").starts_with("BadRecipe: "));
}

TEST_CASE("random bytes and broken recipes are errors, never crashes", "[recipe][fuzz]") {
  std::mt19937 random(17);
  const auto only_errors = [](const std::string& yaml) {
    try {
      const Pipeline p = parse(yaml);
      if (!fake::same(p, parse(p.yaml()))) FAIL("not the same when printed and read again: " << yaml);
    } catch (const Error& e) {
      if (exit_code(e.code()) != 2 || !is_utf8(e.what())) FAIL(e.what() << " for: " << yaml);
    }
  };
  const std::string alphabet = "passes: -\n[]{}&*!'\"\\#|>%@`?,:~ <scale";
  for (int round = 0; round < 4000; ++round) {
    std::string bytes = round % 3 == 0 ? "passes:\n" : "";
    for (auto n = random() % 40; n > 0; --n)
      bytes += round % 2 == 0 ? static_cast<char>(random()) : alphabet[random() % alphabet.size()];
    only_errors(bytes);
  }
  for (int round = 0; round < 4000; ++round) {
    std::string yaml = fake::random_pipeline(random).yaml();
    for (auto n = 1 + random() % 3; n > 0 && !yaml.empty(); --n) {
      const std::size_t at = random() % yaml.size();
      switch (random() % 3) {
        case 0:
          yaml.erase(at, 1 + random() % 5);
          break;
        case 1:
          yaml.insert(at, 1, alphabet[random() % alphabet.size()]);
          break;
        default:
          yaml.insert(at, yaml.substr(random() % yaml.size(), random() % 10));
      }
    }
    only_errors(yaml);
  }
}

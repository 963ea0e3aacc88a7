#include <random>

#include "catch.hpp"
#include "fake_passes.hpp"

using namespace tersor;

namespace {

Pipeline parse(std::string_view text) { return parse_pipeline(text, fake::passes()); }

std::string error_of(std::string_view text) {
  try {
    parse(text);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

fake::Everything everything(std::string_view text) { return *parse(text).passes().at(0).as<fake::Everything>(); }

}  // namespace

TEST_CASE("a pipeline is read as it is written", "[grammar]") {
  const Pipeline p = parse("scale(by=3), plain , everything( amount=1 ,targets=[a, 'b c'])");
  REQUIRE(p.passes().size() == 3);
  CHECK(p.passes()[0].as<fake::Scale>()->by == 3.0);
  CHECK(p.passes()[1].as<fake::Plain>() != nullptr);
  CHECK(p.passes()[1].as<fake::Scale>() == nullptr);
  CHECK(p.passes()[2].as<fake::Everything>()->amount == Amount(1));
  CHECK(p.text() == "scale(by=3), plain, everything(amount=1, targets=[a, 'b c'])");
  CHECK(parse("scale").text() == "scale");
  CHECK(parse(" plain ( ) ").text() == "plain");
  CHECK(parse("\n scale(\n\tby = 3\r\n)\n").text() == "scale(by=3)");
  CHECK(parse("scale(by=2)").text() == "scale");  // the default
}

TEST_CASE("values are read by the type of their field", "[grammar]") {
  CHECK(everything("everything(targets=12)").targets == std::vector<std::string>{"12"});
  CHECK(everything("everything(targets=[])").targets.empty());
  CHECK(everything("everything(weights=[1, 2.5])").weights == std::vector<double>{1.0, 2.5});
  CHECK(everything("everything(note=true)").note == "true");
  CHECK(everything("everything(verify='true')").verify);
  CHECK(everything("everything(path='none')").path == "none");
  CHECK(everything("everything(path=none)").path == std::nullopt);
  CHECK(everything("everything(amount=1)").amount.is_count());
  CHECK_FALSE(everything("everything(amount=1.0)").amount.is_count());
  CHECK(everything("everything(note=re:block.*)").note == "re:block.*");
  CHECK(everything("everything(note='re:block\\.[0-9]+')").note == "re:block\\.[0-9]+");  // a lone backslash stays
  CHECK(everything("everything(note='re:block\\\\.[0-9]+')").note == "re:block\\.[0-9]+");
  CHECK(everything("everything(note='it\\'s')").note == "it's");
  CHECK(everything("everything(note='')").note.empty());
  CHECK(everything("everything(note='größe, (層) = ]')").note == "größe, (層) = ]");
}

TEST_CASE("a syntax error shows the place and what was expected", "[grammar]") {
  CHECK(error_of("scale(by=3") ==
        "BadSyntax: expected ',' or ')', but the text ends at character 11\n"
        "  scale(by=3\n"
        "            ^");
  CHECK(error_of("scale(by 3)") ==
        "BadSyntax: expected '=', but found '3' at character 10\n"
        "  scale(by 3)\n"
        "           ^");
  CHECK(error_of("").starts_with("BadSyntax: expected the name of a pass, but the text ends at character 1\n"));
  CHECK(error_of("plain,").starts_with("BadSyntax: expected the name of a pass, but the text ends at character 7\n"));
  CHECK(error_of("plain plain").starts_with("BadSyntax: expected '(', ',' or the end, but found 'p' at character 7\n"));
  CHECK(error_of("scale(by=1) x").starts_with("BadSyntax: expected ',' or the end, but found 'x' at character 13\n"));
  CHECK(error_of("plain() x").starts_with("BadSyntax: expected ',' or the end, but found 'x' at character 9\n"));
  CHECK(error_of("scale(by=)")
            .starts_with("BadSyntax: expected a value: a number, a word, 'quoted text' or a [list], but found ')' at "
                         "character 10\n"));
  CHECK(error_of("scale(by=1,)")
            .starts_with("BadSyntax: expected the name of an option, but found ')' at character 12\n"));
  CHECK(error_of("scale(by=\"1\")")
            .starts_with("BadSyntax: expected a value: a number, a word, 'quoted text' or a [list], but found '\\x22' "
                         "at character 10\n"));
  CHECK(error_of("everything(targets=[a b])")
            .starts_with("BadSyntax: expected ',' or ']', but found 'b' at character 23\n"));
  CHECK(error_of("everything(note='abc)").starts_with("BadSyntax: the quote is never closed at character 17\n"));
  CHECK(error_of("scale(by=1, by=2)") ==
        "BadSyntax: option 'by' of scale is given twice at character 13\n"
        "  scale(by=1, by=2)\n"
        "              ^");
  CHECK(error_of("plain, \x1b[31m").find('\x1b') == std::string::npos);
  CHECK(error_of("plain\xff") == "BadSyntax: the pipeline is not UTF-8 text");
  CHECK(error_of(std::string("plain\0", 6))
            .starts_with("BadSyntax: expected '(', ',' or the end, but found '\\x00' at character 6\n"));
}

TEST_CASE("the caret stands under the place in long, wide and broken lines", "[grammar]") {
  CHECK(error_of("everything(note='größe 层') x") ==
        "BadSyntax: expected ',' or the end, but found 'x' at character 28\n"
        "  everything(note='größe 层') x\n"
        "                             ^");
  CHECK(error_of("plain,\nplain;").ends_with("\n  plain, plain;\n              ^"));
  const std::string message = error_of("everything(note='" + std::string(1000, 'x') + "') ;" + std::string(1000, 'y'));
  const std::size_t line = message.find('\n') + 1, caret = message.rfind('\n') + 1;
  const std::string shown = message.substr(line, caret - line - 1);
  CHECK(shown.starts_with("  …xxxx"));
  CHECK(shown.size() < 100);
  CHECK(shown.substr(message.size() - caret - 1 + 2, 1) == ";");  // "…" is three bytes wide, one column
}

TEST_CASE("unknown passes and options name the near misses", "[grammar]") {
  CHECK(error_of("scael") ==
        "UnknownPass: there is no pass 'scael'; did you mean 'scale'? The passes are: everything, scale, plain, fails, "
        "needy, liar");
  CHECK(error_of("zzzzzzz").starts_with("UnknownPass: there is no pass 'zzzzzzz'; the passes are: everything, scale"));
  CHECK(error_of("plain, scale(bu=3)") ==
        "UnknownOption: pass 2 (scale): scale has no option 'bu'; did you mean 'by'? Its options are: by");
  CHECK(error_of("scale(by=x)") ==
        "BadOption: pass 1 (scale): by: expected a number, got 'x' (range [-1000000, 1000000])");
  CHECK(error_of("scale(by=0)") == "BadOption: pass 1 (scale): by=0 would clear every weight");
  CHECK(error_of("everything(amount=1.2)").starts_with("BadOption: pass 1 (everything): amount=1.2 is outside [0, 1]"));
  CHECK(error_of("everything(count=0)") == "BadOption: pass 1 (everything): count=0 is outside [1, 100]");
}

TEST_CASE("lists nest to a limit, texts are long to a limit", "[grammar]") {
  const auto nested = [](std::size_t depth) {
    return "everything(targets=" + std::string(depth, '[') + std::string(depth, ']') + ")";
  };
  CHECK(error_of(nested(16)) == "BadOption: pass 1 (everything): targets: expected text, got a list");
  CHECK(error_of(nested(17)).starts_with("BadSyntax: lists nest deeper than 16 at character 36\n"));
  CHECK(error_of(nested(100000)).starts_with("BadSyntax: lists nest deeper than 16"));
  CHECK(error_of(std::string(2 << 20, ' ')) ==
        "BadSyntax: the pipeline is 2097152 bytes long; expected at most 1048576");
}

TEST_CASE("parse(print(x)) == x", "[grammar][property]") {
  std::mt19937 random(7);
  for (int round = 0; round < 1000; ++round) {
    const Pipeline p = fake::random_pipeline(random);
    const std::string text = p.text();
    INFO(text);
    const Pipeline again = parse(text);
    CHECK(fake::same(p, again));
    CHECK(again.text() == text);
  }
}

TEST_CASE("random bytes and broken pipelines are errors, never crashes", "[grammar][fuzz]") {
  std::mt19937 random(11);
  const auto only_errors = [](const std::string& text) {
    try {
      const Pipeline p = parse(text);
      if (!fake::same(p, parse(p.text()))) FAIL("not the same when printed and read again: " << text);
    } catch (const Error& e) {
      if (exit_code(e.code()) != 2 || !is_utf8(e.what())) FAIL(e.what() << " for: " << text);
    }
  };
  const std::string alphabet = "scale(by=1),'\\[] \n.ü";
  for (int round = 0; round < 10000; ++round) {
    std::string bytes(random() % 40, '\0');
    for (char& c : bytes) c = round % 2 == 0 ? static_cast<char>(random()) : alphabet[random() % alphabet.size()];
    only_errors(bytes);
  }
  for (int round = 0; round < 10000; ++round) {
    std::string text = fake::random_pipeline(random).text();
    for (auto n = 1 + random() % 3; n > 0 && !text.empty(); --n) {
      const std::size_t at = random() % text.size();
      switch (random() % 4) {
        case 0:
          text.erase(at, 1 + random() % 5);
          break;
        case 1:
          text.insert(at, 1, alphabet[random() % alphabet.size()]);
          break;
        case 2:
          text[at] = static_cast<char>(random());
          break;
        default:
          text.insert(at, text.substr(random() % text.size(), random() % 10));
      }
    }
    only_errors(text);
  }
}

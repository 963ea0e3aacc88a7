#include "tersor/core/options.hpp"

#include <limits>

#include "catch.hpp"

using namespace tersor;

namespace {

enum class Color { red, dark_green };

struct Sample {
  Amount amount = 0.5;
  std::int64_t round_to = 8;
  int bits = 8;
  double factor = 1.5;
  double free = 0;
  bool verify = false;
  std::string note = "plain";
  std::vector<std::string> targets = {};
  std::vector<std::int64_t> sizes{1, 2};
  std::optional<std::string> path = std::nullopt;
  std::optional<double> limit = std::nullopt;
  Color color = Color::red;

  static constexpr std::string_view name = "sample";
  static constexpr auto fields() {
    return std::tuple{Field{"amount", &Sample::amount, "How much."},
                      Field{"round_to", &Sample::round_to, "Multiple.", 1.0, 64.0, "channels"},
                      Field{"bits", &Sample::bits, "Width.", 2.0, 8.0, "bits"},
                      Field{"factor", &Sample::factor, "Factor.", 0.0},
                      Field{"free", &Sample::free, "Anything."},
                      Field{"verify", &Sample::verify, "Check."},
                      Field{"note", &Sample::note, "Words."},
                      Field{"targets", &Sample::targets, "Layers."},
                      Field{"sizes", &Sample::sizes, "Sizes.", 1.0},
                      Field{"path", &Sample::path, "Where."},
                      Field{"limit", &Sample::limit, "Limit.", {}, 10.0},
                      Field{"color", &Sample::color, "Colour."}};
  }
};

struct Empty {
  static constexpr auto fields() { return std::tuple<>{}; }
};

OptionValue bare(std::string s) { return {OptionValue::Kind::bare, std::move(s), {}}; }
OptionValue quoted(std::string s) { return {OptionValue::Kind::quoted, std::move(s), {}}; }
OptionValue list(std::vector<OptionValue> items) { return {OptionValue::Kind::list, {}, std::move(items)}; }

/// `Code: message` of what setting an option throws.
std::string error_of(std::string_view key, const OptionValue& value) {
  Sample s;
  try {
    set_option(s, key, value);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

template <typename F>
std::string thrown(F f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

}  // namespace

template <>
struct tersor::EnumNames<Color> {
  static constexpr std::array<std::pair<Color, std::string_view>, 2> names{
      {{Color::red, "red"}, {Color::dark_green, "dark_green"}}};
};

TEST_CASE("options are read by the type of their field", "[options]") {
  Sample s;
  set_option(s, "amount", bare("3"));
  CHECK(s.amount == Amount(3));
  set_option(s, "amount", bare("1.0"));
  CHECK(s.amount == Amount(1.0));
  set_option(s, "round_to", bare("16"));
  CHECK(s.round_to == 16);
  set_option(s, "bits", quoted("4"));
  CHECK(s.bits == 4);
  set_option(s, "factor", bare("2e-3"));
  CHECK(s.factor == 2e-3);
  set_option(s, "free", bare("-7"));
  CHECK(s.free == -7.0);
  set_option(s, "verify", bare("true"));
  CHECK(s.verify);
  set_option(s, "note", bare("12"));
  CHECK(s.note == "12");
  set_option(s, "targets", bare("conv1"));
  CHECK(s.targets == std::vector<std::string>{"conv1"});
  set_option(s, "targets", list({bare("12"), quoted("re:a b")}));
  CHECK(s.targets == std::vector<std::string>{"12", "re:a b"});
  set_option(s, "targets", list({}));
  CHECK(s.targets.empty());
  set_option(s, "sizes", list({bare("5")}));
  CHECK(s.sizes == std::vector<std::int64_t>{5});
  set_option(s, "path", quoted("none"));
  CHECK(s.path == "none");
  set_option(s, "path", bare("none"));
  CHECK(s.path == std::nullopt);
  set_option(s, "limit", bare("3.5"));
  CHECK(s.limit == 3.5);
  set_option(s, "color", bare("dark_green"));
  CHECK(s.color == Color::dark_green);
}

TEST_CASE("a wrong value names the option, what was expected and the range", "[options]") {
  CHECK(error_of("amount", bare("1.2")) ==
        "BadOption: amount=1.2 is outside [0, 1]; expected a fraction such as 0.3, or a whole number for a count");
  CHECK(error_of("amount", bare("-1")) == "BadOption: amount=-1 is negative; expected a count of at least 0");
  CHECK(error_of("amount", bare("half")) == "BadOption: amount: expected a fraction, got 'half'");
  CHECK(error_of("amount", bare("nan")).starts_with("BadOption: amount=nan is outside [0, 1]"));
  CHECK(error_of("round_to", bare("0")) == "BadOption: round_to=0 is outside [1, 64]");
  CHECK(error_of("round_to", bare("8.5")) == "BadOption: round_to: expected an integer, got '8.5' (range [1, 64])");
  CHECK(error_of("round_to", bare("99999999999999999999")) ==
        "BadOption: round_to: expected an integer, got '99999999999999999999' (range [1, 64])");
  CHECK(error_of("bits", bare("9")) == "BadOption: bits=9 is outside [2, 8]");
  CHECK(error_of("factor", bare("-0.5")) == "BadOption: factor=-0.5 is outside [0, inf)");
  CHECK(error_of("factor", bare("inf")) == "BadOption: factor=inf is not a finite number");
  CHECK(error_of("free", bare("nan")) == "BadOption: free=nan is not a finite number");
  CHECK(error_of("free", bare("")) == "BadOption: free: expected a number, got ''");
  CHECK(error_of("free", bare("1x")) == "BadOption: free: expected a number, got '1x'");
  CHECK(error_of("verify", bare("yes")) == "BadOption: verify: expected true|false, got 'yes'");
  CHECK(error_of("note", list({bare("a")})) == "BadOption: note: expected text, got a list");
  CHECK(error_of("note", quoted("\xff")) == "BadOption: note='\\xff' is not UTF-8");
  CHECK(error_of("targets", list({list({})})) == "BadOption: targets: expected text, got a list");
  CHECK(error_of("sizes", list({bare("3"), bare("0")})) == "BadOption: sizes=0 is outside [1, inf)");
  CHECK(error_of("limit", bare("11")) == "BadOption: limit=11 is outside (-inf, 10]");
  CHECK(error_of("color", bare("blue")) == "BadOption: color: expected red|dark_green, got 'blue'");
  CHECK(error_of("color", quoted("r\ned")) == "BadOption: color: expected red|dark_green, got 'r\\x0aed'");
}

TEST_CASE("a value that is refused leaves the option as it was", "[options]") {
  Sample s;
  CHECK_THROWS_AS(set_option(s, "round_to", bare("0")), Error);
  CHECK_THROWS_AS(set_option(s, "sizes", list({bare("7"), bare("0")})), Error);
  CHECK(s.round_to == 8);
  CHECK(s.sizes == std::vector<std::int64_t>{1, 2});
}

TEST_CASE("an unknown option names the near misses and all there are", "[options]") {
  CHECK(error_of("amonut", bare("1")) ==
        "UnknownOption: sample has no option 'amonut'; did you mean 'amount'? Its options are: amount, round_to, bits, "
        "factor, free, verify, note, targets, sizes, path, limit, color");
  CHECK(error_of("zzzzz\n", bare("1"))
            .starts_with("UnknownOption: sample has no option 'zzzzz\\x0a'; its options are: amount"));
  Empty e;
  CHECK(thrown([&] { set_option(e, "x", bare("1")); }) ==
        "UnknownOption: this has no option 'x'; its options are: none");
}

TEST_CASE("structs filled in C++ are held to the same rules", "[options]") {
  CHECK(thrown([] { validate_options(Sample{}); }).empty());
  CHECK(thrown([] { validate_options(Empty{}); }).empty());
  CHECK(thrown([] { validate_options(Sample{.amount = 1.2}); }).starts_with("BadOption: amount=1.2 is outside [0, 1]"));
  CHECK(thrown([] { validate_options(Sample{.round_to = 65}); }) == "BadOption: round_to=65 is outside [1, 64]");
  CHECK(thrown([] { validate_options(Sample{.factor = std::numeric_limits<double>::quiet_NaN()}); }) ==
        "BadOption: factor=nan is not a finite number");
  CHECK(thrown([] {
          validate_options(Sample{.targets = {"ok", "\xc0"}});
        }) == "BadOption: targets='\\xc0' is not UTF-8");
  CHECK(thrown([] { validate_options(Sample{.limit = 10.5}); }) == "BadOption: limit=10.5 is outside (-inf, 10]");
}

TEST_CASE("changed options come in field order and set the same struct again", "[options]") {
  CHECK(changed_options(Sample{}).empty());
  CHECK(changed_options(Empty{}).empty());
  const Sample s{.amount = 1,
                 .factor = 0.1,
                 .verify = true,
                 .targets = {"block.1.conv", "re:x\\.[0-9]+", "it's"},
                 .sizes = {},
                 .path = "none",
                 .color = Color::dark_green};
  const auto options = changed_options(s);
  std::string all;
  for (const auto& [key, value] : options) all += key + "=" + text(value) + " ";
  CHECK(all ==
        "amount=1 factor=0.1 verify=true targets=[block.1.conv, 're:x\\\\.[0-9]+', 'it\\'s'] sizes=[] path='none' "
        "color=dark_green ");
  Sample again;
  for (const auto& [key, value] : options) set_option(again, key, value);
  CHECK(again.amount == s.amount);
  CHECK(again.factor == s.factor);
  CHECK(again.targets == s.targets);
  CHECK(again.sizes == s.sizes);
  CHECK(again.path == s.path);
  CHECK(again.color == s.color);
  CHECK(changed_options(again) == options);
}

TEST_CASE("descriptions say name, type, default, range and unit", "[options]") {
  const std::vector<OptionInfo> all = describe_options<Sample>();
  REQUIRE(all.size() == 12);
  CHECK(all[0].type == "fraction or count");
  CHECK(all[0].default_text == "0.5");
  CHECK(all[0].range == "fraction in [0, 1], count in [0, inf)");
  CHECK(all[1].name == "round_to");
  CHECK(all[1].type == "integer");
  CHECK(all[1].default_text == "8");
  CHECK(all[1].range == "[1, 64]");
  CHECK(all[1].unit == "channels");
  CHECK(all[1].help == "Multiple.");
  CHECK(all[7].type == "list of text");
  CHECK(all[7].default_text == "[]");
  CHECK(all[8].default_text == "[1, 2]");
  CHECK(all[9].default_text == "none");
  CHECK(all[10].range == "(-inf, 10]");
  CHECK(all[11].type == "red|dark_green");
  CHECK(describe_options<Empty>().empty());
}

TEST_CASE("text puts quotes only where reading it back needs them", "[options]") {
  CHECK(text(bare("0.3")) == "0.3");
  CHECK(text(quoted("block.1.conv")) == "block.1.conv");
  CHECK(text(quoted("re:block.*")) == "re:block.*");
  CHECK(text(quoted("re:block\\.[0-9]+")) == "'re:block\\\\.[0-9]+'");
  CHECK(text(quoted("a b")) == "'a b'");
  CHECK(text(quoted("größe")) == "'größe'");
  CHECK(text(quoted("it's")) == "'it\\'s'");
  CHECK(text(quoted("")) == "''");
  CHECK(text(bare("none")) == "none");
  CHECK(text(quoted("none")) == "'none'");
  CHECK(text(list({bare("a"), list({}), quoted("b,c")})) == "[a, [], 'b,c']");
}

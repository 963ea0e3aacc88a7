#include "tersor/core/names.hpp"

#include <random>

#include "catch.hpp"

using namespace tersor;

TEST_CASE("escaped keeps printable text and makes the rest harmless", "[names]") {
  CHECK(escaped("block.1.conv") == "block.1.conv");
  CHECK(escaped("größe 层 🙂") == "größe 层 🙂");
  CHECK(escaped("a\nb\x1b[31m") == "a\\x0ab\\x1b[31m");
  CHECK(escaped("it's \"x\" \\") == "it\\x27s \\x22x\\x22 \\x5c");
  CHECK(escaped(std::string_view("a\0b", 3)) == "a\\x00b");
  CHECK(escaped("\x7f") == "\\x7f");
  CHECK(escaped("\xc2\x9b") == "\\xc2\\x9b");             // a C1 control: CSI
  CHECK(escaped("a\xe2\x80\xae") == "a\\xe2\\x80\\xae");  // right-to-left override
  CHECK(escaped("").empty());
}

TEST_CASE("bytes that are no UTF-8 are escaped one by one", "[names]") {
  CHECK(escaped("\xff") == "\\xff");
  CHECK(escaped("\xc0\xaf") == "\\xc0\\xaf");                    // overlong '/'
  CHECK(escaped("\xe0\x80\xaf") == "\\xe0\\x80\\xaf");           // overlong
  CHECK(escaped("\xed\xa0\x80") == "\\xed\\xa0\\x80");           // a surrogate
  CHECK(escaped("\xf4\x90\x80\x80") == "\\xf4\\x90\\x80\\x80");  // beyond U+10FFFF
  CHECK(escaped("\xe5\xb1") == "\\xe5\\xb1");                    // cut off
  CHECK(escaped("\xe5\xb1"
                "a") ==
        "\\xe5\\xb1"
        "a");
  CHECK_FALSE(is_utf8("a\xff"));
  CHECK_FALSE(is_utf8("\xed\xa0\x80"));
  CHECK(is_utf8("größe 层 🙂"));
  CHECK(is_utf8(""));
}

TEST_CASE("escaped text of any bytes is UTF-8 without controls, and stays what it is", "[names]") {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    std::string s(random() % 12, '\0');
    for (char& c : s) c = static_cast<char>(random() % 4 == 0 ? 0xE0 + random() % 16 : random() % 256);
    const std::string out = escaped(s);
    CHECK(is_utf8(out));
    for (const char c : out) CHECK((static_cast<unsigned char>(c) >= 0x20 && c != 0x7f && c != '\'' && c != '"'));
    if (out != s) CHECK(out.find("\\x") != std::string::npos);
  }
}

TEST_CASE("every code point round-trips through the UTF-8 check", "[names]") {
  for (std::uint32_t c = 0x80; c < 0x110000; c += c < 0x3000 ? 1 : 37) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string s;
    if (c < 0x800) {
      s = {static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 0x3F))};
    } else if (c < 0x10000) {
      s = {static_cast<char>(0xE0 | c >> 12), static_cast<char>(0x80 | (c >> 6 & 0x3F)),
           static_cast<char>(0x80 | (c & 0x3F))};
    } else {
      s = {static_cast<char>(0xF0 | c >> 18), static_cast<char>(0x80 | (c >> 12 & 0x3F)),
           static_cast<char>(0x80 | (c >> 6 & 0x3F)), static_cast<char>(0x80 | (c & 0x3F))};
    }
    if (detail::utf8_length(s) != s.size() || detail::utf8_code_point(s) != c) FAIL("code point " << c);
  }
}

TEST_CASE("nearest names: the typing error first, then a common start or end", "[names]") {
  const std::vector<std::string> passes{"prune_l1", "prune_structured", "quantize_static", "quantize_dynamic",
                                        "fold_batch_norm"};
  CHECK(nearest_names("prune_ll", passes).front() == "prune_l1");
  CHECK(nearest_names("qunatize_static", passes) == std::vector<std::string>{"quantize_static"});
  CHECK(nearest_names("PRUNE_L1", passes).front() == "prune_l1");
  CHECK(nearest_names("prune", passes) == std::vector<std::string>{"prune_l1", "prune_structured"});
  CHECK(nearest_names("conv", {"block.1.conv", "head"}) == std::vector<std::string>{"block.1.conv"});
  CHECK(nearest_names("zzz", passes).empty());
  CHECK(nearest_names("", passes).empty());
  CHECK(nearest_names("amonut", {"amount"}) == std::vector<std::string>{"amount"});  // a swap is one edit
  CHECK(nearest_names("a", {"b", "c"}).empty());                                     // nothing in common
  CHECK(nearest_names("layer1", {"layer2", "layer3", "layer4", "layer5"}, 2) ==
        std::vector<std::string>{"layer2", "layer3"});
  CHECK(nearest_names(std::string(100000, 'a'), {std::string(100001, 'a')}).empty());
}

TEST_CASE("did_you_mean is a clause or nothing", "[names]") {
  CHECK(did_you_mean("amonut", {"amount", "scope"}) == "; did you mean 'amount'?");
  CHECK(did_you_mean("layer1", {"layer2", "layer3"}) == "; did you mean 'layer2' or 'layer3'?");
  CHECK(did_you_mean("layer1", {"layer2", "layer3", "layer4"}) == "; did you mean 'layer2', 'layer3' or 'layer4'?");
  CHECK(did_you_mean("layer", {"layer\n"}) == "; did you mean 'layer\\x0a'?");
  CHECK(did_you_mean("zzz", {"amount"}).empty());
}

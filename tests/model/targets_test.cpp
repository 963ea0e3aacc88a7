#include "tersor/model/targets.hpp"

#include "catch.hpp"
#include "tersor/core/error.hpp"

using tersor::Error;
using tersor::ErrorCode;
using tersor::Layer;
using tersor::LayerKind;

namespace {

std::vector<Layer> layers() {
  std::vector<Layer> all;
  for (const auto& [name, kind] :
       {std::pair{"stem.conv", LayerKind::conv2d}, std::pair{"block.1.fc", LayerKind::linear},
        std::pair{"block.10.fc", LayerKind::linear}, std::pair{"12", LayerKind::linear}}) {
    Layer layer;
    layer.name = name;
    layer.kind = kind;
    all.push_back(layer);
  }
  return all;
}

std::vector<std::string> chosen(const std::vector<std::string>& targets, const std::vector<std::string>& ignore,
                                std::vector<std::string>* warnings = nullptr) {
  std::vector<std::string> heard, names;
  const auto linear = [](const Layer& layer) { return layer.kind == LayerKind::linear; };
  for (const Layer& layer : select_layers(layers(), targets, ignore, linear, heard)) names.push_back(layer.name);
  if (warnings) *warnings = heard;
  return names;
}

using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("targets: names, expressions and class names choose layers in layer order") {
  CHECK(chosen({}, {}) == Names{"block.1.fc", "block.10.fc", "12"});
  CHECK(chosen({"12", "stem.conv"}, {}) == Names{"stem.conv", "12"});
  CHECK(chosen({"Linear"}, {}) == Names{"block.1.fc", "block.10.fc", "12"});
  CHECK(chosen({"Conv2d"}, {}) == Names{"stem.conv"});
  CHECK(chosen({R"(re:block\.1)"}, {}) == Names{"block.1.fc", "block.10.fc"});
  CHECK(chosen({R"(re:block\.1\.)"}, {}) == Names{"block.1.fc"});
}

TEST_CASE("targets: an expression matches from the start, not anywhere") {
  CHECK_THROWS_AS(chosen({"re:fc"}, {}), Error);
  CHECK(chosen({"re:.*fc"}, {}) == Names{"block.1.fc", "block.10.fc"});
}

TEST_CASE("targets: ignore wins over targets and defaults") {
  CHECK(chosen({}, {"12"}) == Names{"block.1.fc", "block.10.fc"});
  CHECK(chosen({"12", "block.1.fc"}, {"re:1"}) == Names{"block.1.fc"});
  CHECK(chosen({"12"}, {"Linear"}).empty());
}

TEST_CASE("targets: an entry that matches nothing is an error for targets and a warning for ignore") {
  try {
    chosen({"block.1.fd"}, {});
    FAIL("no error");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::NoSuchTarget);
    CHECK(error.message().find("'block.1.fd'") != std::string::npos);
    CHECK(error.message().find("block.1.fc") != std::string::npos);
  }
  std::vector<std::string> warnings;
  CHECK(chosen({}, {"nothing"}, &warnings).size() == 3);
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0].find("'nothing'") != std::string::npos);
}

TEST_CASE("targets: a broken expression is named") {
  try {
    chosen({"re:("}, {});
    FAIL("no error");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::BadOption);
    CHECK(error.message().find("re:(") != std::string::npos);
  }
}

#include <sstream>

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include "make_pass.hpp"
#include "tersor/core/names.hpp"
#include "tersor/pipeline/pipeline.hpp"

namespace tersor {
namespace {

constexpr std::size_t longest_recipe = std::size_t{1} << 20;
constexpr std::size_t most_values = 100'000;  // counted with aliases followed, which can stand for very many
constexpr int deepest_list = 16;

std::string place(const YAML::Mark& mark) {
  return mark.is_null() ? std::string("recipe") : fmt::format("recipe line {}:{}", mark.line + 1, mark.column + 1);
}

template <typename... Args>
Error bad(const YAML::Node& node, fmt::format_string<Args...> format, Args&&... args) {
  return fail(ErrorCode::BadRecipe, format, std::forward<Args>(args)...).in(place(node.Mark()));
}

class Reader {
 public:
  explicit Reader(std::span<const PassInfo> passes) : passes_(passes) {}

  Pipeline recipe(const YAML::Node& root) {
    if (!root.IsMap()) throw bad(root, "expected a map with the key 'passes'");
    YAML::Node list(YAML::NodeType::Undefined);
    std::size_t lists = 0;
    for (const auto& entry : root) {
      const std::string name = key(entry.first);
      if (name != "passes") {
        const std::string near = did_you_mean(name, {"passes"});
        throw bad(entry.first, "unknown key '{}'{} The only key is 'passes'", escaped(name), near.empty() ? "." : near);
      }
      if (++lists > 1) throw bad(entry.first, "'passes' is given twice");
      list.reset(entry.second);
    }
    if (lists == 0) throw bad(root, "the key 'passes' is missing");
    if (!list.IsSequence())
      throw bad(list, "'passes' is not a list; write each pass on a line of its own, as '- name'");
    if (list.size() == 0) throw bad(list, "'passes' is empty; name at least one pass");
    std::vector<Pass> made;
    for (const auto& item : list) made.push_back(pass(item, made.size() + 1));
    return Pipeline(std::move(made));
  }

 private:
  Pass pass(const YAML::Node& item, std::size_t number) {
    const PassCall call = pass_call(item);
    try {
      return make_pass(call, number, passes_);
    } catch (Error& e) {
      e.in(place(item.Mark()));
      throw;
    }
  }

  PassCall pass_call(const YAML::Node& item) {
    count(item);
    if (item.IsScalar()) return {item.Scalar(), {}};
    if (!item.IsMap() || item.size() != 1)
      throw bad(item, "expected a pass: its name, or one key 'name:' with its options");
    const auto entry = *item.begin();
    PassCall call{key(entry.first), {}};
    const YAML::Node options = entry.second;
    if (options.IsNull())
      throw bad(item, "'{}:' has no options; leave the colon away, or give some", escaped(call.name));
    if (!options.IsMap())
      throw bad(options, "expected the options of '{}' as a map 'option: value'", escaped(call.name));
    for (const auto& option : options) {
      std::string name = key(option.first);
      for (const auto& [known, value] : call.options) {
        if (known == name)
          throw bad(option.first, "option '{}' of {} is given twice", escaped(name), escaped(call.name));
      }
      if (option.second.IsNull())
        throw bad(option.first, "option '{}' is empty; expected a value or a list", escaped(name));
      OptionValue read = value(option.second, name, 0);
      call.options.emplace_back(std::move(name), std::move(read));
    }
    return call;
  }

  OptionValue value(const YAML::Node& node, const std::string& option, int depth) {
    count(node);
    if (node.IsScalar()) {
      const bool in_quotes = node.Tag() == "!";
      return {in_quotes ? OptionValue::Kind::quoted : OptionValue::Kind::bare, node.Scalar(), {}};
    }
    if (!node.IsSequence())
      throw bad(node, "option '{}' is {}; expected a value or a list", escaped(option),
                node.IsMap() ? "a map" : "empty");
    if (depth == deepest_list) throw bad(node, "option '{}': lists nest deeper than {}", escaped(option), deepest_list);
    OptionValue out{OptionValue::Kind::list, {}, {}};
    for (const auto& item : node) out.items.push_back(value(item, option, depth + 1));
    return out;
  }

  std::string key(const YAML::Node& node) {
    count(node);
    if (!node.IsScalar()) throw bad(node, "expected a name as key");
    return node.Scalar();
  }

  void count(const YAML::Node& node) {
    if (++values_ > most_values) throw bad(node, "the recipe has more than {} values", most_values);
  }

  std::span<const PassInfo> passes_;
  std::size_t values_ = 0;
};

struct IgnoreEvents final : YAML::EventHandler {
  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t, const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}
};

/// YAML::Load is silent about what follows the first document, and YAML::LoadAll never returns for some broken texts.
void check_one_document(std::string_view yaml) {
  std::istringstream in{std::string(yaml)};
  YAML::Parser parser(in);
  IgnoreEvents ignore;
  check(parser.HandleNextDocument(ignore), ErrorCode::BadRecipe, "the recipe is empty");
  check(!parser.HandleNextDocument(ignore), ErrorCode::BadRecipe, "the recipe goes on after its first YAML document");
}

void emit(YAML::Emitter& out, const OptionValue& value) {
  if (value.kind != OptionValue::Kind::list) {
    if (text(value).starts_with('\'')) out << YAML::DoubleQuoted;
    out << value.text;
    return;
  }
  out << YAML::Flow << YAML::BeginSeq;
  for (const OptionValue& item : value.items) emit(out, item);
  out << YAML::EndSeq;
}

void emit(YAML::Emitter& out, const Pipeline& pipeline) {
  for (const Pass& pass : pipeline.passes()) {
    if (const auto* nested = pass.as<Pipeline>()) {
      emit(out, *nested);
      continue;
    }
    const auto options = pass.options();
    if (options.empty()) {
      out << std::string(pass.name());
      continue;
    }
    out << YAML::BeginMap << YAML::Key << std::string(pass.name()) << YAML::Value << YAML::BeginMap;
    for (const auto& [key, value] : options) {
      out << YAML::Key << key << YAML::Value;
      emit(out, value);
    }
    out << YAML::EndMap << YAML::EndMap;
  }
}

}  // namespace

Pipeline parse_recipe(std::string_view yaml, std::span<const PassInfo> passes) {
  check(yaml.size() <= longest_recipe, ErrorCode::BadRecipe, "the recipe is {} bytes long; expected at most {}",
        yaml.size(), longest_recipe);
  check(is_utf8(yaml), ErrorCode::BadRecipe, "the recipe is not UTF-8 text");
  try {
    check_one_document(yaml);
    return Reader(passes).recipe(YAML::Load(std::string(yaml)));
  } catch (const YAML::Exception& e) {
    throw fail(ErrorCode::BadRecipe, "{}", e.msg).in(place(e.mark));
  }
}

std::string Pipeline::yaml() const {
  YAML::Emitter out;
  out << YAML::BeginMap << YAML::Key << "passes" << YAML::Value;
  if (passes_.empty()) out << YAML::Flow;
  out << YAML::BeginSeq;
  emit(out, *this);
  out << YAML::EndSeq << YAML::EndMap;
  return std::string(out.c_str()) + "\n";
}

}  // namespace tersor

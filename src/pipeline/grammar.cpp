#include <algorithm>

#include "make_pass.hpp"
#include "tersor/core/names.hpp"
#include "tersor/pipeline/pipeline.hpp"

namespace tersor {
namespace {

constexpr std::size_t longest_text = std::size_t{1} << 20;
constexpr int deepest_list = 16;

constexpr bool is_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

/// Recursive descent, one function per rule of the grammar.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  std::vector<PassCall> pipeline() {
    std::vector<PassCall> calls;
    do calls.push_back(pass());
    while (take(','));
    if (at_ < text_.size()) throw expected(in_parentheses_ ? "',' or the end" : "'(', ',' or the end");
    return calls;
  }

 private:
  PassCall pass() {
    PassCall call{name("the name of a pass"), {}};
    in_parentheses_ = take('(');
    if (!in_parentheses_ || take(')')) return call;
    do option(call);
    while (take(','));
    if (!take(')')) throw expected("',' or ')'");
    return call;
  }

  void option(PassCall& call) {
    skip_spaces();
    const std::size_t start = at_;
    std::string key = name("the name of an option");
    const bool twice =
        std::any_of(call.options.begin(), call.options.end(), [&](const auto& o) { return o.first == key; });
    if (twice) throw error(start, fmt::format("option '{}' of {} is given twice", key, call.name));
    if (!take('=')) throw expected("'='");
    call.options.emplace_back(std::move(key), value(0));
  }

  OptionValue value(int depth) {
    skip_spaces();
    if (at_ < text_.size() && text_[at_] == '[') return list(depth);
    if (at_ < text_.size() && text_[at_] == '\'') return quoted();
    const std::size_t start = at_;
    while (at_ < text_.size() && is_bare(text_[at_])) ++at_;
    if (at_ == start) throw expected("a value: a number, a word, 'quoted text' or a [list]");
    return {OptionValue::Kind::bare, std::string(text_.substr(start, at_ - start)), {}};
  }

  OptionValue list(int depth) {
    if (depth == deepest_list) throw error(at_, fmt::format("lists nest deeper than {}", deepest_list));
    take('[');
    OptionValue out{OptionValue::Kind::list, {}, {}};
    if (take(']')) return out;
    do out.items.push_back(value(depth + 1));
    while (take(','));
    if (!take(']')) throw expected("',' or ']'");
    return out;
  }

  /// A backslash stands for itself unless a quote or a backslash follows, so that most patterns can be typed as they
  /// are.
  OptionValue quoted() {
    const std::size_t start = at_++;
    OptionValue out{OptionValue::Kind::quoted, {}, {}};
    while (at_ < text_.size() && text_[at_] != '\'') {
      if (text_[at_] == '\\' && at_ + 1 < text_.size() && (text_[at_ + 1] == '\'' || text_[at_ + 1] == '\\')) ++at_;
      out.text += text_[at_++];
    }
    if (at_ == text_.size()) throw error(start, "the quote is never closed");
    ++at_;
    return out;
  }

  std::string name(std::string_view what) {
    skip_spaces();
    const std::size_t start = at_;
    while (at_ < text_.size() && is_name(text_[at_])) ++at_;
    if (at_ == start) throw expected(what);
    return std::string(text_.substr(start, at_ - start));
  }

  void skip_spaces() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n' || text_[at_] == '\r'))
      ++at_;
  }

  bool take(char c) {
    skip_spaces();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  Error expected(std::string_view what) {
    skip_spaces();
    const std::string found = at_ == text_.size()
                                  ? "the text ends"
                                  : fmt::format("found {}{}{}", quote_of(at_), escaped(character(at_)), quote_of(at_));
    return error(at_, fmt::format("expected {}, but {}", what, found));
  }

  /// The message, the position and the text with a caret under it.
  Error error(std::size_t at, std::string_view message) const {
    constexpr std::size_t before = 50, after = 25;  // characters shown around the place
    std::size_t position = 1, skipped = 0;
    for (std::size_t i = 0; i < at; i += character(i).size()) ++position;
    std::string line, caret;
    for (std::size_t i = 0, n = 1; i < text_.size() && n <= position + after; i += character(i).size(), ++n) {
      if (n + before < position) {
        ++skipped;
        continue;
      }
      const std::string_view c = character(i);
      const bool space = c == "\n" || c == "\t" || c == "\r";
      const bool punctuation = c == "'" || c == "\"" || c == "\\";
      line += space ? std::string(" ") : punctuation ? std::string(c) : escaped(c);
      if (n < position) caret.resize(width(line), ' ');
    }
    return fail(ErrorCode::BadSyntax, "{} at character {}\n  {}{}\n  {}{}^", message, position, skipped > 0 ? "…" : "",
                line, skipped > 0 ? " " : "", caret);
  }

  std::string_view quote_of(std::size_t at) const { return text_[at] == '\'' ? "\"" : "'"; }
  std::string_view character(std::size_t at) const { return text_.substr(at, detail::utf8_length(text_.substr(at))); }
  static std::size_t width(std::string_view s) {
    return static_cast<std::size_t>(
        std::count_if(s.begin(), s.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; }));
  }

  std::string_view text_;
  std::size_t at_ = 0;
  bool in_parentheses_ = false;  ///< whether the last pass had them
};

}  // namespace

Pass make_pass(const PassCall& call, std::size_t number, std::span<const PassInfo> passes) {
  const auto info = std::find_if(passes.begin(), passes.end(), [&](const PassInfo& p) { return p.name == call.name; });
  if (info == passes.end()) {
    std::vector<std::string> names;
    std::string list;
    for (const PassInfo& p : passes) {
      names.emplace_back(p.name);
      list += (list.empty() ? "" : ", ") + names.back();
    }
    const std::string near = did_you_mean(call.name, names);
    throw fail(ErrorCode::UnknownPass, "there is no pass '{}'{}{}{}", escaped(call.name), near,
               near.empty() ? "; the passes are: " : " The passes are: ", list);
  }
  try {
    return info->make(call.options);
  } catch (Error& e) {
    e.in(fmt::format("pass {} ({})", number, call.name));
    throw;
  }
}

Pipeline parse_pipeline(std::string_view text, std::span<const PassInfo> passes) {
  check(text.size() <= longest_text, ErrorCode::BadSyntax, "the pipeline is {} bytes long; expected at most {}",
        text.size(), longest_text);
  check(is_utf8(text), ErrorCode::BadSyntax, "the pipeline is not UTF-8 text");
  const std::vector<PassCall> calls = Parser(text).pipeline();
  std::vector<Pass> made;
  for (const PassCall& call : calls) made.push_back(make_pass(call, made.size() + 1, passes));
  return Pipeline(std::move(made));
}

}  // namespace tersor

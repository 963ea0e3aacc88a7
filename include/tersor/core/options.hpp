#pragma once

#include <algorithm>
#include <charconv>
#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "tersor/core/amount.hpp"
#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor {

/// A value in the text form of a pipeline, before anyone knows its type. Scalars keep their spelling: `1` is not `1.0`.
struct OptionValue {
  enum class Kind { bare, quoted, list };
  Kind kind = Kind::bare;
  std::string text;                ///< bare and quoted
  std::vector<OptionValue> items;  ///< list

  friend bool operator==(const OptionValue&, const OptionValue&) = default;
};

/// One option of a struct: what the text parser, YAML, the command line, `--help`, validation, the report and the
/// reference page know about a member.
template <typename Struct, typename T>
struct Field {
  std::string_view name;  ///< the member's own name
  T Struct::*member;
  std::string_view help;  ///< one sentence
  std::optional<double> min = std::nullopt;
  std::optional<double> max = std::nullopt;
  std::string_view unit = "";
};

/// A struct with options: `static constexpr auto fields()` returns a tuple of Field.
template <typename S>
concept HasFields = requires {
  S::fields();
};

/// Spelling of an enumeration in text: specialise `names` with a list of {value, word}.
template <typename E>
struct EnumNames;

/// Text form of one option type: `type()` for help, `parse`, `print`; parse(print(x)) == x.
template <typename T>
struct OptionText;

namespace detail {

Error inline bad_value(std::string_view expected, const OptionValue& v) {
  return fail(ErrorCode::BadOption, "expected {}, got {}", expected,
              v.kind == OptionValue::Kind::list ? std::string("a list") : fmt::format("'{}'", escaped(v.text)));
}

inline const std::string& scalar(std::string_view expected, const OptionValue& v) {
  if (v.kind == OptionValue::Kind::list) throw bad_value(expected, v);
  return v.text;
}

template <typename Number>
Number number(std::string_view expected, const OptionValue& v) {
  const std::string& s = scalar(expected, v);
  Number out{};
  const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), out);
  if (error != std::errc{} || end != s.data() + s.size()) throw bad_value(expected, v);
  return out;
}

}  // namespace detail

template <>
struct OptionText<bool> {
  static std::string type() { return "true|false"; }
  static bool parse(const OptionValue& v) {
    const std::string& s = detail::scalar(type(), v);
    if (s == "true") return true;
    if (s == "false") return false;
    throw detail::bad_value(type(), v);
  }
  static OptionValue print(bool x) { return {OptionValue::Kind::bare, x ? "true" : "false", {}}; }
};

template <std::integral I>
struct OptionText<I> {
  static std::string type() { return "integer"; }
  static I parse(const OptionValue& v) { return detail::number<I>("an integer", v); }
  static OptionValue print(I x) { return {OptionValue::Kind::bare, std::to_string(x), {}}; }
};

template <std::floating_point R>
struct OptionText<R> {
  static std::string type() { return "number"; }
  static R parse(const OptionValue& v) { return detail::number<R>("a number", v); }
  static OptionValue print(R x) { return {OptionValue::Kind::bare, fmt::format("{}", x), {}}; }
};

template <>
struct OptionText<Amount> {
  static std::string type() { return "fraction or count"; }
  static Amount parse(const OptionValue& v) {
    const std::string& s = detail::scalar("a fraction or a count", v);
    const bool count = s.find_first_not_of("+-0123456789") == std::string::npos;
    return count ? Amount(detail::number<std::int64_t>("a count", v)) : Amount(detail::number<double>("a fraction", v));
  }
  static OptionValue print(const Amount& x) { return {OptionValue::Kind::bare, x.text(), {}}; }
};

template <>
struct OptionText<std::string> {
  static std::string type() { return "text"; }
  static std::string parse(const OptionValue& v) { return detail::scalar("text", v); }
  static OptionValue print(const std::string& x) { return {OptionValue::Kind::quoted, x, {}}; }
};

template <typename T>
struct OptionText<std::vector<T>> {
  static std::string type() { return "list of " + OptionText<T>::type(); }
  /// A single value stands for a list of one.
  static std::vector<T> parse(const OptionValue& v) {
    std::vector<T> out;
    if (v.kind != OptionValue::Kind::list) return {OptionText<T>::parse(v)};
    for (const OptionValue& item : v.items) out.push_back(OptionText<T>::parse(item));
    return out;
  }
  static OptionValue print(const std::vector<T>& x) {
    OptionValue v{OptionValue::Kind::list, {}, {}};
    for (const T& item : x) v.items.push_back(OptionText<T>::print(item));
    return v;
  }
};

template <typename T>
struct OptionText<std::optional<T>> {
  static std::string type() { return OptionText<T>::type(); }
  static std::optional<T> parse(const OptionValue& v) {
    if (v.kind == OptionValue::Kind::bare && v.text == "none") return std::nullopt;
    return OptionText<T>::parse(v);
  }
  static OptionValue print(const std::optional<T>& x) {
    return x ? OptionText<T>::print(*x) : OptionValue{OptionValue::Kind::bare, "none", {}};
  }
};

template <typename E>
requires std::is_enum_v<E>
struct OptionText<E> {
  static std::string type() {
    std::string s;
    for (const auto& [value, word] : EnumNames<E>::names) s.append(s.empty() ? "" : "|").append(word);
    return s;
  }
  static E parse(const OptionValue& v) {
    const std::string& s = detail::scalar(type(), v);
    for (const auto& [value, word] : EnumNames<E>::names)
      if (s == word) return value;
    throw detail::bad_value(type(), v);
  }
  static OptionValue print(E x) {
    for (const auto& [value, word] : EnumNames<E>::names)
      if (x == value) return {OptionValue::Kind::bare, std::string(word), {}};
    throw fail(ErrorCode::Internal, "enumeration value without a name");
  }
};

/// An option as everyone but the struct itself sees it.
struct OptionInfo {
  std::string name, type, default_text, help, range, unit;
};

/// Sets one option from text. UnknownOption names the near misses; BadOption the option, what was expected and the
/// range.
template <HasFields S>
void set_option(S& options, std::string_view key, const OptionValue& value);

/// Checks all options of a struct that was filled in C++: ranges, finite numbers, UTF-8 text.
template <HasFields S>
void validate_options(const S& options);

/// Options that differ from their defaults, in field order, as text.
template <HasFields S>
std::vector<std::pair<std::string, OptionValue>> changed_options(const S& options);

template <HasFields S>
std::vector<OptionInfo> describe_options();

/// What the grammar reads as a bare word or number: ASCII letters, digits and `_ . - + : / *`.
constexpr bool is_bare(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
         c == '-' || c == '+' || c == ':' || c == '/' || c == '*';
}

/// `0.3`, `word`, `'quoted text'`, `[a, b]`: quotes only where reading it back needs them. Inside quotes `'` and `\`
/// are written `\'` and `\\`.
std::string text(const OptionValue& value);

}  // namespace tersor

#include "tersor/core/options_inl.hpp"

#pragma once

#include <cmath>
#include <limits>

namespace tersor {

namespace detail {

/// `[1, 65536]`, `[1, inf)`, `(-inf, 5]`, or "" without limits.
inline std::string range_text(std::optional<double> min, std::optional<double> max) {
  if (!min && !max) return "";
  return fmt::format("{}, {}", min ? fmt::format("[{}", *min) : "(-inf", max ? fmt::format("{}]", *max) : "inf)");
}

/// Checks one value, element by element for lists; `name` is the option's.
template <typename T>
void validate_value(std::string_view name, const T& value, std::optional<double> min, std::optional<double> max) {
  if constexpr (std::is_same_v<T, Amount>) {
    value.validate(name);
  } else if constexpr (std::is_same_v<T, std::string>) {
    check(is_utf8(value), ErrorCode::BadOption, "{}='{}' is not UTF-8", name, escaped(value));
  } else if constexpr (std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) {
    const auto x = static_cast<double>(value);
    check(std::isfinite(x), ErrorCode::BadOption, "{}={} is not a finite number", name, value);
    check((!min || x >= *min) && (!max || x <= *max), ErrorCode::BadOption, "{}={} is outside {}", name, value,
          range_text(min, max));
  } else if constexpr (requires { value.has_value(); }) {
    if (value) validate_value(name, *value, min, max);
  } else if constexpr (requires { value.begin(); }) {
    for (const auto& item : value) validate_value(name, item, min, max);
  }
}

/// Kind of number in a range, for the reference: what Amount allows is part of its type.
template <typename T>
std::string range_of(std::optional<double> min, std::optional<double> max) {
  return std::is_same_v<T, Amount> ? "fraction in [0, 1], count in [0, inf)" : range_text(min, max);
}

template <HasFields S, typename F>
void for_each_field(F f) {
  std::apply([&](const auto&... field) { (f(field), ...); }, S::fields());
}

}  // namespace detail

template <HasFields S>
void set_option(S& options, std::string_view key, const OptionValue& value) {
  bool known = false;
  std::vector<std::string> names;
  std::string list;
  detail::for_each_field<S>([&]<typename Owner, typename T>(const Field<Owner, T>& field) {
    names.emplace_back(field.name);
    list += (list.empty() ? "" : ", ") + names.back();
    if (field.name != key) return;
    known = true;
    try {
      T parsed = OptionText<T>::parse(value);
      detail::validate_value(field.name, parsed, field.min, field.max);
      options.*field.member = std::move(parsed);
    } catch (const Error& e) {
      if (e.message().starts_with(fmt::format("{}=", field.name))) throw;
      const std::string range = detail::range_text(field.min, field.max);
      throw fail(e.code(), "{}: {}{}", field.name, e.message(), range.empty() ? "" : " (range " + range + ")");
    }
  });
  if (known) return;
  std::string_view owner = "this";
  if constexpr (requires { S::name; }) owner = S::name;
  const std::string near = did_you_mean(key, names);
  throw fail(ErrorCode::UnknownOption, "{} has no option '{}'{}{}{}", owner, escaped(key), near,
             near.empty() ? "; its options are: " : " Its options are: ", list.empty() ? "none" : list);
}

template <HasFields S>
void validate_options(const S& options) {
  detail::for_each_field<S>(
      [&](const auto& field) { detail::validate_value(field.name, options.*field.member, field.min, field.max); });
}

template <HasFields S>
std::vector<std::pair<std::string, OptionValue>> changed_options(const S& options) {
  std::vector<std::pair<std::string, OptionValue>> out;
  const S defaults{};
  detail::for_each_field<S>([&]<typename Owner, typename T>(const Field<Owner, T>& field) {
    if (options.*field.member == defaults.*field.member) return;
    out.emplace_back(std::string(field.name), OptionText<T>::print(options.*field.member));
  });
  return out;
}

template <HasFields S>
std::vector<OptionInfo> describe_options() {
  std::vector<OptionInfo> out;
  const S defaults{};
  detail::for_each_field<S>([&]<typename Owner, typename T>(const Field<Owner, T>& field) {
    out.push_back({std::string(field.name), OptionText<T>::type(), text(OptionText<T>::print(defaults.*field.member)),
                   std::string(field.help), detail::range_of<T>(field.min, field.max), std::string(field.unit)});
  });
  return out;
}

inline std::string text(const OptionValue& value) {
  if (value.kind == OptionValue::Kind::list) {
    std::string out = "[";
    for (const OptionValue& item : value.items) out += (out.size() > 1 ? ", " : "") + text(item);
    return out + "]";
  }
  // `none` in quotes is the word, bare it is "not set".
  const bool bare = !value.text.empty() && std::all_of(value.text.begin(), value.text.end(), is_bare) &&
                    (value.kind == OptionValue::Kind::bare || value.text != "none");
  if (bare) return value.text;
  std::string out = "'";
  for (const char c : value.text) {
    if (c == '\'' || c == '\\') out += '\\';
    out += c;
  }
  return out + "'";
}

}  // namespace tersor

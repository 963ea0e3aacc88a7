#pragma once
// Tiny passes over models of a few named tensors.

#include <array>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tersor/pipeline/pipeline.hpp"

namespace fake {

using namespace tersor;

enum class Mode { fast, slow_and_sure };

/// Every type of option; changes nothing.
struct Everything {
  Amount amount = 0.5;
  std::int64_t count = 1;
  double factor = 1.0;
  bool verify = false;
  std::string note = {};
  std::vector<std::string> targets = {};
  std::vector<double> weights = {1.0};
  std::optional<std::string> path = std::nullopt;
  std::optional<std::int64_t> limit = std::nullopt;
  Mode mode = Mode::fast;

  static constexpr std::string_view name = "everything";
  static constexpr std::string_view summary = "Has an option of every type.";
  static constexpr auto fields() {
    return std::tuple{Field{"amount", &Everything::amount, "How much."},
                      Field{"count", &Everything::count, "How many.", 1.0, 100.0, "channels"},
                      Field{"factor", &Everything::factor, "Factor.", 0.0},
                      Field{"verify", &Everything::verify, "Check the result."},
                      Field{"note", &Everything::note, "Words."},
                      Field{"targets", &Everything::targets, "Layers: names or re:a|b."},
                      Field{"weights", &Everything::weights, "Numbers."},
                      Field{"path", &Everything::path, "A file."},
                      Field{"limit", &Everything::limit, "At most this.", 0.0},
                      Field{"mode", &Everything::mode, "How."}};
  }
  Need needs() const { return Need::weights; }
  Changed run(Model&, PassContext&) const { return Changed::nothing; }

  friend bool operator==(const Everything&, const Everything&) = default;
};

/// Multiplies every tensor.
struct Scale {
  double by = 2.0;

  static constexpr std::string_view name = "scale";
  static constexpr std::string_view summary = "Multiplies every weight.";
  static constexpr auto fields() { return std::tuple{Field{"by", &Scale::by, "Factor.", -1e6, 1e6}}; }
  void validate() const { check(by != 0.0, ErrorCode::BadOption, "by=0 would clear every weight"); }
  Need needs() const { return Need::weights; }
  Changed run(Model& model, PassContext& context) const {
    for (const std::string& tensor : model.tensor_names()) {
      model.rewrite(tensor, model.tensor(tensor).mul(by));
      context.report.row(tensor, "scaled").details.emplace_back("by", fmt::format("{}", by));
    }
    return Changed::weights;
  }
};

/// Has no options.
struct Plain {
  static constexpr std::string_view name = "plain";
  static constexpr std::string_view summary = "Does nothing.";
  static constexpr auto fields() { return std::tuple<>{}; }
  Need needs() const { return Need::weights; }
  Changed run(Model&, PassContext&) const { return Changed::nothing; }
};

/// Edits, then fails.
struct Fails {
  bool foreign = false;

  static constexpr std::string_view name = "fails";
  static constexpr std::string_view summary = "Breaks off in the middle.";
  static constexpr auto fields() {
    return std::tuple{Field{"foreign", &Fails::foreign, "With an exception that is no Error."}};
  }
  Need needs() const { return Need::weights; }
  Changed run(Model& model, PassContext& context) const {
    const std::string first = model.tensor_names().front();
    context.progress.begin("failing", 10);
    model.rewrite(first, model.tensor(first).add(1));
    model.metadata()["half"] = "done";
    if (foreign) throw std::runtime_error("something else");
    throw fail(ErrorCode::NonFiniteWeight, "layer '{}' has 1 NaN", first);
  }
};

/// Needs whatever it is told to need.
struct Needy {
  std::int64_t what = 0;

  static constexpr std::string_view name = "needy";
  static constexpr std::string_view summary = "Needs something.";
  static constexpr auto fields() { return std::tuple{Field{"what", &Needy::what, "Bits of Need."}}; }
  Need needs() const { return Need(what); }
  Changed run(Model& model, PassContext& context) const {
    if (context.original != nullptr) {
      const std::string first = model.tensor_names().front();
      context.report.row(first, "compared")
          .details.emplace_back("same", context.original->tensor(first).equal(model.tensor(first)) ? "yes" : "no");
    }
    return Changed::nothing;
  }
};

/// Claims something else than it does.
struct Liar {
  bool shapes = false;

  static constexpr std::string_view name = "liar";
  static constexpr std::string_view summary = "Says that it changed less than it did.";
  static constexpr auto fields() { return std::tuple{Field{"shapes", &Liar::shapes, "Lie about shapes."}}; }
  Need needs() const { return Need::weights; }
  Changed run(Model& model, PassContext&) const {
    const std::string first = model.tensor_names().front();
    if (shapes) {
      model.keep(first, 0, {0});
      return Changed::weights;
    }
    model.rewrite(first, model.tensor(first).add(1));
    return Changed::nothing;
  }
};

inline const std::vector<PassInfo>& passes() {
  static const std::vector<PassInfo> all{pass_info<Everything>(), pass_info<Scale>(), pass_info<Plain>(),
                                         pass_info<Fails>(),      pass_info<Needy>(), pass_info<Liar>()};
  return all;
}

/// Random text with everything that could break a quoting rule.
inline std::string random_text(std::mt19937& random) {
  static const std::vector<std::string> pieces{
      "a",  "block.1.conv", "'",    "\"",   "\\", "\\\\", "none", "true", "12",  "1.5", "null", "~",
      " ",  "\n",           "\t",   ",",    "(",  ")",    "[",    "]",    "=",   ":",   "#",    "- ",
      "*",  "&a",           "!tag", "|",    ">",  "%",    "@",    "`",    "?",   "{",   "}",    "größe",
      "层", "🙂",         "\x01", "\x7f", "\r", "<<",   "yes",  "0x1F", "re:", ": ",  " #",   "---"};
  std::string out;
  for (auto n = random() % 4; n > 0; --n) out += pieces[random() % pieces.size()];
  return out;
}

inline double random_number(std::mt19937& random) {
  return std::ldexp(static_cast<double>(random()), static_cast<int>(random() % 80) - 60);
}

inline Everything random_everything(std::mt19937& random) {
  Everything e;
  const auto some = [&] { return random() % 3 == 0; };
  if (some()) e.amount = Amount(static_cast<std::int64_t>(random() % 5));
  if (some()) e.amount = Amount(static_cast<double>(random() % 1001) / 1000);
  if (some()) e.count = 1 + static_cast<std::int64_t>(random() % 100);
  if (some()) e.factor = random_number(random);
  e.verify = some();
  if (some()) e.note = random_text(random);
  if (some()) {
    for (auto n = random() % 4; n > 0; --n) e.targets.push_back(random_text(random));
  }
  if (some()) {
    e.weights.clear();
    for (auto n = random() % 3; n > 0; --n) e.weights.push_back(-random_number(random));
  }
  if (some()) e.path = random_text(random);
  if (some()) e.limit = static_cast<std::int64_t>(random());
  if (some()) e.mode = Mode::slow_and_sure;
  return e;
}

inline Pass random_pass(std::mt19937& random, int depth = 0) {
  switch (random() % (depth < 2 ? 4 : 3)) {
    case 0:
      return Plain{};
    case 1:
      return Scale{.by = 1 + static_cast<double>(random() % 1000) / 7};
    case 2:
      return random_everything(random);
    default: {
      std::vector<Pass> inner;
      for (auto n = 1 + random() % 3; n > 0; --n) inner.push_back(random_pass(random, depth + 1));
      return Pipeline(std::move(inner));
    }
  }
}

inline Pipeline random_pipeline(std::mt19937& random) {
  std::vector<Pass> all;
  for (auto n = 1 + random() % 4; n > 0; --n) all.push_back(random_pass(random));
  return Pipeline(std::move(all));
}

inline void flatten(const Pipeline& pipeline, std::vector<Pass>& out) {
  for (const Pass& pass : pipeline.passes()) {
    if (const auto* nested = pass.as<Pipeline>()) {
      flatten(*nested, out);
    } else {
      out.push_back(pass);
    }
  }
}

/// The same passes with the same options, compared as structs.
inline bool same(const Pipeline& a, const Pipeline& b) {
  std::vector<Pass> left, right;
  flatten(a, left);
  flatten(b, right);
  return std::equal(left.begin(), left.end(), right.begin(), right.end(), [](const Pass& x, const Pass& y) {
    if (x.name() != y.name()) return false;
    if (const auto* e = x.as<Everything>()) return *e == *y.as<Everything>();
    if (const auto* s = x.as<Scale>()) return s->by == y.as<Scale>()->by;
    return x.options() == y.options();
  });
}

}  // namespace fake

template <>
struct tersor::EnumNames<fake::Mode> {
  static constexpr std::array<std::pair<fake::Mode, std::string_view>, 2> names{
      {{fake::Mode::fast, "fast"}, {fake::Mode::slow_and_sure, "slow_and_sure"}}};
};

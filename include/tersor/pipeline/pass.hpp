#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tersor/core/options.hpp"
#include "tersor/io/dataset.hpp"
#include "tersor/model/model.hpp"
#include "tersor/pipeline/progress.hpp"
#include "tersor/pipeline/report.hpp"

namespace tersor {

/// What a pass needs to run; checked for the whole pipeline before anything is changed.
enum class Need : unsigned {
  weights = 0,
  graph = 1,     ///< a runnable model and an example
  forward = 2,   ///< a runnable model
  data = 4,      ///< calibration samples
  labels = 8,    ///< labels with them
  original = 16  ///< the model as it was before the first pass
};
constexpr Need operator|(Need a, Need b) { return Need(unsigned(a) | unsigned(b)); }
/// Whether `set` contains all of `one`.
constexpr bool has(Need set, Need one) { return (unsigned(set) & unsigned(one)) == unsigned(one); }

/// Settings of a run that belong to no pass.
struct RunOptions {
  std::optional<Dataset> calibration = std::nullopt;
  std::int64_t samples = 512;    ///< of the calibration data at most
  std::int64_t batch_size = 32;  ///< of calibration batches
  std::uint64_t seed = 0;
  Progress* progress = nullptr;  ///< none: silent
};

/// State of one run, handed to every pass.
struct PassContext {
  const RunOptions& options;
  PassReport& report;
  const Model* original = nullptr;  ///< set when the pass needs it
  Progress& progress;
};

/// A pass is a value: an options struct with a name, a field list, its needs and one verb.
///
///     struct Scale {
///       double by = 2.0;
///       static constexpr std::string_view name = "scale";
///       static constexpr std::string_view summary = "Multiplies every weight.";
///       static constexpr auto fields() { return std::tuple{Field{"by", &Scale::by, "Factor.", 0.0}}; }
///       Need needs() const { return Need::weights; }
///       Changed run(Model& model, PassContext& context) const;
///     };
///
/// A rule that spans several options goes into `void validate() const`, which throws BadOption.
template <typename P>
concept PassType = HasFields<P> && std::copyable<P> && requires(const P pass, Model& model, PassContext& context) {
  { P::name } -> std::convertible_to<std::string_view>;
  { P::summary } -> std::convertible_to<std::string_view>;
  { pass.needs() } -> std::same_as<Need>;
  { pass.run(model, context) } -> std::same_as<Changed>;
};

/// Any pass, as a value.
class Pass {
 public:
  template <PassType P>
  Pass(P pass) : self_(std::make_shared<Holder<P>>(std::move(pass))) {}  // NOLINT(google-explicit-constructor)

  std::string_view name() const { return self_->name(); }
  Need needs() const { return self_->needs(); }
  /// `name` or `name(option=value, …)` with the options that differ from their defaults.
  std::string text() const { return self_->text(); }
  std::vector<std::pair<std::string, OptionValue>> options() const { return self_->options(); }
  /// Throws BadOption unless every option is in its range and the pass agrees with their combination.
  void validate() const { self_->validate(); }
  Changed run(Model& model, PassContext& context) const { return self_->run(model, context); }

  /// The pass itself when it is a P, else nullptr.
  template <PassType P>
  const P* as() const {
    const auto* holder = dynamic_cast<const Holder<P>*>(self_.get());
    return holder == nullptr ? nullptr : &holder->pass;
  }

 private:
  struct Concept {
    virtual ~Concept() = default;
    virtual std::string_view name() const = 0;
    virtual Need needs() const = 0;
    virtual std::string text() const = 0;
    virtual std::vector<std::pair<std::string, OptionValue>> options() const = 0;
    virtual void validate() const = 0;
    virtual Changed run(Model&, PassContext&) const = 0;
  };
  template <typename P>
  struct Holder final : Concept {
    explicit Holder(P p) : pass(std::move(p)) {}
    std::string_view name() const override { return P::name; }
    Need needs() const override { return pass.needs(); }
    std::string text() const override {
      if constexpr (requires { pass.text(); }) {
        return pass.text();
      } else {
        return pass_text(P::name, changed_options(pass));
      }
    }
    std::vector<std::pair<std::string, OptionValue>> options() const override { return changed_options(pass); }
    void validate() const override {
      validate_options(pass);
      if constexpr (requires { pass.validate(); }) pass.validate();
    }
    Changed run(Model& model, PassContext& context) const override { return pass.run(model, context); }
    P pass;
  };
  static std::string pass_text(std::string_view name, const std::vector<std::pair<std::string, OptionValue>>& options);

  std::shared_ptr<const Concept> self_;
};

}  // namespace tersor

#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>

#include "tersor/core/quantization.hpp"
#include "tersor/core/quantize.hpp"

namespace tersor::calibrate {

/// Smallest and largest value. Both finite.
struct Range {
  float min = 0.0F;
  float max = 0.0F;

  friend constexpr bool operator==(const Range&, const Range&) = default;
};

/// Watches the values of one tensor, batch by batch, and says what range its codes should span.
///
/// An observer implements one method, `update`, and keeps a bounded amount of memory whatever it is shown. Values that
/// are not finite never reach it: they are counted, and the batch that holds them is left out.
class Observer {
 public:
  virtual ~Observer() = default;

  /// One batch of any shape and floating dtype; an empty one says nothing.
  void observe(const at::Tensor& x);

  bool seen() const { return seen_; }  ///< whether a batch of finite values came
  Range range() const { return range_; }
  std::int64_t nans() const { return nans_; }
  std::int64_t infinities() const { return infinities_; }

 protected:
  /// Brings `range_` up to date with the finite, non-empty batch `x`, which spans `batch`. `seen()` is false for the
  /// first.
  virtual void update(const at::Tensor& x, Range batch) = 0;

  Range range_;

 private:
  bool seen_ = false;
  std::int64_t nans_ = 0, infinities_ = 0;
};

/// The extremes of everything seen.
class MinMax final : public Observer {
 protected:
  void update(const at::Tensor& x, Range batch) override;
};

/// The extremes of each batch, averaged exponentially: range += averaging * (batch - range). Single outliers count
/// less.
class MovingAverage final : public Observer {
 public:
  explicit MovingAverage(double averaging = 0.01);  ///< in (0, 1]

 protected:
  void update(const at::Tensor& x, Range batch) override;

 private:
  double averaging_;
};

using MakeObserver = std::function<std::unique_ptr<Observer>()>;

/// Scale and zero point of a range. One that is nothing but zero says nothing about the size of the values: scale 1,
/// and 0.0 keeps its exact code.
QuantParams params_of(Range range, const QuantScheme& scheme);

/// Affine int8, one scale for the tensor.
ActivationQuant activation_of(Range range);

}  // namespace tersor::calibrate

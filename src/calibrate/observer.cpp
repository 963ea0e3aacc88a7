#include "tersor/calibrate/observer.hpp"

#include "tersor/core/error.hpp"

namespace tersor::calibrate {

void Observer::observe(const at::Tensor& x) {
  if (x.numel() == 0) return;
  const auto [low, high] = x.detach().aminmax();
  const Range batch{low.item<float>(), high.item<float>()};  // NaN when any value is
  if (!std::isfinite(batch.min) || !std::isfinite(batch.max)) {
    nans_ += x.isnan().sum().item<std::int64_t>();
    infinities_ += x.isinf().sum().item<std::int64_t>();
    return;
  }
  update(x, batch);
  seen_ = true;
}

void MinMax::update(const at::Tensor&, Range batch) {
  range_ = seen() ? Range{std::min(range_.min, batch.min), std::max(range_.max, batch.max)} : batch;
}

MovingAverage::MovingAverage(double averaging) : averaging_(averaging) {
  check(averaging > 0 && averaging <= 1, ErrorCode::BadOption, "averaging={} is outside (0, 1]", averaging);
}

void MovingAverage::update(const at::Tensor&, Range batch) {
  const auto towards = [&](float from, float to) {
    return static_cast<float>(from + averaging_ * (double{to} - double{from}));
  };
  range_ = seen() ? Range{towards(range_.min, batch.min), towards(range_.max, batch.max)} : batch;
}

QuantParams params_of(Range range, const QuantScheme& scheme) {
  if (range == Range{}) return {1.0F, 0};
  return scheme.symmetric ? choose_symmetric(std::max(-range.min, range.max), scheme)
                          : choose_affine(range.min, range.max, scheme);
}

ActivationQuant activation_of(Range range) {
  const QuantParams params = params_of(range, {.bits = 8, .symmetric = false, .granularity = Granularity::per_tensor});
  return {ActivationMode::per_tensor, params.scale, params.zero_point};
}

}  // namespace tersor::calibrate

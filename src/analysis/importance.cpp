#include "tersor/analysis/importance.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace tersor {
namespace {

/// Sum of |w| for every index of `dim`.
std::vector<double> filter_l1(const at::Tensor& weight, std::int64_t dim) {
  const at::Tensor rows = weight.detach().to(at::kDouble).movedim(dim, 0).contiguous();
  const std::int64_t count = rows.size(0), length = count == 0 ? 0 : rows.numel() / count;
  const double* w = rows.const_data_ptr<double>();
  std::vector<double> sums(static_cast<std::size_t>(count), 0.0);
  for (double& sum : sums)
    for (std::int64_t i = 0; i < length; ++i) sum += std::abs(*w++);
  return sums;
}

}  // namespace

std::vector<double> l1_importance(const ChannelFamily& family,
                                  const std::function<at::Tensor(std::string_view)>& tensor) {
  std::vector<double> scores(family.atoms.size(), 0.0);
  std::vector<int> producers(family.atoms.size(), 0);
  for (const ChannelProducer& producer : family.producers) {
    const std::vector<double> sums = filter_l1(tensor(producer.parameter), producer.dim);
    for (std::size_t i = 0; i < scores.size(); ++i) {
      for (const std::int64_t row : producer.rows[i]) scores[i] += sums[static_cast<std::size_t>(row)];
      producers[i] += !producer.rows[i].empty();
    }
  }
  for (std::size_t i = 0; i < scores.size(); ++i) scores[i] /= std::max(producers[i], 1);
  return scores;
}

std::vector<std::size_t> ascending(const std::vector<double>& scores) {
  std::vector<std::size_t> order(scores.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return scores[a] < scores[b]; });
  return order;
}

}  // namespace tersor

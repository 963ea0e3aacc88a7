#include "tersor/calibrate/channels.hpp"

#include <ATen/ops/tensor.h>

#include "model/importance_net.hpp"
#include "support.hpp"

using namespace tersor;

namespace {
const calibrate::RunnerOptions by_four{.samples = 100, .batch_size = 4};
// Float sums over a few hundred positions, double afterwards: a thousand roundings at most.
constexpr double tolerance = 1e-4;
}  // namespace

TEST_CASE("channels: means of inputs and outputs are PyTorch's, scripted and traced") {
  const ImportanceNet net;
  for (const std::string& path : {net.scripted, net.traced}) {
    const auto means = calibrate::channel_means(net.load(path), net.data, by_four);
    for (const char* layer : {"conv1", "conv2", "fc1", "fc2"}) {
      INFO(path << " " << layer);
      CHECK(relative_difference(means.at(layer).input, net.expected.at(std::string("input_mean.") + layer)) <
            tolerance);
      CHECK(relative_difference(means.at(layer).output_absolute, net.expected.at(std::string("activation.") + layer)) <
            tolerance);
    }
  }
}

TEST_CASE("channels: Taylor scores are those of PyTorch's gradients, batch by batch") {
  const ImportanceNet net;
  const std::vector<std::pair<std::string, std::int64_t>> dims{
      {"conv1.weight", 0}, {"conv2.weight", 0}, {"fc1.weight", 0}};
  for (const std::string& path : {net.scripted, net.traced}) {
    const Model model = net.load(path);
    const at::Tensor before = model.tensor("conv1.weight").clone();
    const auto scores = calibrate::taylor_scores(model, dims, net.data, by_four);
    for (const char* layer : {"conv1", "conv2", "fc1"}) {
      INFO(path << " " << layer);
      const at::Tensor got = at::tensor(scores.at({std::string(layer) + ".weight", 0}));
      CHECK(relative_difference(got, net.expected.at(std::string("taylor.") + layer)) < tolerance);
    }
    CHECK(model.tensor("conv1.weight").equal(before));
    CHECK_FALSE(model.tensor("conv1.weight").requires_grad());
  }
  Dataset bare = net.data;
  bare.labels.reset();
  check_error(ErrorCode::MissingData, {"label"},
              [&] { calibrate::taylor_scores(net.load(net.scripted), dims, bare, by_four); });
  Dataset wrong = net.data;
  wrong.labels = wrong.labels->to(at::kFloat);
  check_error(ErrorCode::UnsupportedModel, {"int64 labels"},
              [&] { calibrate::taylor_scores(net.load(net.scripted), dims, wrong, by_four); });
}

TEST_CASE("channels: BatchNorm statistics are those of PyTorch's cumulative average") {
  const ImportanceNet net;
  for (const std::string& path : {net.scripted, net.traced}) {
    Model model = net.load(path);
    const at::Tensor weight = model.tensor("conv2.weight").clone();
    CHECK(calibrate::reestimate_batch_norms(model, net.data, by_four) == std::vector<std::string>{"bn1", "bn2"});
    for (const char* name : {"bn1.running_mean", "bn1.running_var", "bn2.running_mean", "bn2.running_var"}) {
      INFO(path << " " << name);
      CHECK(relative_difference(model.tensor(name), net.expected.at(name)) < tolerance);
    }
    CHECK(model.tensor("conv2.weight").equal(weight));
  }
}

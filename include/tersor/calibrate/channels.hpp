#pragma once

#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tersor/calibrate/runner.hpp"

namespace tersor::calibrate {

/// Per channel means of what flows through a layer, in double, over samples and positions.
struct ChannelMeans {
  at::Tensor input;            ///< of the values
  at::Tensor output_absolute;  ///< of their magnitudes
};

/// Runs the model over the data and watches the Linear, Conv and Embedding layers, by name; those that never ran are
/// missing. Throws MissingData without a sample.
std::map<std::string, ChannelMeans> channel_means(const Model& model, const Dataset& data,
                                                  const RunnerOptions& options = {});

/// For every parameter dimension that was asked for: the mean over batches of (sum of w·dL/dw)² of each index, where L
/// is the cross-entropy of a batch. Molchanov et al., arXiv:1906.10771. Throws MissingData without labels or samples.
std::map<std::pair<std::string, std::int64_t>, std::vector<double>> taylor_scores(
    const Model& model, const std::vector<std::pair<std::string, std::int64_t>>& dims, const Dataset& data,
    const RunnerOptions& options = {});

/// Gives every BatchNorm the mean and variance of its input over the data, as training with a cumulative average would
/// (`momentum=None` in PyTorch: the mean of each batch's mean and unbiased variance, every BatchNorm fed by those
/// before it with the batch's own statistics). Returns the layers in the order in which they ran; batches of one value
/// per channel are left out.
std::vector<std::string> reestimate_batch_norms(Model& model, const Dataset& data, const RunnerOptions& options = {});

}  // namespace tersor::calibrate

#pragma once

#include <map>
#include <string>
#include <vector>

#include "tersor/analysis/channel_groups.hpp"
#include "tersor/passes/prune.hpp"
#include "tersor/pipeline/pass.hpp"

namespace tersor::prune {

/// What removed channels contributed on average to the layers that read them.
struct Compensation {
  std::map<std::string, at::Tensor> additions;  ///< to a bias or a BatchNorm's mean, in the numbering before the cut
  std::map<std::string, std::string> left;      ///< readers that get nothing: why
};

/// For the network as it is before the cut.
Compensation find_compensation(const Model& model, const ChannelGroups& groups, const Removal& removed, Compensate how,
                               const PassContext& context);

/// Adds it to the network after the cut.
void apply_compensation(Model& model, const ChannelGroups& groups, const Removal& removed,
                        const Compensation& compensation);

}  // namespace tersor::prune

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include <ATen/core/Tensor.h>

#include "tersor/core/error.hpp"
#include "tersor/io/dataset.hpp"
#include "tersor/model/model.hpp"
#include "tersor/pipeline/progress.hpp"

namespace tersor::cli {

/// How well a network does on data, alone and beside another.
struct Evaluation {
  std::int64_t samples = 0;
  std::optional<double> accuracy;           ///< share of predictions equal to the labels; predictions are the first
                                            ///< output's argmax over its last dimension
  std::optional<double> accuracy_original;  ///< of the network compared with
  std::optional<double> agreement;          ///< share of equal predictions
  std::optional<double> sqnr_db;            ///< 10 log10(sum original^2 / sum (original - output)^2) over all outputs;
                                            ///< infinite when they are equal
  std::optional<double> cosine;             ///< mean over samples of the cosine of all outputs of a sample
  std::optional<double> max_difference;     ///< largest |original - output|
  std::int64_t non_finite = 0;              ///< values of all outputs that are NaN or infinite
  std::optional<std::int64_t> non_finite_original;

  nlohmann::ordered_json json() const;
  std::string text() const;  ///< lines for people
};

/// Runs `model`, and `original` when there is one, over `data`. `see` gets each batch's outputs of `model`.
/// BadData when labels do not fit the outputs; UnsupportedModel when a network cannot be run or the two differ in
/// shape.
Evaluation evaluate(const Model& model, const Model* original, const Dataset& data, std::int64_t batch_size,
                    Progress* progress = nullptr, const std::function<void(const std::vector<at::Tensor>&)>& see = {});

/// Runs `model`, as it came, once on inputs that the user gave. When it does not run they are to blame: `code`, and
/// `what` says where they came from.
void check_inputs(const Model& model, const std::vector<at::Tensor>& inputs, ErrorCode code, std::string_view what);

}  // namespace tersor::cli

#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/custom_class.h>

#include "tersor/runtime/qtensor.hpp"

namespace tersor {

/// A Linear layer with quantized weights, packed for this machine's kernels when it is made or loaded.
///
/// TorchScript class `__torch__.torch.classes.tersor.PackedLinear`; run by `tersor::linear(x, packed)` and
/// `tersor::linear_relu(x, packed)`. Pickles as a versioned tuple of plain tensors, never of packed ones.
/// Input [..., in_features] of any float dtype, output [..., out_features] of the same dtype.
class PackedLinear : public torch::CustomClassHolder {
 public:
  PackedLinear(LayerQuantization quantization, std::optional<at::Tensor> bias);
  ~PackedLinear() override;

  at::Tensor forward(const at::Tensor& x, bool relu) const;

  /// The same bits as a layer that was packed with `bias` [out_features] (undefined: none), for a bias that lives
  /// elsewhere; gradients reach it. This layer has none of its own, or BadUsage is thrown.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& bias) const;

  const QTensor& weight() const;
  const std::optional<at::Tensor>& bias() const;
  const ActivationQuant& activation() const;

  c10::IValue state() const;                                                     ///< what is pickled
  static c10::intrusive_ptr<PackedLinear> from_state(const c10::IValue& state);  ///< checks every field

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A Conv1d/2d layer whose weight is stored as codes and computed in float (dequantized once when made or loaded).
///
/// TorchScript class `__torch__.torch.classes.tersor.PackedConv`; run by
/// `tersor::conv(x, packed, stride, padding, dilation, groups)`.
class PackedConv : public torch::CustomClassHolder {
 public:
  PackedConv(QTensor weight, std::optional<at::Tensor> bias);

  at::Tensor forward(const at::Tensor& x, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                     std::int64_t groups) const;

  const QTensor& weight() const { return weight_; }
  const std::optional<at::Tensor>& bias() const { return bias_; }
  const at::Tensor& dense() const { return dense_; }  ///< the dequantized weight

  c10::IValue state() const;
  static c10::intrusive_ptr<PackedConv> from_state(const c10::IValue& state);

 private:
  QTensor weight_;
  std::optional<at::Tensor> bias_;
  at::Tensor dense_;
};

/// An Embedding whose table [vocabulary, features] is stored as codes; only the rows asked for are dequantized.
///
/// TorchScript class `__torch__.torch.classes.tersor.PackedEmbedding`; run by `tersor::embedding(ids, packed)`.
/// Input: int64 or int32 ids of any shape [...], output [..., features] of the original table's dtype.
class PackedEmbedding : public torch::CustomClassHolder {
 public:
  explicit PackedEmbedding(QTensor weight);

  /// Throws BadData for an id that is no row of the table.
  at::Tensor forward(const at::Tensor& ids) const;

  const QTensor& weight() const { return weight_; }

  c10::IValue state() const;
  static c10::intrusive_ptr<PackedEmbedding> from_state(const c10::IValue& state);

 private:
  QTensor weight_;
};

}  // namespace tersor

#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace tersor::distill {

/// The distillation loss, for anybody's training loop:
///
///     alpha * T^2 * KL(teacher_T || student_T)  +  (1 - alpha) * cross_entropy(student, labels)
///
/// with both distributions softened by the temperature T and each term averaged over the rows that count. Without
/// labels the loss is the soft term alone, at its full weight. The T^2 keeps the gradients of the soft term at the size
/// of the hard one's. Hinton, Vinyals, Dean: Distilling the Knowledge in a Neural Network, arXiv:1503.02531.
///
///     distill::KnowledgeDistillation loss{.temperature = 4, .alpha = 0.7};
///     loss(student->forward(x), teacher->forward(x), labels).backward();
struct KnowledgeDistillation {
  double temperature = 4.0;          ///< above 0
  double alpha = 0.7;                ///< weight of the soft term, in [0, 1]
  std::int64_t ignore_index = -100;  ///< rows with this label do not count, in either term

  /// A scalar: float32 for half and bfloat16 logits, else of the student's dtype.
  ///
  /// `student` and `teacher` are logits [..., classes] of one shape; the teacher receives no gradient. `labels` (int64)
  /// and `mask` (bool, true where the row counts) have the shape [...] and may be left out. Rows that do not count may
  /// hold anything, also NaN: they add nothing and their gradient is exactly 0. With none left the loss is 0.
  /// Throws BadUsage for shapes, dtypes and labels that do not fit.
  at::Tensor operator()(const at::Tensor& student, const at::Tensor& teacher, const at::Tensor& labels = {},
                        const at::Tensor& mask = {}) const;
};

}  // namespace tersor::distill

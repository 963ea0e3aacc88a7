#include "tersor/distill/knowledge_distillation.hpp"

#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/ranges.h>

#include "tersor/core/error.hpp"

namespace tersor::distill {
namespace {

std::string shape_text(at::IntArrayRef sizes) { return fmt::format("[{}]", fmt::join(sizes, ", ")); }

/// `x` [...] must have one entry for every row of the logits.
void check_rows(std::string_view what, const at::Tensor& x, at::ScalarType dtype, at::IntArrayRef rows) {
  check(x.scalar_type() == dtype, ErrorCode::BadUsage, "{} must be {}, got {}", what, c10::toString(dtype),
        c10::toString(x.scalar_type()));
  check(x.sizes() == rows, ErrorCode::BadUsage, "{} must have one entry per row of the logits, {}, got {}", what,
        shape_text(rows), shape_text(x.sizes()));
}

at::Tensor computable(const at::Tensor& x) {
  const at::ScalarType t = x.scalar_type();
  return t == at::kHalf || t == at::kBFloat16 ? x.to(at::kFloat) : x;
}

/// Sum over classes of p_teacher * (log p_teacher - log p_student), for every row; 0 where the teacher's p is 0.
at::Tensor divergence(const at::Tensor& student, const at::Tensor& teacher, double temperature) {
  const at::Tensor log_q = student.div(temperature).log_softmax(-1);
  const at::Tensor log_p = teacher.div(temperature).log_softmax(-1);
  const at::Tensor p = log_p.exp();
  return at::where(p.gt(0), p.mul(log_p.sub(log_q)), at::zeros_like(p)).sum(-1);
}

}  // namespace

at::Tensor KnowledgeDistillation::operator()(const at::Tensor& student, const at::Tensor& teacher,
                                             const at::Tensor& labels, const at::Tensor& mask) const {
  check(temperature > 0 && std::isfinite(temperature), ErrorCode::BadOption,
        "temperature={} must be a finite number above 0", temperature);
  check(alpha >= 0 && alpha <= 1, ErrorCode::BadOption, "alpha={} is outside [0, 1]", alpha);
  check(student.defined() && teacher.defined(), ErrorCode::BadUsage, "student and teacher logits must be given");
  check(student.is_floating_point() && teacher.is_floating_point(), ErrorCode::BadUsage,
        "logits must be floating point, got {} from the student and {} from the teacher",
        c10::toString(student.scalar_type()), c10::toString(teacher.scalar_type()));
  check(student.dim() >= 1 && student.size(-1) >= 1, ErrorCode::BadUsage,
        "logits must be [..., classes] with at least one class, got {}", shape_text(student.sizes()));
  check(student.sizes() == teacher.sizes(), ErrorCode::BadUsage,
        "student logits {} and teacher logits {} must have the same shape", shape_text(student.sizes()),
        shape_text(teacher.sizes()));

  const at::IntArrayRef rows = student.sizes().slice(0, static_cast<std::size_t>(student.dim() - 1));
  const std::int64_t classes = student.size(-1);
  at::Tensor counts;  // [rows], undefined when every row counts
  if (mask.defined()) {
    check_rows("mask", mask, at::kBool, rows);
    counts = mask.reshape({-1});
  }
  if (labels.defined()) {
    check_rows("labels", labels, at::kLong, rows);
    const at::Tensor labelled = labels.reshape({-1}).ne(ignore_index);
    counts = counts.defined() ? counts.logical_and(labelled) : labelled;
  }

  at::Tensor s = computable(student).reshape({-1, classes});
  at::Tensor t = computable(teacher.detach()).to(s.scalar_type()).reshape({-1, classes});
  at::Tensor y = labels.defined() ? labels.reshape({-1}) : labels;
  if (counts.defined()) {
    // Rows are taken out, not multiplied by 0: 0 * NaN is NaN.
    const at::Tensor kept = counts.nonzero().reshape({-1});
    s = s.index_select(0, kept);
    t = t.index_select(0, kept);
    if (y.defined()) y = y.index_select(0, kept);
  }
  const auto n = static_cast<double>(std::max<std::int64_t>(s.size(0), 1));

  // A term of weight 0 is left out, so that it may be infinite.
  at::Tensor loss;
  const double soft = y.defined() ? alpha : 1.0;
  if (soft > 0) loss = divergence(s, t, temperature).sum().mul(soft * temperature * temperature / n);
  if (soft < 1) {
    if (y.numel() > 0) {
      const auto low = y.min().item<std::int64_t>(), high = y.max().item<std::int64_t>();
      check(low >= 0 && high < classes, ErrorCode::BadUsage, "label {} is outside [0, {}) and is not ignore_index={}",
            low < 0 ? low : high, classes, ignore_index);
    }
    const at::Tensor hard = s.log_softmax(-1).gather(-1, y.unsqueeze(-1)).sum().mul(-(1 - soft) / n);
    loss = loss.defined() ? loss.add(hard) : hard;
  }
  return loss;
}

}  // namespace tersor::distill

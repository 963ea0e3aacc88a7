#include "tersor/runtime/weight_tensor.hpp"

#include <typeinfo>
#include <variant>

#include <ATen/core/stack.h>
#include <ATen/ops/_to_copy.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/WrapDimMinimal.h>
#include <fmt/ranges.h>
#include <torch/library.h>

#include "tersor/core/error.hpp"
#include "tersor/core/names.hpp"

namespace tersor {
namespace {

using Linear = c10::intrusive_ptr<PackedLinear>;
using Conv = c10::intrusive_ptr<PackedConv>;
using Embedding = c10::intrusive_ptr<PackedEmbedding>;

constexpr std::string_view kAdvice =
    "call tersor::dequantize(model) to get float weights back, or weight.dequantize() for a plain tensor of its values";

// What all tensors of one weight share.
struct Weight {
  std::variant<Linear, Conv, Embedding> packed;
  LayerQuantization quantization;
  std::string text;  // for messages: which weight, and what it is

  std::string no_values() const { return fmt::format("{} has no float values in memory; {}", text, kAdvice); }
};

class WeightImpl final : public c10::TensorImpl {
 public:
  WeightImpl(std::shared_ptr<const Weight> weight, at::ScalarType dtype, bool transposed)
      : TensorImpl(c10::DispatchKeySet(c10::DispatchKey::PrivateUse3), c10::scalarTypeToTypeMeta(dtype), at::kCPU),
        weight_(std::move(weight)),
        transposed_(transposed) {
    // In inference mode that key would make a differentiable view of the one transposed tensor, again in every call.
    key_set_ = key_set_.remove(c10::DispatchKey::ADInplaceOrView);
    const std::vector<std::int64_t>& shape = weight_->quantization.weight.shape;
    if (transposed) {
      set_sizes_and_strides(at::IntArrayRef{shape[1], shape[0]}, at::IntArrayRef{1, shape[1]});
    } else {
      set_sizes_contiguous(shape);
    }
    release_storage_and_set_meta_custom_data_ptr_error_msg_(weight_->no_values() +
                                                            "; tersor::Model::save saves a model with such weights");
  }

  const Weight& weight() const { return *weight_; }
  bool transposed() const { return transposed_; }

  // The transposed view is made once, because every call of a Linear module asks for it. It knows no way back: a
  // reference from it would be a cycle.
  static at::Tensor make(std::shared_ptr<const Weight> weight, at::ScalarType dtype, bool transposed) {
    const c10::InferenceMode normal(false);
    auto impl = c10::make_intrusive<WeightImpl>(weight, dtype, transposed);
    if (!transposed && impl->dim() == 2) impl->twin_ = at::Tensor(c10::make_intrusive<WeightImpl>(weight, dtype, true));
    return at::Tensor(std::move(impl));
  }

  at::Tensor transpose() const {
    return transposed_ ? make(weight_, c10::typeMetaToScalarType(dtype()), false) : twin_;
  }
  at::Tensor as(at::ScalarType dtype) const { return make(weight_, dtype, transposed_); }

  at::Tensor values() const { return oriented(dequantize(weight_->quantization.weight)); }

  // Values to compute with; a convolution shares those that it keeps.
  at::Tensor shared_values() const {
    const auto* conv = std::get_if<Conv>(&weight_->packed);
    return conv != nullptr ? oriented((*conv)->dense()) : values();
  }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                         bool allow_metadata_change) const override {
    auto copy = c10::make_intrusive<WeightImpl>(weight_, c10::typeMetaToScalarType(dtype()), transposed_);
    copy_tensor_metadata(this, copy.get(), version, allow_metadata_change);
    copy->twin_ = twin_;
    return copy;
  }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                         bool allow_metadata_change) const override {
    return shallow_copy_and_detach(static_cast<const c10::VariableVersion&>(version), allow_metadata_change);
  }

  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& from) override {
    const TensorImpl& impl = *from;
    check(typeid(impl) == typeid(WeightImpl), ErrorCode::BadUsage,
          "{} is given the data of a tensor that is none of tersor's weights", weight_->text);
    const auto& other = static_cast<const WeightImpl&>(impl);
    copy_tensor_metadata(&other, this, version_counter(), allow_tensor_metadata_change());
    weight_ = other.weight_;
    transposed_ = other.transposed_;
    twin_ = other.twin_;
  }

  void release_resources() override {
    TensorImpl::release_resources();
    weight_.reset();
    twin_.reset();
  }

 private:
  const char* tensorimpl_type_name() const override { return "tersor::WeightImpl"; }

  at::Tensor oriented(const at::Tensor& values) const {
    const at::Tensor typed = values.to(c10::typeMetaToScalarType(dtype()));
    return transposed_ ? typed.t() : typed;
  }

  std::shared_ptr<const Weight> weight_;
  bool transposed_;
  at::Tensor twin_;
};

const WeightImpl* weight_impl(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return typeid(impl) == typeid(WeightImpl) ? static_cast<const WeightImpl*>(&impl) : nullptr;
}

// Of an operator that has nothing else to dispatch on.
const WeightImpl& the_weight(const at::Tensor& tensor) {
  const WeightImpl* impl = weight_impl(tensor);
  check(impl != nullptr, ErrorCode::UnsupportedLayer, "a tensor of another library for PrivateUse3 meets tersor's");
  return *impl;
}

at::Tensor plain(const at::Tensor& tensor) {
  const WeightImpl* impl = weight_impl(tensor);
  return impl != nullptr ? impl->shared_values() : tensor;
}

at::Tensor make(std::variant<Linear, Conv, Embedding> packed, LayerQuantization quantization, const std::string& name) {
  const QTensor& q = quantization.weight;
  std::string text = fmt::format("the weight '{}', {}-bit codes of shape [{}],", escaped(name), q.scheme.bits,
                                 fmt::join(q.shape, ", "));
  const at::ScalarType dtype = q.dtype;
  return WeightImpl::make(
      std::make_shared<const Weight>(Weight{std::move(packed), std::move(quantization), std::move(text)}), dtype,
      false);
}

// x w^T + bias, when `w` is such a weight in the orientation that the integer operators know.
const PackedLinear* linear_of(const at::Tensor& w, bool transposed) {
  const WeightImpl* impl = weight_impl(w);
  if (impl == nullptr || impl->transposed() != transposed) return nullptr;
  const auto* packed = std::get_if<Linear>(&impl->weight().packed);
  return packed != nullptr ? packed->get() : nullptr;
}

// One function per operator, as the members of a class: the names of ATen's own functions are not found from here.
struct Kernels {
  static at::Tensor matmul(const at::Tensor& a, const at::Tensor& b) {
    if (const PackedLinear* packed = linear_of(b, true); packed != nullptr && weight_impl(a) == nullptr)
      return packed->forward(a, at::Tensor());
    return at::matmul(plain(a), plain(b));
  }

  static at::Tensor addmm(const at::Tensor& bias, const at::Tensor& a, const at::Tensor& b, const at::Scalar& beta,
                          const at::Scalar& alpha) {
    const bool plain_sum = beta.equal(1) && alpha.equal(1);
    if (plain_sum && bias.dim() == 1 && bias.size(0) == b.size(1) && weight_impl(bias) == nullptr)
      if (const PackedLinear* packed = linear_of(b, true); packed != nullptr && weight_impl(a) == nullptr)
        return packed->forward(a, bias);
    const at::Tensor y = matmul(a, b);
    return (plain_sum ? y : y.mul(alpha)).add(plain(bias).expand(y.sizes()), beta);
  }

  static at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias) {
    if (const PackedLinear* packed = linear_of(w, false); packed != nullptr && weight_impl(x) == nullptr)
      return packed->forward(x, bias.value_or(at::Tensor()));
    return at::linear(plain(x), plain(w), bias);
  }

  static at::Tensor convolution(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias,
                                at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                                bool transposed, at::IntArrayRef output_padding, std::int64_t groups) {
    const at::Tensor input = plain(x);
    const auto like_input = input.options().requires_grad(false);
    return at::convolution(input, plain(w).to(like_input), bias, stride, padding, dilation, transposed, output_padding,
                           groups);
  }

  static at::Tensor convolution_with_settings(const at::Tensor& x, const at::Tensor& w,
                                              const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                                              at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                                              at::IntArrayRef output_padding, std::int64_t groups, bool /*benchmark*/,
                                              bool /*deterministic*/, bool /*cudnn*/, bool /*tf32*/) {
    return convolution(x, w, bias, stride, padding, dilation, transposed, output_padding, groups);
  }

  static at::Tensor embedding(const at::Tensor& w, const at::Tensor& ids, std::int64_t padding_idx,
                              bool scale_grad_by_freq, bool sparse) {
    const WeightImpl* impl = weight_impl(w);
    const auto* packed =
        impl != nullptr && !impl->transposed() ? std::get_if<Embedding>(&impl->weight().packed) : nullptr;
    if (packed == nullptr) return at::embedding(plain(w), plain(ids), padding_idx, scale_grad_by_freq, sparse);
    return (*packed)->forward(ids).to(w.scalar_type());
  }

  static at::Tensor transpose(const at::Tensor& w, std::int64_t dim0, std::int64_t dim1) {
    dim0 = c10::maybe_wrap_dim(dim0, w.dim());
    dim1 = c10::maybe_wrap_dim(dim1, w.dim());
    if (dim0 == dim1) return w;
    const WeightImpl& impl = the_weight(w);
    if (w.dim() != 2)
      throw fail(ErrorCode::UnsupportedLayer, "aten::transpose is not possible: {}", impl.weight().no_values());
    return impl.transpose();
  }

  static at::Tensor t(const at::Tensor& w) { return transpose(w, 0, 1); }

  static at::Tensor same_codes(const at::Tensor& w) {
    return at::Tensor(the_weight(w).shallow_copy_and_detach(c10::VariableVersion(0), true));
  }

  static at::Tensor values(const at::Tensor& w) { return the_weight(w).values(); }

  static at::Tensor clone(const at::Tensor& w, std::optional<at::MemoryFormat> format) {
    const at::MemoryFormat wanted = format.value_or(at::MemoryFormat::Preserve);
    return wanted == at::MemoryFormat::Preserve ? values(w) : values(w).contiguous(wanted);
  }

  static at::Tensor to_copy(const at::Tensor& w, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                            std::optional<at::Device> device, std::optional<bool> pin_memory, bool non_blocking,
                            std::optional<at::MemoryFormat> format) {
    const WeightImpl& impl = the_weight(w);
    if (device && !device->is_cpu())
      throw fail(ErrorCode::UnsupportedLayer, "{} cannot move to the device {}: its operators run on the CPU only; {}",
                 impl.weight().text, device->str(), kAdvice);
    const at::ScalarType to = dtype.value_or(w.scalar_type());
    const bool codes = to == at::kFloat || to == at::kHalf || to == at::kBFloat16;
    if (codes && layout.value_or(at::kStrided) == at::kStrided) return impl.as(to);
    return at::_to_copy(impl.values(), to, layout, device, pin_memory, non_blocking, format);
  }

  static at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
    if (const WeightImpl* impl = weight_impl(to))
      throw fail(ErrorCode::UnsupportedLayer, "{} cannot be written to; {}", impl->weight().text, kAdvice);
    return to.copy_(plain(from), non_blocking);
  }

  // What set_data asks: between two weights it exchanges the codes.
  static bool may_take_data(const at::Tensor& to, const at::Tensor& from) {
    const WeightImpl* a = weight_impl(to);
    const WeightImpl* b = weight_impl(from);
    if (a != nullptr && b != nullptr) return true;
    throw fail(
        ErrorCode::UnsupportedLayer,
        "set_data (Module::to calls it) between {} and a plain tensor is not possible; put the other tensor in its "
        "place instead, or {}",
        (a != nullptr ? *a : the_weight(from)).weight().text, kAdvice);
  }
};

const WeightImpl* find_weight(const c10::IValue& value) {
  if (value.isTensor()) return weight_impl(value.toTensor());
  if (!value.isList()) return nullptr;
  for (const c10::IValue& item : value.toListRef())
    if (const WeightImpl* impl = find_weight(item)) return impl;
  return nullptr;
}

void refuse(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (const c10::IValue& argument : torch::jit::last(*stack, op.schema().arguments().size()))
    if (const WeightImpl* impl = find_weight(argument))
      throw fail(ErrorCode::UnsupportedLayer, "{} is not possible: {}", op.schema().name(), impl->weight().no_values());
  throw fail(ErrorCode::UnsupportedLayer, "{} has no kernel for PrivateUse3", op.schema().name());
}

// At the autograd key too: what needs a gradient gets it inside of these, and a cached view is not made a
// differentiable one by several threads at once.
void register_kernels(torch::Library& m) {
  m.impl("t", TORCH_FN(Kernels::t));
  m.impl("numpy_T", TORCH_FN(Kernels::t));
  m.impl("transpose.int", TORCH_FN(Kernels::transpose));
  m.impl("addmm", TORCH_FN(Kernels::addmm));
  m.impl("mm", TORCH_FN(Kernels::matmul));
  m.impl("matmul", TORCH_FN(Kernels::matmul));
  m.impl("linear", TORCH_FN(Kernels::linear));
  m.impl("convolution", TORCH_FN(Kernels::convolution));
  m.impl("_convolution", TORCH_FN(Kernels::convolution_with_settings));
  m.impl("embedding", TORCH_FN(Kernels::embedding));
  m.impl("detach", TORCH_FN(Kernels::same_codes));
  m.impl("alias", TORCH_FN(Kernels::same_codes));
  m.impl("dequantize.self", TORCH_FN(Kernels::values));
  m.impl("clone", TORCH_FN(Kernels::clone));
  m.impl("_to_copy", TORCH_FN(Kernels::to_copy));
  m.impl("copy_", TORCH_FN(Kernels::copy));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(Kernels::may_take_data));
  // These have kernels for every backend, which would fail at some step with another operator's name.
  for (const char* name : {"add.Tensor", "add_.Tensor", "sub.Tensor", "sub_.Tensor", "mul.Tensor", "mul_.Tensor",
                           "div.Tensor", "div_.Tensor", "select.int", "slice.Tensor", "narrow", "expand", "permute"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

}  // namespace

at::Tensor make_weight_tensor(Linear packed, const std::string& name) {
  LayerQuantization quantization{packed->weight(), packed->activation()};
  if (packed->bias()) packed = c10::make_intrusive<PackedLinear>(quantization, std::nullopt);
  return make(std::move(packed), std::move(quantization), name);
}

at::Tensor make_weight_tensor(Conv packed, const std::string& name) {
  LayerQuantization quantization{packed->weight(), {}};
  return make(std::move(packed), std::move(quantization), name);
}

at::Tensor make_weight_tensor(Embedding packed, const std::string& name) {
  LayerQuantization quantization{packed->weight(), {}};
  return make(std::move(packed), std::move(quantization), name);
}

bool is_weight_tensor(const at::Tensor& tensor) { return weight_impl(tensor) != nullptr; }

const LayerQuantization& quantization_of(const at::Tensor& weight) {
  const WeightImpl* impl = weight_impl(weight);
  check(impl != nullptr, ErrorCode::BadUsage, "a plain tensor has no quantization; expected one of tersor's weights");
  return impl->weight().quantization;
}

}  // namespace tersor

TORCH_LIBRARY_IMPL(aten, PrivateUse3, m) { tersor::register_kernels(m); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) { tersor::register_kernels(m); }
TORCH_LIBRARY_IMPL(_, PrivateUse3, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&tersor::refuse>()); }
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse3, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

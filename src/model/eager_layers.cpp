#include <cmath>

#include <ATen/ops/zeros_like.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include "eager.hpp"
#include "tersor/core/names.hpp"

namespace tersor {
namespace {

namespace nn = torch::nn;

/// The registry of parameters is protected: reached as a derived class reaches it.
struct Registry : nn::Module {
  static torch::OrderedDict<std::string, at::Tensor>& of(nn::Module& module) {
    return module.*(&Registry::parameters_);
  }
};

/// Calls `see` with the layer as the first of these types that it is.
template <typename... Types, typename See>
bool as_one_of(nn::Module& layer, See&& see) {
  const auto attempt = [&]<typename T>(std::type_identity<T>) {
    T* as = dynamic_cast<T*>(&layer);
    if (as != nullptr) see(*as);
    return as != nullptr;
  };
  return (attempt(std::type_identity<Types>()) || ...);
}

template <typename See>
bool as_convolution(nn::Module& layer, See&& see) {
  return as_one_of<nn::Conv1dImpl, nn::Conv2dImpl, nn::Conv3dImpl>(layer, see);
}
template <typename See>
bool as_transposed_convolution(nn::Module& layer, See&& see) {
  return as_one_of<nn::ConvTranspose1dImpl, nn::ConvTranspose2dImpl, nn::ConvTranspose3dImpl>(layer, see);
}
template <typename See>
bool as_batch_norm(nn::Module& layer, See&& see) {
  return as_one_of<nn::BatchNorm1dImpl, nn::BatchNorm2dImpl, nn::BatchNorm3dImpl>(layer, see);
}

/// How many features a norm's tensors count; nothing without tensors.
template <typename Norm>
std::optional<std::int64_t> features(const Norm& norm) {
  for (const at::Tensor& tensor : {norm.weight, norm.running_mean})
    if (tensor.defined()) return tensor.size(0);
  return std::nullopt;
}

}  // namespace

void sync_options(nn::Module& layer) {
  as_one_of<nn::LinearImpl>(layer, [](nn::LinearImpl& linear) {
    linear.options.in_features(linear.weight.size(1)).out_features(linear.weight.size(0));
  });
  as_convolution(layer, [](auto& conv) {
    conv.options.out_channels(conv.weight.size(0)).in_channels(conv.weight.size(1) * conv.options.groups());
  });
  as_transposed_convolution(layer, [](auto& conv) {
    conv.options.in_channels(conv.weight.size(0)).out_channels(conv.weight.size(1) * conv.options.groups());
  });
  as_batch_norm(layer, [](auto& norm) {
    if (const auto n = features(norm)) norm.options.num_features(*n);
  });
  as_one_of<nn::InstanceNorm1dImpl, nn::InstanceNorm2dImpl, nn::InstanceNorm3dImpl>(layer, [](auto& norm) {
    if (const auto n = features(norm)) norm.options.num_features(*n);
  });
  as_one_of<nn::LayerNormImpl>(layer, [](nn::LayerNormImpl& norm) {
    if (norm.weight.defined()) norm.options.normalized_shape(norm.weight.sizes().vec());
  });
  as_one_of<nn::GroupNormImpl>(layer, [](nn::GroupNormImpl& norm) {
    if (norm.weight.defined()) norm.options.num_channels(norm.weight.size(0));
  });
  as_one_of<nn::LSTMImpl, nn::GRUImpl, nn::RNNImpl>(layer, [](auto& rnn) {
    using Rnn = std::remove_reference_t<decltype(rnn)>;
    constexpr std::int64_t gates = std::same_as<Rnn, nn::LSTMImpl> ? 4 : std::same_as<Rnn, nn::GRUImpl> ? 3 : 1;
    const auto weights = rnn.named_parameters(/*recurse=*/false);
    const std::int64_t inputs = weights["weight_ih_l0"].size(1), hidden = weights["weight_ih_l0"].size(0) / gates;
    rnn.options.input_size(inputs).hidden_size(hidden);
    rnn.options_base.input_size(inputs).hidden_size(hidden);
    if constexpr (std::same_as<Rnn, nn::LSTMImpl>)
      if (const at::Tensor* projection = weights.find("weight_hr_l0")) {
        rnn.options.proj_size(projection->size(0));
        rnn.options_base.proj_size(projection->size(0));
      }
  });
  as_one_of<nn::EmbeddingImpl>(layer, [](nn::EmbeddingImpl& embedding) {
    embedding.options.num_embeddings(embedding.weight.size(0)).embedding_dim(embedding.weight.size(1));
  });
}

void set_groups(nn::Module& layer, std::int64_t groups) {
  const auto set = [&](auto& conv) { conv.options.groups(groups); };
  as_convolution(layer, set);
  as_transposed_convolution(layer, set);
  as_one_of<nn::GroupNormImpl>(layer, [&](nn::GroupNormImpl& norm) { norm.options.num_groups(groups); });
}

bool is_batch_norm(const nn::Module& layer) {
  return as_batch_norm(const_cast<nn::Module&>(layer), [](auto&) {});
}

void become_identity(nn::Module& batch_norm) {
  as_batch_norm(batch_norm, [](auto& norm) {
    norm.weight.set_data(norm.running_var.add(norm.options.eps()).sqrt());
    norm.bias.set_data(at::zeros_like(norm.bias));
    norm.running_mean.set_data(at::zeros_like(norm.running_mean));
  });
}

void become_identity(nn::Module& batch_norm, std::int64_t width) {
  as_batch_norm(batch_norm, [&](auto& norm) {
    norm.running_var.set_data(norm.running_var.new_ones({width}));
    norm.running_mean.set_data(norm.running_mean.new_zeros({width}));
    norm.weight.set_data(norm.weight.detach().new_full({width}, std::sqrt(1 + norm.options.eps())));
    norm.bias.set_data(norm.bias.detach().new_zeros({width}));
  });
}

bool takes_codes(const nn::Module& layer, LayerKind kind) {
  switch (kind) {
    case LayerKind::linear:
      return dynamic_cast<const nn::LinearImpl*>(&layer) != nullptr;
    case LayerKind::conv1d:
      return dynamic_cast<const nn::Conv1dImpl*>(&layer) != nullptr;
    case LayerKind::conv2d:
      return dynamic_cast<const nn::Conv2dImpl*>(&layer) != nullptr;
    case LayerKind::embedding:
      return dynamic_cast<const nn::EmbeddingImpl*>(&layer) != nullptr;
    default:
      return false;
  }
}

bool takes_bias(const nn::Module& layer) {
  nn::Module& any = const_cast<nn::Module&>(layer);
  const auto nothing = [](auto&) {};
  return as_one_of<nn::LinearImpl>(any, nothing) || as_convolution(any, nothing) ||
         as_transposed_convolution(any, nothing);
}

at::Tensor unregistered_weight(const nn::Module& layer) {
  at::Tensor found;
  nn::Module& any = const_cast<nn::Module&>(layer);
  const auto look = [&](auto& known) {
    const at::Tensor* registered = Registry::of(any).find("weight");
    if (registered == nullptr || !registered->is_same(known.weight)) found = known.weight;
  };
  as_one_of<nn::LinearImpl, nn::EmbeddingImpl>(any, look) || as_convolution(any, look) ||
      as_transposed_convolution(any, look);
  return found;
}

void replace_parameter(nn::Module& layer, const std::string& own_name, const at::Tensor& tensor) {
  const auto replace = [&](auto& known) {
    if (own_name == "weight") known.weight = tensor;
    if constexpr (requires { known.bias; })
      if (own_name == "bias") {
        known.bias = tensor;
        known.options.bias(tensor.defined());
      }
  };
  const bool known = as_one_of<nn::LinearImpl, nn::EmbeddingImpl>(layer, replace) || as_convolution(layer, replace) ||
                     as_transposed_convolution(layer, replace);
  check(known, ErrorCode::Internal, "'{}' of a {} cannot be replaced", escaped(own_name), layer.name());
  Registry::of(layer)[own_name] = tensor;
}

}  // namespace tersor

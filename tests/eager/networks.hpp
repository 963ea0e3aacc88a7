#pragma once

#include <cmath>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/pooling.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/pimpl.h>

// Networks as people write them in C++.
namespace eager {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

inline nn::Sequential mlp() {
  return nn::Sequential(nn::Linear(24, 64), nn::ReLU(), nn::Linear(64, 32), nn::ReLU(), nn::Linear(32, 5));
}

// --- a residual network with a downsample branch, as torchvision writes it ---
struct BasicBlockImpl : nn::Module {
  BasicBlockImpl(std::int64_t in, std::int64_t out, std::int64_t stride)
      : conv1(nn::Conv2dOptions(in, out, 3).stride(stride).padding(1).bias(false)),
        bn1(out),
        conv2(nn::Conv2dOptions(out, out, 3).padding(1).bias(false)),
        bn2(out) {
    register_module("conv1", conv1);
    register_module("bn1", bn1);
    register_module("conv2", conv2);
    register_module("bn2", bn2);
    if (stride != 1 || in != out) {
      downsample =
          nn::Sequential(nn::Conv2d(nn::Conv2dOptions(in, out, 1).stride(stride).bias(false)), nn::BatchNorm2d(out));
      register_module("downsample", downsample);
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    torch::Tensor identity = x;
    torch::Tensor out = torch::relu(bn1(conv1(x)));
    out = bn2(conv2(out));
    if (!downsample.is_empty()) identity = downsample->forward(x);
    out += identity;
    return torch::relu_(out);
  }
  nn::Conv2d conv1;
  nn::BatchNorm2d bn1;
  nn::Conv2d conv2;
  nn::BatchNorm2d bn2;
  nn::Sequential downsample{nullptr};
};
TORCH_MODULE(BasicBlock);

struct ResNetImpl : nn::Module {
  ResNetImpl()
      : conv1(nn::Conv2dOptions(3, 16, 3).padding(1).bias(false)),
        bn1(16),
        layer1(BasicBlock(16, 16, 1)),
        layer2(BasicBlock(16, 32, 2), BasicBlock(32, 32, 1)),
        fc(32, 10) {
    register_module("conv1", conv1);
    register_module("bn1", bn1);
    register_module("layer1", layer1);
    register_module("layer2", layer2);
    register_module("fc", fc);
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(bn1(conv1(x)));
    x = layer2->forward(layer1->forward(x));
    x = torch::adaptive_avg_pool2d(x, {1, 1});
    return fc(x.view({x.size(0), -1}));
  }
  nn::Conv2d conv1;
  nn::BatchNorm2d bn1;
  nn::Sequential layer1, layer2;
  nn::Linear fc;
};
TORCH_MODULE(ResNet);

// --- a transformer block with attention written by hand ---
struct TransformerBlockImpl : nn::Module {
  TransformerBlockImpl(std::int64_t width, std::int64_t heads)
      : heads(heads),
        norm1(nn::LayerNormOptions({width})),
        qkv(width, 3 * width),
        out(width, width),
        norm2(nn::LayerNormOptions({width})),
        up(width, 4 * width),
        down(4 * width, width) {
    register_module("norm1", norm1);
    register_module("qkv", qkv);
    register_module("out", out);
    register_module("norm2", norm2);
    register_module("up", up);
    register_module("down", down);
  }
  torch::Tensor forward(torch::Tensor x) {
    const auto batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts = qkv(norm1(x)).view({batch, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    const auto q = parts[0], k = parts[1], v = parts[2];
    const auto weights = torch::softmax(q.matmul(k.transpose(-2, -1)) / std::sqrt(double(width / heads)), -1);
    const auto mixed = weights.matmul(v).permute({0, 2, 1, 3}).reshape({batch, length, width});
    x = x + out(mixed);
    return x + down(torch::gelu(up(norm2(x))));
  }
  std::int64_t heads;
  nn::LayerNorm norm1;
  nn::Linear qkv, out;
  nn::LayerNorm norm2;
  nn::Linear up, down;
};
TORCH_MODULE(TransformerBlock);

struct TransformerImpl : nn::Module {
  TransformerImpl() : block1(16, 4), block2(16, 4), head(16, 7) {
    register_module("block1", block1);
    register_module("block2", block2);
    register_module("head", head);
  }
  torch::Tensor forward(torch::Tensor x) { return head(block2(block1(x)).mean(1)); }
  TransformerBlock block1, block2;
  nn::Linear head;
};
TORCH_MODULE(Transformer);

// --- a tagger: one label a word ---
struct TaggerImpl : nn::Module {
  TaggerImpl() : words(50, 12), lstm(nn::LSTMOptions(12, 16).batch_first(true)), hidden(16, 24), tags(24, 6) {
    register_module("words", words);
    register_module("lstm", lstm);
    register_module("hidden", hidden);
    register_module("tags", tags);
  }
  torch::Tensor forward(torch::Tensor ids) { return tags(torch::relu(hidden(std::get<0>(lstm->forward(words(ids)))))); }
  nn::Embedding words;
  nn::LSTM lstm;
  nn::Linear hidden, tags;
};
TORCH_MODULE(Tagger);

// --- one layer used twice, under two names ---
struct SharedImpl : nn::Module {
  SharedImpl() : first(8, 24), middle(24, 24), last(24, 3) {
    register_module("first", first);
    register_module("middle", middle);
    register_module("again", middle);
    register_module("last", last);
  }
  torch::Tensor forward(torch::Tensor x) {
    return last(torch::relu(middle(torch::relu(middle(torch::relu(first(x)))))));
  }
  nn::Linear first, middle, last;
};
TORCH_MODULE(Shared);

// --- bare parameters and buffers ---
struct BareImpl : nn::Module {
  BareImpl() : fc1(10, 20), fc2(20, 4) {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
    gain = register_parameter("gain", torch::rand({20}) + 0.5);
    shift = register_buffer("shift", torch::randn({20}));
    scale = register_parameter("scale", torch::ones({1}));
  }
  torch::Tensor forward(torch::Tensor x) { return fc2(torch::tanh(fc1(x)) * gain + shift) * scale; }
  nn::Linear fc1, fc2;
  torch::Tensor gain, shift, scale;
};
TORCH_MODULE(Bare);

// --- a width written into the code ---
struct HardCodedImpl : nn::Module {
  HardCodedImpl() : conv(nn::Conv2dOptions(1, 8, 3).padding(1)), fc1(8 * 4 * 4, 32), fc2(32, 4) {
    register_module("conv", conv);
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::max_pool2d(torch::relu(conv(x)), 2);
    return fc2(torch::relu(fc1(x.view({-1, 8 * 4 * 4}))));
  }
  nn::Conv2d conv;
  nn::Linear fc1, fc2;
};
TORCH_MODULE(HardCoded);

// --- several inputs, a tuple and a dictionary ---
struct TwoSides : nn::Module {
  TwoSides() : left(6, 16), right(4, 16), head(16, 3) {
    register_module("left", left);
    register_module("right", right);
    register_module("head", head);
  }
  torch::Tensor joined(const torch::Tensor& a, const torch::Tensor& b) { return torch::relu(left(a) + right(b)); }
  nn::Linear left, right, head;
};

struct TwoInputsImpl : TwoSides {
  std::tuple<torch::Tensor, torch::Tensor> forward(torch::Tensor a, torch::Tensor b) {
    const auto hidden = joined(a, b);
    return {head(hidden), hidden.sum(-1)};
  }
  torch::Tensor encode(torch::Tensor a) { return torch::relu(left(a)); }
};
TORCH_MODULE(TwoInputs);

struct DictionaryImpl : TwoSides {
  std::map<std::string, torch::Tensor> forward(const std::map<std::string, torch::Tensor>& in) {
    const auto hidden = joined(in.at("a"), in.at("b"));
    return {{"logits", head(hidden)}, {"hidden", hidden.sum(-1)}};
  }
};
TORCH_MODULE(Dictionary);

}  // namespace eager

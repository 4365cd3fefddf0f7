#include "transformer.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/nn/init.h>

#include <vector>

namespace {

torch::nn::LayerNorm layer_norm(const TransformerConfig& config) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width}));
}

/// at::linear adds the bias inside the matrix product, as Python's nn.Linear does. forward() of the
/// C++ module adds it afterwards for 3-d input: one more pass over memory, and other last bits.
at::Tensor fused_linear(const torch::nn::Linear& linear, const at::Tensor& x) {
  return at::linear(x, linear->weight, linear->bias);
}

}  // namespace

// Modules are registered in the order that a Python twin assigns them, so that both draw the same
// numbers for the same parameters.
BlockImpl::BlockImpl(const TransformerConfig& config)
    : heads_(config.heads),
      attention_norm_(register_module("attention_norm", layer_norm(config))),
      query_key_value_(
          register_module("query_key_value", torch::nn::Linear(config.width, 3 * config.width))),
      projection_(register_module("projection", torch::nn::Linear(config.width, config.width))),
      mlp_norm_(register_module("mlp_norm", layer_norm(config))),
      expand_(register_module("expand", torch::nn::Linear(config.width, 4 * config.width))),
      contract_(register_module("contract", torch::nn::Linear(4 * config.width, config.width))) {}

at::Tensor BlockImpl::forward(const at::Tensor& x) {
  const at::Tensor attended = x + attend(attention_norm_->forward(x));
  const at::Tensor hidden = at::gelu(fused_linear(expand_, mlp_norm_->forward(attended)));
  return attended + fused_linear(contract_, hidden);
}

at::Tensor BlockImpl::attend(const at::Tensor& x) {
  std::vector<at::Tensor> parts = fused_linear(query_key_value_, x).chunk(3, -1);
  for (at::Tensor& part : parts) {
    part = part.view({x.size(0), x.size(1), heads_, -1}).transpose(1, 2);
  }
  const at::Tensor mixed =
      at::scaled_dot_product_attention(parts[0], parts[1], parts[2], /*attn_mask=*/{},
                                       /*dropout_p=*/0.0, /*is_causal=*/true);
  return fused_linear(projection_, mixed.transpose(1, 2).reshape(x.sizes()));
}

TransformerImpl::TransformerImpl(const TransformerConfig& config)
    : token_embedding_(register_module("token_embedding",
                                       torch::nn::Embedding(config.vocabulary, config.width))),
      position_embedding_(register_module("position_embedding",
                                          torch::nn::Embedding(config.context, config.width))),
      blocks_(register_module("blocks", torch::nn::Sequential())),
      norm_(register_module("norm", layer_norm(config))) {
  for (std::int64_t layer = 0; layer < config.layers; ++layer) blocks_->push_back(Block(config));
  initialise();
}

void TransformerImpl::initialise() {
  for (const auto& item : named_parameters()) {
    const at::Tensor& parameter = item.value();
    const bool is_bias = item.key().ends_with("bias");
    if (parameter.dim() > 1) torch::nn::init::normal_(parameter, 0.0, 0.02);
    if (is_bias) torch::nn::init::zeros_(parameter);
  }
}

at::Tensor TransformerImpl::forward(const at::Tensor& tokens) {
  const at::Tensor positions = at::arange(tokens.size(1), tokens.options());
  at::Tensor x = token_embedding_->forward(tokens) + position_embedding_->forward(positions);
  x = blocks_->forward(x);
  // The embedding's own tensor, not a second module with it: C++ lists shared parameters twice.
  return at::linear(norm_->forward(x), token_embedding_->weight);
}

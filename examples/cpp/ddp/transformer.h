#pragma once

// A decoder-only transformer: embeddings, pre-norm blocks, a head tied to the token embedding.
//
//   Transformer net(TransformerConfig{.vocabulary = 65});
//   at::Tensor logits = net->forward(tokens);  // int64 [rows, context] -> [rows, context, 65]

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

struct TransformerConfig {
  std::int64_t vocabulary = 0;
  std::int64_t context = 32;
  std::int64_t width = 64;
  std::int64_t heads = 4;
  std::int64_t layers = 2;
};

/// x + attention(norm(x)), then x + mlp(norm(x)).
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const TransformerConfig& config);

  /// x: [rows, length, width]; the result has its shape.
  at::Tensor forward(const at::Tensor& x);

 private:
  at::Tensor attend(const at::Tensor& x);

  std::int64_t heads_;
  torch::nn::LayerNorm attention_norm_;
  torch::nn::Linear query_key_value_;
  torch::nn::Linear projection_;
  torch::nn::LayerNorm mlp_norm_;
  torch::nn::Linear expand_;
  torch::nn::Linear contract_;
};
TORCH_MODULE(Block);

class TransformerImpl : public torch::nn::Module {
 public:
  /// Draws the weights from torch's default generator: call torch::manual_seed before.
  explicit TransformerImpl(const TransformerConfig& config);

  /// tokens: int64 [rows, length], length <= context. Returns logits [rows, length, vocabulary].
  at::Tensor forward(const at::Tensor& tokens);

  /// What a sharded model makes units of.
  const torch::nn::Sequential& blocks() const { return blocks_; }

 private:
  void initialise();

  torch::nn::Embedding token_embedding_;
  torch::nn::Embedding position_embedding_;
  torch::nn::Sequential blocks_;
  torch::nn::LayerNorm norm_;
};
TORCH_MODULE(Transformer);

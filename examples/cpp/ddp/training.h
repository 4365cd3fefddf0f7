#pragma once

// What the training programs of this folder and of ../fsdp share: optimizer, batches, printed
// lines, errors. What is left to each program is how its model is wrapped.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <libddp/libddp.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "data.h"
#include "options.h"

/// Where this rank trains: the CPU, or the GPU of number LOCAL_RANK (0 without it). Throws
/// std::invalid_argument where there is no such GPU.
at::Device choose_device(const Options& options);

/// `replica`: of the data-parallel model that zero1 shares the work of.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Options& options,
                                                        std::vector<at::Tensor> parameters,
                                                        libddp::ReplicatedModel* replica = nullptr);

/// Mean cross entropy of this rank's batch, after its backward pass. `forward`: tokens to logits,
/// both on `device`.
at::Tensor forward_and_backward(const std::function<at::Tensor(const at::Tensor&)>& forward,
                                Batch batch, BatchShape shape, at::Device device);

/// Prints the loss of rank 0 and the average. Collective. %.9g gives every bit of a float32, so two
/// runs can be compared.
void report(const libddp::Group& group, std::int64_t step, const at::Tensor& loss);

/// Reads the command line and runs `train`; returns the exit status of the program.
int run_program(int argc, char** argv,
                const std::function<void(const Options&, const Text&)>& train);

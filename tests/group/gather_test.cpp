// The derived operations: reduce, gather, scatter, all_gather of lists, all_to_all.

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "tests/support/catch.h"
#include "tests/support/torch_group_fixture.h"

using namespace libddp;
using namespace libddp::test;

namespace {

/// One wide and one narrow type where each call of many ranks takes its time.
std::vector<at::ScalarType> some_dtypes(int world_size) {
  if (world_size > 2) return {at::kFloat, at::kBool};
  return {at::kFloat, at::kHalf, at::kLong, at::kByte, at::kBool};
}

std::vector<at::Tensor> zeros_like_each(int count, at::IntArrayRef sizes, at::ScalarType dtype) {
  std::vector<at::Tensor> list;
  for (int i = 0; i < count; ++i) list.push_back(at::zeros(sizes, dtype));
  return list;
}

/// What rank `from` sends to rank `to`: `rows` rows that say so.
at::Tensor message(int from, int to, std::int64_t rows) {
  return at::full({rows, 3}, from * 100 + to, at::kLong);
}

}  // namespace

TEST_CASE("reduce gives the result to the root only", "[gather]") {
  for (const int world_size : {1, 2, 3, 5}) {
    run_group(world_size, [](ProcessGroup& group) {
      for (int root = 0; root < group.size(); ++root) {
        at::Tensor tensor = input_of(group.rank(), {50}, at::kFloat);
        group.reduce(tensor, root);
        const bool is_root = group.rank() == root;
        expect_equal(tensor,
                     is_root ? reduced(group.size(), {50}, at::kFloat, ReduceOp::Sum)
                             : input_of(group.rank(), {50}, at::kFloat),
                     is_root ? "root has the sum" : "others keep theirs");
      }
    });
  }
}

TEST_CASE("gather and scatter reach every root", "[gather]") {
  for (const int world_size : {1, 2, 3, 5}) {
    run_group(world_size, [](ProcessGroup& group) {
      const int p = group.size();
      for (int root = 0; root < p; ++root) {
        for (const at::ScalarType dtype : some_dtypes(p)) {
          const bool is_root = group.rank() == root;
          const at::Tensor input = input_of(group.rank(), {2, 3}, dtype);
          auto gathered = zeros_like_each(is_root ? p : 0, {2, 3}, dtype);
          group.gather(gathered, input, root);
          std::vector<at::Tensor> sent;
          for (int rank = 0; rank < p; ++rank) {
            if (is_root)
              expect_equal(gathered[static_cast<std::size_t>(rank)], input_of(rank, {2, 3}, dtype),
                           "gathered");
            if (is_root) sent.push_back(input_of(rank + root, {4}, dtype));
          }
          at::Tensor output = at::zeros({4}, dtype);
          group.scatter(output, sent, root);
          expect_equal(output, input_of(group.rank() + root, {4}, dtype), "scattered");
        }
      }
    });
  }
}

TEST_CASE("all_gather fills a list", "[gather]") {
  for (const int world_size : {1, 2, 3, 5}) {
    run_group(world_size, [](ProcessGroup& group) {
      const int p = group.size();
      for (const at::ScalarType dtype : some_dtypes(p)) {
        auto outputs = zeros_like_each(p, {2, 3}, dtype);
        outputs[0] = at::zeros({3, 2}, dtype).t();
        group.all_gather(outputs, input_of(group.rank(), {2, 3}, dtype));
        at::Tensor flat = at::zeros({p * 6}, dtype);
        group.all_gather(flat.chunk(p), input_of(group.rank(), {6}, dtype));
        for (int rank = 0; rank < p; ++rank) {
          const auto index = static_cast<std::size_t>(rank);
          expect_equal(outputs[index], input_of(rank, {2, 3}, dtype), "separate");
          expect_equal(flat.narrow(0, rank * 6, 6), input_of(rank, {6}, dtype), "adjacent");
        }
      }
    });
  }
}

TEST_CASE("all_gather takes uneven sizes", "[gather]") {
  for (const int world_size : {2, 3, 5}) {
    run_group(world_size, [](ProcessGroup& group) {
      std::vector<at::Tensor> outputs;
      for (int rank = 0; rank < group.size(); ++rank) outputs.push_back(at::zeros({rank, 2}));
      group.all_gather(outputs, input_of(group.rank(), {group.rank(), 2}, at::kFloat));
      for (int rank = 0; rank < group.size(); ++rank) {
        expect_equal(outputs[static_cast<std::size_t>(rank)], input_of(rank, {rank, 2}, at::kFloat),
                     "uneven");
      }
    });
  }
}

TEST_CASE("all_to_all exchanges lists of any sizes", "[gather]") {
  for (const int world_size : {1, 2, 3, 5}) {
    run_group(world_size, [](ProcessGroup& group) {
      std::vector<at::Tensor> inputs;
      std::vector<at::Tensor> outputs;
      for (int rank = 0; rank < group.size(); ++rank) {
        inputs.push_back(message(group.rank(), rank, group.rank() + rank));
        outputs.push_back(at::zeros({group.rank() + rank, 3}, at::kLong));
      }
      group.all_to_all(outputs, inputs);
      for (int rank = 0; rank < group.size(); ++rank) {
        expect_equal(outputs[static_cast<std::size_t>(rank)],
                     message(rank, group.rank(), group.rank() + rank), "block");
      }
    });
  }
}

TEST_CASE("all_to_all_single splits evenly and by sizes", "[gather]") {
  for (const int world_size : {1, 2, 3, 5}) {
    run_group(world_size, [](ProcessGroup& group) {
      const int p = group.size();
      std::vector<at::Tensor> even_in, even_out, uneven_in, uneven_out;
      std::vector<std::int64_t> sends, receives;
      for (int rank = 0; rank < p; ++rank) {
        even_in.push_back(message(group.rank(), rank, 2));
        even_out.push_back(message(rank, group.rank(), 2));
        sends.push_back(rank);
        receives.push_back(group.rank());
        uneven_in.push_back(message(group.rank(), rank, rank));
        uneven_out.push_back(message(rank, group.rank(), group.rank()));
      }
      at::Tensor output = at::zeros({p * 2, 3}, at::kLong);
      group.all_to_all_single(output, at::cat(even_in), {}, {});
      expect_equal(output, at::cat(even_out), "even");
      at::Tensor uneven = at::zeros({3, group.rank() * p}, at::kLong).t();
      group.all_to_all_single(uneven, at::cat(uneven_in), receives, sends);
      expect_equal(uneven, at::cat(uneven_out), "uneven");
    });
  }
}

TEST_CASE("large blocks cross in both directions at once", "[gather]") {
  run_group(2, [](ProcessGroup& group) {
    const std::int64_t numel = 3000001;
    at::Tensor input = at::full({2 * numel}, group.rank() + 1.0f, at::kFloat);
    at::Tensor output = at::zeros({2 * numel});
    group.all_to_all_single(output, input, {}, {});
    expect(output[0].item<float>() == 1.0f && output[numel].item<float>() == 2.0f, "blocks");
    expect(output.sum().item<double>() == 3.0 * static_cast<double>(numel), "all elements");
  });
}

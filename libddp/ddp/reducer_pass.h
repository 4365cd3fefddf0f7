#pragma once

// One backward pass of a Reducer: how far it has come, which gradients have fired, what is sent,
// and what the other ranks know of an error in it.
//
// `restart` makes all of it anew, so that nothing of a pass reaches the next one, however it ended.
// Between passes it holds what the last one has left.
//
//   None --restart--> Armed --its end is asked for--> Running --end--> None
//                                                     |    ^
//             the end was that of a nested pass       v    |  the next gradient
//                                                    Reopened
//
//   Running, Reopened --an exception--> Broken --restart--> Armed
//
// Gradients of passes that come after a broken one without a restart (local ones, those of other
// reducers) do not count in it.
// Thread rule: as Reducer, and `num_missing` from any thread.
//
//   pass.restart(ReducerPass::Stage::Armed, buckets, num_expected);
//   if (pass.buckets[b].num_missing.fetch_sub(1) == 1) send(b);

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "libddp/ddp/gradient_buckets.h"
#include "libddp/group/work.h"

namespace libddp {

struct ReducerPass {
  enum class Stage : std::uint8_t { None, Armed, Running, Reopened, Broken };
  /// What the other ranks have been told of an error in it.
  enum class Told : std::uint8_t { Nothing, Error, Explained };

  struct Bucket {
    /// Gradients that have not fired as often as they will.
    std::atomic<int> num_missing{0};
    /// Null unless its communication is in flight.
    WorkPtr work;
  };

  explicit ReducerPass(std::size_t num_parameters) : num_fired(num_parameters, 0) {}

  /// `num_expected`: how often each parameter's gradient fires. Allocates only where the number of
  /// buckets is another one than before.
  void restart(Stage first, const GradientBuckets& of,
               const std::vector<std::uint32_t>& num_expected);
  /// Gradients that fire belong to it.
  bool is_running() const { return stage == Stage::Running || stage == Stage::Reopened; }
  /// It runs, or an exception has ended it.
  bool is_unfinished() const { return is_running() || stage == Stage::Broken; }

  Stage stage = Stage::None;
  Told told = Told::Nothing;
  /// Of a rank that has no data while others have: contributes zeros.
  bool is_empty = false;
  /// The first that is not sent.
  std::size_t next_bucket = 0;
  std::unique_ptr<Bucket[]> buckets;
  std::size_t num_buckets = 0;
  /// By parameter.
  std::vector<std::uint32_t> num_fired;
  /// Order in which gradients have fired, in a pass that learns it.
  std::vector<std::size_t> fired_order;
};

}  // namespace libddp

#pragma once

// One backward pass of a Reducer: how far it has come, which gradients have fired, which buckets
// are complete and sent, and what the other ranks know of an error in it.
//
// `restart` makes all of it anew, so that nothing of a pass reaches the next one, however it ended.
// Between passes it holds what the last one has left.
//
//   None --restart--> Armed --run: its end is asked for--> Running --end--> None
//                                                     |    ^
//             the end was that of a nested pass       v    |  the next gradient
//                                                    Reopened
//
//   Running, Reopened --an exception--> Broken --restart--> Armed
//
// Gradients of passes that come after a broken one without a restart (local ones, those of other
// reducers) do not count in it.
// Thread rule: as Reducer, and `mark_ready` and the buckets' completeness from any thread.
//
//   pass.restart(BackwardPass::Stage::Armed, buckets, num_expected);
//   if (pass.count(index) == expected && pass.mark_ready(bucket)) send_complete_buckets();

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "libddp/ddp/gradient_buckets.h"

namespace libddp {

class BackwardPass {
 public:
  enum class Stage : std::uint8_t { None, Armed, Running, Reopened, Broken };
  /// What the other ranks have been told of an error in it.
  enum class Told : std::uint8_t { Nothing, Error, Explained };

  explicit BackwardPass(std::size_t num_parameters) : num_fired_(num_parameters, 0) {}

  /// `num_expected`: how often each parameter's gradient fires. Allocates only where the number of
  /// buckets is another one than before.
  void restart(Stage first, const GradientBuckets& of,
               const std::vector<std::uint32_t>& num_expected);

  Stage stage() const { return stage_; }
  bool is_armed() const { return stage_ == Stage::Armed; }
  /// Gradients that fire belong to it.
  bool is_running() const { return stage_ == Stage::Running || stage_ == Stage::Reopened; }
  /// It runs, or an exception has ended it.
  bool is_unfinished() const { return is_running() || stage_ == Stage::Broken; }
  /// Of a rank that has no data while others have: contributes zeros.
  bool is_empty() const { return is_empty_; }
  /// Counts the passes that synchronise; that of the last one between them.
  std::uint64_t number() const { return number_; }

  /// The pass begins. Its stage changes when its end is asked for (`run`).
  void begin() {
    told_ = Told::Nothing;
    ++number_;
  }
  void begin_empty() {
    is_empty_ = true;
    ++number_;
  }
  void run() { stage_ = Stage::Running; }
  void reopen() { stage_ = Stage::Reopened; }
  void end() { stage_ = Stage::None; }
  void break_off() { stage_ = Stage::Broken; }

  /// Whether the others have heard all that there is to say.
  bool is_explained() const { return told_ == Told::Explained; }
  void told(Told what) {
    if (what > told_) told_ = what;
  }

  /// A gradient has fired; how often by now.
  std::uint32_t count(std::size_t index) { return ++num_fired_[index]; }
  std::uint32_t num_fired(std::size_t index) const { return num_fired_[index]; }
  const std::vector<std::uint32_t>& num_fired() const { return num_fired_; }
  /// A gradient of `bucket` has fired as often as it will; true if it was the last one.
  bool mark_ready(std::size_t bucket) {
    return num_missing_[bucket].fetch_sub(1, std::memory_order_acq_rel) == 1;
  }
  bool is_ready(std::size_t bucket) const { return num_missing_[bucket].load() == 0; }
  bool are_all_ready() const;

  // Buckets are sent in their order.
  std::size_t num_buckets() const { return num_buckets_; }
  std::size_t num_sent() const { return num_sent_; }
  bool is_sent(std::size_t bucket) const { return bucket < num_sent_; }
  bool are_all_sent() const { return num_sent_ == num_buckets_; }
  /// Only the last one is left.
  bool is_last_next() const { return num_sent_ + 1 >= num_buckets_; }
  /// The next one, which counts as sent from now on.
  std::size_t take_next() { return num_sent_++; }

  /// Throws StateError where an exception has ended it after buckets had been sent, or its end was
  /// that of a nested pass. One that failed before has cost nothing: the ranks still agree. `where`
  /// begins the message.
  void check_not_ended_early(const std::string& where) const;

 private:
  Stage stage_ = Stage::None;
  Told told_ = Told::Nothing;
  bool is_empty_ = false;
  std::uint64_t number_ = 0;
  std::size_t num_sent_ = 0;
  std::size_t num_buckets_ = 0;
  /// By bucket: gradients that have not fired as often as they will.
  std::unique_ptr<std::atomic<int>[]> num_missing_;
  /// By parameter.
  std::vector<std::uint32_t> num_fired_;
};

}  // namespace libddp

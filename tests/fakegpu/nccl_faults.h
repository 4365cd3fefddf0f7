#pragma once

// What tests want of mock NCCL, and what they may ask of it afterwards: the state behind
// mock_nccl.h. Only the table's functions use it.
// Thread rule: any thread.

#include <array>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tests/fakegpu/mock_nccl.h"

namespace mock_nccl {

class Faults {
 public:
  static Faults& get();

  /// A call of a function by a rank (-1: of none): what it gives instead of doing anything.
  ncclResult_t enter(const std::string& function, int rank);

  struct Operation {
    /// Since the reset, over all ranks.
    int number;
    bool hangs;
    bool ends_alone;
    ncclResult_t async_error;
    int delay_ms;
    std::vector<std::function<void()>> meanwhile{};
  };
  Operation begin_operation(int rank);
  bool hangs_init(int rank);

  /// Public, under `mutex`: a list of wishes, no class of its own.
  struct Wishes {
    struct Failure {
      std::string function;
      int nth;
      int rank;
      ncclResult_t result;
    };
    std::vector<Failure> failures;
    std::vector<std::pair<int, int>> hanging_operations;  // nth, rank
    std::vector<std::pair<int, int>> lonely_operations;   // nth, rank
    std::vector<Failure> async_errors;
    std::vector<int> hanging_inits;  // ranks
    struct Interlude {
      int nth;
      int rank;
      std::function<void()> function;
    };
    std::vector<Interlude> interludes;
    int delay_ms = 0;
    std::map<std::pair<std::string, int>, int> calls;  // by function and rank; -2: of all
    std::map<int, int> operations;                     // by rank; -2: of all
    std::vector<Issued> issued;
  };
  std::mutex mutex;
  Wishes wishes;
  /// Not touched by reset.
  Live live;
};

}  // namespace mock_nccl

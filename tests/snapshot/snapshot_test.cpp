#include "libddp/snapshot/snapshot.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <thread>

#include "libddp/base/files.h"
#include "libddp/base/random.h"
#include "libddp/snapshot/saved_version.h"
#include "tests/snapshot/kept_job.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/torch_group_fixture.h"

using namespace libddp;
using namespace libddp::test;

namespace {

/// The rows of a [4, 1000] tensor that a rank has, and a counter that all have.
struct State {
  State(int rank, int size) {
    const int begin = 4 * rank / size;
    const int end = 4 * (rank + 1) / size;
    rows = at::zeros({end - begin, 1000});
    tensors = {{"w", rows, {4, 1000}, begin * 1000, end * 1000, StoredBy::EachRank},
               SnapshotTensor::whole("count", count, StoredBy::FirstOfHost),
               SnapshotTensor::whole("moment", moment, StoredBy::HostTogether)};
  }

  void fill(std::int64_t step) {
    const auto& w = tensors[0];
    rows.copy_(at::arange(w.begin, w.end, at::kFloat).view({-1, 1000}).add(10'000 * step));
    count.fill_(step);
    moment.copy_(at::arange(moment.numel()).remainder(1000).add(step).view(moment.sizes()));
  }
  bool is(std::int64_t step) const {
    State same(*this);
    same.rows = rows.clone();
    same.count = count.clone();
    same.moment = moment.clone();
    same.fill(step);
    return at::equal(same.rows, rows) && at::equal(same.count, count) &&
           at::equal(same.moment, moment);
  }
  void forget() {
    rows.zero_();
    count.zero_();
    moment.zero_();
  }

  at::Tensor rows;
  at::Tensor count = at::zeros({}, at::kLong);
  at::Tensor moment = at::zeros({100, 1000}, at::kHalf);
  std::vector<SnapshotTensor> tensors;
};

std::string values_of(std::int64_t step, int rank) {
  return fmt::format(R"({{"rank":{},"step":{}}})", rank, step);
}

}  // namespace

TEST_CASE("a job of one process finds its memory again", "[snapshot]") {
  const KeptJob job;
  State state(0, 1);
  {
    auto snapshot = Snapshot::create(nullptr, job.options());
    REQUIRE(!snapshot->load(state.tensors));
    for (std::int64_t step = 1; step <= 5; ++step) {
      state.fill(step);
      const Snapshot::Report report = snapshot->save(step, state.tensors, values_of(step, 0));
      REQUIRE(report.step == step);
      REQUIRE(report.bytes == 4 * 4000 + 8 + 2 * 100'000);
      REQUIRE(!report.is_stored);
    }
  }
  state.forget();
  auto snapshot = Snapshot::create(nullptr, job.options());
  std::string values;
  REQUIRE(snapshot->load(state.tensors, &values) == 5);
  REQUIRE(values == values_of(5, 0));
  REQUIRE(state.is(5));
  // The step before it is there, too, and the memory is written on.
  REQUIRE(snapshot->versions().size() == 2);
  state.fill(6);
  snapshot->save(6, state.tensors);
  REQUIRE(snapshot->versions().size() == 2);
  REQUIRE(snapshot->versions()[0]->saved().step == 6);
  REQUIRE(snapshot->versions()[1]->saved().step == 5);
  const auto version = snapshot->versions()[0];
  for (int i = 0; i < 2; ++i) snapshot->close();
  snapshot->wait();
  REQUIRE(snapshot->status() == "null");
  for (const std::function<void()>& call : std::vector<std::function<void()>>{
           [&] { snapshot->save(7, state.tensors); },
           [&] { snapshot->load(state.tensors); },
           [&] { snapshot->versions(); },
           [&] { snapshot->open(*version); },
           [&] { snapshot->read(*version, state.tensors); },
           [&] { snapshot->prepare(state.tensors); },
       }) {
    REQUIRE_THROWS_WITH(call(), "libddp snapshot: it is closed. Hint: make another one.");
  }
}

TEST_CASE("lazy and strided views are loaded as what they stand for", "[snapshot]") {
  const KeptJob job;
  auto snapshot = Snapshot::create(nullptr, job.options());
  const at::Tensor complex = at::full({5}, c10::complex<double>(1, 2), at::kComplexDouble);
  const at::Tensor conjugate = complex.conj();
  const at::Tensor negative = at::imag(conjugate);
  const at::Tensor strided = at::arange(6, at::kFloat).reshape({2, 3}).t();
  REQUIRE((conjugate.is_conj() && negative.is_neg() && !strided.is_contiguous()));
  const at::Tensor stride_values = strided.clone();
  const std::vector<SnapshotTensor> tensors{SnapshotTensor::whole("conjugate", conjugate),
                                            SnapshotTensor::whole("strided", strided)};
  snapshot->save(1, tensors);
  complex.zero_();
  strided.zero_();
  REQUIRE(snapshot->load(tensors) == 1);
  REQUIRE(complex.equal(at::full({5}, c10::complex<double>(1, 2), at::kComplexDouble)));
  REQUIRE(strided.equal(stride_values));
  const at::Tensor twos = at::full({5}, 2.0, at::kDouble);
  snapshot->save(2, {SnapshotTensor::whole("negative", negative)});
  complex.zero_();
  REQUIRE(snapshot->load({SnapshotTensor::whole("negative", negative)}) == 2);
  REQUIRE(at::imag(complex).equal(twos));
  snapshot->close();
}

TEST_CASE("an expanded tensor is loaded if the save has one value for each place", "[snapshot]") {
  const KeptJob job;
  auto snapshot = Snapshot::create(nullptr, job.options());
  const at::Tensor base = at::tensor({1.0, std::numeric_limits<double>::quiet_NaN()}, at::kDouble);
  const at::Tensor expanded = base.view({2, 1}).expand({2, 3});
  const std::vector<SnapshotTensor> tensors{SnapshotTensor::whole("mask", expanded)};
  snapshot->save(1, tensors);
  base.zero_();
  REQUIRE(snapshot->load(tensors) == 1);
  REQUIRE(base[0].item<double>() == 1.0);
  REQUIRE(std::isnan(base[1].item<double>()));
  snapshot->save(2, {SnapshotTensor::whole("mask", at::arange(6, at::kDouble).view({2, 3}))});
  const std::string told = message_of<ArgumentError>([&] { snapshot->load(tensors); });
  REQUIRE(contains(told, "'mask' is expanded"));
  snapshot->close();
}

TEST_CASE("any number of ranks takes up what others have saved", "[snapshot]") {
  TemporaryFolder folder;
  for (const bool is_stored : {false, true}) {
    for (const auto& [before, after] : {std::pair{3, 2}, {2, 4}, {1, 3}, {4, 1}}) {
      const KeptJob job(is_stored ? folder.path() + "/" + random_hex(4) : "");
      run_group(before, [&](ProcessGroup& group) {
        auto snapshot = Snapshot::create(group.shared_from_this(), job.options());
        State state(group.rank(), group.size());
        for (std::int64_t step = 1; step <= 3; ++step) {
          state.fill(step);
          snapshot->save(step, state.tensors, values_of(step, group.rank()),
                         is_stored ? Storage::Folder : Storage::Memory);
        }
        if (!is_stored) return;
        snapshot->wait();
        snapshot->close();  // the memory goes
      });
      run_group(after, [&](ProcessGroup& group) {
        auto snapshot = Snapshot::create(group.shared_from_this(), job.options());
        State state(group.rank(), group.size());
        std::string values;
        expect(snapshot->load(state.tensors, &values) == 3, "the newest step");
        expect(state.is(3), "the tensors of step 3");
        const int of_rank = group.rank() < before ? group.rank() : 0;
        expect(values == values_of(3, of_rank), "the values of the rank, or of the first");
        state.fill(4);
        snapshot->save(4, state.tensors);
        expect(snapshot->versions()[0]->saved().step == 4, "the next save is the newest");
        group.barrier();
        snapshot->close();
      });
    }
  }
}

TEST_CASE("ranks may list small tensors in different orders", "[snapshot]") {
  const auto counters_of = [](int rank, std::int64_t value) {
    std::vector<SnapshotTensor> tensors;
    for (int i = 0; i < 7; ++i) {
      tensors.push_back(SnapshotTensor::whole(
          fmt::format("count{}", i), at::full({}, value + i, at::kLong), StoredBy::HostTogether));
    }
    std::rotate(tensors.begin(), tensors.begin() + 2 * rank, tensors.end());
    return tensors;
  };
  const KeptJob job;
  run_group(3, [&](ProcessGroup& group) {
    auto snapshot = Snapshot::create(group.shared_from_this(), job.options());
    snapshot->save(1, counters_of(group.rank(), 10));
    const std::vector<SnapshotTensor> wanted = counters_of((group.rank() + 1) % 3, 0);
    expect(snapshot->load(wanted) == 1, "the step");
    for (const SnapshotTensor& each : wanted) {
      expect(each.tensor.item<std::int64_t>() == 10 + each.key.back() - '0', each.key);
    }
    group.barrier();
    snapshot->close();
  });
}

TEST_CASE("layouts may change from save to save", "[snapshot]") {
  const KeptJob job;
  auto snapshot = Snapshot::create(nullptr, job.options());
  for (int count = 1; count < 6; ++count) {
    std::vector<SnapshotTensor> tensors;
    for (int i = 0; i < count; ++i) {
      tensors.push_back(
          SnapshotTensor::whole(fmt::format("t{}", i), at::full({10, i}, count, at::kDouble)));
    }
    snapshot->save(count, tensors);
    std::vector<SnapshotTensor> wanted;
    for (int i = 0; i < count; ++i) {
      wanted.push_back(
          SnapshotTensor::whole(fmt::format("t{}", i), at::zeros({10, i}, at::kDouble)));
    }
    REQUIRE(snapshot->load(wanted) == count);
    for (int i = 0; i < count; ++i) REQUIRE(at::equal(wanted[i].tensor, tensors[i].tensor));
  }
  snapshot->close();
}

TEST_CASE("the memory of the first save is made ready, whatever it turns out to be", "[snapshot]") {
  constexpr std::int64_t kNumel = 2 << 20;
  const auto tensors_of = [](std::int64_t numel, double value) {
    return std::vector{SnapshotTensor::whole("w", at::full({numel}, value, at::kFloat))};
  };
  const auto expected = tensors_of(kNumel, 0);
  for (const std::int64_t numel : {kNumel, kNumel / 4, 16 * kNumel}) {
    const KeptJob job;
    auto snapshot = Snapshot::create(nullptr, job.options());
    REQUIRE(snapshot->prepared_bytes() == 0);
    REQUIRE(!snapshot->load(expected));
    // What the first save writes, and not the other slot.
    wait_until([&] { return snapshot->prepared_bytes() >= kNumel * 4; });
    REQUIRE(snapshot->prepared_bytes() < 2 * kNumel * 4);
    for (std::int64_t step = 1; step <= 3; ++step) {
      snapshot->save(step, tensors_of(numel, static_cast<double>(step)));
      REQUIRE(snapshot->prepared_bytes() == 0);
    }
    const auto wanted = tensors_of(numel, 0);
    REQUIRE(snapshot->load(wanted) == 3);
    REQUIRE(at::equal(wanted[0].tensor, at::full({numel}, 3.0, at::kFloat)));
    // There is a memory as large: nothing is made ready beside it.
    snapshot->prepare(tensors_of(numel, 0));
    REQUIRE(snapshot->prepared_bytes() == 0);
    snapshot->close();
  }
  // Small ones, and more than the machine has, are left to the save.
  auto snapshot = Snapshot::create(nullptr, KeptJob().options());
  snapshot->prepare(tensors_of(1000, 0));
  REQUIRE(snapshot->prepared_bytes() == 0);
  const at::Tensor huge = at::zeros({1}).expand({std::int64_t{1} << 44});
  snapshot->prepare({SnapshotTensor::whole("w", huge)});
  REQUIRE(snapshot->prepared_bytes() == 0);
}

TEST_CASE("what was kept in a process is read where it is mapped, and checked", "[snapshot]") {
  const KeptJob job;
  auto snapshot = Snapshot::create(nullptr, job.options());
  State state(0, 1);
  for (std::int64_t step = 1; step <= 2; ++step) {
    state.fill(step);
    snapshot->save(step, state.tensors);
  }
  const auto& memory_of = [&] { return snapshot->versions()[0]->places()[0].memory; };
  const auto memory = memory_of();
  REQUIRE(memory_of() == memory);
  REQUIRE(snapshot->load(state.tensors) == 2);
  REQUIRE(memory_of() == memory);
  auto& byte = const_cast<std::byte&>(memory->slot(1).data()[100]);
  byte ^= std::byte{1};
  REQUIRE(snapshot->load(state.tensors) == 1);
  REQUIRE(state.is(1));
  byte ^= std::byte{1};
  memory->data()[0] ^= std::byte{1};  // of the header: there is nothing to be read any more
  REQUIRE(!snapshot->load(state.tensors));
  memory->data()[0] ^= std::byte{1};
  REQUIRE(snapshot->load(state.tensors) == 2);
  snapshot->close();
}

TEST_CASE("tensors that are not dense come back as they were", "[snapshot]") {
  const KeptJob job;
  auto snapshot = Snapshot::create(nullptr, job.options());
  const at::Tensor base = at::arange(12, at::kFloat).view({3, 4});
  snapshot->save(1,
                 {SnapshotTensor::whole("t", base.t()), SnapshotTensor::whole("e", at::zeros({0})),
                  SnapshotTensor::whole("x", at::full({1}, 7).expand({5}))});
  const at::Tensor target = at::zeros({3, 4});
  const at::Tensor expanded = at::zeros({5}, at::kLong);
  REQUIRE(snapshot->load({SnapshotTensor::whole("t", target.t()),
                          SnapshotTensor::whole("e", at::zeros({0})),
                          SnapshotTensor::whole("x", expanded)}) == 1);
  REQUIRE(at::equal(target, base));
  REQUIRE(at::equal(expanded, at::full({5}, 7)));
  snapshot->close();
}

TEST_CASE("what cannot be saved is refused, and the step before stays", "[snapshot]") {
  const KeptJob job;
  auto snapshot = Snapshot::create(nullptr, job.options());
  State state(0, 1);
  state.fill(1);
  snapshot->save(1, state.tensors);
  const auto refused = [&](const std::vector<SnapshotTensor>& tensors, const std::string& text,
                           std::string_view values = "null", Storage storage = Storage::Memory) {
    const std::string told =
        message_of<ArgumentError>([&] { snapshot->save(2, tensors, values, storage); });
    CAPTURE(told);
    REQUIRE(contains(told, text));
    state.forget();
    REQUIRE(snapshot->load(state.tensors) == 1);
    REQUIRE(state.is(1));
  };
  refused({SnapshotTensor::whole("s", at::zeros({2, 2}).to_sparse())}, "'s' is a Sparse tensor");
  refused({SnapshotTensor::whole("m", at::zeros({2}, at::TensorOptions(at::kMeta)))},
          "without memory (meta)");
  refused({SnapshotTensor::whole("a", at::zeros({2})), SnapshotTensor::whole("a", at::zeros({2}))},
          "'a'");
  refused({{"r", at::zeros({2}), {4}, 0, 3}}, "has 2 elements for the range 0 to 3");
  refused(state.tensors, "it has no folder", "null", Storage::Folder);
  refused(state.tensors, "not JSON", "{");
  snapshot->close();
  REQUIRE(contains(message_of<ArgumentError>([] { Snapshot::create(nullptr, {.run = "a/b"}); }),
                   "no name of a run"));
  REQUIRE(contains(message_of<ArgumentError>([] { Snapshot::create(nullptr, {.keep = 0}); }),
                   "would keep nothing"));
}

TEST_CASE("an error of one rank is one of all, and the step before stays", "[snapshot]") {
  const KeptJob job;
  run_group(3, [&](ProcessGroup& group) {
    auto snapshot = Snapshot::create(group.shared_from_this(), job.options());
    State state(group.rank(), group.size());
    state.fill(1);
    snapshot->save(1, state.tensors);
    const std::string other = message_of<ArgumentError>(
        [&] { snapshot->save(group.rank() == 2 ? 3 : 2, state.tensors); });
    expect(contains(other, "rank 0 saves step 2, rank 2 step 3"), other);
    const std::string bad = message_of<ArgumentError>([&] {
      auto tensors = state.tensors;
      if (group.rank() == 1) tensors.push_back(SnapshotTensor::whole("s", at::Tensor()));
      snapshot->save(2, tensors);
    });
    expect(contains(bad, "'s' is an undefined tensor"), bad);
    expect(contains(bad, "rank 1 could not save step 2") == (group.rank() != 1), bad);
    // Small ones are shared out over the ranks, so that no rank has both.
    const std::string twice = message_of<ArgumentError>([&] {
      auto tensors = state.tensors;
      for (const double value : {1.0, 2.0}) {
        tensors.push_back(SnapshotTensor::whole("t", at::full({2}, value), StoredBy::HostTogether));
      }
      snapshot->save(2, tensors);
    });
    expect(contains(twice, "key 't' is given twice"), twice);
    const std::string lacking = message_of<ArgumentError>([&] {
      auto tensors = state.tensors;
      if (group.rank() != 1) {
        tensors.push_back(SnapshotTensor::whole("t", at::zeros({2}), StoredBy::HostTogether));
      }
      snapshot->save(2, tensors);
    });
    expect(contains(lacking,
                    "ranks 0 and 1 of one host store other tensors together: the latter "
                    "has no 't' Float [2]"),
           lacking);
    state.forget();
    expect(snapshot->load(state.tensors) == 1, "the step before");
    expect(state.is(1), "its tensors");
    state.fill(2);
    snapshot->save(2, state.tensors);
    group.barrier();
    snapshot->close();
  });
}

TEST_CASE("another model is refused before anything changes", "[snapshot]") {
  const KeptJob job;
  auto snapshot = Snapshot::create(nullptr, job.options());
  snapshot->save(1, {SnapshotTensor::whole("w", at::full({4}, 1.0))});
  const at::Tensor target = at::zeros({4});
  const auto refused = [&](const SnapshotTensor& tensor, const std::string& text) {
    const std::string told = message_of<ArgumentError>([&] { snapshot->load({tensor}); });
    CAPTURE(told);
    REQUIRE(contains(told, text));
  };
  refused(SnapshotTensor::whole("v", target), "has no 'v'");
  refused(SnapshotTensor::whole("w", at::zeros({5})),
          "memory, step 1: 'w' was stored as F32 [4], here it is F32 [5]. Hint: load into");
  refused(SnapshotTensor::whole("w", at::zeros({4}, at::kHalf)), "here it is F16 [4]");
  snapshot->close();
}

TEST_CASE("a damaged save is named and the one before it taken", "[snapshot]") {
  TemporaryFolder folder;
  const KeptJob job(folder.path() + "/run");
  State state(0, 1);
  {
    auto snapshot = Snapshot::create(nullptr, job.options());
    for (std::int64_t step = 1; step <= 2; ++step) {
      state.fill(step);
      snapshot->save(step, state.tensors, values_of(step, 0), Storage::Folder);
      snapshot->wait();
    }
    snapshot->close();
  }
  const auto flip = [&](const std::string& step) {
    const std::string path = folder.path() + "/run/" + step + "/rank-0-of-1.safetensors";
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    REQUIRE(file.good());
    file.seekg(-100, std::ios::end);
    const int byte = file.get();
    file.seekp(-100, std::ios::end);
    file.put(static_cast<char>(byte ^ 16));
  };
  flip("step-2.2");
  auto snapshot = Snapshot::create(nullptr, job.options());
  REQUIRE(snapshot->load(state.tensors) == 1);
  REQUIRE(state.is(1));
  flip("step-1.1");
  const std::string told = message_of<SnapshotError>([&] { snapshot->load(state.tensors); });
  REQUIRE(contains(told, "none of the saves"));
  REQUIRE(contains(told, "what they were loaded into may have parts of them"));
  REQUIRE(contains(told, "step-2.2"));
  REQUIRE(contains(told, "step-1.1"));
  REQUIRE(contains(told, "'moment'"));
  // A fresh save is newer than both.
  snapshot->save(1, state.tensors);
  REQUIRE(snapshot->load(state.tensors) == 1);
  snapshot->close();
}

// tests/python/snapshot has the same for libddp.Snapshot.load.
TEST_CASE("a save of another model behind a damaged one is a reason more", "[snapshot]") {
  TemporaryFolder folder;
  const KeptJob job(folder.path() + "/run");
  {
    auto snapshot = Snapshot::create(nullptr, job.options());
    snapshot->save(1, {SnapshotTensor::whole("w", at::full({4}, 1.0))}, "null", Storage::Folder);
    snapshot->wait();
    snapshot->save(2, {SnapshotTensor::whole("w", at::full({5}, 2.0))}, "null", Storage::Folder);
    snapshot->wait();
    snapshot->close();
  }
  auto snapshot = Snapshot::create(nullptr, job.options());
  const at::Tensor target = at::zeros({4});
  const std::vector<SnapshotTensor> wanted = {SnapshotTensor::whole("w", target)};
  // The newest is whole, and of another model: that is the caller's to change, and none is older.
  const std::string refused = message_of<ArgumentError>([&] { snapshot->load(wanted); });
  CAPTURE(refused);
  REQUIRE(contains(refused, "step-2.2: 'w' was stored as F32 [5], here it is F32 [4]"));
  REQUIRE(at::equal(target, at::zeros({4})));

  const std::string file = folder.path() + "/run/step-2.2/rank-0-of-1.safetensors";
  REQUIRE(::truncate(file.c_str(), 30) == 0);
  REQUIRE(snapshot->load(wanted) == 1);
  REQUIRE(at::equal(target, at::full({4}, 1.0, at::kFloat)));
  const std::string told = message_of<SnapshotError>(
      [&] { snapshot->load({SnapshotTensor::whole("w", at::zeros({5}))}); });
  CAPTURE(told);
  REQUIRE(contains(told, "none of the saves that are there can be loaded"));
  REQUIRE(contains(told, "Hint: `libddp snapshot verify FOLDER`"));
  REQUIRE(contains(told, "step-2.2"));
  REQUIRE(contains(told, "step-1.1: 'w' was stored as F32 [4], here it is F32 [5]"));
  snapshot->close();
}

TEST_CASE("a folder that was made anew is another job's", "[snapshot]") {
  TemporaryFolder folder;
  const std::string path = folder.path() + "/run";
  const KeptJob job(path);
  State state(0, 1);
  const auto save = [&] {
    auto snapshot = Snapshot::create(nullptr, job.options());
    snapshot->save(1, state.tensors);
    return snapshot;
  };
  auto first = save();
  REQUIRE(Snapshot::create(nullptr, job.options())->load(state.tensors) == 1);
  REQUIRE(remove_tree(path) == 0);
  REQUIRE(!Snapshot::create(nullptr, job.options())->load(state.tensors));
  first->close();
}

TEST_CASE("a keeper that dies is replaced", "[snapshot]") {
  TemporaryFolder folder;
  const KeptJob job(folder.path() + "/run");
  State state(0, 1);
  auto snapshot = Snapshot::create(nullptr, job.options());
  state.fill(1);
  snapshot->save(1, state.tensors);
  const pid_t keeper = keeper_pid(snapshot->status());
  ::kill(keeper, SIGKILL);
  wait_until([&] { return ::kill(keeper, 0) != 0 || is_zombie(keeper); });
  state.fill(2);
  snapshot->save(2, state.tensors, values_of(2, 0), Storage::Folder);
  REQUIRE(keeper_pid(snapshot->status()) != keeper);
  snapshot->wait();
  auto other = Snapshot::create(nullptr, job.options());
  state.forget();
  REQUIRE(other->load(state.tensors) == 2);
  REQUIRE(state.is(2));
  other->close();
  snapshot->close();
}

TEST_CASE("a forked child is no rank", "[snapshot]") {
  const KeptJob job;
  auto snapshot = Snapshot::create(nullptr, job.options());
  State state(0, 1);
  snapshot->save(1, state.tensors);
  const auto results = fork_ranks(
      1, [&](int) { return message_of<StateError>([&] { snapshot->save(2, state.tensors); }); });
  REQUIRE(results[0].ok());
  REQUIRE(contains(results[0].text, "child of fork()"));
  snapshot->close();
}

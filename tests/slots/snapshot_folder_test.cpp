#include "libddp/slots/snapshot_folder.h"

#include <fmt/format.h>

#include <fstream>
#include <optional>

#include "libddp/base/error.h"
#include "libddp/base/files.h"
#include "libddp/slots/scatter.h"
#include "tests/slots/stored_tensors.h"
#include "tests/slots/traced_process.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/temporary_folder.h"

using namespace libddp;
using namespace libddp::test;

namespace {

/// Two ranks that save into a folder.
struct Ranks {
  explicit Ranks(const std::string& path) : folder(path) {}

  static SavedStep saved(std::uint64_t sequence) {
    return {.step = static_cast<std::int64_t>(100 * sequence), .sequence = sequence};
  }

  void save(std::uint64_t sequence, const std::string& start) {
    for (int rank = 0; rank < 2; ++rank) {
      StoredTensors tensors({"w", "m"}, 3000);
      tensors.fill(static_cast<unsigned>(sequence * 2 + static_cast<unsigned>(rank)));
      SlotMemory memory = tensors.memory();
      tensors.store(memory, 0, saved(sequence));
      folder.add_rank(saved(sequence), start, rank, 2, SlotSource(memory, 0),
                      fmt::format(R"({{"rank":{}}})", rank));
    }
    folder.commit(saved(sequence), start, 2);
    folder.keep_newest(2, start);
  }

  /// The sequences that are there; each must be whole.
  std::vector<std::uint64_t> whole() {
    std::vector<std::uint64_t> sequences;
    for (const auto& entry : folder.list()) {
      const SnapshotIndex index = folder.read(entry);
      expect(index.ranks.size() == 2, "two ranks");
      for (const StoredRank& rank : index.ranks) {
        const FileSource file = folder.open(entry, rank);
        StoredTensors wanted({"w", "m"}, 3000);
        wanted.fill(
            static_cast<unsigned>(entry.saved.sequence * 2 + static_cast<unsigned>(rank.rank)));
        StoredTensors found({"w", "m"}, 3000);
        scatter(file, found.segments(file.layout()));
        expect(found.bytes() == wanted.bytes(), "the bytes of that save");
      }
      sequences.push_back(entry.saved.sequence);
    }
    return sequences;
  }

  SnapshotFolder folder;
};

using Sequences = std::vector<std::uint64_t>;

}  // namespace

TEST_CASE("a folder keeps the newest snapshots", "[folder]") {
  TemporaryFolder place;
  Ranks ranks(place.path() + "/deep/run");
  REQUIRE(ranks.folder.list().empty());
  for (std::uint64_t i = 8; i < 12; ++i) ranks.save(i, "a1");
  REQUIRE(ranks.whole() == Sequences{11, 10});
  const auto entry = ranks.folder.list().front();
  REQUIRE(entry.saved == SavedStep{1100, 11});
  REQUIRE(ranks.folder.read(entry).ranks[1].values == R"({"rank":1})");
  REQUIRE(list_folder(entry.path) == std::set<std::string>{"index.json", "rank-0-of-2.safetensors",
                                                           "rank-1-of-2.safetensors"});
}

TEST_CASE("nothing is committed before every rank is there", "[folder]") {
  TemporaryFolder place;
  Ranks ranks(place.path());
  StoredTensors tensors({"w"}, 10);
  SlotMemory memory = tensors.memory();
  tensors.store(memory, 0, Ranks::saved(1));
  REQUIRE(ranks.folder.missing_ranks(Ranks::saved(1), "a", 2) == std::vector<int>{0, 1});
  ranks.folder.add_rank(Ranks::saved(1), "a", 1, 2, SlotSource(memory, 0), "null");
  REQUIRE(ranks.folder.missing_ranks(Ranks::saved(1), "a", 2) == std::vector<int>{0});
  REQUIRE(ranks.folder.list().empty());
  REQUIRE(contains(message_of<SnapshotError>([&] { ranks.folder.commit(Ranks::saved(1), "a", 2); }),
                   "rank-0.json"));
  // Another start of the job does not count them, and removes them.
  ranks.save(1, "b");
  REQUIRE(ranks.whole() == Sequences{1});
  REQUIRE(list_folder(place.path()) == std::set<std::string>{"step-100.1"});
}

TEST_CASE("foreign names and damaged indexes", "[folder]") {
  TemporaryFolder place;
  Ranks ranks(place.path());
  ranks.save(1, "a");
  REQUIRE(make_folders(place.path() + "/step-x.1") == 0);
  REQUIRE(make_folders(place.path() + "/step-5.99999999999999999999") == 0);
  std::ofstream(place.path() + "/notes.txt") << "mine";
  REQUIRE(ranks.whole() == Sequences{1});
  const auto entry = ranks.folder.list().front();
  const std::string path = entry.path + "/index.json";
  const auto refused = [&](const std::string& text) {
    std::ofstream(path) << text;
    return message_of<SnapshotError>([&] { ranks.folder.read(entry); });
  };
  REQUIRE(contains(refused("{"), path + ": not JSON"));
  REQUIRE(contains(refused("{}"), "'format' is missing"));
  REQUIRE(contains(refused(R"({"format":"libddp-snapshot","version":3})"), "of version 3"));
  SnapshotIndex index{.saved = {1, 1}, .ranks = {}, .world_size = 1};
  REQUIRE(contains(refused(index.encode()), "of another snapshot"));
  index = {.saved = entry.saved,
           .ranks = {StoredRank{.rank = 0, .file = "../x", .stored = {}}},
           .world_size = 1};
  REQUIRE(contains(refused(index.encode()), "'../x' is no name of a file"));
  index.ranks = {StoredRank{.rank = 4, .file = "x", .stored = {}}};
  REQUIRE(contains(refused(index.encode()), "rank 4 of 1"));
  REQUIRE(remove_tree(path) == 0);
  REQUIRE(contains(message_of<SnapshotError>([&] { ranks.folder.read(entry); }), path));
}

TEST_CASE("no bit of an index can change what it says", "[folder]") {
  StoredRank rank{.rank = 0, .file = "rank-0-of-1.safetensors", .stored = {}};
  rank.stored.bytes = 4096;
  rank.stored.header_sum = 7;
  rank.stored.chunk_sums = {1, 2};
  rank.values = R"({"lr":0.1,"step":700})";
  SnapshotIndex index{.saved = {700, 12}, .ranks = {}, .world_size = 1};
  index.ranks.push_back(rank);
  const std::string text = index.encode();
  REQUIRE(SnapshotIndex::decode(text).encode() == text);
  long num_accepted = 0;
  for (std::size_t bit = 0; bit < 8 * text.size(); ++bit) {
    std::string damaged = text;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    try {
      // The same meaning in other letters, as 1E5 for 1e5, is no damage.
      num_accepted += SnapshotIndex::decode(damaged).encode() != text;
    } catch (const SnapshotError&) {
    }
  }
  REQUIRE(num_accepted == 0);
}

TEST_CASE("what is unfinished is listed apart", "[folder]") {
  TemporaryFolder place;
  Ranks ranks(place.path());
  REQUIRE(SnapshotFolder(place.path() + "/none").unfinished().empty());
  ranks.save(1, "a");
  for (const char* name : {"step-300.3.4f2a.part", "step-200.2.old.part", "step-9.9.a-b.part"}) {
    REQUIRE(make_folders(place.path() + "/" + name) == 0);
  }
  const auto parts = ranks.folder.unfinished();
  REQUIRE(parts.size() == 2);
  REQUIRE(parts[0].saved == Ranks::saved(3));
  REQUIRE(parts[0].start == "4f2a");
  REQUIRE(parts[0].path == place.path() + "/step-300.3.4f2a.part");
  REQUIRE(parts[1].start == "old");
  REQUIRE(ranks.whole() == Sequences{1});
}

TEST_CASE("a process may die at any system call of a save", "[folder][crash]") {
  TemporaryFolder place;
  Ranks ranks(place.path());
  ranks.save(1, "a");
  ranks.save(2, "a");
  long calls = 0;
  long num_new = 0;
  std::uint64_t next = 3;
  for (bool has_finished = false; !has_finished; ++calls) {
    const std::string start = fmt::format("s{}", calls);
    const Sequences before = ranks.whole();
    const pid_t child = traced([&] { ranks.save(next, start); });
    std::optional<int> end;
    for (long i = 0; i <= calls && !end; ++i) end = run_to_change(child);
    has_finished = end.has_value();
    if (has_finished) {
      REQUIRE(*end == 0);
    } else {
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
    }
    const Sequences after = ranks.whole();
    const bool is_new = after.front() == next;
    num_new += is_new;
    REQUIRE((is_new || after == before));
    REQUIRE(after.size() >= 2);
    if (is_new) ++next;
  }
  REQUIRE(calls > 50);
  REQUIRE(num_new > 1);
  ranks.save(next, "end");
  REQUIRE(ranks.whole() == Sequences{next, next - 1});
  REQUIRE(list_folder(place.path()).size() == 2);
}

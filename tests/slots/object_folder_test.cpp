#include "libddp/slots/object_folder.h"

#include <fmt/format.h>

#include <map>

#include "libddp/base/error.h"
#include "libddp/slots/scatter.h"
#include "tests/slots/stored_tensors.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

using namespace libddp;
using namespace libddp::test;

namespace {

/// A service that notes what it is asked to change, and refuses on request.
class Objects final : public ObjectStore {
 public:
  std::string address() const override { return "s3://bucket/run"; }
  std::vector<std::string> list() const override {
    std::vector<std::string> names;
    for (const auto& [name, bytes] : all) names.push_back(name);
    return names;
  }
  std::string read(const std::string& name, std::uint64_t offset,
                   std::uint64_t bytes) const override {
    const auto found = all.find(name);
    if (found == all.end()) throw SnapshotError(name + " is not there");
    return offset < found->second.size() ? found->second.substr(offset, bytes) : "";
  }
  void write(const std::string& name, std::uint64_t,
             const std::function<void(const Append&)>& produce) override {
    std::string bytes;
    produce([&](std::span<const std::byte> part) {
      bytes.append(reinterpret_cast<const char*>(part.data()), part.size());
    });
    if (name == refused) throw SnapshotError("503 for " + name);
    all[name] = bytes;
    changes.push_back("+" + name);
  }
  void create(const std::string& name, const std::string& text) override {
    all.emplace(name, text);
  }
  void remove(const std::vector<std::string>& names) override {
    for (const std::string& name : names) {
      if (all.erase(name) > 0) changes.push_back("-" + name);
    }
  }

  std::map<std::string, std::string> all;
  std::vector<std::string> changes;
  std::string refused;
};

struct ObjectRanks {
  static SavedStep saved(std::uint64_t sequence) {
    return {.step = static_cast<std::int64_t>(100 * sequence), .sequence = sequence};
  }

  static StoredTensors tensors(std::uint64_t sequence, int rank) {
    StoredTensors made({"w", "m"}, 3000);
    made.fill(static_cast<unsigned>(sequence * 2 + static_cast<unsigned>(rank)));
    return made;
  }

  void add(std::uint64_t sequence, const std::string& start, int rank) {
    StoredTensors all = tensors(sequence, rank);
    SlotMemory memory = all.memory();
    all.store(memory, 0, saved(sequence));
    folder.add_rank(saved(sequence), start, rank, 2, SlotSource(memory, 0),
                    fmt::format(R"({{"rank":{}}})", rank));
  }

  void save(std::uint64_t sequence, const std::string& start) {
    add(sequence, start, 0);
    add(sequence, start, 1);
    folder.commit(saved(sequence), start, 2);
    folder.keep_newest(2, start);
  }

  std::vector<std::uint64_t> sequences() const {
    std::vector<std::uint64_t> found;
    for (const auto& entry : folder.list()) found.push_back(entry.saved.sequence);
    return found;
  }

  std::shared_ptr<Objects> objects = std::make_shared<Objects>();
  ObjectFolder folder{objects};
};

using Sequences = std::vector<std::uint64_t>;
using Texts = std::vector<std::string>;

}  // namespace

TEST_CASE("an index comes last and goes first", "[objects]") {
  ObjectRanks ranks;
  REQUIRE(ranks.folder.list().empty());
  ranks.save(8, "a1");
  REQUIRE(ranks.objects->changes ==
          Texts{"+step-800.8/rank-0-of-2.a1.safetensors", "+step-800.8/rank-0.a1.json",
                "+step-800.8/rank-1-of-2.a1.safetensors", "+step-800.8/rank-1.a1.json",
                "+step-800.8/index.json", "-step-800.8/rank-0.a1.json",
                "-step-800.8/rank-1.a1.json"});
  ranks.save(9, "a1");
  ranks.objects->changes.clear();
  ranks.save(10, "b2");
  REQUIRE(ranks.sequences() == Sequences{10, 9});
  const Texts& changes = ranks.objects->changes;
  REQUIRE(Texts(changes.end() - 3, changes.end()) ==
          Texts{"-step-800.8/index.json", "-step-800.8/rank-0-of-2.a1.safetensors",
                "-step-800.8/rank-1-of-2.a1.safetensors"});
  const auto entry = ranks.folder.list().front();
  REQUIRE(entry.path == "s3://bucket/run/step-1000.10");
  const SnapshotIndex index = ranks.folder.read(entry);
  REQUIRE(index.ranks.at(1).values == R"({"rank":1})");
  for (const StoredRank& rank : index.ranks) {
    const auto source = ranks.folder.source(entry, rank);
    StoredTensors found({"w", "m"}, 3000);
    scatter(*source, found.segments(source->layout()));
    REQUIRE(found.bytes() == ObjectRanks::tensors(10, rank.rank).bytes());
  }
}

TEST_CASE("what a start has left is not seen, and goes", "[objects]") {
  ObjectRanks ranks;
  ranks.save(4, "a1");
  ranks.add(5, "a1", 0);
  REQUIRE(ranks.folder.missing_ranks(ObjectRanks::saved(5), "a1", 2) == std::vector<int>{1});
  // Its next start makes the same save.
  REQUIRE(ranks.folder.missing_ranks(ObjectRanks::saved(5), "b2", 2) == std::vector<int>{0, 1});
  REQUIRE(ranks.sequences() == Sequences{4});
  REQUIRE(ranks.folder.unfinished().size() == 1);
  REQUIRE(ranks.folder.unfinished()[0].start == "a1");
  ranks.save(6, "b2");
  ranks.add(7, "b2", 0);
  ranks.folder.keep_newest(2, "b2");
  REQUIRE(ranks.sequences() == Sequences{6, 4});
  REQUIRE(ranks.folder.unfinished().size() == 1);
  REQUIRE(ranks.folder.unfinished()[0].saved.sequence == 7);
}

TEST_CASE("objects that are refused, damaged or others'", "[objects]") {
  ObjectRanks ranks;
  ranks.save(4, "a1");
  ranks.objects->refused = "step-500.5/index.json";
  ranks.add(5, "a1", 0);
  ranks.add(5, "a1", 1);
  const std::string told =
      message_of<SnapshotError>([&] { ranks.folder.commit(ObjectRanks::saved(5), "a1", 2); });
  REQUIRE(contains(told, "503"));
  REQUIRE(ranks.sequences() == Sequences{4});

  const std::string data = "step-400.4/rank-0-of-2.a1.safetensors";
  const auto entry = ranks.folder.list().front();
  const StoredRank rank = ranks.folder.read(entry).ranks[0];
  const std::string whole = ranks.objects->all[data];
  ranks.objects->all[data].back() ^= 1;
  REQUIRE(contains(message_of<SnapshotError>([&] { verify(*ranks.folder.source(entry, rank)); }),
                   "s3://bucket/run/" + data + " is damaged"));
  ranks.objects->all[data] = whole.substr(0, whole.size() - 1);
  REQUIRE(contains(message_of<SnapshotError>([&] { verify(*ranks.folder.source(entry, rank)); }),
                   "it ends early"));
  ranks.objects->all["step-400.4/index.json"] = "{";
  REQUIRE(contains(message_of<SnapshotError>([&] { ranks.folder.read(entry); }),
                   "s3://bucket/run/step-400.4/index.json"));

  for (const char* name : {"step-9.9", "step-9.9/other", "step-9.9/deep/index.json", "steps/7"}) {
    ranks.objects->all[name] = "a stranger's";
  }
  REQUIRE(ranks.sequences() == Sequences{4});
  ranks.objects->refused.clear();
  ranks.save(6, "a1");
  ranks.save(7, "a1");
  REQUIRE(ranks.sequences() == Sequences{7, 6});
  REQUIRE(ranks.objects->all.contains("step-9.9/deep/index.json"));
}

TEST_CASE("the first who asks names the job", "[objects]") {
  ObjectRanks ranks;
  REQUIRE(ranks.folder.run(false).empty());
  const std::string run = ranks.folder.run(true);
  REQUIRE(run.size() == 16);
  REQUIRE(ObjectFolder(ranks.objects).run(true) == run);
  ranks.objects->all["run"] = "no name\n";
  REQUIRE(contains(message_of<SnapshotError>([&] { ranks.folder.run(false); }),
                   "s3://bucket/run/run: it is no name of a run"));
}

#include "libddp/slots/stored_file.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <random>

#include "libddp/base/error.h"
#include "libddp/slots/scatter.h"
#include "tests/slots/stored_tensors.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/temporary_folder.h"

using namespace libddp;
using namespace libddp::test;

namespace {

struct Stored {
  explicit Stored(std::size_t bytes = kChunkBytes + 100)
      : tensors({"w", "m"}, bytes), memory(tensors.memory()) {
    tensors.store(memory, 0, {.step = 7, .sequence = 3});
  }

  StoredTensors tensors;
  SlotMemory memory;
};

void flip(const std::string& path, std::uint64_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(at));
  const char byte = static_cast<char>(file.get() ^ 1);
  file.seekp(static_cast<std::streamoff>(at));
  file.put(byte);
}

}  // namespace

TEST_CASE("a file gives back what was stored", "[file]") {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{5}, kChunkBytes + 100}) {
    TemporaryFolder folder;
    Stored stored(bytes);
    const std::string path = folder.path() + "/rank-0.safetensors";
    const StoredFile known = write_stored_file(path, SlotSource(stored.memory, 0));
    struct stat status {};
    REQUIRE(::stat(path.c_str(), &status) == 0);
    REQUIRE(static_cast<std::uint64_t>(status.st_size) == known.bytes);
    REQUIRE(list_folder(folder.path()) == std::set<std::string>{"rank-0.safetensors"});
    const auto kept = stored.tensors.bytes();
    stored.tensors.fill(2);
    const FileSource file(path, known);
    scatter(file, stored.tensors.segments(file.layout()), 2);
    REQUIRE(stored.tensors.bytes() == kept);
  }
}

TEST_CASE("every flipped bit of a file is found", "[file]") {
  TemporaryFolder folder;
  Stored stored(5000);
  const std::string path = folder.path() + "/rank-0.safetensors";
  const StoredFile known = write_stored_file(path, SlotSource(stored.memory, 0));
  std::mt19937_64 random(3);
  for (int trial = 0; trial < 1000; ++trial) {
    const std::uint64_t at = random() % (trial % 2 ? known.bytes : 300);
    flip(path, at);
    const std::string message = message_of<SnapshotError>([&] { verify(FileSource(path, known)); });
    REQUIRE(contains(message, path));
    flip(path, at);
  }
  verify(FileSource(path, known));
}

TEST_CASE("a file that is not the one that is known is refused", "[file]") {
  TemporaryFolder folder;
  Stored stored(100);
  const std::string path = folder.path() + "/rank-0.safetensors";
  const StoredFile known = write_stored_file(path, SlotSource(stored.memory, 0));
  const auto refused = [&](const std::string& name, const StoredFile& file) {
    return message_of<SnapshotError>([&] { FileSource(name, file); });
  };
  REQUIRE(contains(refused(folder.path() + "/other", known), "No such file"));
  REQUIRE(contains(refused(folder.path(), known), "bytes, not"));
  StoredFile other = known;
  other.chunk_sums.push_back(1);
  REQUIRE(contains(refused(path, other), "another size"));
  REQUIRE(::truncate(path.c_str(), static_cast<off_t>(known.bytes - 1)) == 0);
  REQUIRE(contains(refused(path, known), std::to_string(known.bytes - 1) + " bytes, not"));
}

TEST_CASE("all damage of a file is found", "[file]") {
  TemporaryFolder place;
  const std::string path = place.path() + "/f";
  const auto size = static_cast<std::size_t>(2 * kChunkBytes + 10);
  StoredTensors tensors({"w", "m"}, size);
  SlotMemory memory = tensors.memory();
  tensors.store(memory, 0, {.step = 7, .sequence = 1});
  const StoredFile stored = write_stored_file(path, SlotSource(memory, 0));
  const auto found = [&] { return find_damage(FileSource(path, stored), 2); };
  const std::uint64_t begin = stored.bytes - 2 * size;
  REQUIRE(found().empty());
  flip(path, begin);
  flip(path, begin + 3 * kChunkBytes);
  flip(path, stored.bytes - 1);
  // Neighbours are one; the last chunk is short.
  const std::vector<Damage> wanted{{0, kChunkBytes}, {3 * kChunkBytes, 2 * size}};
  REQUIRE(found() == wanted);
  flip(path, begin);
  REQUIRE(found() == std::vector<Damage>{wanted[1]});
}

TEST_CASE("damaged memory is not stored", "[file]") {
  TemporaryFolder folder;
  Stored stored;
  const_cast<std::byte&>(stored.memory.slot(0).data()[kChunkBytes + 5]) ^= std::byte{1};
  const std::string path = folder.path() + "/rank-0.safetensors";
  const std::string message =
      message_of<SnapshotError>([&] { write_stored_file(path, SlotSource(stored.memory, 0)); });
  REQUIRE(contains(message, "not written, as the memory of rank 1 of 4 at step 7 is damaged"));
  REQUIRE(folder.is_empty());
}

TEST_CASE("a write that fails names the path and leaves the older file", "[file]") {
  TemporaryFolder folder;
  Stored stored;
  const std::string path = folder.path() + "/rank-0.safetensors";
  const StoredFile known = write_stored_file(path, SlotSource(stored.memory, 0));
  const auto results = fork_ranks(1, [&](int) -> std::string {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{.rlim_cur = 4096, .rlim_max = 4096};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    return message_of<SnapshotError>(
        [&] { write_stored_file(path, SlotSource(stored.memory, 0)); });
  });
  REQUIRE(results[0].ok());
  REQUIRE(contains(results[0].text, path));
  REQUIRE(contains(results[0].text, "File too large"));
  REQUIRE(list_folder(folder.path()) == std::set<std::string>{"rank-0.safetensors"});
  verify(FileSource(path, known));
  REQUIRE(contains(message_of<SnapshotError>([&] {
                     write_stored_file(folder.path() + "/none/f", SlotSource(stored.memory, 0));
                   }),
                   "No such file"));
}

TEST_CASE("a full disk is told with the bytes that are missing, and nothing is taken of it",
          "[file]") {
  // A small disk would have to be mounted; 8 TiB do not fit on this one either.
  class Huge final : public ChunkSource {
   public:
    const PieceLayout& layout() const override { return layout_; }
    std::uint32_t checksum(std::size_t) const override { return 0; }
    std::span<const std::byte> chunk(std::size_t, std::vector<std::byte>&) const override {
      return {};
    }
    std::string name() const override { return "huge"; }

   private:
    const PieceLayout layout_ = PieceLayout::of(
        {{.key = "w", .dtype = "U8", .shape = {1ll << 43}, .begin = 0, .end = 1ll << 43}});
  };
  TemporaryFolder folder;
  const auto results = fork_ranks(1, [&](int) -> std::string {
    // So that an attempt to take space is told as another error, and fills no disk of others.
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{.rlim_cur = 1u << 20, .rlim_max = 1u << 20};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    return message_of<SnapshotError>([&] { write_stored_file(folder.path() + "/f", Huge()); });
  });
  REQUIRE(results[0].ok());
  INFO(results[0].text);
  REQUIRE(contains(results[0].text, "No space left"));
  REQUIRE(contains(results[0].text, "bytes are needed"));
  REQUIRE(contains(results[0].text, "are free"));
  REQUIRE(folder.is_empty());
}

// A save that a keeper pulls from another one over loopback, beside memcpy of as many bytes: first
// into fresh memory, then into pages that are there.
//
//   libddp_bench_replica [MIB] [REPEATS]

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include "libddp/base/random.h"
#include "libddp/keeper/keeper.h"
#include "libddp/keeper/keeper_client.h"

using namespace libddp;

namespace {

Deadline soon() { return Deadline::after(std::chrono::seconds(120)); }

/// A keeper in a thread.
class Host {
 public:
  Host(const std::string& run, const std::string& name)
      : keeper_({.run = run, .host = name}),
        thread_([this] { keeper_.run(); }),
        client(run, {.is_worker = true, .host = name}, soon()),
        address(client.listen("127.0.0.1", *RunKey::from_bytes(std::string(32, 'k')))) {}
  ~Host() {
    keeper_.stop();
    thread_.join();
  }

 private:
  Keeper keeper_;
  std::thread thread_;

 public:
  KeeperClient client;
  const std::string address;
};

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void print(const char* what, std::size_t bytes, std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  fmt::print(R"({{"case":"{}","mib":{},"min_s":{:.4f},"median_s":{:.4f},"gb_per_s":{:.2f}}})"
             "\n",
             what, bytes >> 20, seconds.front(), median, static_cast<double>(bytes) / median / 1e9);
}

}  // namespace

int main(int count, char** arguments) {
  const std::size_t bytes = (count > 1 ? std::strtoul(arguments[1], nullptr, 10) : 1024) << 20;
  const int repeats = count > 2 ? std::atoi(arguments[2]) : 7;
  const std::string run = "bench-" + random_hex(8);
  std::vector<std::byte> source(bytes);
  for (std::size_t i = 0; i < bytes; ++i) source[i] = static_cast<std::byte>(i * 31 + (i >> 12));
  const auto numel = static_cast<std::int64_t>(bytes);
  SlotMemory memory = SlotMemory::create(
      PieceLayout::of({{.key = "w", .dtype = "U8", .shape = {numel}, .begin = 0, .end = numel}}),
      {.run = run, .rank = 1, .world_size = 2}, 64);
  Host holder(run, "a");
  Host puller(run, "b");
  holder.client.put(memory, std::nullopt);
  std::vector<std::byte> copy(bytes);
  std::vector<double> fresh, again, copied;
  const std::span<const std::byte> sources[] = {source};
  for (int i = 0; i < repeats + 2; ++i) {
    const auto sequence = static_cast<std::uint64_t>(i + 1);
    memory.slot(i % 2).fill({.step = i, .sequence = sequence}, sources, "{}", 1);
    const double pulled = seconds_of([&] {
      puller.client.pull(holder.address, 1, 0, sequence);
      puller.client.wait_pull(1, 0, sequence, soon());
    });
    (i < 2 ? fresh : again).push_back(pulled);
    copied.push_back(seconds_of([&] { std::memcpy(copy.data(), source.data(), bytes); }));
  }
  print("pull into fresh memory", bytes, fresh);
  print("pull", bytes, again);
  print("memcpy", bytes, copied);
  return 0;
}

#include "tests/support/comm_fixture.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstring>

namespace libddp::test {
namespace {

constexpr std::size_t kBytesPerArena = 256u << 20;

SharedSegment map_again(const SharedSegment& segment) {
  return SharedSegment::map(UniqueFd(::fcntl(segment.fd(), F_DUPFD_CLOEXEC, 0)));
}

}  // namespace

CommFixture::CommFixture(int world_size, const char* cpu_mask) {
  std::vector<SharedSegment> pages;
  for (int r = 0; r < world_size; ++r) {
    arenas_.push_back(Arena::create("test", kBytesPerArena));
    pages.push_back(ShmComm::create_page("test", world_size));
  }
  for (int r = 0; r < world_size; ++r) {
    ShmCommOptions options{
        .rank = r, .world_size = world_size, .group_name = "test", .arena = arenas_[r]};
    for (int peer = 0; peer < world_size; ++peer) {
      ShmMember& member = options.members.emplace_back();
      member.pid = 1000 + peer;
      member.host = "here";
      member.cpu_mask = cpu_mask;
      member.page = map_again(pages[peer]);
      if (peer != r) member.arena = map_again(arenas_[peer]->segment());
    }
    comms_.push_back(std::make_unique<ShmComm>(std::move(options)));
  }
}

std::shared_ptr<std::byte> CommFixture::allocate(int rank, std::size_t bytes, Memory memory) {
  const bool in_arena = memory == Memory::Arena || (memory == Memory::Mixed && rank % 2 == 0);
  std::shared_ptr<std::byte> block;
  if (in_arena) {
    block = arenas_[rank]->allocate(bytes);
  } else {
    block.reset(new std::byte[bytes + 1], std::default_delete<std::byte[]>());
  }
  if (bytes > 0) std::memset(block.get(), 0, bytes);
  return block;
}

CommCall CommFixture::call(OpKind kind, std::uint64_t sequence, Dtype dtype, std::uint64_t count,
                           ReduceOp op) {
  CommCall call;
  call.description.kind = kind;
  call.description.dtype = dtype;
  call.description.reduce_op = op;
  call.description.count = count;
  call.description.num_dims = kind == OpKind::Barrier ? 0 : 1;
  call.description.shape[0] = static_cast<std::int64_t>(count);
  call.sequence = sequence;
  call.timeout = std::chrono::seconds(60);
  return call;
}

}  // namespace libddp::test

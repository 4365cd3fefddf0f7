#include "libddp/memory/private_view.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "libddp/memory/shared_segment.h"
#include "tests/support/catch.h"

namespace libddp {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kBytes = 64 * kPage;
/// Neither begins nor ends with a page.
constexpr std::size_t kFirst = kPage + 128, kSize = 20 * kPage + 1000;

bool holds(const std::byte* bytes, std::size_t count, int value) {
  return std::all_of(bytes, bytes + count,
                     [value](std::byte byte) { return byte == static_cast<std::byte>(value); });
}

TEST_CASE("bytes of a segment are found", "[private_view]") {
  const SharedSegment first = SharedSegment::create("first", kBytes);
  SharedSegment second = SharedSegment::create("second", kBytes);
  const auto place = SharedSegment::find(second.data() + 5, 10);
  REQUIRE(place.has_value());
  CHECK(place->fd == second.fd());
  CHECK(place->offset == 5);
  CHECK(SharedSegment::find(second.data(), kBytes)->offset == 0);
  CHECK_FALSE(SharedSegment::find(second.data(), kBytes + 1).has_value());
  CHECK_FALSE(SharedSegment::find(&place, 1).has_value());
  const std::byte* const was = second.data();
  const SharedSegment moved = std::move(second);
  CHECK(SharedSegment::find(was, 1)->fd == moved.fd());
  {
    const SharedSegment gone = SharedSegment::create("third", kBytes);
    CHECK(SharedSegment::find(gone.data(), 1)->fd == gone.fd());
  }
  CHECK(SharedSegment::find(first.data(), 1)->fd == first.fd());
}

TEST_CASE("a view shows what is shared until it is written to", "[private_view]") {
  const SharedSegment segment = SharedSegment::create("view", kBytes);
  std::byte* const shared = segment.data() + kFirst;
  std::fill_n(shared, kSize, std::byte{1});
  const auto view = PrivateView::of(shared, kSize);
  CHECK(holds(view->data(), kSize, 1));
  CHECK(view->written().empty());
  std::fill_n(shared, kSize, std::byte{2});
  CHECK(holds(view->data(), kSize, 2));
  CHECK(view->written().empty());

  // In the third page of the view and the last two.
  view->data()[2 * kPage] = std::byte{7};
  view->data()[kSize - 1001] = view->data()[kSize - 1] = std::byte{8};
  CHECK(holds(shared, kSize, 2));
  std::fill_n(shared, kSize, std::byte{3});
  CHECK(view->data()[2 * kPage] == std::byte{7});
  CHECK(view->data()[2 * kPage + 1] == std::byte{2});
  CHECK(view->data()[kSize - 1] == std::byte{8});
  CHECK(holds(view->data(), kPage, 3));
  const auto written = view->written();
  CHECK(written == std::vector<PrivateView::Range>{{2 * kPage - 128, 3 * kPage - 128},
                                                   {20 * kPage - 128, kSize}});

  view->drop();
  CHECK(view->written().empty());
  CHECK(holds(view->data(), kSize, 3));
  std::fill_n(shared, kSize, std::byte{4});
  CHECK(holds(view->data(), kSize, 4));
}

TEST_CASE("pages locked in memory are made equal", "[private_view]") {
  const SharedSegment segment = SharedSegment::create("locked", kBytes);
  const auto view = PrivateView::of(segment.data() + kFirst, kSize);
  if (::mlock(view->data(), kPage) != 0) return;  // not allowed here
  std::fill_n(view->data(), kPage, std::byte{5});
  view->drop();
  CHECK(holds(view->data(), kSize, 0));
}

TEST_CASE("another process has its own view", "[private_view]") {
  const SharedSegment segment = SharedSegment::create("fork", kBytes);
  const auto view = PrivateView::of(segment.data(), kSize);
  std::fill_n(view->data(), kSize, std::byte{1});
  const pid_t child = ::fork();
  if (child == 0) {
    const auto mine = PrivateView::of(segment.data(), kSize);
    bool good = holds(mine->data(), kSize, 0);
    segment.data()[3] = std::byte{9};
    good = good && mine->data()[3] == std::byte{9} && view->data()[3] == std::byte{1};
    ::_exit(good ? 0 : 1);
  }
  int status = 1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(view->data()[3] == std::byte{1});
  view->drop();
  CHECK(view->data()[3] == std::byte{9});
}

}  // namespace
}  // namespace libddp

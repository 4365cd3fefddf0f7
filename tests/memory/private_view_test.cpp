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

constexpr std::size_t kViewPage = 4096;
constexpr std::size_t kSegmentBytes = 64 * kViewPage;
/// Neither begins nor ends with a page.
constexpr std::size_t kViewFirst = kViewPage + 128, kViewSize = 20 * kViewPage + 1000;

bool holds(const std::byte* bytes, std::size_t count, int value) {
  return std::all_of(bytes, bytes + count,
                     [value](std::byte byte) { return byte == static_cast<std::byte>(value); });
}

TEST_CASE("bytes of a segment are found", "[private_view]") {
  const SharedSegment first = SharedSegment::create("first", kSegmentBytes);
  SharedSegment second = SharedSegment::create("second", kSegmentBytes);
  const auto place = SharedSegment::find(second.data() + 5, 10);
  REQUIRE(place.has_value());
  CHECK(place->fd == second.fd());
  CHECK(place->offset == 5);
  CHECK(SharedSegment::find(second.data(), kSegmentBytes)->offset == 0);
  CHECK_FALSE(SharedSegment::find(second.data(), kSegmentBytes + 1).has_value());
  CHECK_FALSE(SharedSegment::find(&place, 1).has_value());
  const std::byte* const was = second.data();
  const SharedSegment moved = std::move(second);
  CHECK(SharedSegment::find(was, 1)->fd == moved.fd());
  {
    const SharedSegment gone = SharedSegment::create("third", kSegmentBytes);
    CHECK(SharedSegment::find(gone.data(), 1)->fd == gone.fd());
  }
  CHECK(SharedSegment::find(first.data(), 1)->fd == first.fd());
}

TEST_CASE("a view shows what is shared until it is written to", "[private_view]") {
  const SharedSegment segment = SharedSegment::create("view", kSegmentBytes);
  std::byte* const shared = segment.data() + kViewFirst;
  std::fill_n(shared, kViewSize, std::byte{1});
  const auto view = PrivateView::of(shared, kViewSize);
  CHECK(holds(view->data(), kViewSize, 1));
  CHECK(view->written().empty());
  std::fill_n(shared, kViewSize, std::byte{2});
  CHECK(holds(view->data(), kViewSize, 2));
  CHECK(view->written().empty());

  // In the third page of the view and the last two.
  view->data()[2 * kViewPage] = std::byte{7};
  view->data()[kViewSize - 1001] = view->data()[kViewSize - 1] = std::byte{8};
  CHECK(holds(shared, kViewSize, 2));
  std::fill_n(shared, kViewSize, std::byte{3});
  CHECK(view->data()[2 * kViewPage] == std::byte{7});
  CHECK(view->data()[2 * kViewPage + 1] == std::byte{2});
  CHECK(view->data()[kViewSize - 1] == std::byte{8});
  CHECK(holds(view->data(), kViewPage, 3));
  const auto written = view->written();
  CHECK(written == std::vector<PrivateView::Range>{{2 * kViewPage - 128, 3 * kViewPage - 128},
                                                   {20 * kViewPage - 128, kViewSize}});

  view->drop();
  CHECK(view->written().empty());
  CHECK(holds(view->data(), kViewSize, 3));
  std::fill_n(shared, kViewSize, std::byte{4});
  CHECK(holds(view->data(), kViewSize, 4));
}

TEST_CASE("pages that are written again and again are kept for a while", "[private_view]") {
  const SharedSegment segment = SharedSegment::create("again", kSegmentBytes);
  std::byte* const shared = segment.data() + kViewFirst;
  const auto view = PrivateView::of(shared, kViewSize);
  int num_kept = 0;
  for (int round = 1; round <= 100; ++round) {
    std::fill_n(view->data() + 10, 3 * kViewPage, std::byte{200});
    std::fill_n(shared, kViewSize, static_cast<std::byte>(round));
    view->drop();
    CHECK(holds(view->data(), kViewSize, round));
    if (!view->written().empty()) ++num_kept;
  }
  CHECK(num_kept > 80);
  CHECK(num_kept < 99);
  // Once nothing is written any more, nothing is kept.
  int round = 0;
  while (!view->written().empty() && round++ < 100) view->drop();
  CHECK(round < 100);
}

TEST_CASE("pages locked in memory are made equal", "[private_view]") {
  const SharedSegment segment = SharedSegment::create("locked", kSegmentBytes);
  const auto view = PrivateView::of(segment.data() + kViewFirst, kViewSize);
  if (::mlock(view->data(), kViewPage) != 0) return;  // not allowed here
  std::fill_n(view->data(), kViewPage, std::byte{5});
  view->drop();
  CHECK(holds(view->data(), kViewSize, 0));
}

TEST_CASE("another process has its own view", "[private_view]") {
  const SharedSegment segment = SharedSegment::create("fork", kSegmentBytes);
  const auto view = PrivateView::of(segment.data(), kViewSize);
  std::fill_n(view->data(), kViewSize, std::byte{1});
  const pid_t child = ::fork();
  if (child == 0) {
    const auto mine = PrivateView::of(segment.data(), kViewSize);
    bool good = holds(mine->data(), kViewSize, 0);
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

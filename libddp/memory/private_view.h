#pragma once

// Shared memory as this process alone may change it: a second mapping of the same bytes, copied
// page by page where it is written to.
//
// As long as nothing is written, it shows what stands in the shared memory, also what others put
// there later, and takes no memory of its own. A page that was written stays as it is here until
// `drop`, whatever becomes of the shared one.
// (POSIX leaves open whether a private mapping shows later changes of a file; Linux defines it for
// memory files: an untouched page of it is the file's own.)
// Thread rule: one thread at a time calls members; the bytes are the caller's to guard.
//
//   std::shared_ptr<PrivateView> view = PrivateView::of(shared, size_bytes);
//   use(view->data());                                  // reads and writes
//   for (const auto& [begin, end] : view->written()) keep(view->data() + begin, end - begin);
//   view->drop();

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace libddp {

class PrivateView {
 public:
  /// Bytes [begin, end).
  using Range = std::pair<std::size_t, std::size_t>;

  /// Of bytes of a SharedSegment of this process, which must stay mapped. Throws Error where the
  /// system gives no further mapping.
  static std::shared_ptr<PrivateView> of(std::byte* shared, std::size_t size_bytes);
  PrivateView(const PrivateView&) = delete;
  PrivateView& operator=(const PrivateView&) = delete;
  ~PrivateView();

  std::byte* data() const { return pages_ + head_bytes_; }
  std::byte* shared() const { return shared_; }
  std::size_t size_bytes() const { return size_bytes_; }

  /// Where this process has bytes of its own, by whole pages; everywhere, where the system does not
  /// tell (/proc/self/pagemap).
  std::vector<Range> written() const;
  /// Shows what is shared again. Gives the copies back; where each of the last calls found some,
  /// they are likely to be written again, and are made equal and kept instead, most of the time.
  void drop();

 private:
  PrivateView(std::byte* shared, std::size_t size_bytes, int fd, std::uint64_t offset);

  std::size_t num_pages() const;
  /// Pages [begin, end) that this process has copies of.
  std::vector<Range> written_pages() const;

  std::byte* const shared_;
  const std::size_t size_bytes_;
  /// Between the beginning of the first page and the first byte.
  const std::size_t head_bytes_;
  std::byte* pages_ = nullptr;
  /// Calls of drop in a row that found copies.
  int num_drops_ = 0;
};

}  // namespace libddp

#include "libddp/slots/direct_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "libddp/base/service_thread.h"

namespace libddp {
namespace {

/// More gain nothing: pieces are megabytes.
constexpr int kAtOnce = 2;

bool is_aligned(const std::byte* bytes) {
  return reinterpret_cast<std::uintptr_t>(bytes) % DirectWriter::kBlockBytes == 0;
}

}  // namespace

void DirectWriter::Free::operator()(std::byte* buffer) const { std::free(buffer); }

DirectWriter::DirectWriter(const std::string& path, int fd)
    : fd_(fd),
      direct_(::open(path.c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC)),
      is_usable_(static_cast<bool>(direct_)) {}

DirectWriter::~DirectWriter() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void DirectWriter::write(std::span<const std::byte> bytes, std::uint64_t offset, bool stays) {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_pieces_ < kAtOnce; });
  }
  Piece piece{.bytes = bytes, .offset = offset, .buffer = {}};
  if (!stays || !is_aligned(bytes.data())) {
    piece.buffer = copy(bytes);
    piece.bytes = {piece.buffer.bytes.get(), bytes.size()};
  }
  if (threads_.size() < kAtOnce) add_thread();
  if (threads_.empty()) return store(piece);  // a limit on threads
  {
    const std::lock_guard lock(mutex_);
    ++num_pieces_;
    waiting_.push_back(std::move(piece));
  }
  changed_.notify_all();
}

int DirectWriter::finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return num_pieces_ == 0; });
  return error();
}

DirectWriter::Buffer DirectWriter::copy(std::span<const std::byte> bytes) {
  Buffer buffer;
  {
    const std::lock_guard lock(mutex_);
    if (!buffers_.empty()) {
      buffer = std::move(buffers_.back());
      buffers_.pop_back();
    }
  }
  if (buffer.size < bytes.size()) {
    const std::size_t size = (bytes.size() + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    buffer = {};
    buffer.bytes.reset(static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, size)));
    if (!buffer.bytes) throw std::bad_alloc();
    buffer.size = size;
  }
  std::memcpy(buffer.bytes.get(), bytes.data(), bytes.size());
  return buffer;
}

void DirectWriter::add_thread() {
  try {
    threads_.push_back(start_service_thread("libddp-write", [this] { run(); }));
  } catch (const std::system_error&) {
  }
}

void DirectWriter::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return is_over_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    Piece piece = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    store(piece);
    lock.lock();
    if (piece.buffer.bytes) buffers_.push_back(std::move(piece.buffer));
    --num_pieces_;
    changed_.notify_all();
  }
}

void DirectWriter::store(const Piece& piece) {
  std::span<const std::byte> bytes = piece.bytes;
  auto offset = static_cast<off_t>(piece.offset);
  bool is_direct = is_usable();
  while (!bytes.empty() && error() == 0) {
    const ssize_t count =
        ::pwrite(is_direct ? direct_.get() : fd_, bytes.data(), bytes.size(), offset);
    if (count > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(count));
      offset += count;
    } else if (count < 0 && is_direct && (errno == EINVAL || errno == EOPNOTSUPP)) {
      is_direct = false;
      is_usable_ = false;
    } else if (count < 0 && errno != EINTR) {
      int none = 0;
      error_.compare_exchange_strong(none, errno);
    }
  }
}

}  // namespace libddp

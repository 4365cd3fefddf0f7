#include "libddp/slots/stored_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/system_error.h"
#include "libddp/base/unique_fd.h"
#include "libddp/kernels/crc32c.h"
#include "libddp/slots/fresh_file.h"

namespace libddp {
namespace {

constexpr std::uint64_t kCountBytes = 8;
constexpr std::uint64_t kBlockBytes = DirectWriter::kBlockBytes;

/// The data begins where a disk's block does, and is written without a copy (FreshFile), unless
/// the header would become too long for a reader.
std::uint64_t head_bytes_of(const PieceLayout& layout) {
  const std::uint64_t bytes = kCountBytes + layout.text().size();
  const std::uint64_t whole = (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  return whole - kCountBytes <= PieceLayout::kMaxTextBytes ? whole : bytes;
}

/// The bytes ahead of the data.
std::string head_of(const PieceLayout& layout) {
  std::string head(kCountBytes, '\0');
  head += layout.text();
  head.resize(head_bytes_of(layout), ' ');
  const std::uint64_t count = head.size() - kCountBytes;
  for (std::size_t i = 0; i < kCountBytes; ++i) head[i] = static_cast<char>(count >> (8 * i));
  return head;
}

/// Of a file that is opened and has the size that is known.
StoredSource::Read file_reader(const std::string& path, std::uint64_t bytes_known) {
  const auto fd = std::make_shared<UniqueFd>(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!*fd) refuse_stored_file(path, errno_text("open", errno));
  struct stat status {};
  if (::fstat(fd->get(), &status) != 0) refuse_stored_file(path, errno_text("fstat", errno));
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (!S_ISREG(status.st_mode) || size != bytes_known) {
    refuse_stored_file(path, fmt::format("it has {} bytes, not {}", size, bytes_known));
  }
  return [fd, path](void* to, std::uint64_t bytes, std::uint64_t offset) {
    auto* at = static_cast<std::byte*>(to);
    while (bytes > 0) {
      const ssize_t count = ::pread(fd->get(), at, bytes, static_cast<off_t>(offset));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) refuse_stored_file(path, errno_text("read", errno));
      if (count == 0) refuse_stored_file(path, "it ends early");
      at += count;
      offset += static_cast<std::uint64_t>(count);
      bytes -= static_cast<std::uint64_t>(count);
    }
  };
}

}  // namespace

void refuse_stored_file(const std::string& path, const std::string& why) {
  refuse_file(path, why, "it was truncated, replaced or damaged; take another copy");
}

StoredFile send_stored(const std::string& path, const ChunkSource& source,
                       const std::function<void(std::span<const std::byte>, bool)>& append) {
  const std::uint64_t data_bytes = source.layout().data_bytes();
  const std::string head = head_of(source.layout());
  StoredFile stored{.bytes = head.size() + data_bytes,
                    .header_sum = crc32c(head.data(), head.size()),
                    .chunk_sums = {}};
  append(std::as_bytes(std::span(head)), false);
  std::vector<std::byte> scratch;
  for (std::size_t i = 0; i < num_chunks(data_bytes); ++i) {
    const std::span<const std::byte> bytes = source.chunk(i, scratch);
    stored.chunk_sums.push_back(source.checksum(i));
    if (crc32c(bytes.data(), bytes.size()) != stored.chunk_sums.back()) {
      const std::uint64_t begin = i * kChunkBytes;
      refuse_file(
          path,
          fmt::format("not written, as {} is damaged at bytes {} to {} ({})", source.name(), begin,
                      begin + bytes.size(), source.layout().describe(begin, begin + bytes.size())),
          "look at this machine's memory; the next save is not affected");
    }
    append(bytes, source.stays());
  }
  return stored;
}

StoredFile write_stored_file(const std::string& path, const ChunkSource& source) {
  FreshFile file(path);
  file.reserve(head_bytes_of(source.layout()) + source.layout().data_bytes());
  StoredFile stored = send_stored(path, source, [&](std::span<const std::byte> bytes, bool stays) {
    file.append(bytes, stays);
  });
  file.put_in_place();
  return stored;
}

StoredSource::StoredSource(std::string path, StoredFile known, Read read)
    : path_(std::move(path)), known_(std::move(known)), read_(std::move(read)) {
  const auto refuse = [&](const std::string& why) { refuse_stored_file(path_, why); };
  const std::uint64_t size = known_.bytes;
  unsigned char count[kCountBytes] = {};
  if (size < kCountBytes) refuse("it is too short");
  read_(count, kCountBytes, 0);
  std::uint64_t text_bytes = 0;
  for (std::size_t i = kCountBytes; i-- > 0;) text_bytes = text_bytes << 8 | count[i];
  if (text_bytes > PieceLayout::kMaxTextBytes || text_bytes > size - kCountBytes) {
    refuse(fmt::format("it counts a header of {} bytes", text_bytes));
  }
  std::string text(text_bytes, '\0');
  read_(text.data(), text_bytes, kCountBytes);
  if (crc32c(text.data(), text.size(), crc32c(count, kCountBytes)) != known_.header_sum) {
    refuse("its header has another checksum");
  }
  data_begin_ = kCountBytes + text_bytes;
  try {
    layout_ = PieceLayout::parse(text);
  } catch (const SnapshotError& error) {
    refuse(error.what());
  }
  if (layout_.data_bytes() != size - data_begin_ ||
      known_.chunk_sums.size() != num_chunks(layout_.data_bytes())) {
    refuse("its header is for another size");
  }
}

std::span<const std::byte> StoredSource::chunk(std::size_t index,
                                               std::vector<std::byte>& scratch) const {
  scratch.resize(chunk_bytes(layout_.data_bytes(), index));
  read_(scratch.data(), scratch.size(), data_begin_ + index * kChunkBytes);
  return scratch;
}

FileSource::FileSource(const std::string& path, StoredFile known)
    : StoredSource(path, known, file_reader(path, known.bytes)) {}

}  // namespace libddp

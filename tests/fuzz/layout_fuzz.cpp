// The text of a layout, as it comes from a file or from the memory of a process that has died. What
// is understood says the same when it is read again, and lies without gaps.

#include <string>

#include "libddp/base/error.h"
#include "libddp/slots/piece_layout.h"
#include "tests/fuzz/fuzz.h"

using namespace libddp;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const PieceLayout layout = PieceLayout::parse({reinterpret_cast<const char*>(data), size});
    std::uint64_t reached = 0;
    for (const Piece& piece : layout.pieces()) {
      fuzz::require(piece.offset == reached && layout.find(piece.key) == &piece);
      fuzz::require(piece.begin >= 0 && piece.begin <= piece.end);
      fuzz::require(piece.end <= numel_of(piece.shape));
      reached += piece.bytes;
    }
    fuzz::require(reached == layout.data_bytes());
    const PieceLayout again = PieceLayout::parse(PieceLayout::of(layout.pieces()).text());
    fuzz::require(again.data_bytes() == reached);
    fuzz::require(again.pieces().size() == layout.pieces().size());
  } catch (const SnapshotError&) {
  }
  return 0;
}

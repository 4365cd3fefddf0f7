#pragma once

// Descriptors that forked children must not keep.
//
// A connection ends for the other side only when the last copy of its descriptor is closed, and a
// child of fork() has copies of all: a data loader's worker that outlives its killed rank would
// keep the rank's connections open, and other hosts would wait for a sign of life instead of being
// told. In a child every marked number becomes a descriptor of nothing (an empty eventfd): what the
// child's copies of objects close later is theirs, and no number is reused under them.
// UniqueFd unmarks what it closes; whoever takes a marked number out by release() unmarks it.
// Thread rule: any thread, no locks; the handler of fork() makes system calls only.
//
//   UniqueFd connection(::accept4(...));
//   close_in_children(connection.get());

namespace libddp {

/// Does nothing for a negative number, and for one above 65,535.
void close_in_children(int fd);
void keep_in_children(int fd);

}  // namespace libddp

#pragma once

// For threads that other libraries' calls look up names in, where nobody needs the answer.
//
// torch's TCPStore asks for the name of the address that it has connected to, for its log. A name
// server that does not answer, or that many ranks of a host ask at once, costs each of them what
// resolv.conf says, 10 s unless it says something; the address is printed then.
//
//   std::thread([] { shorten_lookups(); connect(); });

namespace libddp {

/// Of the calling thread, for as long as it lives: each name server is asked once, for a second.
/// Does nothing where the C library is not glibc. REQUIRES: no answer of the thread's lookups
/// matters.
void shorten_lookups();

}  // namespace libddp

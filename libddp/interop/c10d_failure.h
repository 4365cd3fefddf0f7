#pragma once

// What another c10d backend throws, in libddp's classes.
//
// The classes of torch and the words of Gloo decide: a deadline, a connection that the other side
// closed, one that cannot be made, an argument that the backend does not take. What fits nothing is
// a PeerError without a rank: some rank failed or called something else.
// Thread rule: free functions.
//
//   std::rethrow_exception(error_of_c10d(error, "libddp[group dp, rank 0/2] all_reduce #3",
//   "gloo"));

#include <exception>
#include <string>

namespace libddp {

/// `where` begins the message, `backend` names the other library; its own text is kept.
/// Exceptions of libddp come back as they are.
std::exception_ptr error_of_c10d(const std::exception_ptr& error, const std::string& where,
                                 const std::string& backend);

/// The other backend lacks an operation (as opposed to: failed in it).
bool is_unsupported(const std::exception& error);

}  // namespace libddp

#include "libddp/interop/c10d_failure.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cctype>
#include <initializer_list>

#include "libddp/base/error.h"
#include "libddp/rendezvous/torch_store.h"

namespace libddp {
namespace {

enum class Cause { Argument, Store, Network, Timeout, Peer };

bool has_any(const std::string& text, std::initializer_list<const char*> words) {
  for (const char* word : words) {
    if (text.find(word) != std::string::npos) return true;
  }
  return false;
}

std::string lower(std::string text) {
  for (char& letter : text) letter = static_cast<char>(std::tolower(letter));
  return text;
}

Cause cause_by_words(const std::string& text, Cause otherwise) {
  const std::string words = lower(text);
  if (has_any(words, {"timed out", "timeout", "time out"})) return Cause::Timeout;
  if (has_any(words, {"closed by peer", "reset by peer", "broken pipe", "connection closed"})) {
    return Cause::Peer;
  }
  if (has_any(words, {"connect", "unreachable", "no route"})) return Cause::Network;
  return otherwise;
}

Cause cause_of(const std::exception& error, const std::string& text) {
  if (dynamic_cast<const c10::DistStoreError*>(&error) != nullptr) return Cause::Store;
  if (dynamic_cast<const c10::DistNetworkError*>(&error) != nullptr) {
    return cause_by_words(text, Cause::Network);
  }
  if (dynamic_cast<const c10::DistError*>(&error) != nullptr) {
    return cause_by_words(text, Cause::Peer);
  }
  // torch checks arguments with its general classes, before anything is sent.
  if (dynamic_cast<const c10::Error*>(&error) != nullptr) {
    return cause_by_words(text, Cause::Argument);
  }
  return cause_by_words(text, Cause::Peer);
}

template <class Made>
std::exception_ptr make(const std::string& message, const char* hint) {
  return std::make_exception_ptr(Made(message + ". Hint: " + hint + "."));
}

std::exception_ptr make_error(Cause cause, const std::string& message) {
  switch (cause) {
    case Cause::Argument:
      return make<ArgumentError>(message, "the backend below does not take this call");
    case Cause::Store:
      return make<StoreError>(message, "look at the process that holds the store");
    case Cause::Network:
      return make<NetworkError>(message, "look at the network between the ranks");
    case Cause::Timeout:
      return make<TimeoutError>(
          message, "look at what the other ranks do; if they are only slow, raise the timeout");
    case Cause::Peer:
      break;
  }
  return std::make_exception_ptr(
      PeerError(message + ". Hint: look at the output of the other ranks.", -1));
}

}  // namespace

std::exception_ptr error_of_c10d(const std::exception_ptr& error, const std::string& where,
                                 const std::string& backend) {
  if (!error) return nullptr;
  try {
    std::rethrow_exception(error);
  } catch (const Error&) {
    return error;
  } catch (const std::exception& e) {
    const std::string text = torch_error_text(e);
    return make_error(cause_of(e, text), fmt::format("{}: {}: {}", where, backend, text));
  } catch (...) {
    return make_error(Cause::Peer, fmt::format("{}: {}: an unknown exception", where, backend));
  }
}

bool is_unsupported(const std::exception& error) {
  const std::string text = lower(torch_error_text(error));
  // The last one: a process group written by somebody who left the operation out.
  return has_any(text, {"does not support", "not supported", "not implement", "notimplemented",
                        "unsupported", "no backend type associated"});
}

}  // namespace libddp

#pragma once

// libddp's exceptions in a form that torch keeps the type of.
//
// Torch's own code between a backend and the user (autograd engine, Reducer, ivalue::Future) knows
// c10's classes only: any other exception reaches Python as a bare RuntimeError. So what leaves the
// c10d backend derives from c10's class and carries the original; our own bindings unwrap it and
// raise the exact Python class.
//
//   ArgumentError -> c10::Error             StoreError -> c10::DistStoreError
//   NetworkError, TimeoutError -> c10::DistNetworkError
//   PeerError, DeviceError -> c10::DistBackendError     others -> c10::DistError
//
// Thread rule: free functions; any thread.
//
//   return for_torch([&] { return group->barrier(); });

#include <c10/util/Exception.h>

#include <exception>
#include <string>
#include <utility>

#include "libddp/base/error.h"

namespace libddp {

/// The second base of every exception made here.
class ErrorCarrier {
 public:
  explicit ErrorCarrier(std::exception_ptr cause) : cause_(std::move(cause)) {}
  virtual ~ErrorCarrier() = default;

  /// libddp's own exception.
  const std::exception_ptr& cause() const { return cause_; }

 private:
  std::exception_ptr cause_;
};

/// `TorchError` with libddp's exception inside. No backtrace: the message says where and why.
template <class TorchError>
class CarriedError final : public TorchError, public ErrorCarrier {
 public:
  CarriedError(const std::string& message, std::exception_ptr cause)
      : TorchError(message, c10::Backtrace()), ErrorCarrier(std::move(cause)) {}
};

/// The carrier for one of libddp's exceptions; any other exception, and null, as it is.
std::exception_ptr error_for_torch(const std::exception_ptr& error);

/// Calls `function`; libddp's exceptions leave as carriers.
template <class Function>
auto for_torch(Function&& function) -> decltype(function()) {
  try {
    return std::forward<Function>(function)();
  } catch (const Error&) {
    std::rethrow_exception(error_for_torch(std::current_exception()));
  }
}

}  // namespace libddp

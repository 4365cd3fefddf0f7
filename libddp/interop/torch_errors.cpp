#include "libddp/interop/torch_errors.h"

namespace libddp {
namespace {

template <class TorchError>
std::exception_ptr carry(const Error& error, const std::exception_ptr& cause) {
  return std::make_exception_ptr(CarriedError<TorchError>(error.what(), cause));
}

}  // namespace

std::exception_ptr error_for_torch(const std::exception_ptr& error) {
  if (!error) return nullptr;
  try {
    std::rethrow_exception(error);
  } catch (const ArgumentError& e) {
    return carry<c10::Error>(e, error);
  } catch (const StoreError& e) {
    return carry<c10::DistStoreError>(e, error);
  } catch (const NetworkError& e) {
    return carry<c10::DistNetworkError>(e, error);
  } catch (const TimeoutError& e) {
    return carry<c10::DistNetworkError>(e, error);
  } catch (const PeerError& e) {
    return carry<c10::DistBackendError>(e, error);
  } catch (const DeviceError& e) {
    return carry<c10::DistBackendError>(e, error);
  } catch (const Error& e) {
    return carry<c10::DistError>(e, error);
  } catch (...) {
    return error;  // not ours: torch knows it or nobody does
  }
}

}  // namespace libddp

#pragma once

// Whether autocast was on when a block ran, and to what type. Autograd does not keep it.
// Thread rule: each object in one thread; the state is the thread's own.
//
//   auto then = AutocastState::now(devices);
//   { AutocastScope scope(then); run(); }    // casts as it did then

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <vector>

namespace libddp {

class AutocastState {
 public:
  /// Of the host and of the kinds of `devices`.
  static AutocastState now(const std::vector<c10::Device>& devices);

  bool operator==(const AutocastState& other) const = default;
  bool is_enabled() const;
  /// The present state of the same kinds of devices.
  AutocastState same_kinds_now() const;
  void apply() const;

 private:
  struct Kind {
    c10::DeviceType type;
    bool is_enabled;
    c10::ScalarType dtype;
    bool operator==(const Kind& other) const = default;
  };

  static Kind kind_now(c10::DeviceType type);

  std::vector<Kind> kinds_;
  bool is_caching_ = true;
};

/// Within its life the thread's autocast is `state`, with a cache of casts of its own.
class AutocastScope {
 public:
  explicit AutocastScope(const AutocastState& state);
  ~AutocastScope();
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  AutocastState former_;
  bool is_active_;
};

}  // namespace libddp

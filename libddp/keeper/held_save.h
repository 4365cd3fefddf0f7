#pragma once

// A save in memory that nobody overwrites as long as this lives: its slot is held.
// Thread rule: one owner.
//
//   const HeldSave held = HeldSave::of(memory, 0);
//   if (held && held.saved().sequence == 12) send(held.slot().data());

#include <memory>
#include <utility>

#include "libddp/slots/slot_memory.h"

namespace libddp {

class HeldSave {
 public:
  HeldSave() = default;
  /// Holds nothing if the slot is being written or has no save.
  static HeldSave of(std::shared_ptr<SlotMemory> memory, int slot);
  ~HeldSave() { release(); }
  HeldSave(HeldSave&& other) noexcept;
  HeldSave& operator=(HeldSave&& other) noexcept;

  explicit operator bool() const { return memory_ != nullptr; }
  const SlotMemory& memory() const { return *memory_; }
  const Slot& slot() const { return std::as_const(*memory_).slot(slot_); }
  const SavedStep& saved() const { return saved_; }

 private:
  void release();

  std::shared_ptr<SlotMemory> memory_;
  int slot_ = 0;
  SavedStep saved_;
};

}  // namespace libddp

#include "libddp/keeper/held_save.h"

namespace libddp {

HeldSave HeldSave::of(std::shared_ptr<SlotMemory> memory, int slot) {
  HeldSave held;
  if (!memory->slot(slot).try_hold()) return held;
  const auto saved = memory->slot(slot).whole();
  if (!saved) {
    memory->slot(slot).release();
    return held;
  }
  held.memory_ = std::move(memory);
  held.slot_ = slot;
  held.saved_ = *saved;
  return held;
}

HeldSave::HeldSave(HeldSave&& other) noexcept
    : memory_(std::move(other.memory_)), slot_(other.slot_), saved_(other.saved_) {}

HeldSave& HeldSave::operator=(HeldSave&& other) noexcept {
  if (this == &other) return *this;
  release();
  memory_ = std::move(other.memory_);
  slot_ = other.slot_;
  saved_ = other.saved_;
  return *this;
}

void HeldSave::release() {
  if (memory_) memory_->slot(slot_).release();
  memory_.reset();
}

}  // namespace libddp

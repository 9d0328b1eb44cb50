// Requests that a GPU's caching allocator refuses: others are evicted for them, and it is asked again (`Shortage`).
//
// Room is made for an operator's results before it runs. What a library takes for itself is not known then, nor whether free
// memory is in one piece. A kernel that is refused memory may have written already, and could not run again. And cuDNN's
// convolutions tell nobody: they take another algorithm, with other bits, and remember it.
#pragma once

#include <c10/core/Allocator.h>

#include <cstring>

#include "shortage.h"

namespace dtrrun {

// PyTorch has one allocator for all GPUs, and no place to be asked by it. So its `allocate` is replaced in a copy of its table of
// virtual functions, once and for good: whoever replaces it later may keep ours.
class DeviceAllocator {
 public:
  static void watch(c10::DeviceType type) {
    if (original_ != nullptr) return;
    c10::Allocator* allocator = c10::GetAllocator(type);
    void*** table = reinterpret_cast<void***>(allocator);
    // Memory goes on behind a table: a library's other tables and its data.
    std::memcpy(entries_, *table - ABOVE, sizeof entries_);
    original_ = reinterpret_cast<Allocate>(entries_[ABOVE + ALLOCATE]);
    entries_[ABOVE + ALLOCATE] = reinterpret_cast<void*>(&allocate);
    *table = entries_ + ABOVE;
  }

 private:
  using Allocate = c10::DataPtr (*)(c10::Allocator*, size_t);
  static constexpr size_t ABOVE = 2;     // entries before those of functions: where the object begins, and its type
  static constexpr size_t ALLOCATE = 2;  // the first of `c10::Allocator`, after two destructors
  static constexpr size_t ENTRIES = 192;  // more than any allocator of PyTorch's has

  static c10::DataPtr allocate(c10::Allocator* self, size_t nbytes) {
    for (int attempt = 0;; attempt++) {
      try {
        return original_(self, nbytes);
      } catch (const c10::OutOfMemoryError&) {
        if (!Shortage::own().relieve(nbytes, attempt)) throw;
      }
    }
  }

  static inline void* entries_[ENTRIES];
  static inline Allocate original_ = nullptr;
};

}  // namespace dtrrun

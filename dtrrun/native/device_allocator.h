// Retries requests that a GPU's caching allocator refuses, after other tensors have been evicted for them (`Shortage`).
//
// Room is made for an operator's results before it runs. What a library allocates itself is not known then, nor whether free
// memory is contiguous. A kernel that is refused memory may have written already, and could not run again. And cuDNN's
// convolutions do not report it: they would take another algorithm, with different bits, and remember it.
#pragma once

#include <ATen/Context.h>
#include <c10/core/Allocator.h>

#include <cstring>

#include "shortage.h"

namespace dtrrun {

// PyTorch has one allocator for all GPUs, and no hook for refused requests. So its `allocate` is replaced in a copy of its
// vtable, permanently: code that replaces it later may keep a pointer to ours.
class DeviceAllocator {
 public:
  static void watch(c10::DeviceType type) {
    if (original_ != nullptr) return;
    c10::Allocator* allocator = c10::GetAllocator(type);
    void*** table = reinterpret_cast<void***>(allocator);
    // Memory continues past the vtable, with the library's other vtables and data.
    std::memcpy(entries_, *table - ABOVE, sizeof entries_);
    original_ = reinterpret_cast<Allocate>(entries_[ABOVE + ALLOCATE]);
    entries_[ABOVE + ALLOCATE] = reinterpret_cast<void*>(&allocate);
    *table = entries_ + ABOVE;
  }

 private:
  using Allocate = c10::DataPtr (*)(c10::Allocator*, size_t);
  static constexpr size_t ABOVE = 2;     // entries before the functions: the offset of the object's start, and its type
  static constexpr size_t ALLOCATE = 2;  // the first of `c10::Allocator`, after two destructors
  static constexpr size_t ENTRIES = 192;  // more than any of PyTorch's allocators has

  static c10::DataPtr allocate(c10::Allocator* self, size_t nbytes) {
    for (int attempt = 0;; attempt++) {
      try {
        return original_(self, nbytes);
      } catch (const c10::OutOfMemoryError& error) {
        auto answer = Shortage::own().relieve(nbytes, attempt);
        if (answer == Shortage::Answer::ASK_AGAIN) continue;
        // A benchmark takes what there is memory for, and chooses by time: its results differ from run to run anyway.
        if (answer == Shortage::Answer::FAIL && !at::globalContext().benchmarkCuDNN()) Shortage::Kernel::refuse(error);
        throw;
      }
    }
  }

  static inline void* entries_[ENTRIES];
  static inline Allocate original_ = nullptr;
};

}  // namespace dtrrun

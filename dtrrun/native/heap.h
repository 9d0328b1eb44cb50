// PyTorch's allocator for the CPU while a session is on: large blocks are in an arena, all others the C library's, as
// without us.
//
// The C library either gives the pages of evicted tensors back, and the system clears them for the next tensors, or keeps
// them where no other tensor fits (`runtime/heap.py`).
#pragma once

#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <mutex>

#include "arena.h"

namespace dtrrun {

class Heap final : public c10::Allocator {
 public:
  // The process's own, which is never destroyed: blocks live longer than sessions.
  static Heap& own() {
    static Heap& heap = *new Heap();
    return heap;
  }

  // Returns false if PyTorch has an allocator that we do not know.
  bool install() {
    if (plain_->raw_deleter() == nullptr || c10::GetCPUAllocator() != plain_) return false;
    c10::SetCPUAllocator(this);
    return c10::GetCPUAllocator() == this;  // another one may have precedence
  }
  void remove() {
    if (c10::GetCPUAllocator() == this) c10::SetCPUAllocator(plain_);
    set_cap(0);  // free pages go back to the system, and so do blocks from now on
  }

  // How many bytes blocks and free pages may take together.
  void set_cap(size_t nbytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    arena_.set_cap(nbytes);
  }
  Arena::Figures figures() {
    std::lock_guard<std::mutex> guard(mutex_);
    return arena_.figures();
  }

  // Whether a block is in the arena.
  bool has(const void* block) const { return arena_.has(block); }

  c10::DataPtr allocate(size_t nbytes) override {
    void* block = nullptr;
    if (nbytes >= LARGE) {
      std::lock_guard<std::mutex> guard(mutex_);
      block = arena_.take(nbytes);
    }
    if (block != nullptr) {
      c10::profiledCPUMemoryReporter().New(block, nbytes);
    } else {
      block = plain_->raw_allocate(nbytes);  // or its error
    }
    return {block, block, &free_block, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }

 private:
  static constexpr size_t LARGE = size_t{32} << 10;

  Heap() : plain_(c10::GetCPUAllocator()) {
    // A child inherits the lock, but not the thread that would unlock it.
    auto lock = [] { own().mutex_.lock(); };
    auto unlock = [] { own().mutex_.unlock(); };
    pthread_atfork(lock, unlock, unlock);
  }

  static void free_block(void* block) {
    Heap& heap = own();
    if (!heap.arena_.has(block)) {
      heap.plain_->raw_deallocate(block);
      return;
    }
    c10::profiledCPUMemoryReporter().Delete(block);
    std::lock_guard<std::mutex> guard(heap.mutex_);
    heap.arena_.give_back(block);
  }

  std::mutex mutex_;
  Arena arena_;
  c10::Allocator* plain_;
};

}  // namespace dtrrun

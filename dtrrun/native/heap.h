// PyTorch's CPU allocator while a session is on: large blocks come from an arena, all others from the C library, as without
// dtrrun.
//
// The C library alone either returns the pages of evicted tensors to the system, which clears them for the next tensors, or
// keeps them where no other tensor fits (`runtime/heap.py`).
#pragma once

#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <mutex>

#include "arena.h"
#include "counted_kernel.h"
#include "outside.h"
#include "shortage.h"
#include "tables.h"

namespace dtrrun {

class Heap final : public c10::Allocator {
 public:
  // The process-wide instance, never destroyed: blocks outlive sessions.
  static Heap& own() {
    static Heap& heap = *new Heap();
    return heap;
  }

  // Returns false if PyTorch's allocator is one that we do not know, or does not call what we have put into its table.
  bool install() {
    if (!is_known() || own_->raw_deleter() == nullptr || c10::GetCPUAllocator() != own_) return false;
    c10::SetCPUAllocator(this);
    if (c10::GetCPUAllocator() != this) return false;  // another one has precedence
    use_table(own_, passing_on_);
    return own_->raw_deleter() == &free_block;  // asks through the table
  }
  void remove() {
    use_table(own_, plain_table_);
    if (c10::GetCPUAllocator() == this) c10::SetCPUAllocator(own_);
    set_cap(0);  // free pages go back to the system, and from now on so do freed blocks
  }

  // Sets how many bytes blocks and free pages may take together.
  void set_cap(size_t nbytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    arena_.set_cap(nbytes);
  }
  Arena::Figures figures() {
    std::lock_guard<std::mutex> guard(mutex_);
    return arena_.figures();
  }
  // Returns the peak bytes of blocks since the last call.
  size_t most() {
    std::lock_guard<std::mutex> guard(mutex_);
    size_t found = arena_.figures().most;
    arena_.count_anew();
    return found;
  }

  // Returns true if a block is in the arena.
  bool has(const void* block) const { return arena_.has(block); }

  c10::DataPtr allocate(size_t nbytes) override {
    bool outside = Outside::own().asks(nbytes);
    void* block = take(nbytes);
    if (outside) Outside::own().note(block, nbytes);
    return {block, block, &free_block, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }

 private:
  static constexpr size_t LARGE = size_t{32} << 10;

  void* take(size_t nbytes) {
    CountedKernel::allocates(nbytes);
    for (int attempt = 0;; attempt++) {
      if (void* block = nbytes >= LARGE ? take_large(nbytes) : nullptr) {
        c10::profiledCPUMemoryReporter().New(block, nbytes);
        return block;
      }
      if (nbytes >= LARGE && Arena::is_limited() && is_relieved(nbytes, attempt)) continue;
      try {
        return plain_->raw_allocate(nbytes);
      } catch (const c10::Error&) {
        if (!is_relieved(nbytes, attempt)) throw;
      }
    }
  }
  static bool is_relieved(size_t nbytes, int attempt) {
    return Shortage::own().relieve(nbytes, attempt) == Shortage::Answer::ASK_AGAIN;
  }
  void* take_large(size_t nbytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    return arena_.take(nbytes);
  }

  // Storages made in Python (`torch.UntypedStorage(n)`) use PyTorch's own allocator, whatever allocator has been set. So that
  // object gets the vtable of this class while we are installed. It has no members.
  class PassingOn final : public c10::Allocator {
   public:
    c10::DataPtr allocate(size_t nbytes) override { return own().allocate(nbytes); }
    c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
    void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
  };
  using Table [[gnu::may_alias]] = void*;  // a vtable, to which an object's first word points
  bool is_known() const {
    using A = c10::Allocator;
    auto table = static_cast<const void* const*>(plain_table_);
    return is_at(table, place_of(&A::allocate), "allocate") && is_at(table, place_of(&A::raw_deleter), "raw_deleter");
  }
  static Table& table_of(c10::Allocator* allocator) { return *reinterpret_cast<Table*>(allocator); }
  static void use_table(c10::Allocator* allocator, Table table) {
    __atomic_store_n(&table_of(allocator), table, __ATOMIC_RELAXED);
  }

  Heap()
      : own_(c10::GetDefaultCPUAllocator()), plain_table_(table_of(own_)), passing_on_(table_of(new PassingOn)),
        plain_(reinterpret_cast<c10::Allocator*>(new Table(plain_table_))) {
    // A child inherits the lock, but not the thread that would unlock it.
    auto lock = [] {
      own().mutex_.lock();
      Outside::own().lock();
    };
    auto unlock = [] {
      Outside::own().unlock();
      own().mutex_.unlock();
    };
    pthread_atfork(lock, unlock, unlock);
  }

  static void free_block(void* block) {
    Heap& heap = own();
    Outside::own().leave(block);
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
  c10::Allocator* own_;              // PyTorch's
  Table plain_table_, passing_on_;  // its own vtable, and the one that it has while we are installed
  c10::Allocator* plain_;  // another object like it, whose vtable stays
};

}  // namespace dtrrun

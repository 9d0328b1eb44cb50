// The addresses of evicted storages: each has a range of its size that can be neither read nor written.
//
// An evicted storage has no memory, but code that still has tensors over it may read them by address: a kernel that keeps a
// tensor in a global, a serializer, an unknown library. With a null pointer, such code would crash, or take the tensor for an
// empty one. With a placeholder, its access faults at an address that identifies the storage (`faults.h`).
#pragma once

#include <c10/core/StorageImpl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include "heap.h"

namespace dtrrun {

class Placeholders {
 public:
  // The process-wide instance, never destroyed: storages outlive sessions.
  static Placeholders& own() {
    static Placeholders& all = *new Placeholders();
    return all;
  }

  // Returns what an evicted storage points to: a null pointer if the system has no addresses left.
  at::DataPtr take(c10::StorageImpl* storage) {
    std::lock_guard<std::mutex> guard(mutex_);
    uintptr_t place = enter(storage, round_up(std::max<size_t>(storage->nbytes(), 1)));
    auto* data = reinterpret_cast<void*>(place);
    return {data, data, place == 0 ? nullptr : &free_range, storage->device()};
  }

  static bool is_one(const c10::StorageImpl* storage) { return storage->data_ptr().get_deleter() == &free_range; }

  // Returns true if an address is in the range that placeholders are taken from.
  bool has(uintptr_t address) const { return begin_ <= address && address < end_; }

  // What a thread that has touched an address finds there.
  struct Claim {
    uintptr_t first = 0;                // of the range; 0 if no storage has it
    c10::StorageImpl* storage = nullptr;  // the range's; perhaps dead
    bool is_memory = false;             // another thread has made the range memory meanwhile
  };
  // Until `release`, the range is not given to another storage, even if its own storage no longer points to it.
  Claim claim(uintptr_t address) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto next = ranges_.upper_bound(address);
    if (next == ranges_.begin()) return {};
    auto& [first, range] = *std::prev(next);
    if (address >= first + range.nbytes) return {};
    range.claims++;
    return {first, range.storage, range.is_memory};
  }
  void release(const Claim& claim) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = ranges_.find(claim.first);
    if (--found->second.claims == 0 && found->second.is_free) ranges_.erase(found);
  }
  bool is_memory(const Claim& claim) {
    std::lock_guard<std::mutex> guard(mutex_);
    return ranges_.at(claim.first).is_memory;
  }

  // Moves the contents of a storage that is back in memory to its former placeholder, which is claimed. Returns false if the
  // system has no memory. Frees arena memory as it copies, `AT_ONCE` bytes at a time.
  bool make_memory(const Claim& claim, c10::StorageImpl* storage) {
    uintptr_t first = claim.first;
    size_t nbytes = storage->nbytes();
    auto* to = reinterpret_cast<char*>(first);
    if (mprotect(to, round_up(nbytes), PROT_READ | PROT_WRITE) != 0) return false;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      auto& range = ranges_.at(first);
      range.is_memory = true;
      range.is_free = false;
    }
    auto* from = static_cast<char*>(storage->data_ptr().get());
    bool in_arena = Heap::own().has(from);  // where all pages between its ends belong to it alone
    for (size_t done = 0; done < nbytes; done += AT_ONCE) {
      size_t count = std::min(AT_ONCE, nbytes - done);
      std::memcpy(to + done, from + done, count);
      uintptr_t begin = round_up(reinterpret_cast<uintptr_t>(from + done));
      uintptr_t end = reinterpret_cast<uintptr_t>(from + done + count) & -page_;
      if (in_arena && begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
    }
    storage->set_data_ptr_noswap({to, to, &free_memory, storage->device()});
    return true;
  }

  static constexpr size_t AT_ONCE = size_t{64} << 10;

 private:
  static constexpr size_t RESERVED[] = {size_t{1} << 40, size_t{1} << 36, size_t{1} << 30};

  struct Range {
    size_t nbytes;
    c10::StorageImpl* storage;
    int claims = 0;          // threads that have touched it, and wait for its memory
    bool is_free = false;    // no storage points to it
    bool is_memory = false;  // it is its storage's memory now
  };

  Placeholders() : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    auto lock = [] { own().mutex_.lock(); };  // a child inherits the lock, but not the thread that would unlock it
    auto unlock = [] { own().mutex_.unlock(); };
    pthread_atfork(lock, unlock, unlock);
    for (size_t nbytes : RESERVED) {  // address space only, which costs nothing
      void* found = mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (found == MAP_FAILED) continue;
      begin_ = next_ = reinterpret_cast<uintptr_t>(found);
      end_ = begin_ + nbytes;
      return;
    }
  }

  size_t round_up(size_t nbytes) const { return (nbytes + page_ - 1) & -page_; }

  // Adds a range of `nbytes` addresses and returns the first, or 0. Addresses are reused as late as possible: code that still has
  // the address of a storage that is back in memory should not find another storage there.
  uintptr_t enter(c10::StorageImpl* storage, size_t nbytes) {
    bool wrapped = false;
    for (auto behind = ranges_.lower_bound(next_);;) {
      uintptr_t limit = behind == ranges_.end() ? end_ : behind->first;
      if (next_ + nbytes <= limit) {
        uintptr_t place = next_;
        ranges_.emplace_hint(behind, place, Range{nbytes, storage});
        next_ += nbytes;
        return place;
      }
      if (behind != ranges_.end()) {
        next_ = behind->first + behind->second.nbytes;
        ++behind;
      } else if (!wrapped) {
        wrapped = true;
        next_ = begin_;
        behind = ranges_.begin();
      } else {
        return 0;
      }
    }
  }

  static void free_range(void* place) {
    Placeholders& all = own();
    std::lock_guard<std::mutex> guard(all.mutex_);
    auto found = all.ranges_.find(reinterpret_cast<uintptr_t>(place));
    if (found->second.claims == 0)
      all.ranges_.erase(found);
    else
      found->second.is_free = true;
  }
  static void free_memory(void* place) {
    Placeholders& all = own();
    std::lock_guard<std::mutex> guard(all.mutex_);
    auto found = all.ranges_.find(reinterpret_cast<uintptr_t>(place));
    mmap(place, all.round_up(found->second.nbytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    found->second.is_memory = false;
    found->second.is_free = true;
    if (found->second.claims == 0) all.ranges_.erase(found);
  }

  const size_t page_;
  std::mutex mutex_;
  std::map<uintptr_t, Range> ranges_;  // by first address
  uintptr_t begin_ = 0, end_ = 0, next_ = 0;  // the reserved addresses, and where to look for room
};

// If true, evicted memory is overwritten, so that tests find code that still reads at the former address.
inline bool spoils_evicted = false;

// Gives the memory of a storage back to its allocator. Tensors over it keep their sizes, strides and identity.
inline void empty(c10::StorageImpl* storage) {
  bool is_mapped = storage->device_type() == c10::DeviceType::CPU;
  if (spoils_evicted && is_mapped) std::memset(storage->data_ptr().get(), 0xfb, storage->nbytes());
  if (!is_mapped) storage->set_nbytes(0);
  storage->set_data_ptr_noswap(is_mapped ? Placeholders::own().take(storage) : at::DataPtr(nullptr, storage->device()));
}
// Returns true if a storage that no session has evicted exists only for the shapes of its tensors. PyTorch's FakeTensor is over
// such a storage, and claims to be on a CPU.
inline bool is_for_shapes(c10::StorageImpl* storage) {
  if (storage->device_type() == c10::DeviceType::Meta || storage->sym_nbytes().is_symbolic()) return true;
  return storage->_mutable_data_ptr_no_checks().get() == nullptr && storage->nbytes() > 0;
}
inline bool is_empty(const c10::StorageImpl* storage) {
  return storage->nbytes() == 0 || storage->data_ptr().get() == nullptr || Placeholders::is_one(storage);
}

}  // namespace dtrrun

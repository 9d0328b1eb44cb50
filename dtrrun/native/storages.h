// Watched storages: how their deaths are noticed, in any thread, without the GIL and without Python objects.
//
// When the last tensor releases a storage that has weak references, PyTorch frees its memory through a virtual function,
// `release_resources`. A watched storage has the vtable of a subclass of ours, which overrides only this function.
#pragma once

#include <ATen/EmptyTensor.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <utility>

namespace dtrrun {

using ImplRef = c10::intrusive_ptr<c10::StorageImpl>;

// Rounds bytes as an allocator does. mask: minus the allocator's granularity, a power of 2.
inline int64_t rounded(int64_t nbytes, int64_t mask) { return (nbytes - 1 - mask) & mask; }

// Keeps the storages that have died, in order, until a thread that has the GIL notifies the sessions. Their addresses may have
// been reused by then. Lock-free, since a process forked meanwhile would inherit the lock taken.
class Deaths {
 public:
  void add(const c10::StorageImpl* storage) {
    if (listeners_.load(std::memory_order_relaxed) == 0) return;
    auto* one = new Death{storage, last_.load(std::memory_order_relaxed)};
    while (!last_.compare_exchange_weak(one->before, one, std::memory_order_release, std::memory_order_relaxed)) {
    }
  }
  bool any() const { return last_.load(std::memory_order_relaxed) != nullptr; }
  // Removes all of them, oldest first, and calls `function` with each. The caller has the GIL.
  template <class Function>
  void each(const Function& function) {
    Death *next = nullptr, *one = last_.exchange(nullptr, std::memory_order_acquire);
    while (one != nullptr) one = std::exchange(one->before, std::exchange(next, one));  // reverses the list
    while (next != nullptr) {
      function(next->storage);
      delete std::exchange(next, next->before);
    }
  }
  // Adds or removes a consumer. Without one, deaths are not kept.
  void listen(bool on) { listeners_ += on ? 1 : -1; }

 private:
  struct Death {
    const c10::StorageImpl* storage;
    Death* before;
  };
  std::atomic<Death*> last_{nullptr};
  std::atomic<int> listeners_{0};
};
inline Deaths& deaths = *new Deaths;  // never destroyed: storages may live longer

// Constructed only for its vtable.
class WatchedStorage final : public c10::StorageImpl {
 public:
  using c10::StorageImpl::StorageImpl;
  void release_resources() override {
    use_table(this, plain_table);
    c10::StorageImpl::release_resources();
    deaths.add(this);
  }

  // Returns true if a storage is of PyTorch's own class, not of a class that someone has derived from it.
  static bool can_watch(c10::StorageImpl* storage) {
    return table_of(storage) == plain_table || table_of(storage) == watched_table;
  }
  // Watches a storage that can be watched.
  static void watch(c10::StorageImpl* storage) { use_table(storage, watched_table); }

 private:
  using Table [[gnu::may_alias]] = void*;  // a vtable, to which an object's first word points
  static Table& table_of(c10::StorageImpl* storage) { return *reinterpret_cast<Table*>(storage); }
  static void use_table(c10::StorageImpl* storage, Table table) {
    __atomic_store_n(&table_of(storage), table, __ATOMIC_RELAXED);
  }
  // PyTorch's own, from a storage that PyTorch has made: before 2.10, every library has its own copy of it.
  static Table table_of_pytorch() {
    return table_of(at::detail::empty_cpu({0}, at::kByte).storage().unsafeGetStorageImpl());
  }
  static Table table_of_ours() {
    return table_of(new WatchedStorage(use_byte_size_t(), 0, at::DataPtr(), nullptr, /*resizable=*/false));
  }
  static const Table plain_table, watched_table;
};
inline const WatchedStorage::Table WatchedStorage::plain_table = WatchedStorage::table_of_pytorch();
inline const WatchedStorage::Table WatchedStorage::watched_table = WatchedStorage::table_of_ours();
static_assert(sizeof(WatchedStorage) == sizeof(c10::StorageImpl));

// -- weak references, which keep a storage's address from being reused -------------------------------------------

inline c10::StorageImpl* weak_reference(c10::StorageImpl* storage) {
  c10::raw::weak_intrusive_ptr::incref(storage);
  return storage;
}
inline void let_go(c10::StorageImpl* storage) {
  if (storage != nullptr) c10::raw::weak_intrusive_ptr::decref(storage);
}
inline bool is_alive(c10::StorageImpl* storage) {
  return storage != nullptr && c10::raw::weak_intrusive_ptr::use_count(storage) != 0;
}
// Returns a strong reference, or null if the storage has died.
inline ImplRef held(c10::StorageImpl* storage) {
  if (storage == nullptr) return ImplRef();
  return ImplRef::reclaim(static_cast<c10::StorageImpl*>(c10::raw::weak_intrusive_ptr::lock(storage)));
}

}  // namespace dtrrun

// The storages of a session: how their deaths are noticed, in any thread, without the GIL and without Python objects.
//
// When the last tensor releases a storage, PyTorch frees it through virtual functions: its destructor or, if it has weak
// references, `release_resources` first. A session's storages have a vtable of ours with other ones.
#pragma once

#include <ATen/EmptyTensor.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "../core/census.h"
#include "tables.h"

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

// Storages of PyTorch's own class, by the first word of each, its vtable: plain ones, and those that belong to a session. These
// are WATCHED, which have versions and report their deaths, or COUNTED, whose bytes are in the session's census while they live
// (counting.h). What an operator of a backward pass has made that was only counted, and what has a version by now, is both: ENTERED.
//
// Storages outlive their sessions. So each session has vtables of its own: copies of PyTorch's, with functions of ours in three
// places, and in front of them whose they are.
class OwnStorages {
 public:
  // Returns those of a new session, which lives until it calls `leave`.
  static OwnStorages& enter() {
    static auto& all = *new std::vector<OwnStorages*>;  // the vtables are used again once all their storages have died
    auto unused = std::find_if(all.begin(), all.end(), [](OwnStorages* one) { return !one->is_used_ && one->census.alive == 0; });
    if (unused == all.end()) unused = all.insert(all.end(), new OwnStorages);
    (*unused)->is_used_ = true;
    present_ = *unused;
    return **unused;
  }
  void leave() {
    census.counting = census.backward = false;
    is_used_ = false;
    present_ = &none();
  }
  // Those of the session that is on.
  static OwnStorages& present() { return *present_.load(std::memory_order_relaxed); }

  // Returns whether PyTorch's storages have the virtual functions that we replace. If not, there can be no session.
  static bool are_known() {
    const auto* table = reinterpret_cast<const void* const*>(plain());
    return kind().is_known && is_at(table, kind().release, "release_resources") &&
           is_at(table, kind().complete, "StorageImpl", "D") && is_at(table, kind().deleting, "StorageImpl", "D");
  }

  Census census;

  bool knows(const c10::StorageImpl* storage) const {
    Table table = table_of(storage);
    return table == watched_.functions() || table == counted_.functions() || table == entered_.functions();
  }
  static bool is_plain(const c10::StorageImpl* storage) { return table_of(storage) == plain(); }
  // Returns true if a storage is of PyTorch's own class, not of a class that someone has derived from it.
  static bool can_watch(const c10::StorageImpl* storage) { return is_plain(storage) || is_own(storage); }
  bool counts(const c10::StorageImpl* storage) const { return table_of(storage) == counted_.functions(); }
  // Returns true if it is counted, in whatever session.
  static bool is_counted(const c10::StorageImpl* storage) { return table_of(storage)[kind().release] == as_word(&end_counted); }

  // Watches a storage that can be watched, for the session that is on.
  static void watch(c10::StorageImpl* storage) {
    OwnStorages& own = present();
    Table table = table_of(storage);
    if (table == own.watched_.functions() || table == own.entered_.functions()) return;
    bool enters = table == own.counted_.functions() && own.census.backward.load(std::memory_order_relaxed);
    if (is_counted(storage)) uncount(storage);
    if (!is_plain(storage)) owner_of(storage).census.alive--;
    own.census.alive++;
    if (enters) own.census.entered.fetch_add(own.size_of(storage), std::memory_order_relaxed);
    use_table(storage, (enters ? own.entered_ : own.watched_).functions());
  }
  // Called when it is known why what was only counted has to stay: it does so in full, too.
  void stays(c10::StorageImpl* storage) {
    if (table_of(storage) != entered_.functions()) return;
    end_entered(storage);
    use_table(storage, watched_.functions());
  }
  // Counts a plain storage.
  void count(c10::StorageImpl* storage) {
    census.alive.fetch_add(1, std::memory_order_relaxed);
    census.bytes.fetch_add(size_of(storage), std::memory_order_relaxed);
    use_table(storage, counted_.functions());
  }
  // mask: rounds bytes as the session's allocator does.
  void round_with(int64_t mask) { mask_ = mask; }
  int64_t mask() const { return mask_; }

 private:
  using Word [[gnu::may_alias]] = void*;
  using Table = const Word*;  // a vtable, to which an object's first word points
  using Function = void (*)(c10::StorageImpl*);  // as a virtual function without other arguments is called
  static constexpr size_t ABOVE = 2,
                          MOST = 16;  // ABOVE: entries before the functions: the offset of the object's start, and its type

  // A copy of PyTorch's vtable, with others of the functions that end a storage.
  class Vtable {
   public:
    Vtable(OwnStorages* owner, Function complete, Function deleting, Function release) : owner_(owner) {
      std::copy(plain() - ABOVE, plain() + kind().count, entries_);
      entries_[ABOVE + kind().complete] = as_word(complete);
      entries_[ABOVE + kind().deleting] = as_word(deleting);
      entries_[ABOVE + kind().release] = as_word(release);
    }
    Vtable(const Vtable&) = delete;
    Table functions() const { return entries_ + ABOVE; }
    static OwnStorages& owner_of(Table functions) {
      static_assert(offsetof(Vtable, entries_) == sizeof(OwnStorages*));
      return *static_cast<OwnStorages*>(functions[-static_cast<ptrdiff_t>(ABOVE) - 1]);
    }

   private:
    OwnStorages* owner_;
    Word entries_[ABOVE + MOST];
  };

  // The places of these functions among the virtual functions of PyTorch's class, and how many these are.
  struct Kind {
    size_t complete = MOST, deleting = MOST, release = MOST, count = 0;  // the first two are destructors
    bool is_known = true;
  };
  // Overrides what we want to find.
  class Probe final : public c10::StorageImpl {
   public:
    using c10::StorageImpl::StorageImpl;
    ~Probe() override { ended = true; }
    void release_resources() override { ended = true; }
    virtual void follows() {}
    bool ended = false;
  };
  static Kind found_kind() {
    Kind found;
    Table probe = table_of(new Probe(c10::StorageImpl::use_byte_size_t(), 0, at::DataPtr(), nullptr, /*resizable=*/false));
    found.count = place_of(&Probe::follows);
    found.release = place_of(&Probe::release_resources);
    for (size_t place = 0; place < std::min(found.count, MOST); place++) {
      if (probe[place] == plain()[place] || place == found.release) continue;
      if (found.complete == MOST)
        found.complete = place;
      else if (found.deleting == MOST)
        found.deleting = place;
      else
        found.count = MOST + 1;  // more than we know of
    }
    if (found.count <= MOST && found.deleting < found.count && found.release < found.count) return found;
    return {0, 0, 0, 0, /*is_known=*/false};
  }
  static const Kind& kind() {
    static const Kind kind = found_kind();
    return kind;
  }
  // PyTorch's own vtable, from a storage that PyTorch has made: before 2.10, every library has its own copy of it.
  static Table plain() {
    static const Table table = table_of(at::detail::empty_cpu({0}, at::kByte).storage().unsafeGetStorageImpl());
    return table;
  }

  OwnStorages()
      : watched_(this, run<&end_watched, &Kind::complete>, run<&end_watched, &Kind::deleting>, end_watched_with_references),
        counted_(this, run<&uncount, &Kind::complete>, run<&uncount, &Kind::deleting>, end_counted),
        entered_(this, run<&end_entered, &Kind::complete>, run<&end_entered, &Kind::deleting>, end_entered_with_references) {}
  // For storages that are watched without a session.
  static OwnStorages& none() {
    static OwnStorages& none = *new OwnStorages;
    return none;
  }

  static Word as_word(Function function) { return reinterpret_cast<void*>(function); }
  static Table table_of(const c10::StorageImpl* storage) {
    return static_cast<Table>(__atomic_load_n(reinterpret_cast<const Word*>(storage), __ATOMIC_RELAXED));
  }
  static void use_table(c10::StorageImpl* storage, Table table) {
    __atomic_store_n(reinterpret_cast<Word*>(storage), const_cast<Word*>(table), __ATOMIC_RELAXED);
  }
  static bool is_own(const c10::StorageImpl* storage) {
    Word release = table_of(storage)[kind().release];
    return release == as_word(&end_counted) || release == as_word(&end_watched_with_references) ||
           release == as_word(&end_entered_with_references);
  }
  static OwnStorages& owner_of(const c10::StorageImpl* storage) { return Vtable::owner_of(table_of(storage)); }
  int64_t size_of(const c10::StorageImpl* storage) const { return rounded(static_cast<int64_t>(storage->nbytes()), mask_); }

  static void uncount(c10::StorageImpl* storage) {
    OwnStorages& owner = owner_of(storage);
    owner.census.bytes.fetch_sub(owner.size_of(storage), std::memory_order_relaxed);
  }
  static void end_watched(c10::StorageImpl*) {}
  // The destructors, and `release_resources` of a watched and of a counted storage: end it, and do what PyTorch's would do.
  template <Function end, size_t Kind::* function>
  static void run(c10::StorageImpl* storage) {
    end(storage);
    owner_of(storage).census.alive.fetch_sub(1, std::memory_order_relaxed);
    use_table(storage, plain());
    reinterpret_cast<Function>(plain()[kind().*function])(storage);
  }
  static void end_watched_with_references(c10::StorageImpl* storage) {
    run<&end_watched, &Kind::release>(storage);
    deaths.add(storage);
  }
  static void end_entered(c10::StorageImpl* storage) {
    OwnStorages& owner = owner_of(storage);
    owner.census.entered.fetch_sub(owner.size_of(storage), std::memory_order_relaxed);
  }
  static void end_entered_with_references(c10::StorageImpl* storage) {
    run<&end_entered, &Kind::release>(storage);
    deaths.add(storage);
  }
  static void end_counted(c10::StorageImpl* storage) { run<&uncount, &Kind::release>(storage); }

  Vtable watched_, counted_, entered_;
  int64_t mask_ = -1;
  bool is_used_ = false;
  static std::atomic<OwnStorages*> present_;
};
inline std::atomic<OwnStorages*> OwnStorages::present_{&none()};

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

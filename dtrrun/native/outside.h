// Blocks that are allocated while no operator is under way: `torch.UntypedStorage(n)`, `copy.deepcopy`, `torch.load`.
//
// Nobody has foreseen them, and the ledger does not know them until a tensor over them is met. So their room is asked for
// before they are allocated (`runtime/outside.py`), and until then their bytes are counted here.
#pragma once

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "python.h"
#include "way_in.h"

namespace dtrrun {

class Outside {
 public:
  static constexpr size_t NOTICED = 8 << 10;  // below are a generator's state, and numbers of almost every operator

  // The process's own, which is never destroyed.
  static Outside& own() {
    static Outside& outside = *new Outside();
    return outside;
  }

  // ask: called with the bytes of a block before it is allocated; or null. Called with the GIL.
  void listen(PyObject* ask) {
    std::lock_guard<std::mutex> guard(mutex_);
    ask_ = ask == nullptr ? Ref() : Ref::copy(ask);
    listening_ = ask != nullptr;
    blocks_.clear();
    nbytes_ = 0;
  }

  // Whether a block of so many bytes is one to be noted, once room has been made for it. Raises the budget error. The
  // threads that ask have the GIL already: one that waited for it here might have a lock that its owner wants.
  bool asks(size_t nbytes) {
    if (nbytes < NOTICED || !listening_.load(std::memory_order_relaxed)) return false;
    if (!is_outside() || !PyGILState_Check() || !ask_) return false;
    Ref ask = Ref::copy(ask_.get());
    checked(PyObject_CallFunction(ask.get(), "n", static_cast<Py_ssize_t>(nbytes)));
    return true;
  }
  void note(const void* block, size_t nbytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (listening_ && blocks_.emplace(block, nbytes).second) nbytes_ += nbytes;
  }
  // It has been freed, or is counted as a tensor's from now on. Returns its bytes if it was here.
  size_t leave(const void* block) {
    if (nbytes_.load(std::memory_order_relaxed) == 0) return 0;
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = blocks_.find(block);
    if (found == blocks_.end()) return 0;
    size_t nbytes = found->second;
    blocks_.erase(found);
    nbytes_ -= nbytes;
    return nbytes;
  }
  size_t nbytes() const { return nbytes_; }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  // Whether no operator is under way in this thread, of those that come to us, and nothing of ours. What makes tensors of
  // numbers (`torch.tensor`) hides its operators from our key, together with another one.
  static bool is_outside() {
    if (!Off::none() || !is_switched_on()) return false;
    return !is_hidden() || c10::impl::tls_is_dispatch_key_excluded(DispatchKey::DeferredInit);
  }

 private:
  Outside() = default;

  Ref ask_;
  std::atomic<bool> listening_{false};
  std::mutex mutex_;
  std::unordered_map<const void*, size_t> blocks_;
  std::atomic<size_t> nbytes_{0};
};

}  // namespace dtrrun

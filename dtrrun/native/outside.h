// Blocks that are allocated while no operator is running: `torch.UntypedStorage(n)`, `copy.deepcopy`, `torch.load`.
//
// Nothing announces them, and the ledger does not know them until it meets a tensor over them. So room is made before they are
// allocated (`runtime/outside.py`), and until the ledger knows them, their bytes are counted here.
#pragma once

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "python.h"
#include "way_in.h"

namespace dtrrun {

class Outside {
 public:
  static constexpr size_t NOTICED = 8 << 10;  // smaller ones are a generator's state, and numbers of almost every operator

  // The process-wide instance, never destroyed.
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

  // Makes room for a block. Returns true if the block must then be noted. Raises the budget error. Does nothing in threads
  // without the GIL: a thread that waited for it here might hold a lock that the GIL's owner wants.
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
  // The block has been freed, or is counted as a tensor's from now on. Returns its bytes if it was noted.
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

  // Returns true if this thread is running none of the operators that arrive here, and no code of ours. Code that makes tensors
  // of numbers (`torch.tensor`) hides its operators from our key, together with another one.
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

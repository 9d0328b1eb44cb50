// What is done when the system refuses memory to the heap (`ulimit -d`), or a GPU's allocator to a kernel: others are evicted for
// it, and it is asked again.
//
// It may happen in the middle of an operator, whose kernel goes on afterwards: nothing runs twice. `runtime/shortage.py`
// evicts. What the kernel reads is locked, and nothing comes to depend on what it writes to.
#pragma once

#include <atomic>

#include "outside.h"
#include "python.h"
#include "pytorch.h"

namespace dtrrun {

class Shortage {
 public:
  static constexpr int ATTEMPTS = 5;

  // A kernel that runs in this thread. locked: whether its tensors are. If not, nothing is evicted for it.
  class Kernel {
   public:
    explicit Kernel(bool locked) : outer_(std::exchange(all_locked, all_locked && locked)) {}
    ~Kernel() { all_locked = outer_; }
    Kernel(const Kernel&) = delete;

   private:
    friend class Shortage;
    bool outer_;
    static inline thread_local bool all_locked = true;  // those of all kernels in this thread
  };

  // The process's own, which is never destroyed.
  static Shortage& own() {
    static Shortage& shortage = *new Shortage();
    return shortage;
  }

  // release: called with the bytes of the block that is refused and the number of the attempt, from 0, returns whether
  // anything has been freed; or null. Called with the GIL.
  void listen(PyObject* release) {
    release_ = release == nullptr ? Ref() : Ref::copy(release);
    listening_ = release != nullptr;
  }

  // The system refuses so many bytes. Returns whether to ask it again. In other threads, such as those that share the work of
  // a kernel, nothing is done: the one that they work for may have the GIL.
  bool relieve(size_t nbytes, int attempt) {
    if (attempt >= ATTEMPTS || !listening_ || busy_ || !Kernel::all_locked || (Off::none() && !Outside::is_outside())) return false;
    Gil gil;
    if (!release_) return false;
    busy_ = true;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Ref release = Ref::copy(release_.get());
    Ref found(PyObject_CallFunction(release.get(), "ni", static_cast<Py_ssize_t>(nbytes), attempt));
    bool freed = found.get() == Py_True;
    if (!found && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
    if (!found) PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    busy_ = false;
    return freed;
  }

 private:
  Shortage() = default;

  Ref release_;
  std::atomic<bool> listening_{false};
  static inline thread_local bool busy_ = false;
};

}  // namespace dtrrun

// Handles memory that the system refuses to the heap (`ulimit -d`), or a GPU's allocator to a kernel: evicts other tensors, and
// asks again.
//
// This may happen in the middle of an operator, whose kernel continues afterwards: nothing runs twice. `runtime/shortage.py`
// evicts. What the kernel reads is locked, and nothing becomes dependent on what it writes to.
#pragma once

#include <atomic>

#include "outside.h"
#include "python.h"
#include "pytorch.h"

namespace dtrrun {

class Shortage {
 public:
  static constexpr int ATTEMPTS = 5;

  // A kernel that runs in this thread. locked: whether its tensors are locked. If not, nothing is evicted for it.
  class Kernel {
   public:
    explicit Kernel(bool locked) : outer_(std::exchange(all_locked, all_locked && locked)) {}
    ~Kernel() { all_locked = outer_; }
    Kernel(const Kernel&) = delete;

   private:
    friend class Shortage;
    bool outer_;
    static inline thread_local bool all_locked = true;  // the tensors of all kernels in this thread
  };

  // The process-wide instance, never destroyed.
  static Shortage& own() {
    static Shortage& shortage = *new Shortage();
    return shortage;
  }

  // release: called with the bytes of the refused block and the number of the attempt, from 0; returns whether anything has
  // been freed. May be null. Called with the GIL.
  void listen(PyObject* release) {
    release_ = release == nullptr ? Ref() : Ref::copy(release);
    listening_ = release != nullptr;
  }

  // The system has refused so many bytes. Returns true if it should be asked again. Does nothing in other threads, such as
  // those that share the work of a kernel: the thread that they work for may have the GIL.
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

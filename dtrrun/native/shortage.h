// Handles memory that the system refuses to the heap (`ulimit -d`), or a GPU's allocator to a kernel: evicts other tensors, and
// asks again.
//
// This may happen in the middle of an operator, whose kernel continues afterwards: nothing runs twice. `runtime/shortage.py` evicts,
// or on a GPU `runtime/cuda/oom_retry.py`. What the kernel reads is locked, and nothing becomes dependent on what it writes to.
//
// Some libraries catch an out-of-memory error and take another algorithm, with other bits, for good: cuDNN's convolutions in
// PyTorch's `try_configs`. So where nothing more can be evicted, PyTorch's own kernels get an error of a type that is not caught
// (`Refused`), and their caller gets the original one (`Kernel::run`).
#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <exception>
#include <utility>

#include "outside.h"
#include "python.h"
#include "pytorch.h"

namespace dtrrun {

// Thrown into a kernel in place of an out-of-memory error, which it might catch and go on.
class Refused final : public c10::Error {
 public:
  explicit Refused(const c10::Error& error) : c10::Error(error) {}
};

class Shortage {
 public:
  enum class Answer {
    ASK_AGAIN,  // something has been freed
    FAIL,  // nothing can be freed: the kernel must not go on without the memory
    LEAVE,  // the program gets the error, as without dtrrun
  };

  // A kernel that runs in this thread.
  class Kernel {
   public:
    // locked: whether its tensors are locked. If not, nothing is evicted for it. own: whether it is PyTorch's own; others may
    // handle out-of-memory errors as they like. Raises c10::OutOfMemoryError if it was refused memory, even if it has returned.
    template <class Run>
    static void run(bool locked, bool own, Run&& run_kernel) {
      Kernel kernel(locked, own);
      try {
        run_kernel();
      } catch (...) {
        if (kernel.refusal_) std::rethrow_exception(kernel.refusal_);
        throw;
      }
      if (!kernel.refusal_) return;
      try {
        std::rethrow_exception(kernel.refusal_);
      } catch (c10::OutOfMemoryError& error) {
        error.add_context(WENT_ON);
        throw;
      }
    }
    Kernel(const Kernel&) = delete;

    // Called while an out-of-memory error is being handled that remains. Throws `Refused` if the kernel might catch it.
    static void refuse(const c10::OutOfMemoryError& error) {
      if (innermost_ == nullptr || !innermost_->own_) return;
      if (!innermost_->refusal_) innermost_->refusal_ = std::current_exception();
      throw Refused(error);
    }

   private:
    friend class Shortage;
    // Recognised by `oom_retry.py`.
    static constexpr const char* WENT_ON = "dtrrun: a library went on without this memory";

    Kernel(bool locked, bool own)
        : own_(own), outer_locked_(std::exchange(all_locked, all_locked && locked)), outer_(std::exchange(innermost_, this)) {}
    ~Kernel() {
      all_locked = outer_locked_;
      innermost_ = outer_;
    }

    const bool own_, outer_locked_;
    Kernel* const outer_;
    std::exception_ptr refusal_;
    static inline thread_local Kernel* innermost_ = nullptr;
    static inline thread_local bool all_locked = true;  // the tensors of all kernels in this thread
  };

  // While it lives, this thread gets what the system says: nothing is evicted for what it is refused.
  class Ignored {
   public:
    Ignored() : outer_(std::exchange(busy_, true)) {}
    ~Ignored() { busy_ = outer_; }
    Ignored(const Ignored&) = delete;

   private:
    const bool outer_;
  };

  // The process-wide instance, never destroyed.
  static Shortage& own() {
    static Shortage& shortage = *new Shortage();
    return shortage;
  }

  // release: called with the bytes of the refused block and the number of the attempt, from 0; returns whether anything has
  // been freed, or None to leave the error to the program. May be null. Called with the GIL.
  void listen(PyObject* release) {
    release_ = release == nullptr ? Ref() : Ref::copy(release);
    listening_ = release != nullptr;
  }

  // avoid: called, with the GIL, with the bytes of a request for which a GPU's allocator has no cached block; what it evicts may
  // make one. May be null.
  using Avoid = void (*)(size_t nbytes);
  void listen_before_flush(Avoid avoid) { avoid_ = avoid; }

  bool asks_before_flush() const { return avoid_ != nullptr && !busy_ && may_evict(); }

  void before_flush(size_t nbytes) {
    Gil gil;
    if (Avoid avoid = avoid_) aside([&] { avoid(nbytes); });
  }

  // The system has refused so many bytes.
  Answer relieve(size_t nbytes, int attempt) {
    if (!listening_ || busy_) return Answer::LEAVE;
    if (!may_evict()) return Answer::FAIL;
    Gil gil;
    if (!release_) return Answer::LEAVE;
    Answer answer = Answer::FAIL;
    aside([&] {
      Ref release = Ref::copy(release_.get());
      Ref found = checked(PyObject_CallFunction(release.get(), "ni", static_cast<Py_ssize_t>(nbytes), attempt));
      answer = found.get() == Py_True ? Answer::ASK_AGAIN : found.get() == Py_None ? Answer::LEAVE : Answer::FAIL;
    });
    return answer;
  }

 private:
  Shortage() = default;

  // Not in other threads, such as those that share the work of a kernel: the thread that they work for may have the GIL.
  static bool may_evict() { return Kernel::all_locked && (!Off::none() || Outside::is_outside()); }

  // Calls a function, whatever error is being handled. It may raise any.
  template <class Function>
  static void aside(const Function& function) {
    Ignored ignored;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    try {
      function();
    } catch (...) {
      if (is_error_of(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
    }
    PyErr_Restore(type, value, traceback);
  }

  Ref release_;
  std::atomic<bool> listening_{false};
  std::atomic<Avoid> avoid_{nullptr};
  static inline thread_local bool busy_ = false;
};

}  // namespace dtrrun

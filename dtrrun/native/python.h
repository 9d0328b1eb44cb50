// Python's errors, and the GIL.
#pragma once

#include <exception>

#include "../bindings/python.h"
#include "../core/policy/clock.h"

namespace dtrrun {

// Converts a C++ exception to a Python exception. (python_objects.cpp)
Ref as_error(const std::exception_ptr& exception);

// Releases the GIL, which this thread has, while in scope.
class WithoutGil {
 public:
  WithoutGil() : saved_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(saved_); }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* saved_;
};

// Returns the state of the thread that has the GIL, or null.
inline PyThreadState* gil_holder() {
#if PY_VERSION_HEX >= 0x030D0000
  return PyThreadState_GetUnchecked();
#else
  return _PyThreadState_UncheckedGet();
#endif
}

// Holds the GIL; `Released` gives it up for a while, unless the thread had it before. Does what `PyGILState_Ensure` and its
// counterpart do, which look up the thread's state three times.
class Gil {
 public:
  Gil() : thread_(PyGILState_GetThisThreadState()) {
    if (thread_ == nullptr) {
      ensured_ = PyGILState_Ensure();  // which makes a state
    } else if (thread_ == gil_holder()) {
      held_before_ = true;
    } else {
      PyEval_RestoreThread(thread_);
    }
  }
  ~Gil() {
    if (thread_ == nullptr)
      PyGILState_Release(ensured_);
    else if (!held_before_)
      PyEval_SaveThread();
  }
  Gil(const Gil&) = delete;

  bool held_before() const { return held_before_; }

  class Released {
   public:
    explicit Released(const Gil& gil) : saved_(gil.held_before_ ? nullptr : PyEval_SaveThread()) {}
    ~Released() {
      if (saved_ != nullptr) PyEval_RestoreThread(saved_);
    }
    Released(const Released&) = delete;

   private:
    PyThreadState* saved_;
  };

 private:
  PyThreadState* thread_;  // null if Python did not know this thread
  bool held_before_ = false;
  PyGILState_STATE ensured_;
};

}  // namespace dtrrun

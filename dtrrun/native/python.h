// Errors of Python's and of PyTorch's, and the GIL.
#pragma once

#include <torch/csrc/Exceptions.h>

#include "../bindings/python.h"
#include "../core/policy/clock.h"

namespace dtrrun {

// For PyTorch to give to the program.
[[noreturn]] inline void raise() {
  python_error error;
  error.persist();
  throw std::move(error);
}

// Not HANDLE_TH_ERRORS, which would also show warnings here: they belong to the program's own call.
inline void set_python_error() { torch::translate_exception_to_python(std::current_exception()); }

// An exception of C++, as Python gets it.
inline Ref as_error(const std::exception_ptr& exception) {
  torch::translate_exception_to_python(exception);
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  Ref types(type), frames(traceback);
  return Ref(value);
}

// Gives up the GIL, which this thread has, until its end.
class WithoutGil {
 public:
  WithoutGil() : saved_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(saved_); }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* saved_;
};

// The state of the thread that has the GIL, or null.
inline PyThreadState* gil_holder() {
#if PY_VERSION_HEX >= 0x030D0000
  return PyThreadState_GetUnchecked();
#else
  return _PyThreadState_UncheckedGet();
#endif
}

// Holds the GIL; `released` gives it up for a while, unless the thread had it before. As `PyGILState_Ensure`, which looks for the
// thread's state three times, here and there.
class Gil {
 public:
  Gil() : thread_(PyGILState_GetThisThreadState()) {
    if (thread_ == nullptr) {
      ensured_ = PyGILState_Ensure();  // which makes one
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
  PyThreadState* thread_;  // null if Python had not met this thread
  bool held_before_ = false;
  PyGILState_STATE ensured_;
};

}  // namespace dtrrun

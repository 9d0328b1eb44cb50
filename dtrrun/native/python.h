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

// Holds the GIL; `released` gives it up for a while, unless the thread had it before.
class Gil {
 public:
  Gil() : held_before_(PyGILState_Check()), state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }
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
  bool held_before_;
  PyGILState_STATE state_;
};

}  // namespace dtrrun

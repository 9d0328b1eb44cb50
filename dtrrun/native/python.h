// Python's and PyTorch's errors, and the GIL.
#pragma once

#include <torch/csrc/Exceptions.h>

#include "../bindings/python.h"
#include "../core/policy/clock.h"

namespace dtrrun {

// Throws the current Python error, for PyTorch to pass on to the program.
//
// `python_error::persist` would ask for the error's text, for C++ that catches it. A budget error's advice takes a tenth of a
// second to work out, and is worked out when the program reads it: C++ gets the text without it.
[[noreturn]] inline void raise() {
  python_error error;
  PyErr_Fetch(&error.type, &error.value, &error.traceback);
  Ref brief(error.value == nullptr ? nullptr : PyObject_GetAttrString(error.value, "without_advice"));
  const char* text = brief && PyUnicode_Check(brief.get()) ? PyUnicode_AsUTF8(brief.get()) : nullptr;
  PyErr_Clear();
  if (text != nullptr)
    error.message = text;
  else
    error.build_message();
  throw std::move(error);
}

// Not HANDLE_TH_ERRORS, which would also show warnings here: they belong to the program's own call.
inline void set_python_error() { torch::translate_exception_to_python(std::current_exception()); }

// Converts a C++ exception to a Python exception.
inline Ref as_error(const std::exception_ptr& exception) {
  torch::translate_exception_to_python(exception);
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  Ref types(type), frames(traceback);
  return Ref(value);
}

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

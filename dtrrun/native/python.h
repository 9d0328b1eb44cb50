// Python's errors, and the GIL.
#pragma once

#include <exception>

#include "../bindings/python.h"
#include "../core/policy/clock.h"

namespace dtrrun {

// Converts a C++ exception to a Python exception. (python_objects.cpp)
Ref as_error(const std::exception_ptr& exception);
// Called where a C++ exception is handled. Returns true if it is Python's and must reach the program, since it is no error: an
// interrupt, or an exit. Otherwise, nothing of it remains. Gets the GIL. (python_objects.cpp)
bool is_no_error();

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

// Returns a Python function without arguments that calls `function`, which must outlive it, and may return a Python object.
template <class Function>
Ref callable(Function& function) {
  static PyMethodDef call = {"call",
                             [](PyObject* capsule, PyObject*) -> PyObject* {
                               return guarded([&]() -> PyObject* {
                                 auto& run = *static_cast<Function*>(PyCapsule_GetPointer(capsule, nullptr));
                                 if constexpr (std::is_same_v<decltype(run()), Ref>) {
                                   return run().release();
                                 } else {
                                   run();
                                   Py_RETURN_NONE;
                                 }
                               });
                             },
                             METH_NOARGS, nullptr};
  Ref capsule = checked(PyCapsule_New(&function, nullptr, nullptr));
  return checked(PyCFunction_New(&call, capsule.get()));
}

// A context of Python's, entered while in scope.
class Entered {
 public:
  explicit Entered(Ref context) : context_(std::move(context)) {
    if (context_) checked(PyObject_CallMethod(context_.get(), "__enter__", nullptr));
  }
  ~Entered() {
    if (!context_) return;  // otherwise something has raised
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (!leave(context_)) PyErr_WriteUnraisable(context_.get());
    PyErr_Restore(type, value, traceback);
  }
  Entered(const Entered&) = delete;
  void end() {
    if (Ref context = std::move(context_); context && !leave(context)) raise();
  }

 private:
  static Ref leave(const Ref& context) {
    return Ref(PyObject_CallMethod(context.get(), "__exit__", "OOO", Py_None, Py_None, Py_None));
  }
  Ref context_;
};

}  // namespace dtrrun

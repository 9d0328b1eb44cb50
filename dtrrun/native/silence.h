// Suppresses warnings of operators that are run again: the program has had them once, or is going to.
#pragma once

#include <c10/util/Exception.h>

#include <vector>

#include "python.h"

namespace dtrrun {

// Suppresses warnings of PyTorch's C++ code, and of Python code that it calls, in this thread while in scope.
class Silent : c10::WarningHandler {
 public:
  Silent() : filters_(filters()) {
    depth++;
    if (filters_ && PyList_Insert(filters_.get(), 0, filter()) < 0) PyErr_Clear();
  }
  ~Silent() {
    depth--;
    for (Py_ssize_t i = 0; filters_ && i < PyList_GET_SIZE(filters_.get()); i++) {
      if (PyList_GET_ITEM(filters_.get(), i) != filter()) continue;
      if (PyList_SetSlice(filters_.get(), i, i + 1, nullptr) < 0) PyErr_Clear();
      break;
    }
  }
  Silent(const Silent&) = delete;
  void process(const c10::Warning&) override {}

 private:
  // Returns `warnings.filters`, or null if the program has replaced it with something that is not a list.
  static Ref filters() {
    static PyObject* warnings = PyImport_ImportModule("warnings");
    Ref found(warnings == nullptr ? nullptr : PyObject_GetAttrString(warnings, "filters"));
    if (!found) PyErr_Clear();
    return found && PyList_Check(found.get()) ? std::move(found) : Ref();
  }
  // Returns a filter with an object in place of the pattern for the text, which matches all warnings of silent threads.
  static PyObject* filter() {
    static PyObject* made = [] {
      static PyMethodDef match = {"match", [](PyObject*, PyObject*) { return PyBool_FromLong(depth > 0); }, METH_O, nullptr};
      Ref matcher = checked(PyModule_New("_dtrrun_silent")), function = checked(PyCFunction_New(&match, nullptr));
      if (PyObject_SetAttrString(matcher.get(), "match", function.get()) < 0) raise();
      return Py_BuildValue("(sOOOi)", "ignore", matcher.get(), PyExc_Warning, Py_None, 0);
    }();
    return made;
  }

  static inline thread_local int depth = 0;
  Ref filters_;
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

// Keeps the warnings of PyTorch's C++ code in this thread while in scope, and passes them on at the end unless they are dropped.
class HeldWarnings : c10::WarningHandler {
 public:
  HeldWarnings() : outer_(c10::WarningUtils::get_warning_handler()), guard_(this) {}
  ~HeldWarnings() override {
    for (const c10::Warning& one : held_) outer_->process(one);
  }
  HeldWarnings(const HeldWarnings&) = delete;
  void process(const c10::Warning& warning) override { held_.push_back(warning); }
  void drop() { held_.clear(); }

 private:
  c10::WarningHandler* const outer_;
  c10::WarningUtils::WarningHandlerGuard guard_;
  std::vector<c10::Warning> held_;
};

}  // namespace dtrrun

// Python objects from C++: owned references, the GIL, and the slots of Python classes.
//
// The parts of dtrrun/core that are not native keep their counters in classes with `__slots__`. A slot is a pointer at a
// fixed offset in the object, which the class's member descriptor tells. So C++ reads and writes the same objects as
// Python does, and nothing exists twice. Those that are native: graph.h, figures.h.
#pragma once

#include <Python.h>
#include <structmember.h>
#include <time.h>
#include <torch/csrc/Exceptions.h>

#include <cstdint>
#include <string>
#include <utility>

namespace dtrrun {

inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);  // as Python's perf_counter_ns
  return now.tv_sec * 1'000'000'000ll + now.tv_nsec;
}

// An owned reference.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }
  static Ref copy(PyObject* borrowed) {
    Py_XINCREF(borrowed);
    return Ref(borrowed);
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// The value of an int. For large ones, such as times in ns, PyLong_AsLong is three times as fast as PyLong_AsLongLong.
inline int64_t as_number(PyObject* object) {
  static_assert(sizeof(long) == sizeof(int64_t));
  return PyLong_AsLong(object);
}

// Throws the Python error that is set, for PyTorch to give to the program.
[[noreturn]] inline void raise() {
  python_error error;
  error.persist();
  throw std::move(error);
}

// The result of a call into Python. Throws if it failed.
inline Ref checked(PyObject* owned) {
  if (owned == nullptr) raise();
  return Ref(owned);
}

// An exception of C++, as Python gets it.
inline Ref as_error(const std::exception_ptr& exception) {
  torch::translate_exception_to_python(exception);
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  Ref types(type), frames(traceback);
  return Ref(value);
}

// Calls `function`, which returns what Python gets. Its exceptions become Python's.
template <class Function>
PyObject* guarded(const Function& function) {
  // Not HANDLE_TH_ERRORS, which would also show warnings here: they belong to the program's own call.
  try {
    return function();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
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

template <class Refs>
Ref as_tuple(const Refs& all) {
  Ref tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(all.size())));
  for (size_t i = 0; i < all.size(); i++) PyTuple_SET_ITEM(tuple.get(), i, Ref::copy(all[i].get()).release());
  return tuple;
}

// What a list or a tuple holds, as borrowed references. It must not change meanwhile.
class Items {
 public:
  explicit Items(PyObject* sequence)
      : first_(PySequence_Fast_ITEMS(sequence)), size_(PySequence_Fast_GET_SIZE(sequence)) {}
  Items(PyObject** first, Py_ssize_t size) : first_(first), size_(size) {}
  Items() = default;
  PyObject** begin() const { return first_; }
  PyObject** end() const { return first_ + size_; }
  PyObject* operator[](Py_ssize_t place) const { return first_[place]; }
  Py_ssize_t size() const { return size_; }

 private:
  PyObject** first_ = nullptr;
  Py_ssize_t size_ = 0;
};

// A slot of a Python class.
class Slot {
 public:
  Slot(PyObject* cls, const char* name) {
    Ref descriptor(PyObject_GetAttrString(cls, name));
    if (!descriptor || Py_TYPE(descriptor.get()) != &PyMemberDescr_Type)
      throw std::runtime_error(std::string("dtrrun: ") + name + " is not a slot");
    offset_ = reinterpret_cast<PyMemberDescrObject*>(descriptor.get())->d_member->offset;
  }
  PyObject* get(PyObject* object) const { return at(object); }
  bool is_none(PyObject* object) const { return at(object) == Py_None; }
  bool is_true(PyObject* object) const { return at(object) == Py_True; }
  int64_t number(PyObject* object) const { return as_number(at(object)); }
  void set(PyObject* object, PyObject* borrowed) const {
    Py_INCREF(borrowed);
    take(object, borrowed);
  }
  void take(PyObject* object, PyObject* owned) const {
    PyObject* before = std::exchange(at(object), owned);
    Py_XDECREF(before);
  }
  void set_number(PyObject* object, int64_t number) const { take(object, PyLong_FromLongLong(number)); }

 private:
  PyObject*& at(PyObject* object) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
  }
  Py_ssize_t offset_;
};

}  // namespace dtrrun

// Python objects from C++: owned references, and the slots of Python classes.
//
// The runtime's Python classes have `__slots__` for what C++ reads at each operator. A slot is a pointer at a fixed offset in
// the object, which the class's member descriptor gives.
#pragma once

#include <Python.h>
#include <structmember.h>

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

namespace dtrrun {

// -- defined by each extension ------------------------------------------------------------------------------------

// Throws the Python error that is set.
[[noreturn]] void raise();
// Sets the exception being handled as the Python error.
void set_python_error();
// Returns whether the exception being handled is a Python exception of this class.
bool is_error_of(PyObject* type);
// Returns the exception being handled without its Python frames, which keep alive what they refer to.
std::exception_ptr without_frames();

// -- objects ------------------------------------------------------------------------------------------------------

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

// Returns the value of an int. For large ones, such as times in ns, PyLong_AsLong is three times as fast as PyLong_AsLongLong.
inline int64_t as_number(PyObject* object) {
  static_assert(sizeof(long) == sizeof(int64_t));
  return PyLong_AsLong(object);
}

// Returns the result of a call into Python. Throws if it failed.
inline Ref checked(PyObject* owned) {
  if (owned == nullptr) raise();
  return Ref(owned);
}

// Calls `function` and returns its result to Python. Its exceptions become Python errors.
template <class Function>
PyObject* guarded(const Function& function) {
  try {
    return function();
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

template <class Refs>
Ref as_tuple(const Refs& all) {
  Ref tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(all.size())));
  for (size_t i = 0; i < all.size(); i++) PyTuple_SET_ITEM(tuple.get(), i, Ref::copy(all[i].get()).release());
  return tuple;
}

// The items of a list or a tuple, as borrowed references. It must not change meanwhile.
class Items {
 public:
  explicit Items(PyObject* sequence) : first_(PySequence_Fast_ITEMS(sequence)), size_(PySequence_Fast_GET_SIZE(sequence)) {}
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

// Calls `function` with each item of a list, which may change meanwhile. list: may be null.
template <class Function>
void each_in(PyObject* list, const Function& function) {
  for (Py_ssize_t i = 0; list != nullptr && i < PyList_GET_SIZE(list); i++)
    checked(function(Ref::copy(PyList_GET_ITEM(list, i)).get()));
}

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
  bool is_true(PyObject* object) const { return at(object) == Py_True; }
  int64_t number(PyObject* object) const { return as_number(at(object)); }

 private:
  PyObject*& at(PyObject* object) const { return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_); }
  Py_ssize_t offset_;
};

inline Ref attribute(PyObject* object, const char* name) { return checked(PyObject_GetAttrString(object, name)); }

inline bool truth(PyObject* object, const char* name) {
  Ref found = attribute(object, name);
  int is_true = PyObject_IsTrue(found.get());
  if (is_true < 0) raise();
  return is_true;
}

inline int64_t attribute_number(PyObject* object, const char* name) { return as_number(attribute(object, name).get()); }

inline PyObject* type_of(PyObject* classes, const char* name) { return PyDict_GetItemString(classes, name); }

}  // namespace dtrrun

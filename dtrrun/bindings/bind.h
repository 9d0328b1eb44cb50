// pybind11, and how the core's own types are passed to Python and back.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "nodes.h"

namespace dtrrun {

namespace py = pybind11;
using namespace py::literals;

// Classes are an extension's own, since a process may load two that have the same.
inline const py::module_local ITS_OWN;

inline py::object object_in(Ref owned) { return py::reinterpret_steal<py::object>(owned.release()); }
inline py::object borrowed(PyObject* object) { return py::reinterpret_borrow<py::object>(object); }

// Has the errors of functions become Python's as `set_python_error` says. For an extension, once.
inline void translate_errors() {
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      std::rethrow_exception(error);
    } catch (const py::cast_error& error) {
      PyErr_SetString(PyExc_TypeError, error.what());
    } catch (const py::builtin_exception&) {
      throw;  // to pybind11's own translator
    } catch (...) {
      set_python_error();
    }
  });
}

// Returns the C++ object of a Python object whose class, or a base class, is bound; null if it has not been made yet.
template <class Object>
Object* bound(PyObject* self) {
  return reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder().value_ptr<Object>();
}

// For a class whose objects refer to Python objects: lets the garbage collector follow these.
template <class Object, py::object Object::*... links>
py::custom_type_setup collected() {
  return py::custom_type_setup([](PyHeapTypeObject* made) {
    PyTypeObject& type = made->ht_type;
    type.tp_flags |= Py_TPFLAGS_HAVE_GC;
    type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(Py_TYPE(self));
      if (auto* one = bound<Object>(self))
        for (PyObject* link : {(one->*links).ptr()...}) Py_VISIT(link);
      return 0;
    };
    type.tp_clear = [](PyObject* self) {
      if (auto* one = bound<Object>(self)) (std::exchange(one->*links, {}), ...);
      return 0;
    };
  });
}

}  // namespace dtrrun

namespace dtrrun {

// A reason why a version stays, as an argument. (pybind11 would pass a `Pin` as a string of its own, whose address is another.)
struct GivenPin {
  Pin pin = nullptr;
  operator Pin() const { return pin; }
};

}  // namespace dtrrun

namespace pybind11::detail {

template <>
struct type_caster<dtrrun::Ref> {
  static constexpr auto name = const_name("object");
  static handle cast(dtrrun::Ref&& one, return_value_policy, handle) { return one.release(); }
};

// Versions and operations, by their pointers. Their Python objects are not pybind11's (nodes.h).
template <class Node, auto* type, auto node_in>
struct node_caster {
  template <class>
  using cast_op_type = Node*;
  operator Node*() const { return node_; }
  bool load(handle object, bool) {
    if (Py_TYPE(object.ptr()) != *type) return false;
    node_ = node_in(object.ptr());
    return true;
  }
  static handle cast(const Node* one, return_value_policy, handle) { return dtrrun::as_object(one).release(); }

 private:
  Node* node_ = nullptr;
};
template <>
struct type_caster<dtrrun::Version> : node_caster<dtrrun::Version, &dtrrun::version_type, &dtrrun::node_of> {
  static constexpr auto name = const_name("Version");
};
template <>
struct type_caster<dtrrun::Node> : node_caster<dtrrun::Node, &dtrrun::version_type, &dtrrun::node_of> {
  static constexpr auto name = const_name("Version");
};
template <>
struct type_caster<dtrrun::Recorded> : node_caster<dtrrun::Recorded, &dtrrun::operation_type, &dtrrun::recorded_in> {
  static constexpr auto name = const_name("Operation");
};
template <>
struct type_caster<dtrrun::VersionRef> {
  PYBIND11_TYPE_CASTER(dtrrun::VersionRef, const_name("Version"));
  bool load(handle object, bool) {
    if (Py_TYPE(object.ptr()) != dtrrun::version_type) return false;
    value = dtrrun::VersionRef(dtrrun::node_of(object.ptr()));
    return true;
  }
  static handle cast(const dtrrun::VersionRef& one, return_value_policy, handle) {
    return dtrrun::as_object(one.get()).release();
  }
};
template <>
struct type_caster<dtrrun::KeptNode> {
  static constexpr auto name = const_name("Version");
  static handle cast(const dtrrun::KeptNode& one, return_value_policy, handle) { return dtrrun::as_object(one.get()).release(); }
};
template <>
struct type_caster<dtrrun::StorageRef> {
  PYBIND11_TYPE_CASTER(dtrrun::StorageRef, const_name("object"));
  bool load(handle object, bool) {
    value = dtrrun::as_storage(object.ptr());
    return true;
  }
  static handle cast(const dtrrun::StorageRef& one, return_value_policy, handle) { return dtrrun::as_object(one).release(); }
};
template <>
struct type_caster<dtrrun::GivenPin> {
  PYBIND11_TYPE_CASTER(dtrrun::GivenPin, const_name("str"));
  bool load(handle object, bool) {
    value = {dtrrun::as_pin(object.ptr())};
    return true;
  }
};

}  // namespace pybind11::detail

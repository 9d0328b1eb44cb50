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

// Calls a method. Throws what `raise` does.
template <class... Args>
Ref call(py::handle object, const char* method, const Args&... args) {
  Ref found = attribute(object.ptr(), method);
  return checked(PyObject_CallObject(found.get(), py::make_tuple(args...).ptr()));
}

inline std::vector<VersionRef> versions_in(PyObject* sequence) {
  Ref items = checked(PySequence_Fast(sequence, "versions must be a sequence"));
  std::vector<VersionRef> found;
  for (PyObject* one : Items(items.get())) found.emplace_back(native_node(one));
  return found;
}

// Returns the operation in this object, or null for None. Throws if it is something else.
inline Recorded* native_operation(PyObject* object) {
  if (object == Py_None) return nullptr;
  if (Py_TYPE(object) == operation_type) return recorded_in(object);
  throw py::type_error("an operation is wanted");
}

// Has the errors of functions become Python's as `set_python_error` says. For an extension, once.
inline void translate_errors() {
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      std::rethrow_exception(std::move(error));
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

// Finds the C++ object of a bound class, or of one that Python derives from it and from no other. pybind11 would look up its classes in
// tables for each argument.
template <class Object>
struct own_caster : py::detail::type_caster_generic {
  static constexpr auto name = py::detail::const_name<Object>();
  static inline PyTypeObject* type = nullptr;
  template <class As>
  using cast_op_type = py::detail::cast_op_type<As>;

  own_caster() : type_caster_generic(static_cast<const py::detail::type_info*>(nullptr)) {}  // which is not looked up
  bool load(py::handle given, bool) {
    if (!PyObject_TypeCheck(given.ptr(), type)) return false;
    value = bound<Object>(given.ptr());
    return true;
  }
  operator Object*() { return static_cast<Object*>(value); }
  operator Object&() {
    if (value == nullptr) throw py::reference_cast_error();
    return *static_cast<Object*>(value);
  }
  template <class Given>
  static py::handle cast(Given&& one, py::return_value_policy policy, py::handle parent) {
    return py::detail::type_caster_base<Object>::cast(std::forward<Given>(one), policy, parent);
  }
};

// Binds a class whose caster that is.
template <class Object, class... More>
py::class_<Object> own_class(py::module_& module, const char* name, const More&... more) {
  py::class_<Object> made(module, name, ITS_OWN, more...);
  own_caster<Object>::type = reinterpret_cast<PyTypeObject*>(made.ptr());
  return made;
}

// For a class whose objects refer to Python objects: lets the garbage collector follow these. links: members of the class. Without
// them, it has a method `each_link`, which calls a function with each reference, and `unlink`, which drops them.
template <class Object, py::object Object::*... links>
py::custom_type_setup collected() {
  return py::custom_type_setup([](PyHeapTypeObject* made) {
    PyTypeObject& type = made->ht_type;
    type.tp_flags |= Py_TPFLAGS_HAVE_GC;
    type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(Py_TYPE(self));
      auto* one = bound<Object>(self);
      if (one == nullptr) return 0;
      int result = 0;
      auto follow = [&](const py::object& link) {
        if (result == 0 && link) result = visit(link.ptr(), arg);
      };
      if constexpr (sizeof...(links) != 0)
        (follow(one->*links), ...);
      else
        one->each_link(follow);
      return result;
    };
    type.tp_clear = [](PyObject* self) {
      auto* one = bound<Object>(self);
      if (one == nullptr) return 0;
      if constexpr (sizeof...(links) != 0)
        (std::exchange(one->*links, {}), ...);
      else
        one->unlink();
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

// Versions and operations, by their pointers. Their Python objects are not pybind11's (nodes.h). found_in: throws for others.
template <class Node, auto found_in>
struct node_caster {
  template <class>
  using cast_op_type = Node*;
  operator Node*() const { return node_; }
  bool load(handle object, bool) {
    node_ = found_in(object.ptr());
    return true;
  }
  static handle cast(const Node* one, return_value_policy, handle) { return dtrrun::as_object(one).release(); }

 private:
  Node* node_ = nullptr;
};
template <>
struct type_caster<dtrrun::Version> : node_caster<dtrrun::Version, &dtrrun::native_node> {
  static constexpr auto name = const_name("Version");
};
template <>
struct type_caster<dtrrun::Node> : node_caster<dtrrun::Node, &dtrrun::native_node> {
  static constexpr auto name = const_name("Version");
};
template <>
struct type_caster<dtrrun::Recorded> : node_caster<dtrrun::Recorded, &dtrrun::native_operation> {
  static constexpr auto name = const_name("Operation | None");
};
template <>
struct type_caster<dtrrun::VersionRef> {
  PYBIND11_TYPE_CASTER(dtrrun::VersionRef, const_name("Version"));
  bool load(handle object, bool) {
    value = dtrrun::VersionRef(dtrrun::native_node(object.ptr()));
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

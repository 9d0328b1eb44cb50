// `_dtrrun_native.CallNotes`: the notes of the program's operators, for Python.
#pragma once

#include "backend.h"

namespace dtrrun {

struct PythonCallNotes : CallNotes {
  PythonCallNotes(py::object ledger, py::object judge) : CallNotes(std::move(ledger), std::move(judge)) { of_session() = this; }
  ~PythonCallNotes() { close(); }

  void close() {
    set_mode(0);
    if (ledger && of_session() == this) of_session() = nullptr;
  }
  CallNotes*& of_session() const { return backend_of(core_of(ledger.ptr())).notes; }

  // Returns (module, line, whether in a backward pass); line: "file:number", or "" if no code of the program has called it.
  std::tuple<int64_t, py::object, bool> told(const NotedCall* one) const {
    if (one == nullptr) return {0, py::str(""), false};
    py::object line = py::str("");
    if (PyObject* code = code_of(*one); code != nullptr) {
      auto* its = reinterpret_cast<PyCodeObject*>(code);
      line = object_in(checked(PyUnicode_FromFormat("%U:%d", its->co_filename, PyCode_Addr2Line(its, one->place))));
    }
    return {one->module, line, one->backward};
  }

  template <class Function>
  void each_link(const Function& function) {
    function(ledger), function(judge), function(look);
  }
  void unlink() {
    close();
    each_link([](py::object& link) { std::exchange(link, py::object()); });
  }
};

inline void bind_call_notes(py::module_& module) {
  using N = PythonCallNotes;
  py::class_<N>(module, "CallNotes", ITS_OWN, collected<N>(), "Notes of the program's operators.")
      .def(py::init<py::object, py::object>(), "ledger"_a, "judge"_a)
      .def("called", &N::called, "An operator that is not a view has been called.")
      .def("close", &N::close, "Note nothing any more.")
      .def("forget", &N::forget, "Forget the operators before this number.")
      .def(
          "at", [](const N& self, int64_t age) { return self.told(self.at(age)); },
          "Return the number of the module and the line that called this operator, or the last one before, and whether that was in\n"
          "a backward pass.")
      .def(
          "origin", [](const N& self, int64_t age) { return self.told(self.origin(self.at(age))); },
          "Like `at`; for an operator of a backward pass, of the one in the forward pass that it belongs to.")
      .def(
          "maker_of", [](const N& self, int64_t node) { return self.told(self.maker_of(node)); },
          "Return the same of the operator that has made the node of this number in autograd's graph.")
      .def("backward", &N::backward,
           "Return the numbers of the first and the last operator of backward passes; 0 if there are none.")
      .def(
          "storages",
          [](const N& self) {
            std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, bool>> all;
            for (const NotedStorage& one : self.storages())
              all.emplace_back(one.key, one.nbytes, one.born, one.died, one.gradient);
            return all;
          },
          "Return what is known of storages: their key, bytes, when they were made and released, and whether they were gradients.")
      .def_readwrite("look", &N::look)
      .def_property_readonly("size", &N::size, "How many operators are noted.")
      .def_property("mode", &N::mode, &N::set_mode, "What is noted: the sum of 1 (lines), 2 (bytes) and 4 (storages).")
      .def_readwrite("module", &N::module, "The number of the present module.")
      .def_readwrite("most", &N::most, "The most bytes after an operator.")
      .def_readwrite("most_age", &N::most_age, "The number of that operator.")
      .def_readwrite("target", &N::target, "The bytes at which `look` is called, once.");
}

}  // namespace dtrrun

// `_dtrrun_native.CallNotes`: the notes of the program's operators, for Python.
#pragma once

#include "backend.h"

namespace dtrrun {

inline void CallNotesObject::close(PyObject* self) {
  auto* one = reinterpret_cast<CallNotesObject*>(self);
  if (one->notes == nullptr) return;
  one->notes->set_mode(0);
  if (one->ledger == nullptr) return;
  CallNotes*& notes = backend_of(core_of(one->ledger)).notes;
  if (notes == one->notes) notes = nullptr;
}

inline PyTypeObject* CallNotesObject::make_type() {
  using N = CallNotesObject;
  auto create = [](PyTypeObject* type, PyObject* args, PyObject*) -> PyObject* {
    PyObject *ledger, *judge;
    if (!PyArg_ParseTuple(args, "OO", &ledger, &judge)) return nullptr;
    return guarded([&] {
      Ref made = checked(type->tp_alloc(type, 0));
      auto* one = reinterpret_cast<N*>(made.get());
      one->ledger = Ref::copy(ledger).release();
      one->judge = Ref::copy(judge).release();
      one->notes = new CallNotes(ledger, judge, &one->look);
      backend_of(core_of(ledger)).notes = one->notes;
      return made.release();
    });
  };
  auto called = [](PyObject* self, PyObject*) -> PyObject* { return done([&] { of(self).called(); }); };
  auto close = [](PyObject* self, PyObject*) -> PyObject* { return done([&] { N::close(self); }); };
  auto forget = [](PyObject* self, PyObject* age) -> PyObject* { return done([&] { of(self).forget(as_number(age)); }); };
  // (module, line, whether in a backward pass); line: "file:number", or "" if no code of the program has called it.
  auto told = [](const CallNotes& notes, const NotedCall* one) -> PyObject* {
    if (one == nullptr) return Py_BuildValue("(isO)", 0, "", Py_False);
    Ref line(PyUnicode_FromString(""));
    if (PyObject* code = notes.code_of(*one); code != nullptr) {
      auto* its = reinterpret_cast<PyCodeObject*>(code);
      line = Ref(PyUnicode_FromFormat("%U:%d", its->co_filename, PyCode_Addr2Line(its, one->place)));
    }
    if (!line) raise();
    return Py_BuildValue("(iOO)", static_cast<int>(one->module), line.get(), one->backward ? Py_True : Py_False);
  };
  static auto tell = told;
  auto at = [](PyObject* self, PyObject* age) -> PyObject* {
    return guarded([&] { return tell(of(self), of(self).at(as_number(age))); });
  };
  auto origin = [](PyObject* self, PyObject* age) -> PyObject* {
    return guarded([&] { return tell(of(self), of(self).origin(of(self).at(as_number(age)))); });
  };
  auto maker_of = [](PyObject* self, PyObject* node) -> PyObject* {
    return guarded([&] { return tell(of(self), of(self).maker_of(as_number(node))); });
  };
  auto backward = [](PyObject* self, PyObject*) -> PyObject* {
    auto [first, last] = of(self).backward();
    return Py_BuildValue("(LL)", static_cast<long long>(first), static_cast<long long>(last));
  };
  auto storages = [](PyObject* self, PyObject*) -> PyObject* {
    return guarded([&] {
      Ref all = checked(PyList_New(0));
      for (const NotedStorage& one : of(self).storages()) {
        Ref row = checked(Py_BuildValue("(LLLLO)", static_cast<long long>(one.key), static_cast<long long>(one.nbytes),
                                        static_cast<long long>(one.born), static_cast<long long>(one.died),
                                        one.gradient ? Py_True : Py_False));
        if (PyList_Append(all.get(), row.get()) < 0) raise();
      }
      return all.release();
    });
  };
  static PyMethodDef methods[] = {
      {"called", called, METH_NOARGS, "An operator that is not a view has been called."},
      {"close", close, METH_NOARGS, "Note nothing any more."},
      {"forget", forget, METH_O, "Forget the operators before this number."},
      {"at", at, METH_O,
       "Return the number of the module and the line that called this operator, or the last one before, and whether that was in "
       "a backward pass."},
      {"origin", origin, METH_O,
       "Like `at`; for an operator of a backward pass, of the one in the forward pass that it belongs to."},
      {"maker_of", maker_of, METH_O,
       "Return the same of the operator that has made the node of this number in autograd's graph."},
      {"backward", backward, METH_NOARGS,
       "Return the numbers of the first and the last operator of backward passes; 0 if there are none."},
      {"storages", storages, METH_NOARGS,
       "Return what is known of storages: their key, bytes, when they were made and released, and whether they were gradients."},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyMemberDef members[] = {
      {"look", T_OBJECT, offsetof(N, look), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  auto size = [](PyObject* self, void*) -> PyObject* { return PyLong_FromSize_t(of(self).size()); };
  auto mode = [](PyObject* self, void*) -> PyObject* { return PyLong_FromLong(of(self).mode()); };
  auto set_mode = [](PyObject* self, PyObject* value, void*) -> int {
    int64_t found;
    if (!read_number(value, found)) return -1;
    of(self).set_mode(static_cast<int>(found));
    return 0;
  };
  static PyGetSetDef computed[] = {
      {"size", size, nullptr, "How many operators are noted.", nullptr},
      {"mode", mode, set_mode, "What is noted: the sum of 1 (lines), 2 (bytes) and 4 (storages).", nullptr},
      {"module", number<&CallNotes::module>, set_number<&CallNotes::module>, "The number of the present module.", nullptr},
      {"most", number<&CallNotes::most>, set_number<&CallNotes::most>, "The most bytes after an operator.", nullptr},
      {"most_age", number<&CallNotes::most_age>, set_number<&CallNotes::most_age>, "The number of that operator.", nullptr},
      {"target", number<&CallNotes::target>, set_number<&CallNotes::target>, "The bytes at which `look` is called, once.",
       nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  return Base<N, &N::ledger, &N::judge, &N::look>::make("_dtrrun_native.CallNotes", create, members, methods, computed,
                                                        "CallNotes(ledger, judge): notes of the program's operators.");
}

}  // namespace dtrrun

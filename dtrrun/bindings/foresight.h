// Foresight: Python follows the recorded step (`core.foresight`), and gives the position in it.
#pragma once

#include "../core/policy/foresight.h"
#include "bind.h"

namespace dtrrun {

class RecordedForesight : public Foresight {
 public:
  explicit RecordedForesight(py::object followed)
      : object(std::move(followed)), rescued_(py::module_::import("dtrrun.core.foresight").attr("Rescued")) {}

  py::object object, stretches;

  bool look() override {
    bool jumped = object.attr("look")().ptr() == Py_True;
    auto now = object.attr("now")().cast<std::tuple<std::optional<int64_t>, int64_t, int64_t, py::list>>();
    predicts_ = std::get<0>(now).has_value();
    position_ = std::get<0>(now).value_or(position_);
    horizon_ = std::get<1>(now);
    begin_ = std::get<2>(now);
    stretches = std::get<3>(now);
    return jumped;
  }

  int64_t next_use(Node* node) const override {
    if (node->age <= begin_) return NEVER;
    PyObject*& known = place_of(node);
    if (known == nullptr || known == Py_None || (PyTuple_GET_SIZE(known) != 0 && PyTuple_GET_ITEM(known, 0) != latest())) {
      Ref uses = uses_of(node);
      Py_XSETREF(known, checked(PyTuple_Pack(2, latest(), uses.get())).release());
    }
    if (PyTuple_GET_SIZE(known) == 0) return NEVER;
    PyObject* uses = PyTuple_GET_ITEM(known, 1);
    if (uses == Py_None) return position_ + horizon_ / 4;  // half a step ahead
    Items times(uses);
    PyObject** next = std::upper_bound(times.begin(), times.end(), position_,
                                       [](int64_t position, PyObject* time) { return position < as_number(time); });
    if (next == times.end()) return NEVER;
    bool last = next + 1 == times.end();
    if (last && Py_TYPE(uses) == reinterpret_cast<PyTypeObject*>(rescued_.ptr()) && node->resident) return position_;
    return as_number(*next);
  }

 protected:
  // Where it is cached when the node is used: the stretch in which that was looked up, and the times; (): never again.
  virtual PyObject*& place_of(Node* node) const { return enclosing(node)->uses; }

 private:
  PyObject* latest() const { return PyList_GET_ITEM(stretches.ptr(), PyList_GET_SIZE(stretches.ptr()) - 1); }

  // Returns when the node is used, according to the step that the program followed when it was made, or None. No Python code
  // runs here, since a choice is in progress.
  Ref uses_of(const Node* node) const {
    enum { AGE, ORIGIN, STEP };  // `core.foresight._Stretch`
    Items all(stretches.ptr());
    Py_ssize_t place = all.size() - 1;
    while (place > 0 && as_number(PyTuple_GET_ITEM(all[place], AGE)) > node->age) place--;
    PyObject* step = PyTuple_GET_ITEM(all[place], STEP);
    if (step == Py_None) return Ref::copy(Py_None);
    Ref maker(PyLong_FromLongLong(node->age - as_number(PyTuple_GET_ITEM(all[place], ORIGIN)) - 1));
    Ref by_place = attribute(step, "uses");
    PyObject* made = PyDict_GetItem(by_place.get(), maker.get());
    if (made == nullptr || PyDict_GET_SIZE(made) == 0) return Ref::copy(Py_None);
    Ref nbytes(PyLong_FromLongLong(node->nbytes));
    if (PyObject* uses = PyDict_GetItem(made, nbytes.get())) return Ref::copy(uses);
    std::vector<int64_t> times;  // of everything that was made there
    PyObject *size, *uses;
    for (Py_ssize_t next = 0; PyDict_Next(made, &next, &size, &uses);)
      for (PyObject* time : Items(uses)) times.push_back(as_number(time));
    std::sort(times.begin(), times.end());
    times.erase(std::unique(times.begin(), times.end()), times.end());
    Ref merged = checked(PyList_New(static_cast<Py_ssize_t>(times.size())));
    for (size_t i = 0; i < times.size(); i++) PyList_SET_ITEM(merged.get(), i, PyLong_FromLongLong(times[i]));
    return merged;
  }

  py::object rescued_;
  int64_t begin_ = 0;
};

}  // namespace dtrrun

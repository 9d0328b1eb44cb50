// Foresight: Python follows the recorded step (`core.foresight`), and gives the position in it.
#pragma once

#include "../core/policy/foresight.h"
#include "nodes.h"

namespace dtrrun {

class RecordedForesight : public Foresight {
 public:
  explicit RecordedForesight(PyObject* object)
      : object_(Ref::copy(object)),
        rescued_(attribute(checked(PyImport_ImportModule("dtrrun.core.foresight")).get(), "Rescued")) {}

  bool look() override {
    bool jumped = checked(PyObject_CallMethod(object_.get(), "look", nullptr)).get() == Py_True;
    Ref now = checked(PyObject_CallMethod(object_.get(), "now", nullptr));
    predicts_ = PyTuple_GET_ITEM(now.get(), 0) != Py_None;
    if (predicts_) position_ = as_number(PyTuple_GET_ITEM(now.get(), 0));
    horizon_ = as_number(PyTuple_GET_ITEM(now.get(), 1));
    begin_ = as_number(PyTuple_GET_ITEM(now.get(), 2));
    stretches_ = Ref::copy(PyTuple_GET_ITEM(now.get(), 3));
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
    if (last && Py_TYPE(uses) == reinterpret_cast<PyTypeObject*>(rescued_.get()) && node->resident) return position_;
    return as_number(*next);
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(object_.get());
    Py_VISIT(stretches_.get());
    return 0;
  }
  PyObject* object() const { return object_.get(); }

 protected:
  // Where it is cached when the node is used: the stretch in which that was looked up, and the times; (): never again.
  virtual PyObject*& place_of(Node* node) const { return enclosing(node)->uses; }

 private:
  PyObject* latest() const { return PyList_GET_ITEM(stretches_.get(), PyList_GET_SIZE(stretches_.get()) - 1); }

  // Returns when the node is used, according to the step that the program followed when it was made, or None. No Python code
  // runs here, since a choice is in progress.
  Ref uses_of(const Node* node) const {
    enum { AGE, ORIGIN, STEP };  // `core.foresight._Stretch`
    Items stretches(stretches_.get());
    Py_ssize_t place = stretches.size() - 1;
    while (place > 0 && as_number(PyTuple_GET_ITEM(stretches[place], AGE)) > node->age) place--;
    PyObject* step = PyTuple_GET_ITEM(stretches[place], STEP);
    if (step == Py_None) return Ref::copy(Py_None);
    Ref maker(PyLong_FromLongLong(node->age - as_number(PyTuple_GET_ITEM(stretches[place], ORIGIN)) - 1));
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

  Ref object_, rescued_, stretches_;
  int64_t begin_ = 0;
};

}  // namespace dtrrun

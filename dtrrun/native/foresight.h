// When a storage is used next: `core.foresight.Foresight.next_use`. Python follows the recorded step.
#pragma once

#include "pool.h"

namespace dtrrun {

class Foresight {
 public:
  explicit Foresight(const Nodes& nodes) : version_(nodes.version) {}

  PyObject* object() const { return object_ ? object_.get() : Py_None; }
  void follow(PyObject* foresight) {
    if (!rescued_) rescued_ = attribute(checked(PyImport_ImportModule("dtrrun.core.foresight")).get(), "Rescued");
    object_ = foresight == Py_None ? Ref() : Ref::copy(foresight);
    predicts_ = false;
  }
  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(object_.get());
    Py_VISIT(stretches_.get());
    return 0;
  }
  void clear() {
    object_ = Ref();
    stretches_ = Ref();
  }

  // Finds the position. Returns whether it changed other than by moving forward.
  bool look() {
    if (!object_) return false;
    bool jumped = checked(PyObject_CallMethod(object_.get(), "look", nullptr)).get() == Py_True;
    Ref now = checked(PyObject_CallMethod(object_.get(), "now", nullptr));
    predicts_ = PyTuple_GET_ITEM(now.get(), 0) != Py_None;
    if (predicts_) position_ = as_number(PyTuple_GET_ITEM(now.get(), 0));
    horizon_ = as_number(PyTuple_GET_ITEM(now.get(), 1));
    begin_ = as_number(PyTuple_GET_ITEM(now.get(), 2));
    stretches_ = Ref::copy(PyTuple_GET_ITEM(now.get(), 3));
    return jumped;
  }
  // Of the last look: whether there is a position in a recorded step, and which.
  bool predicts() const { return predicts_; }
  int64_t position() const { return position_; }
  // The distance of what is not used again.
  int64_t horizon() const { return horizon_; }

  // When the program uses it next, or NEVER.
  int64_t next_use(PyObject* node) const {
    if (version_.age.number(node) <= begin_) return NEVER;
    PyObject* known = version_.uses.get(node);
    if (known == Py_None || (PyTuple_GET_SIZE(known) != 0 && PyTuple_GET_ITEM(known, 0) != latest())) {
      Ref uses = uses_of(node);
      version_.uses.take(node, checked(PyTuple_Pack(2, latest(), uses.get())).release());
      known = version_.uses.get(node);
    }
    if (PyTuple_GET_SIZE(known) == 0) return NEVER;
    PyObject* uses = PyTuple_GET_ITEM(known, 1);
    if (uses == Py_None) return position_ + horizon_ / 4;
    Items times(uses);
    PyObject** next = std::upper_bound(times.begin(), times.end(), position_,
                                       [](int64_t position, PyObject* time) { return position < as_number(time); });
    if (next == times.end()) return NEVER;
    bool last = next + 1 == times.end();
    if (last && Py_TYPE(uses) == reinterpret_cast<PyTypeObject*>(rescued_.get()) && version_.resident.is_true(node))
      return position_;
    return as_number(*next);
  }

 private:
  PyObject* latest() const { return PyList_GET_ITEM(stretches_.get(), PyList_GET_SIZE(stretches_.get()) - 1); }

  // `Foresight.uses_of`. No code of Python runs here, since a choice is under way.
  Ref uses_of(PyObject* node) const {
    enum { AGE, ORIGIN, STEP };  // `core.foresight._Stretch`
    Items stretches(stretches_.get());
    int64_t age = version_.age.number(node);
    Py_ssize_t place = stretches.size() - 1;
    while (place > 0 && as_number(PyTuple_GET_ITEM(stretches[place], AGE)) > age) place--;
    PyObject* step = PyTuple_GET_ITEM(stretches[place], STEP);
    if (step == Py_None) return Ref::copy(Py_None);
    Ref maker(PyLong_FromLongLong(age - as_number(PyTuple_GET_ITEM(stretches[place], ORIGIN)) - 1));
    Ref by_place = attribute(step, "uses");
    PyObject* made = PyDict_GetItem(by_place.get(), maker.get());
    if (made == nullptr || PyDict_GET_SIZE(made) == 0) return Ref::copy(Py_None);
    Ref nbytes(PyLong_FromLongLong(version_.nbytes.number(node)));
    if (PyObject* uses = PyDict_GetItem(made, nbytes.get())) return Ref::copy(uses);
    std::vector<int64_t> times;  // of all that was made there
    PyObject *size, *uses;
    for (Py_ssize_t next = 0; PyDict_Next(made, &next, &size, &uses);)
      for (PyObject* time : Items(uses)) times.push_back(as_number(time));
    std::sort(times.begin(), times.end());
    times.erase(std::unique(times.begin(), times.end()), times.end());
    Ref merged = checked(PyList_New(static_cast<Py_ssize_t>(times.size())));
    for (size_t i = 0; i < times.size(); i++) PyList_SET_ITEM(merged.get(), i, PyLong_FromLongLong(times[i]));
    return merged;
  }

  const VersionFields& version_;
  Ref object_, rescued_, stretches_;
  bool predicts_ = false;
  int64_t position_ = 0, horizon_ = 1, begin_ = 0;
};

}  // namespace dtrrun

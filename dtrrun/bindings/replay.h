// A replay as a Python object, for `simulator/replay.py`.
#pragma once

#include "../core/paper/semantics.h"
#include "policy.h"

namespace dtrrun {

// Foresight over a replay's storages.
class ReplayedForesight final : public RecordedForesight {
 public:
  using RecordedForesight::RecordedForesight;
  ~ReplayedForesight() override {
    for (PyObject* one : uses_) Py_XDECREF(one);
  }

 protected:
  PyObject*& place_of(Node* node) const override {
    size_t place = static_cast<Replay::Storage*>(node)->name;
    if (uses_.size() <= place) uses_.resize(place + 1, nullptr);
    return uses_[place];
  }

 private:
  mutable std::vector<PyObject*> uses_;  // by storage
};

struct ReplayObject {
  PyObject_HEAD
  Replay* replay;
};

inline Replay& replay_of(PyObject* self) { return *reinterpret_cast<ReplayObject*>(self)->replay; }

// Converts the number of a storage or an operator from Python. Raises out_of_range if it can't be one.
inline Replay::Number as_place(PyObject* object) {
  int64_t found = as_number(object);
  if (found == -1 && PyErr_Occurred()) raise();
  if (found < 0 || found > UINT32_MAX) throw std::out_of_range("no storage or operator has this number");
  return static_cast<Replay::Number>(found);
}
inline Replay::Numbers as_places(PyObject* sequence) {
  Ref items = checked(PySequence_Fast(sequence, "numbers must be a sequence"));
  Replay::Numbers found;
  for (PyObject* one : Items(items.get())) found.push_back(as_place(one));
  return found;
}
inline int64_t as_amount(PyObject* object) {
  int64_t found = as_number(object);
  if (found == -1 && PyErr_Occurred()) raise();
  return found;
}
inline std::string as_text(PyObject* object) {
  const char* text = PyUnicode_AsUTF8(object);
  if (text == nullptr) raise();
  return text;
}
inline PyObject* as_object(Status status) {
  static const char* names[] = {"ok", "oom", "thrash"};
  return PyUnicode_FromString(names[static_cast<int>(status)]);
}

inline DeallocationPolicy as_deallocation(const std::string& name) {
  if (name == "eager") return DeallocationPolicy::EAGER;
  if (name == "banish") return DeallocationPolicy::BANISH;
  if (name == "ignore") return DeallocationPolicy::IGNORE;
  throw std::invalid_argument(name + " is no way of deallocation");
}

inline Replay::Observer as_observer(PyObject* given) {
  if (given == Py_None) return nullptr;
  auto observer = std::make_shared<Ref>(Ref::copy(given));
  return [observer](Replay::Event event, Replay::Number number) {
    static const char* names[] = {"run", "compute", "evict"};
    checked(PyObject_CallFunction(observer->get(), "sI", names[static_cast<int>(event)], number));
  };
}

inline PyObject* new_replay(PyTypeObject* type, PyObject* args, PyObject* named) {
  PyObject *heuristic, *budget, *observer;
  const char* deallocation;
  int latest, scan, requeue;
  double limit;
  static const char* names[] = {"heuristic", "budget", "limit", "latest", "scan", "requeue", "deallocation", "observer", nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, named, "OOdpppsO", const_cast<char**>(names), &heuristic, &budget, &limit, &latest,
                                   &scan, &requeue, &deallocation, &observer))
    return nullptr;
  return guarded([&]() -> PyObject* {
    Replay::Options options{budget == Py_None ? INT64_MAX : as_amount(budget), limit, requeue != 0,
                            as_deallocation(deallocation)};
    Policy::Options search;
    search.latest = latest != 0;
    search.scan = scan != 0;
    auto made = std::make_unique<Replay>(as_heuristic(heuristic), std::move(search), options, as_observer(observer));
    Ref self = checked(type->tp_alloc(type, 0));
    reinterpret_cast<ReplayObject*>(self.get())->replay = made.release();
    return self.release();
  });
}

struct ScheduleObject {
  PyObject_HEAD
  Replay::Schedule* schedule;
};

inline PyTypeObject* schedule_type = nullptr;

inline PyObject* new_schedule(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *nbytes, *storage_of, *roots, *operators, *constant;
  if (!PyArg_ParseTuple(args, "O!O!O!O!O", &PyList_Type, &nbytes, &PyList_Type, &storage_of, &PyList_Type, &roots, &PyList_Type,
                        &operators, &constant))
    return nullptr;
  return guarded([&]() -> PyObject* {
    auto made = std::make_unique<Replay::Schedule>();
    for (PyObject* one : Items(nbytes)) made->nbytes.push_back(as_amount(one));
    Replay::Numbers first = as_places(roots);
    for (Replay::Number storage : as_places(storage_of)) {
      bool is_view = first.at(storage) != made->tensors.size();
      made->tensors.emplace_back(storage, is_view ? 0 : made->nbytes.at(storage));
    }
    for (PyObject* one : Items(operators)) {
      Ref name = attribute(one, "name");
      Replay::Operator op{as_text(name.get()),
                          attribute_number(one, "cost"),
                          0,
                          attribute_number(one, "workspace"),
                          as_places(attribute(one, "inputs").get()),
                          as_places(attribute(one, "outputs").get()),
                          PyUnicode_Compare(name.get(), constant) == 0};
      for (Replay::Number input : op.inputs) made->tensors.at(input);
      for (Replay::Number output : op.outputs) op.nbytes += made->tensors.at(output).second;
      op.peak_bytes += op.nbytes;
      made->operators.push_back(std::make_shared<Replay::Operator>(std::move(op)));
    }
    Ref self = checked(type->tp_alloc(type, 0));
    reinterpret_cast<ScheduleObject*>(self.get())->schedule = made.release();
    return self.release();
  });
}

inline PyTypeObject* make_schedule_type(const char* name) {
  PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(new_schedule)},
      {Py_tp_dealloc, reinterpret_cast<void*>(deallocate_owner<ScheduleObject, Replay::Schedule, &ScheduleObject::schedule>)},
      {Py_tp_doc, const_cast<char*>("Schedule(nbytes, storage_of, roots, operators, constant): what replays need of a "
                                    "`simulator.schedule.Schedule`, and the name of constants.")},
      {0, nullptr},
  };
  PyType_Spec spec = {name, sizeof(ScheduleObject), 0, Py_TPFLAGS_DEFAULT, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

// run(events, outputs): those of a `Schedule`.
inline PyObject* run_schedule(PyObject* self, PyObject* args) {
  PyObject *events, *outputs;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &events, &PyList_Type, &outputs)) return nullptr;
  return guarded([&]() -> PyObject* {
    Replay& replay = replay_of(self);
    for (PyObject* one : Items(events)) {
      int64_t event = as_amount(one);
      if (event < 0) {
        replay.release(static_cast<Replay::Number>(~event));
      } else if (Status status = replay.call(static_cast<Replay::Number>(event)); status != Status::OK) {
        return as_object(status);
      }
      if (PyErr_CheckSignals() != 0) raise();
    }
    for (PyObject* one : Items(outputs))
      if (Status status = replay.keep(as_place(one)); status != Status::OK) return as_object(status);
    return as_object(Status::OK);
  });
}

template <int64_t Replay::* counter>
PyObject* replayed(PyObject* self, void*) {
  return PyLong_FromLongLong(replay_of(self).*counter);
}

inline PyTypeObject* make_replay_type(const char* name) {
  static PyMethodDef methods[] = {
      {"add",
       [](PyObject* self, PyObject* schedule) -> PyObject* {
         if (Py_TYPE(schedule) != schedule_type) {
           PyErr_SetString(PyExc_TypeError, "a Schedule is wanted");
           return nullptr;
         }
         return guarded([&]() -> PyObject* {
           replay_of(self).add(*reinterpret_cast<ScheduleObject*>(schedule)->schedule);
           Py_RETURN_NONE;
         });
       },
       METH_O, "Add the storages, tensors and operators of a Schedule."},
      {"run", run_schedule, METH_VARARGS, "run(events, outputs): those of a Schedule. Returns ok, oom or thrash."},
      {"add_storage",
       [](PyObject* self, PyObject* nbytes) -> PyObject* {
         return guarded([&] { return PyLong_FromLong(replay_of(self).add_storage(as_amount(nbytes))); });
       },
       METH_O, "Returns its number."},
      {"add_tensor",
       [](PyObject* self, PyObject* args) -> PyObject* {
         unsigned storage;
         long long nbytes;
         if (!PyArg_ParseTuple(args, "IL", &storage, &nbytes)) return nullptr;
         return guarded([&] { return PyLong_FromLong(replay_of(self).add_tensor(storage, nbytes)); });
       },
       METH_VARARGS, "add_tensor(storage, nbytes), 0 for a view. Returns its number."},
      {"add_operator",
       [](PyObject* self, PyObject* args) -> PyObject* {
         const char* text;
         long long cost;
         PyObject *inputs, *outputs;
         int is_constant;
         if (!PyArg_ParseTuple(args, "sLOOp", &text, &cost, &inputs, &outputs, &is_constant)) return nullptr;
         return guarded([&] {
           return PyLong_FromLong(
               replay_of(self).add_operator(text, cost, as_places(inputs), as_places(outputs), 0, is_constant != 0));
         });
       },
       METH_VARARGS, "add_operator(name, cost, inputs, outputs, is_constant). Returns its number."},
      {"call",
       [](PyObject* self, PyObject* number) -> PyObject* {
         return guarded([&] { return as_object(replay_of(self).call(as_place(number))); });
       },
       METH_O, "Run an operator of the program itself. Returns ok, oom or thrash."},
      {"release",
       [](PyObject* self, PyObject* storage) -> PyObject* {
         return guarded([&]() -> PyObject* {
           replay_of(self).release(as_place(storage));
           Py_RETURN_NONE;
         });
       },
       METH_O, "The program's last reference to a storage has been released."},
      {"state",
       [](PyObject* self, PyObject* number) -> PyObject* {
         return guarded([&] {
           const Replay::Storage& storage = replay_of(self).storage(as_place(number));
           return Py_BuildValue("(NNNN)", PyBool_FromLong(storage.resident), PyBool_FromLong(storage.pinned),
                                PyBool_FromLong(storage.waits), PyBool_FromLong(storage.banished));
         });
       },
       METH_O, "(resident, pinned, waits for its banishment, banished) of a storage."},
      {"made_last",
       [](PyObject* self, PyObject*) -> PyObject* {
         return guarded([&] {
           const Replay& replay = replay_of(self);
           Ref made = checked(PyList_New(0));
           for (Replay::Number number : replay.made_last) {
             const Replay::Storage& storage = replay.storage(number);
             Ref one = checked(Py_BuildValue("(LsL)", static_cast<long long>(storage.age), replay.maker_of(storage).c_str(),
                                             static_cast<long long>(storage.nbytes)));
             if (PyList_Append(made.get(), one.get()) < 0) raise();
           }
           return PyObject_GetIter(made.get());
         });
       },
       METH_NOARGS, "As core.foresight.Program.made_last."},
      {"foresee",
       [](PyObject* self, PyObject* foresight) -> PyObject* {
         return guarded([&]() -> PyObject* {
           replay_of(self).policy.follow(std::make_unique<ReplayedForesight>(foresight));
           Py_RETURN_NONE;
         });
       },
       METH_O, "Let the policy know a core.foresight.Foresight."},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyGetSetDef attributes[] = {
      {"memory", replayed<&Replay::memory>, nullptr, nullptr, nullptr},
      {"peak_bytes", replayed<&Replay::peak_bytes>, nullptr, nullptr, nullptr},
      {"clock", replayed<&Replay::clock>, nullptr, nullptr, nullptr},
      {"evictions", replayed<&Replay::evictions>, nullptr, nullptr, nullptr},
      {"chosen", replayed<&Replay::chosen>, nullptr, nullptr, nullptr},
      {"rematerializations", replayed<&Replay::rematerializations>, nullptr, nullptr, nullptr},
      {"age", replayed<&Replay::age>, nullptr, nullptr, nullptr},
      {"score_evaluations", [](PyObject* self, void*) { return PyLong_FromLongLong(replay_of(self).policy.score_evaluations()); },
       nullptr, nullptr, nullptr},
      {"accesses", [](PyObject* self, void*) { return PyLong_FromLongLong(replay_of(self).policy.accesses()); }, nullptr, nullptr,
       nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(new_replay)},
      {Py_tp_methods, methods},
      {Py_tp_getset, attributes},
      {Py_tp_dealloc, reinterpret_cast<void*>(deallocate_owner<ReplayObject, Replay, &ReplayObject::replay>)},
      {Py_tp_doc, const_cast<char*>("A `simulator.replay.Replay`.")},
      {0, nullptr},
  };
  PyType_Spec spec = {name, sizeof(ReplayObject), 0, Py_TPFLAGS_DEFAULT, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

}  // namespace dtrrun

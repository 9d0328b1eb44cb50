// Operators as their observers see them (`core.observer.Observer`, `core.operator.Call`). Observers ask for most of their attributes
// before the operator runs, as `observe/recorder.py` does. Without observers, nothing here is made.
#pragma once

#include <unordered_map>

#include "operator_call.h"
#include "replays.h"
#include "split_lists.h"

namespace dtrrun {

struct ObservedCall;

// What all calls of a session share.
class Observation {
 public:
  Observation(PyObject* callbacks, const TensorVersions& versions, const FirstCalls& first_calls)
      : versions(versions), first_calls(first_calls), callbacks(Ref::copy(callbacks)) {}

  const TensorVersions& versions;
  const FirstCalls& first_calls;
  Ref callbacks;
  // Slow-path keys by signature. The signatures are kept alive with them.
  std::unordered_map<PyObject*, std::pair<Ref, Ref>> identities;
};

// An operator, from before room is made for it until it has run: notifies observers, if there are any.
class Observed {
 public:
  // found: the operator's signature. call: null for an operator of `lists.h`.
  Observed(Observation& by, const OperatorInfo& info, Arrival& arrival, PyObject* found, const OperatorCall* call) {
    if (by.versions.observers.any()) admit(by, info, arrival, found, call);
  }
  ~Observed() {
    if (call_) end();
  }
  Observed(const Observed&) = delete;

  // now: true if its kernel is about to run, false if it could not begin.
  void runs(bool now) {
    if (call_) set_running(now);
  }
  // Its results are in the ledger. outputs: those that are not plain, or null.
  void finished(PyObject* outputs = nullptr) {
    if (call_) finish(outputs == nullptr ? nothing : outputs);
  }

 private:
  void admit(Observation& by, const OperatorInfo& info, Arrival& arrival, PyObject* found, const OperatorCall* call);
  void set_running(bool now);
  void finish(PyObject* outputs);
  void end() noexcept;
  ObservedCall* get() const { return reinterpret_cast<ObservedCall*>(call_.get()); }

  Ref call_;
};

struct ObservedCall {
  PyObject_HEAD
  Observation* by;  // null once the call is over
  const OperatorInfo* info;
  Arrival* arrival;
  const OperatorCall* call;  // null for an operator of `lists.h`
  PyObject *signature, *versions;
  enum State : uint8_t { ADMITTED, RUNNING, FINISHED } state;

  size_t count() const { return arrival->count; }
  const IValue* values() const {
    expect(ADMITTED);  // the kernel consumes them
    return arrival->values();
  }
  void expect(State expected) const {
    if (state != expected) throw std::runtime_error("dtrrun: internal error: an observer asks too early or too late");
  }

  // Returns true if the signature is as specific as the key in logs. Other signatures are shared by tensors at
  // different places in their storages, and by lists of the same length and size.
  bool is_exact() const {
    return info->handler == HandlerKind::PLAIN ? info->makes_tensors : info->handler != HandlerKind::LISTS;
  }
  // Calls function(place, tensor) for each hole, in order.
  template <class Function>
  void each_tensor(const Function& function) const {
    expect(ADMITTED);
    if (call != nullptr) return call->each_tensor(function);
    for (size_t place = 0; place < count(); place++) {
      const IValue& value = values()[place];
      if (is_hole(value)) function(place, value.toTensor());
      if (!value.isTensorList() && !value.isOptionalTensorList()) continue;
      for (const IValue& item : value.toListRef())
        if (is_hole(item)) function(place, item.toTensor());
    }
  }
  // Returns a list of the holes for which `predicate` is true.
  template <class Predicate>
  Ref holes_if(const Predicate& predicate) const {
    Ref holes = checked(PyList_New(0));
    Py_ssize_t hole = 0;
    each_tensor([&](size_t place, const at::Tensor& tensor) {
      if (predicate(place, tensor) && PyList_Append(holes.get(), checked(PyLong_FromSsize_t(hole)).get()) < 0) raise();
      hole++;
    });
    return holes;
  }

  bool is_statistics(size_t) const { return false; }

  // -- the attributes of `core.operator.Call` --

  Ref operator_() const { return Ref::copy(info->operator_.get()); }
  Ref its_signature() const { return Ref::copy(signature); }
  Ref its_versions() const { return Ref::copy(versions); }
  Ref cost() const { return Ref(PyLong_FromLongLong(as_signature(signature)->figures.cost)); }
  Ref handed_out() const {
    Ref all = checked(PyList_New(0));
    if (call == nullptr) return all;
    for (const VersionRef& one : call->handed_out)
      if (PyList_Append(all.get(), as_object(one.get()).get()) < 0) raise();
    return all;
  }
  bool opaque() const { return call != nullptr && call->opaque; }
  bool reshapes() const { return info->reshapes; }
  bool view() const { return info->only_views; }
  bool untouching() const { return info->untouching; }
  bool uninitialised() const { return info->uninitialised; }
  bool replayable() const { return call != nullptr ? call->replayable : info->replayable; }
  bool shrinks() const { return info->shrinks; }
  bool updates_statistics() const { return info->updates && PyList_GET_SIZE(statistics().get()) != 0; }
  Ref written() const {
    Ref all = checked(PyDict_New());
    if (call != nullptr && call->written.empty()) return all;
    Ref holes = holes_if([&](size_t place, const at::Tensor&) { return info->writes_to(place); });
    for (PyObject* hole : Items(holes.get())) {
      Ref target(PyLong_FromVoidPtr(PyTuple_GET_ITEM(versions, as_number(hole)))), none = checked(PyList_New(0));
      PyObject* its = PyDict_SetDefault(all.get(), target.get(), none.get());
      if (its == nullptr || PyList_Append(its, hole) < 0) raise();
    }
    return all;
  }
  // written: an index into what is written to.
  bool overwrites(size_t written) const { return call != nullptr && call->overwrites(written); }
  Ref leaves() const {
    return holes_if([&](size_t, const at::Tensor& tensor) { return !opaque() && is_leaf(tensor); });
  }
  Ref statistics() const {
    bool trains = info->trains < 0 || values()[info->trains] == IValue(true);
    return holes_if([&](size_t place, const at::Tensor&) {
      return trains && std::find(info->statistics, info->statistics + 2, static_cast<int>(place)) != info->statistics + 2;
    });
  }
  // Returns the place of each tensor in the operator's lists, -1 for one that is in none of them; None if the call can't be split into
  // calls with parts of the lists (split_lists.h).
  Ref places() const {
    ListsOfCall lists(values(), info->splits ? count() : 0);
    if (lists.length == 0 || !lists.are_alike()) return Ref::copy(Py_None);
    Ref all = checked(PyList_New(0));
    for (const IValue& value : c10::ArrayRef<IValue>(values(), count())) {
      bool is_list = value.isTensorList();
      for (size_t place = 0; place < (is_list ? value.toListRef().size() : is_hole(value)); place++) {
        if (is_list && !is_hole(value.toListRef()[place])) return Ref::copy(Py_None);
        if (PyList_Append(all.get(), checked(PyLong_FromLongLong(is_list ? static_cast<long long>(place) : -1)).get()) < 0)
          raise();
      }
    }
    return all;
  }
  Ref geometries() const {
    if (is_exact()) return attribute(signature, "geometries");
    return by->first_calls.geometries_of(*this, false);
  }
  // Returns what calls have in common that cost the same in every process.
  Ref identity() const {
    auto known = by->identities.find(signature);
    if (is_exact() && known != by->identities.end()) return Ref::copy(known->second.second.get());
    auto [args, kwargs] =
        templates_of(arrival->schema(), values(), *info->enumerations, call == nullptr ? nullptr : call->holes.data());
    Ref more = call == nullptr ? Ref::copy(nothing) : FirstCalls::more_of(*call);
    Ref made = checked(PyObject_CallMethod(by->callbacks.get(), "identity_of", "OOOOO", info->operator_.get(), args.get(),
                                           kwargs ? kwargs.get() : Py_None, geometries().get(), more.get()));
    if (is_exact()) by->identities[signature] = {Ref::copy(signature), Ref::copy(made.get())};
    return made;
  }
  // Returns the storage and the geometry of each tensor among the results; None for those without a plain storage.
  Ref results() const {
    expect(FINISHED);
    Ref all = checked(PyList_New(0));
    for (const at::Tensor& tensor : arrival->tensors()) {
      Ref one = Ref::copy(Py_None);
      if (tensor.has_storage()) {
        Ref storage = object_of(tensor.storage()), geometry = by->first_calls.geometry_of(tensor);
        one = checked(PyTuple_Pack(2, storage.get(), geometry.get()));
      }
      if (PyList_Append(all.get(), one.get()) < 0) raise();
    }
    return all;
  }
};

inline PyTypeObject* observed_call_type = nullptr;

inline void Observed::admit(Observation& by, const OperatorInfo& info, Arrival& arrival, PyObject* found,
                            const OperatorCall* of) {
  auto* call = PyObject_New(ObservedCall, observed_call_type);
  if (call == nullptr) raise();
  Ref made(reinterpret_cast<PyObject*>(call));
  call->by = &by;
  call->info = &info;
  call->arrival = &arrival;
  call->call = of;
  call->signature = Ref::copy(found).release();
  call->versions = nullptr;
  call->state = ObservedCall::ADMITTED;
  c10::SmallVector<Ref, 6> versions;
  if (of != nullptr)
    for (const Version* one : of->versions) versions.push_back(as_object(one));
  else
    call->each_tensor([&](size_t, const at::Tensor& tensor) { versions.push_back(as_object(by.versions.of(tensor))); });
  call->versions = as_tuple(versions).release();
  call_ = std::move(made);
  try {
    by.versions.observers.admitted(call_.get());
  } catch (...) {
    end();
    throw;
  }
}

inline void OperatorCall::finished() {
  if (observed != nullptr) observed->finished(outputs.get());
}

inline void Observed::set_running(bool now) { get()->state = now ? ObservedCall::RUNNING : ObservedCall::ADMITTED; }

inline void Observed::finish(PyObject* outputs) {
  get()->state = ObservedCall::FINISHED;
  get()->by->versions.observers.finished(call_.get(), outputs);
  end();
}

// Also releases the versions, so that they have as many references as without observers.
inline void Observed::end() noexcept {
  ObservedCall* call = get();
  try {
    if (call->state == ObservedCall::ADMITTED) call->by->versions.observers.abandoned(call_.get());
    if (call->state == ObservedCall::RUNNING) call->by->versions.observers.failed(call_.get());
  } catch (...) {
    set_python_error();
    PyErr_WriteUnraisable(nullptr);
  }
  call->by = nullptr;
  Py_CLEAR(call->versions);
  call_ = Ref();
}

// Gets an attribute, for Python.
template <auto attribute>
PyObject* ask(PyObject* self, void*) {
  return guarded([&]() -> PyObject* {
    auto* call = reinterpret_cast<const ObservedCall*>(self);
    if (call->by == nullptr) throw std::runtime_error("dtrrun: internal error: an observer asks of what is over");
    if constexpr (std::is_same_v<decltype((call->*attribute)()), bool>)
      return PyBool_FromLong((call->*attribute)());
    else
      return (call->*attribute)().release();
  });
}

inline PyObject* overwrites(PyObject* self, PyObject* written) {
  return guarded([&] {
    return PyBool_FromLong(reinterpret_cast<const ObservedCall*>(self)->overwrites(static_cast<size_t>(as_number(written))));
  });
}

inline PyTypeObject* make_observed_call_type() {
  using C = ObservedCall;
  static PyGetSetDef attributes[] = {
      {"cost", ask<&C::cost>, nullptr, nullptr, nullptr},
      {"geometries", ask<&C::geometries>, nullptr, nullptr, nullptr},
      {"handed_out", ask<&C::handed_out>, nullptr, nullptr, nullptr},
      {"identity", ask<&C::identity>, nullptr, nullptr, nullptr},
      {"leaves", ask<&C::leaves>, nullptr, nullptr, nullptr},
      {"opaque", ask<&C::opaque>, nullptr, nullptr, nullptr},
      {"operator", ask<&C::operator_>, nullptr, nullptr, nullptr},
      {"places", ask<&C::places>, nullptr, nullptr, nullptr},
      {"replayable", ask<&C::replayable>, nullptr, nullptr, nullptr},
      {"reshapes", ask<&C::reshapes>, nullptr, nullptr, nullptr},
      {"results", ask<&C::results>, nullptr, nullptr, nullptr},
      {"shrinks", ask<&C::shrinks>, nullptr, nullptr, nullptr},
      {"signature", ask<&C::its_signature>, nullptr, nullptr, nullptr},
      {"statistics", ask<&C::statistics>, nullptr, nullptr, nullptr},
      {"uninitialised", ask<&C::uninitialised>, nullptr, nullptr, nullptr},
      {"untouching", ask<&C::untouching>, nullptr, nullptr, nullptr},
      {"updates_statistics", ask<&C::updates_statistics>, nullptr, nullptr, nullptr},
      {"versions", ask<&C::its_versions>, nullptr, nullptr, nullptr},
      {"view", ask<&C::view>, nullptr, nullptr, nullptr},
      {"written", ask<&C::written>, nullptr, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  static PyMethodDef methods[] = {
      {"overwrites", overwrites, METH_O, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  auto destroy = [](PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    Py_CLEAR(reinterpret_cast<C*>(self)->signature);
    Py_CLEAR(reinterpret_cast<C*>(self)->versions);
    PyObject_Free(self);
    Py_DECREF(type);
  };
  PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(+destroy)},
      {Py_tp_getset, attributes},
      {Py_tp_methods, methods},
      {Py_tp_doc, const_cast<char*>("An operator as observers see it (`core.operator.Call`).")},
      {0, nullptr},
  };
  constexpr unsigned long flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
  PyType_Spec spec = {"_dtrrun_native.ObservedCall", sizeof(C), 0, flags, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

}  // namespace dtrrun

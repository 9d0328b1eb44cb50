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
  // By signature: keys that are the same in every process (`Callbacks.identity_of`). The signatures are kept alive with them.
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
  ObservedCall* get() const { return bound<ObservedCall>(call_.ptr()); }

  py::object call_;
};

struct ObservedCall {
  Observation* by;  // null once the call is over
  const OperatorInfo* info;
  Arrival* arrival;
  const OperatorCall* call;  // null for an operator of `lists.h`
  py::object signature, versions{};
  enum State : uint8_t { ADMITTED, RUNNING, FINISHED } state = ADMITTED;

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
  Ref its_signature() const { return Ref::copy(signature.ptr()); }
  Ref its_versions() const { return Ref::copy(versions.ptr()); }
  Ref cost() const { return Ref(PyLong_FromLongLong(as_signature(signature.ptr())->figures.cost)); }
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
      Ref target(PyLong_FromVoidPtr(PyTuple_GET_ITEM(versions.ptr(), as_number(hole)))), none = checked(PyList_New(0));
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
    if (is_exact()) return attribute(signature.ptr(), "geometries");
    return by->first_calls.geometries_of(*this, false);
  }
  // Returns what calls have in common that cost the same in every process.
  Ref identity() const {
    auto known = by->identities.find(signature.ptr());
    if (is_exact() && known != by->identities.end()) return Ref::copy(known->second.second.get());
    auto [args, kwargs] =
        templates_of(arrival->schema(), values(), *info->enumerations, call == nullptr ? nullptr : call->holes.data());
    Ref more = call == nullptr ? Ref::copy(nothing) : FirstCalls::more_of(*call);
    Ref made = checked(PyObject_CallMethod(by->callbacks.get(), "identity_of", "OOOOO", info->operator_.get(), args.get(),
                                           kwargs ? kwargs.get() : Py_None, geometries().get(), more.get()));
    if (is_exact()) by->identities[signature.ptr()] = {Ref::copy(signature.ptr()), Ref::copy(made.get())};
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

inline void Observed::admit(Observation& by, const OperatorInfo& info, Arrival& arrival, PyObject* found,
                            const OperatorCall* of) {
  call_ = py::cast(std::make_unique<ObservedCall>(ObservedCall{&by, &info, &arrival, of, borrowed(found)}));
  ObservedCall* call = get();
  c10::SmallVector<Ref, 6> versions;
  if (of != nullptr)
    for (const Version* one : of->versions) versions.push_back(as_object(one));
  else
    call->each_tensor([&](size_t, const at::Tensor& tensor) { versions.push_back(as_object(by.versions.of(tensor))); });
  call->versions = object_in(as_tuple(versions));
  try {
    by.versions.observers.admitted(call_.ptr());
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
  get()->by->versions.observers.finished(call_.ptr(), outputs);
  end();
}

// Also releases the versions, so that they have as many references as without observers.
inline void Observed::end() noexcept {
  ObservedCall* call = get();
  try {
    if (call->state == ObservedCall::ADMITTED) call->by->versions.observers.abandoned(call_.ptr());
    if (call->state == ObservedCall::RUNNING) call->by->versions.observers.failed(call_.ptr());
  } catch (...) {
    set_python_error();
    PyErr_WriteUnraisable(nullptr);
  }
  call->by = nullptr;
  std::exchange(call->versions, py::object());
  call_ = py::object();
}

inline void bind_observed_call(py::module_& module) {
  using C = ObservedCall;
  py::class_<C> type(module, "ObservedCall", ITS_OWN, "An operator as observers see it (`core.operator.Call`).");
  auto attribute = [&](const char* name, auto ask) {
    type.def_property_readonly(name, [ask](const C& self) {
      if (self.by == nullptr) throw std::runtime_error("dtrrun: internal error: an observer asks of what is over");
      return (self.*ask)();
    });
  };
  attribute("cost", &C::cost);
  attribute("geometries", &C::geometries);
  attribute("handed_out", &C::handed_out);
  attribute("identity", &C::identity);
  attribute("leaves", &C::leaves);
  attribute("opaque", &C::opaque);
  attribute("operator", &C::operator_);
  attribute("places", &C::places);
  attribute("replayable", &C::replayable);
  attribute("reshapes", &C::reshapes);
  attribute("results", &C::results);
  attribute("shrinks", &C::shrinks);
  attribute("signature", &C::its_signature);
  attribute("statistics", &C::statistics);
  attribute("uninitialised", &C::uninitialised);
  attribute("untouching", &C::untouching);
  attribute("updates_statistics", &C::updates_statistics);
  attribute("versions", &C::its_versions);
  attribute("view", &C::view);
  attribute("written", &C::written);
  type.def("overwrites", &C::overwrites);
}

}  // namespace dtrrun

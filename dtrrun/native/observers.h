// What is notified of operators: observers (`core/observer.py`), fingerprints under `--verify`
// (`runtime/observe/verify.py`), and the notes of `--where` and `--peak` (`call_notes.h`).
//
// While there is none, each costs one comparison per operator. What the core notifies is in `bindings/backend.h`.
#pragma once

#include "call_notes.h"
#include "graph.h"

namespace dtrrun {

// A list of the ledger's, which may change while its members are being notified.
class ObserverList {
 public:
  ObserverList(PyObject* ledger, const char* name) : all_(attribute(ledger, name)) {}
  bool any() const { return PyList_GET_SIZE(all_.get()) != 0; }

 protected:
  template <class Call>
  void each(const Call& call) const {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(all_.get()); i++) checked(call(Ref::copy(PyList_GET_ITEM(all_.get(), i)).get()));
  }

 private:
  Ref all_;
};

// Notifies each `core.observer.Observer` of operators. The core or Python notifies them of everything else.
class Observers : public ObserverList {
 public:
  explicit Observers(PyObject* ledger) : ObserverList(ledger, "observers") {}

  // call: an `ObservedCall` (observed.h).
  void admitted(PyObject* call) const { tell("admitted", call); }
  void abandoned(PyObject* call) const { tell("abandoned", call); }
  void failed(PyObject* call) const { tell("failed", call); }
  // outputs: as `Operators::finish` takes them; plain storages need not be among them.
  void finished(PyObject* call, PyObject* outputs) const {
    each([&](PyObject* one) { return PyObject_CallMethod(one, "finished", "OO", call, outputs); });
  }

 private:
  void tell(const char* name, PyObject* what) const {
    each([&](PyObject* one) { return PyObject_CallMethod(one, name, "O", what); });
  }
};

// Digests of evicted contents: records which part of a storage they cover.
class Fingerprints {
 public:
  explicit Fingerprints(PyObject* ledger) : object_(attribute(ledger, "fingerprints")) {}

  bool are_taken() const { return object_.get() != Py_None; }
  // Some operators allocate more than their result needs: the rest is never written.
  void note(Version* one, const at::Tensor& tensor) const {
    if (are_taken() && tensor.is_contiguous())
      one->extent = (tensor.storage_offset() + tensor.numel()) * static_cast<int64_t>(tensor.itemsize());
  }

 private:
  Ref object_;
};

// Has operators noted (`Callbacks.calls`), if there are notes.
class CallObserver {
 public:
  explicit CallObserver(PyObject* callbacks) : object_(attribute(callbacks, "calls")) {
    if (object_.get() != Py_None) notes_ = bound<CallNotes>(object_.get());  // `PythonCallNotes` has no other base
  }
  bool is_on() const { return notes_ != nullptr; }
  // An operator that is not a view has been called.
  void called() const {
    if (notes_ != nullptr) notes_->called();
  }

 private:
  Ref object_;
  CallNotes* notes_ = nullptr;
};

}  // namespace dtrrun

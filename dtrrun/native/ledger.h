// The accounts of `core.ledger.Ledger`: versions by storage, those that come and go, and the bytes of each.
//
// Every function has the effect of the one in Python that it names, on the same objects.
#pragma once

#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/Storage.h>

#include "policy.h"

namespace dtrrun {

constexpr int LOOK_SHIFT = 4;  // as in core/ledger.py

// `Ledger.policy`, which may change between operators: one in C++, or any other through its Python methods.
class Rule {
 public:
  Rule(const Slot& policy, PyObject* ledger) : policy_(policy), ledger_(ledger) {}
  void insert(PyObject* version) { tell<&Policy::insert>("insert", version); }
  void discard(PyObject* version) { tell<&Policy::discard>("discard", version); }
  void evicted(PyObject* version) { tell<&Policy::evicted>("evicted", version); }
  void released(PyObject* version) { tell<&Policy::released>("released", version); }
  void rematerialized(PyObject* version) { tell<&Policy::left>("rematerialized", version); }
  void forget(PyObject* version) { tell<&Policy::left>("forget", version); }
  int64_t projected_cost(PyObject* version) {
    if (Policy* policy = native()) return policy->projected_cost(version);
    return as_number(checked(PyObject_CallMethod(object(), "projected_cost", "O", version)).get());
  }
  // Returns the version to evict, or null. The same predicate twice: for Python, and for C++.
  template <class Evictable>
  Ref select(int64_t now, PyObject* may_be_evicted, const Evictable& evictable) {
    if (Policy* policy = native()) return policy->select(now, evictable);
    Ref found = checked(PyObject_CallMethod(object(), "select", "LO", static_cast<long long>(now), may_be_evicted));
    return found.get() == Py_None ? Ref() : std::move(found);
  }

 private:
  PyObject* object() const { return policy_.get(ledger_); }
  Policy* native() const { return Py_TYPE(object()) == policy_type ? &policy_of(object()) : nullptr; }
  template <void (Policy::*event)(PyObject*)>
  void tell(const char* name, PyObject* version) {
    if (Policy* policy = native())
      (policy->*event)(version);
    else
      checked(PyObject_CallMethod(object(), name, "O", version));
  }
  Slot policy_;
  PyObject* ledger_;  // which outlives this
};

class Accounts {
 public:
  Accounts(PyObject* ledger_object, PyObject* classes, int64_t mask)
      : ledger_(Ref::copy(ledger_object)), version_class_(Ref::copy(type_of(classes, "Version"))),
        block_class_(Ref::copy(type_of(classes, "Block"))), on_death_(attribute(ledger_object, "on_death")),
        nothing_(checked(PyTuple_New(0))), no_pin_(checked(PyUnicode_InternFromString(""))),
        scratch_(attribute(ledger_object, "scratch")), blocks_(attribute(ledger_object, "blocks")),
        version(version_class_.get()), signature(type_of(classes, "Signature")),
        slots(type_of(classes, "Ledger")), rule(slots.policy, ledger_object),
        block_address_(block_class_.get(), "address"), block_nbytes_(block_class_.get(), "nbytes"),
        block_pin_(block_class_.get(), "pin"), mask_(mask) {
    pop_dead_ = attribute(slots.dead.get(ledger_object), "popleft");
  }

  PyObject* get() const { return ledger_.get(); }
  int64_t number(const Slot& slot) const { return slot.number(ledger_.get()); }
  bool is_true(const Slot& slot) const { return slot.is_true(ledger_.get()); }
  void add(const Slot& slot, int64_t more) { slot.set_number(ledger_.get(), number(slot) + more); }
  int64_t rounded(int64_t nbytes) const { return (nbytes - 1 - mask_) & mask_; }

 private:  // made first
  Ref ledger_, version_class_, block_class_, on_death_, nothing_, no_pin_, scratch_, blocks_, pop_dead_;

 public:
  VersionSlots version;
  SignatureSlots signature;
  LedgerSlots slots;
  Rule rule;

  // -- versions --

  // The version of a tensor's storage: a borrowed reference, or null.
  PyObject* version_of(const at::Tensor& tensor) const {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (!impl->has_storage()) return nullptr;
    return version_at(impl->unsafe_storage().unsafeGetStorageImpl());
  }
  PyObject* version_at(c10::StorageImpl* storage) const {
    PyObject* object = storage->pyobj_slot()->load_pyobj();
    if (object == nullptr) return nullptr;
    Ref key(PyLong_FromVoidPtr(object));
    return PyDict_GetItem(slots.versions.get(ledger_.get()), key.get());
  }
  // The storage of a version's own memory (`Version.memory`): borrowed, or null.
  PyObject* memory_of(PyObject* one) const {
    if (!version.scratch.is_none(one)) return version.scratch.get(one);
    return version.superseded.is_true(one) ? nullptr : referent(one);
  }
  // What a weak reference refers to: borrowed, or null.
  static PyObject* referent(PyObject* reference) {
    PyObject* found = PyWeakref_GetObject(reference);
    return found == Py_None ? nullptr : found;
  }

  // An instance of a subclass of `weakref.ref`, as `cls(object, on_death)` makes it.
  Ref watching(PyObject* cls, PyObject* object) {
    auto* type = reinterpret_cast<PyTypeObject*>(cls);
    Ref given = checked(PyTuple_Pack(2, object, on_death_.get()));
    return checked(type->tp_base->tp_new(type, given.get(), nullptr));
  }

  // `core.graph.new_version`, without its size and age.
  Ref bare_version(PyObject* object, PyObject* key) {
    Ref made = watching(version_class_.get(), object);
    version.key.set(made.get(), key);
    version.last_access.set(made.get(), slots.clock.get(ledger_.get()));
    version.operation.set(made.get(), Py_None);
    version.cost.set_number(made.get(), 0);
    version.resident.set(made.get(), Py_True);
    for (const Slot* slot : {&version.superseded, &version.used, &version.escaped}) slot->set(made.get(), Py_False);
    for (const Slot* slot : {&version.locks, &version.mutations}) slot->set_number(made.get(), 0);
    version.extent.set_number(made.get(), -1);
    for (const Slot* slot : {&version.pin, &version.scratch, &version.block, &version.needed_by, &version.fingerprint,
                             &version.component, &version.dependents, &version.bound, &version.neighbourhood})
      slot->set(made.get(), Py_None);
    // It is in no cycle, but the garbage collector must know it: it lists the weak references whose callbacks it calls.
    return made;
  }

  // `Recipes.supersede`, for a mutation that has a recipe.
  Ref supersede(PyObject* target, PyObject* maker, PyObject* found) {
    PyObject* key = version.key.get(target);
    Ref object = Ref::copy(static_cast<PyObject*>(PyLong_AsVoidPtr(key)));  // the storage, which the call holds
    Ref made = bare_version(object.get(), key);
    version.nbytes.set(made.get(), version.nbytes.get(target));
    version.age.set(made.get(), version.age.get(target));
    version.mutations.set_number(made.get(), version.mutations.number(target) + 1);
    version.escaped.set(made.get(), version.escaped.get(target));
    version.superseded.set(target, Py_True);
    version.resident.set(target, Py_False);
    version.uses.set(target, nothing_.get());
    if (PyDict_SetItem(slots.versions.get(ledger_.get()), key, made.get()) < 0) raise();
    version.operation.set(made.get(), maker);
    version.cost.set(made.get(), signature.cost.get(found));
    if (is_true(slots.pressure) && !version.operation.is_none(target)) rule.released(target);
    evictable(made.get());
    return made;
  }

  // `Operators.enter`, or `adopt` for memory that nothing has written to: maker is null.
  Ref new_version(c10::StorageImpl* storage, PyObject* object, PyObject* maker, PyObject* found, PyObject* pin) {
    Ref key(PyLong_FromVoidPtr(object));
    Ref made = bare_version(object, key.get());
    int64_t nbytes = rounded(static_cast<int64_t>(storage->nbytes()));
    version.nbytes.set_number(made.get(), nbytes);
    version.age.set(made.get(), slots.age.get(ledger_.get()));
    if (maker != nullptr) {
      version.cost.set(made.get(), signature.cost.get(found));
      version.operation.set(made.get(), maker);
    } else {
      version.pin.set(made.get(), pin);
    }
    if (PyDict_SetItem(slots.versions.get(ledger_.get()), key.get(), made.get()) < 0) raise();
    add(slots.resident_bytes, nbytes);
    note_peak(number(slots.resident_bytes));
    if (maker != nullptr) evictable(made.get());
    return made;
  }

  // -- bytes --

  // `Ledger.evictable`.
  void evictable(PyObject* one) {
    if (is_true(slots.pressure) && version.nbytes.number(one) >= number(slots.least_bytes)) rule.insert(one);
  }
  void note_peak(int64_t nbytes) {
    if (nbytes <= number(slots.step_peak_bytes)) return;
    slots.step_peak_bytes.set_number(ledger_.get(), nbytes);
    if (nbytes > number(slots.peak_bytes)) slots.peak_bytes.set_number(ledger_.get(), nbytes);
  }
  // `Ledger.emptied`.
  void emptied(PyObject* one) {
    version.resident.set(one, Py_False);
    int64_t nbytes = version.nbytes.number(one);
    add(slots.resident_bytes, -nbytes);
    add(slots.evicted_bytes, nbytes);
  }
  // `Ledger.restored`, without fingerprints.
  void restored(PyObject* one) {
    version.resident.set(one, Py_True);
    int64_t nbytes = version.nbytes.number(one);
    add(slots.evicted_bytes, -nbytes);
    add(slots.resident_bytes, nbytes);
    note_peak(number(slots.resident_bytes));
  }

  // `Ledger.scratch`: borrowed.
  PyObject* scratch() const { return scratch_.get(); }
  // `Ledger.hold_scratch`.
  void hold_scratch(PyObject* one, PyObject* storage) {
    int64_t nbytes = version.nbytes.number(one);
    Ref block = watching(block_class_.get(), storage);
    block_nbytes_.set_number(block.get(), nbytes);
    block_pin_.set(block.get(), no_pin_.get());
    block_address_.set_number(block.get(), 0);
    Ref place(PyLong_FromVoidPtr(block.get())), key(PyLong_FromVoidPtr(one));
    if (PyDict_SetItem(blocks_.get(), place.get(), block.get()) < 0) raise();
    if (PyDict_SetItem(scratch_.get(), key.get(), one) < 0) raise();
    version.block.take(one, block.release());
    add(slots.scratch_bytes, nbytes);
    add(slots.resident_bytes, nbytes);
    version.scratch.set(one, storage);
    version.resident.set(one, Py_True);
    note_peak(number(slots.resident_bytes));
  }
  // `Ledger.drop_scratch`.
  void drop_scratch(PyObject* one) {
    Ref kept = Ref::copy(one);  // the table may have the last reference
    int64_t nbytes = version.nbytes.number(one);
    Ref key(PyLong_FromVoidPtr(one)), place(PyLong_FromVoidPtr(version.block.get(one)));
    if (PyDict_GetItem(scratch_.get(), key.get()) != nullptr) {
      PyDict_DelItem(scratch_.get(), key.get());
      add(slots.scratch_bytes, -nbytes);
    }
    if (PyDict_GetItem(blocks_.get(), place.get()) != nullptr) {
      PyDict_DelItem(blocks_.get(), place.get());
      add(slots.resident_bytes, -nbytes);
    }
    version.block.set(one, Py_None);  // before the storage, whose death it would tell
    version.scratch.set(one, Py_None);
    version.resident.set(one, Py_False);
  }

  // An operator of the program has run.
  void ran(PyObject* found, int64_t cost) {
    int64_t calls = signature.calls.number(found);
    if (calls < SETTLED) {
      if (calls == 0 || cost < signature.cost.number(found)) signature.cost.set_number(found, cost);
      signature.calls.set_number(found, calls + 1);
    }
    add(slots.clock, signature.cost.number(found));
    add(slots.age, 1);
  }

  bool some_died() const { return Py_SIZE(slots.dead.get(ledger_.get())) != 0; }

  // `Ledger.collect_dead`.
  void collect_dead() {
    if (!some_died()) return;
    PyObject *accounts = ledger_.get(), *dead = slots.dead.get(accounts), *versions = slots.versions.get(accounts);
    bool pressure = is_true(slots.pressure);
    int64_t before = number(slots.resident_bytes);
    while (Py_SIZE(dead) != 0) {
      Ref first = checked(PySequence_GetItem(dead, 0));
      PyObject* one = first.get();
      if (Py_TYPE(one) != reinterpret_cast<PyTypeObject*>(version_class_.get())) break;  // a block
      checked(PyObject_CallNoArgs(pop_dead_.get()));
      PyObject* key = version.key.get(one);
      if (PyDict_GetItem(versions, key) != one) continue;  // superseded by a later version
      if (PyDict_DelItem(versions, key) < 0) raise();
      int64_t nbytes = version.nbytes.number(one);
      bool used = version.used.is_true(one);
      if (!version.scratch.is_none(one)) {
        add(slots.evicted_bytes, -nbytes);
      } else if (version.resident.is_true(one)) {
        add(slots.resident_bytes, -nbytes);
        version.resident.set(one, Py_False);
        if (pressure && !version.operation.is_none(one)) {
          rule.discard(one);
          if (used) rule.released(one);
        }
      } else {
        add(slots.evicted_bytes, -nbytes);
        rule.forget(one);
        if (used) rule.released(one);
      }
    }
    int64_t nbytes = before - number(slots.resident_bytes);
    if (Py_SIZE(dead) != 0) checked(PyObject_CallMethod(accounts, "collect_dead", nullptr));
    if (nbytes != 0) freed(nbytes);
  }

  // `Ledger.freed`, which decides the same once more when it is called.
  void freed(int64_t nbytes) {
    PyObject* accounts = ledger_.get();
    if (slots.heap.is_none(accounts)) return;
    int64_t total = number(slots.freed_bytes) + nbytes;
    slots.freed_bytes.set_number(accounts, total);
    bool unlimited = slots.budget_bytes.is_none(accounts);
    int64_t limit = number(unlimited ? slots.peak_bytes : slots.limit);
    if (total > limit >> LOOK_SHIFT && (is_true(slots.pressure) || unlimited))
      checked(PyObject_CallMethod(accounts, "freed", "i", 0));
  }

 private:
  Slot block_address_, block_nbytes_, block_pin_;
  int64_t mask_;
};

}  // namespace dtrrun

// The accounts of `core.ledger.Ledger`: versions by storage, those that come and go, and the bytes of each.
//
// Every function has the effect of the one in Python that it names, on the same objects.
#pragma once

#include <torch/csrc/Storage.h>

#include "figures.h"
#include "observers.h"
#include "policy.h"
#include "versions.h"

namespace dtrrun {

constexpr int LOOK_SHIFT = 4;  // as in core/ledger.py, like the next
constexpr int64_t LOOK_BYTES = 4 << 20;

// `Ledger.policy`, which may change between operators: one in C++, or any other through its Python methods.
class Rule {
 public:
  explicit Rule(PyObject* ledger) : ledger_(ledger) {}
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
  PyObject* object() const { return CounterFields().policy.get(ledger_); }
  Policy* native() const { return Py_TYPE(object()) == policy_type ? &policy_of(object()) : nullptr; }
  template <void (Policy::*event)(PyObject*)>
  void tell(const char* name, PyObject* version) {
    if (Policy* policy = native())
      (policy->*event)(version);
    else
      checked(PyObject_CallMethod(object(), name, "O", version));
  }
  PyObject* ledger_;  // which outlives this
};

class Accounts {
 public:
  Accounts(PyObject* ledger, PyObject* classes, int64_t mask)
      : ledger_(Ref::copy(ledger)), block_class_(Ref::copy(type_of(classes, "Block"))),
        on_death_(attribute(ledger, "on_death")), no_pin_(checked(PyUnicode_InternFromString(""))),
        mutated_(checked(PyUnicode_InternFromString("mutated"))),
        scratch_(attribute(ledger, "scratch")), blocks_(attribute(ledger, "blocks")),
        dead_(queue_of(counters.dead.get(ledger))), versions_(versions_of(counters.versions.get(ledger))),
        observers(ledger), fingerprints(ledger), rule(ledger), block_address_(block_class_.get(), "address"),
        block_nbytes_(block_class_.get(), "nbytes"), block_pin_(block_class_.get(), "pin"), mask_(mask) {}

  PyObject* get() const { return ledger_.get(); }
  template <class Field>
  int64_t number(const Field& field) const {
    return field.number(ledger_.get());
  }
  template <class Field>
  bool is_true(const Field& field) const {
    return field.is_true(ledger_.get());
  }
  template <class Field>
  void add(const Field& field, int64_t more) {
    field.add(ledger_.get(), more);
  }
  int64_t rounded(int64_t nbytes) const { return (nbytes - 1 - mask_) & mask_; }

  VersionFields version;
  CounterFields counters;

 private:  // made first
  Ref ledger_, block_class_, on_death_, no_pin_, mutated_, scratch_, blocks_;
  Queue& dead_;  // the ledger's, like the next
  Versions& versions_;

 public:
  SignatureFields signature;
  Observers observers;
  Fingerprints fingerprints;
  Rule rule;

  // -- versions --

  const Versions& versions() const { return versions_; }

  // The version of a tensor's storage: a borrowed reference, or null.
  PyObject* version_of(const at::Tensor& tensor) const {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (!impl->has_storage()) return nullptr;
    return version_at(impl->unsafe_storage().unsafeGetStorageImpl());
  }
  // Null, too, if the storage cannot be watched: all that concerns it is for Python.
  PyObject* version_at(const c10::StorageImpl* storage) const {
    VersionObject* found = versions_.find(storage);
    return found == nullptr || found->storage == nullptr ? nullptr : reinterpret_cast<PyObject*>(found);
  }
  // Whether the program has a version's storage (`Version.has_storage`), which can be watched.
  static bool has_storage(PyObject* one) { return is_alive(as_version(one)->storage); }
  // That storage, or null.
  static StorageRef storage_of(PyObject* one) { return held(as_version(one)->storage); }
  // The storage of a version's own memory (`Version.memory`), or none.
  c10::Storage memory_of(PyObject* one) const {
    if (!version.scratch.is_none(one)) return THPStorage_Unpack(version.scratch.get(one));
    return c10::Storage(version.superseded.is_true(one) ? StorageRef() : storage_of(one));
  }
  // What a weak reference refers to: borrowed, or null.
  static PyObject* referent(PyObject* reference) {
    PyObject* found = PyWeakref_GetObject(reference);
    return found == Py_None ? nullptr : found;
  }

  // `Graph.new_version`, without its size and age.
  Ref bare_version(c10::StorageImpl* storage) {
    Ref made = blank_version();
    take_storage(as_version(made.get()), storage);
    as_version(made.get())->last_access = number(counters.clock);
    return made;
  }

  // `Recipes.supersede`. maker: the mutation as a recipe, or null if there is none. found: its signature.
  Ref supersede(PyObject* target, PyObject* maker, PyObject* found) {
    Ref made = bare_version(as_version(target)->storage);
    version.nbytes.set_number(made.get(), version.nbytes.number(target));
    version.age.set_number(made.get(), version.age.number(target));
    version.mutations.set_number(made.get(), version.mutations.number(target) + 1);
    if (fingerprints.are_taken()) version.extent.set_number(made.get(), version.extent.number(target));
    version.escaped.set(made.get(), version.escaped.is_true(target));
    version.superseded.set(target, true);
    bool has_copy = !version.copy.is_none(target);
    if (has_copy) {
      version.scratch.set(target, version.copy.get(target));
      version.copy.clear(target);
      version.escaped.set(target, false);
    }
    version.resident.set(target, has_copy);
    version.uses.set(target, nothing);
    versions_.put(as_version(made.get()));
    if (maker == nullptr) {
      PyObject* pin = version.pin.get(target);
      version.pin.set(made.get(), pin == Py_None ? mutated_.get() : pin);
    } else {
      version.operation.set(made.get(), maker);
      version.cost.set_number(made.get(), signature.cost.number(found));
    }
    if (is_true(counters.pressure) && !version.operation.is_none(target)) rule.released(target);
    if (maker != nullptr) evictable(made.get());
    return made;
  }

  // `Operators.enter`, or `adopt` for memory that nothing has written to: maker is null.
  Ref new_version(c10::StorageImpl* storage, PyObject* maker, PyObject* found, PyObject* pin) {
    Ref made = bare_version(storage);
    int64_t nbytes = rounded(static_cast<int64_t>(storage->nbytes()));
    version.nbytes.set_number(made.get(), nbytes);
    version.age.set_number(made.get(), number(counters.age));
    if (maker != nullptr) {
      version.cost.set_number(made.get(), signature.cost.number(found));
      version.operation.set(made.get(), maker);
    } else {
      version.pin.set(made.get(), pin);
    }
    versions_.put(as_version(made.get()));
    add(counters.resident_bytes, nbytes);
    note_peak(number(counters.resident_bytes));
    if (maker != nullptr) evictable(made.get());
    return made;
  }

  // -- bytes --

  // `Ledger.evictable`.
  void evictable(PyObject* one) {
    if (is_true(counters.pressure) && version.nbytes.number(one) >= number(counters.least_bytes)) rule.insert(one);
  }
  void note_peak(int64_t nbytes) {
    if (nbytes <= number(counters.step_peak_bytes)) return;
    counters.step_peak_bytes.set_number(ledger_.get(), nbytes);
    if (nbytes > number(counters.peak_bytes)) counters.peak_bytes.set_number(ledger_.get(), nbytes);
  }
  void decided(Decision decision, PyObject* one) {
    note_decision(ledger_.get(), decision, version.nbytes.number(one), version.age.number(one), version.mutations.number(one));
  }
  // `Ledger.emptied`.
  void emptied(PyObject* one) {
    decided(Decision::EMPTIED, one);
    version.resident.set(one, false);
    int64_t nbytes = version.nbytes.number(one);
    add(counters.resident_bytes, -nbytes);
    add(counters.evicted_bytes, nbytes);
  }
  // `Ledger.restored`.
  void restored(PyObject* one) {
    decided(Decision::RESTORED, one);
    version.resident.set(one, true);
    int64_t nbytes = version.nbytes.number(one);
    add(counters.evicted_bytes, -nbytes);
    add(counters.resident_bytes, nbytes);
    note_peak(number(counters.resident_bytes));
    fingerprints.compare(one);
  }

  // `Ledger.scratch`: borrowed.
  PyObject* scratch() const { return scratch_.get(); }
  // `Ledger.hold_scratch`.
  void hold_scratch(PyObject* one, PyObject* storage) {
    decided(Decision::HELD, one);
    int64_t nbytes = version.nbytes.number(one);
    auto* type = reinterpret_cast<PyTypeObject*>(block_class_.get());  // a subclass of `weakref.ref`
    Ref given = checked(PyTuple_Pack(2, storage, on_death_.get()));
    Ref block = checked(type->tp_base->tp_new(type, given.get(), nullptr));
    block_nbytes_.set_number(block.get(), nbytes);
    block_pin_.set(block.get(), no_pin_.get());
    block_address_.set_number(block.get(), 0);
    Ref place(PyLong_FromVoidPtr(block.get())), key(PyLong_FromVoidPtr(one));
    if (PyDict_SetItem(blocks_.get(), place.get(), block.get()) < 0) raise();
    if (PyDict_SetItem(scratch_.get(), key.get(), one) < 0) raise();
    version.block.take(one, block.release());
    add(counters.scratch_bytes, nbytes);
    add(counters.resident_bytes, nbytes);
    version.scratch.set(one, storage);
    version.resident.set(one, true);
    note_peak(number(counters.resident_bytes));
  }
  // `Ledger.drop_scratch`.
  void drop_scratch(PyObject* one) {
    decided(Decision::DROPPED, one);
    Ref kept = Ref::copy(one);  // the table may have the last reference
    int64_t nbytes = version.nbytes.number(one);
    Ref key(PyLong_FromVoidPtr(one)), place(PyLong_FromVoidPtr(version.block.get(one)));
    if (PyDict_GetItem(scratch_.get(), key.get()) != nullptr) {
      PyDict_DelItem(scratch_.get(), key.get());
      add(counters.scratch_bytes, -nbytes);
    }
    if (PyDict_GetItem(blocks_.get(), place.get()) != nullptr) {
      PyDict_DelItem(blocks_.get(), place.get());
      add(counters.resident_bytes, -nbytes);
    }
    version.block.clear(one);  // before the storage, whose death it would tell
    version.scratch.clear(one);
    version.resident.set(one, false);
  }

  // `Recipes.lose`.
  void lose(PyObject* one) {
    decided(Decision::LOST, one);
    bool pressure = is_true(counters.pressure);
    if (pressure) rule.forget(one);
    if (!version.scratch.is_none(one)) {
      if (pressure) rule.discard(one);
      drop_scratch(one);
    }
    version.operation.clear(one);
  }

  // An operator of the program has run.
  void ran(PyObject* found, int64_t cost) {
    learn_cost(found, cost);
    add(counters.clock, signature.cost.number(found));
    add(counters.age, 1);
  }
  void learn_cost(PyObject* found, int64_t cost) {
    int64_t calls = signature.calls.number(found);
    if (calls >= SETTLED) return;
    if (calls == 0 || cost < signature.cost.number(found)) signature.cost.set_number(found, cost);
    signature.calls.set_number(found, calls + 1);
  }

  bool some_died() const { return !dead_.empty(); }

  // `Ledger.collect_dead`.
  void collect_dead() {
    if (!some_died()) return;
    bool pressure = is_true(counters.pressure);
    int64_t before = number(counters.resident_bytes);
    while (some_died() && Py_TYPE(dead_.front()) == version_type) {
      Ref first = dead_.pop();
      PyObject* one = first.get();
      if (versions_.find(version.key.number(one)) != as_version(one)) continue;  // superseded by a later version
      if (observers.any()) tell_death(one);
      versions_.remove(version.key.number(one));
      int64_t nbytes = version.nbytes.number(one);
      bool used = version.used.is_true(one);
      if (!version.scratch.is_none(one)) {
        add(counters.evicted_bytes, -nbytes);
      } else if (version.resident.is_true(one)) {
        add(counters.resident_bytes, -nbytes);
        version.resident.set(one, false);
        if (pressure && !version.operation.is_none(one)) {
          rule.discard(one);
          if (used) rule.released(one);
        }
      } else {
        add(counters.evicted_bytes, -nbytes);
        rule.forget(one);
        if (used) rule.released(one);
      }
    }
    int64_t nbytes = before - number(counters.resident_bytes);
    if (some_died()) checked(PyObject_CallMethod(ledger_.get(), "collect_dead", nullptr));  // a block
    if (nbytes != 0) freed(nbytes);
  }

  // `Ledger.freed`, which decides the same once more when it is called.
  void freed(int64_t nbytes) {
    PyObject* accounts = ledger_.get();
    if (counters.heap.is_none(accounts)) return;
    int64_t total = number(counters.freed_bytes) + nbytes;
    counters.freed_bytes.set_number(accounts, total);
    bool unlimited = counters.budget_bytes.is_none(accounts);
    int64_t limit = unlimited ? number(counters.peak_bytes) : number(counters.limit);
    if (total > std::max(limit >> LOOK_SHIFT, LOOK_BYTES))
      checked(PyObject_CallMethod(accounts, "freed", "i", 0));
  }

 private:
  // Before no table has it any more: until then no other storage gets its address.
  void tell_death(PyObject* one) {
    try {
      observers.died(one);
    } catch (...) {  // an interrupt: it will be told again
      dead_.prepend(one);
      throw;
    }
  }

  Slot block_address_, block_nbytes_, block_pin_;
  int64_t mask_;
};

}  // namespace dtrrun

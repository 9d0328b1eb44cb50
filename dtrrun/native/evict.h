// Makes room: the eviction loop (`core.evict.Eviction`), and what it calls to keep recipes replayable
// (`core.recipes.Recipes`) and to manage recomputed memory that the program does not have
// (`core.deallocation.Deallocation`).
//
// Every function has the effect of the one in Python that it names. All of this is done with the GIL.
#pragma once

#include <unordered_set>

#include "ledger.h"
#include "placeholders.h"

namespace dtrrun {

constexpr int KEPT = 4, SCRATCH_SHIFT = 3;  // as in core/deallocation.py, like the next
constexpr size_t FARTHEST = 16;

class Evictions {
 public:
  Evictions(PyObject* dtr, PyObject* classes, Accounts& accounts)
      : eviction_(attribute(dtr, "eviction")), deallocation_(attribute(dtr, "deallocation")),
        recipes_(attribute(dtr, "recipes")), foreign_(attribute(recipes_.get(), "foreign")),
        decision_observers(accounts.get()), reserved_(attribute(accounts.get(), "reserved")),
        overhead_(attribute(accounts.get(), "overhead")),
        evicted_by_(attribute(eviction_.get(), "evicted_by")), came_back_(attribute(deallocation_.get(), "_came_back")),
        may_be_evicted_(attribute(eviction_.get(), "may_be_evicted")),
        warn_only_(truth(eviction_.get(), "warn_only")), in_python_(truth(eviction_.get(), "in_python")),
        garbage_(attribute(dtr, "garbage")), rematerializer_(attribute(dtr, "rematerializer")), accounts_(accounts),
        count_(type_of(classes, "Eviction"), "evictions"),
        nbytes_(type_of(classes, "Eviction"), "evicted_bytes_total"),
        making_room_ns_(type_of(classes, "Eviction"), "making_room_ns"),
        replaying_(type_of(classes, "Eviction"), "replaying"), due_ns_(type_of(classes, "Garbage"), "due_ns"),
        recomputed_ns_(type_of(classes, "Rematerializer"), "operators_ns"), swept_(type_of(classes, "Deallocation"), "swept"),
        gradient_(checked(PyUnicode_InternFromString("gradient"))) {}

  DecisionObservers decision_observers;

  // `Eviction.in_python`.
  bool in_python() const { return in_python_; }

  // Whether operators that are under way have reserved memory (`Ledger.reserved`).
  bool any_reserved() const { return PyDict_GET_SIZE(reserved_.get()) != 0; }
  int64_t reserved_bytes() const { return attribute_number(accounts_.get(), "reserved_bytes"); }
  void reserve(PyObject* key, int64_t nbytes) const {
    Ref own = checked(Py_BuildValue("(kL)", PyThread_get_thread_ident(), static_cast<long long>(nbytes)));
    if (PyDict_SetItem(reserved_.get(), key, own.get()) < 0) raise();
  }
  void give_back(PyObject* key) const {
    if (PyDict_DelItem(reserved_.get(), key) < 0) PyErr_Clear();
  }

  // -- room --

  // `Eviction.make_room`, for a call of this signature. Raises the budget error.
  void make_room(int64_t nbytes, PyObject* found) {
    accounts_.collect_dead();
    bool alone = !any_reserved() && !in_python();
    if (alone && fits(nbytes)) return;
    Ref name = attribute(signature_.operator_.get(found), "name");
    const char* rest = alone ? "no_room" : "make_room";
    checked(PyObject_CallMethod(eviction_.get(), rest, "LO", static_cast<long long>(nbytes), name.get()));
  }

  // `Eviction._evict_to`.
  bool evict_to(int64_t most) {
    int64_t started = now_ns();
    if (!accounts_.is_true(ledger_.pressure)) checked(PyObject_CallMethod(accounts_.get(), "begin_pressure", nullptr));
    if (!any_replaying() && recomputed_ns_.number(rematerializer_.get()) >= due_ns_.number(garbage_.get()))
      checked(PyObject_CallMethod(garbage_.get(), "when_due", nullptr));
    bool fits = true;
    while (accounts_.number(ledger_.resident_bytes) > most) {
      if (sweep()) continue;
      int64_t began = decision_observers.start();
      Ref victim = accounts_.rule.select(accounts_.number(ledger_.clock), may_be_evicted_.get(),
                                         [&](PyObject* one) { return may_be_evicted(one); });
      if (began != 0) decision_observers.searched(victim.get(), began);
      if (victim) {
        StorageRef storage = Accounts::storage_of(victim.get());  // so that it outlives what Python does in between
        if (secure(victim.get())) evict(victim.get(), storage.get());
      } else if (accounts_.some_died()) {
        accounts_.collect_dead();
      } else if (checked(PyObject_CallMethod(eviction_.get(), "collect_garbage", nullptr)).get() != Py_True) {
        fits = false;
        break;
      }
    }
    add(making_room_ns_, now_ns() - started);
    return fits;
  }

  // Whether a garbage collection gives reason to try once more what the program has asked for since this time, in ns.
  bool found_garbage(int64_t since) {
    int64_t started = now_ns();
    Ref found = checked(PyObject_CallMethod(garbage_.get(), "before_refusing", "L", static_cast<long long>(since)));
    add(making_room_ns_, now_ns() - started);
    return found.get() == Py_True;
  }

  // ns so far.
  int64_t making_room_ns() const { return making_room_ns_.number(eviction_.get()); }

  // Counts the rematerializations in progress.
  void replaying(int64_t more) { add(replaying_, more); }
  bool any_replaying() const { return replaying_.number(eviction_.get()) != 0; }

  // -- recomputed memory that the program does not have --

  // `Deallocation.was_read`. others: whether other recipes may read it.
  void was_read(PyObject* one, bool others) {
    if (others) {
      if (accounts_.is_true(ledger_.pressure)) accounts_.rule.insert(one);
    } else {
      accounts_.drop_scratch(one);
      accounts_.rule.released(one);
    }
  }

  // `Deallocation.trim`.
  void trim() {
    PyObject* scratch = accounts_.scratch();
    if (PyDict_GET_SIZE(scratch) == 0) return;
    int64_t allowed = ledger_.budget_bytes.is_none(accounts_.get()) ? 0 : accounts_.number(ledger_.limit) >> SCRATCH_SHIFT;
    if (accounts_.number(ledger_.scratch_bytes) <= allowed) return;
    std::vector<Ref> idle;
    PyObject *key, *one;
    int64_t excess = -allowed;
    for (Py_ssize_t place = 0; PyDict_Next(scratch, &place, &key, &one);) {
      if (version_.locks.number(one) != 0) continue;
      idle.push_back(Ref::copy(one));
      excess += version_.nbytes.number(one);
    }
    for (const Ref& version : idle) {
      if (excess <= 0) break;
      excess -= version_.nbytes.number(version.get());
      accounts_.drop_scratch(version.get());
      accounts_.rule.released(version.get());
    }
  }

  // `Deallocation.came_back`.
  void came_back(PyObject* maker) {
    PyObject* kept = operation_.kept_inputs.get(maker);
    if (PyTuple_GET_SIZE(kept) == 0) return;
    Ref pair = checked(PyTuple_Pack(2, maker, kept));
    if (PyList_Append(came_back_.get(), pair.get()) < 0) raise();
  }
  void release_kept_inputs() {
    if (PyList_GET_SIZE(came_back_.get()) != 0)
      checked(PyObject_CallMethod(deallocation_.get(), "release_kept_inputs", nullptr));
  }

 private:
  // Whether so much more fits into the budget, once others are evicted. The caller is alone.
  bool fits(int64_t nbytes) {
    if (room_for(nbytes)) return true;
    if (PyDict_GET_SIZE(overhead_.get()) != 0) {  // some of it may have been freed
      checked(PyObject_CallMethod(accounts_.get(), "look_outside", nullptr));
      if (room_for(nbytes)) return true;
    }
    return evict_to(accounts_.number(ledger_.limit) - nbytes);
  }
  bool room_for(int64_t nbytes) const {
    return accounts_.number(ledger_.resident_bytes) + nbytes <= accounts_.number(ledger_.limit);
  }

  void add(const Slot& counter, int64_t more) {
    counter.set_number(eviction_.get(), counter.number(eviction_.get()) + more);
  }

  // `Eviction.may_be_evicted`.
  bool may_be_evicted(PyObject* one) const {
    if (version_.locks.number(one) != 0 || !version_.resident.is_true(one) || version_.operation.is_none(one))
      return false;
    if (!version_.scratch.is_none(one)) return !(warn_only_ && any_replaying());
    return Accounts::has_storage(one);
  }

  // `Eviction.evict`. storage: the program's, or null.
  void evict(PyObject* one, c10::StorageImpl* storage) {
    int64_t nbytes = version_.nbytes.number(one), started = decision_observers.start();
    add(count_, 1);
    add(nbytes_, nbytes);
    Ref name = attribute(signature_.operator_.get(operation_.signature.get(version_.operation.get(one))), "name");
    PyObject* before = PyDict_GetItem(evicted_by_.get(), name.get());
    Ref count(PyLong_FromLongLong(before == nullptr ? 1 : as_number(before) + 1));
    if (PyDict_SetItem(evicted_by_.get(), name.get(), count.get()) < 0) raise();
    if (!version_.scratch.is_none(one)) {
      accounts_.drop_scratch(one);
      accounts_.rule.released(one);
    } else {
      keep_inputs(one);
      accounts_.fingerprints.take(one);
      accounts_.emptied(one);
      empty(storage);
      accounts_.rule.evicted(one);
    }
    accounts_.freed(nbytes);
    if (started != 0) decision_observers.evicted(one, started);
  }

  // `Deallocation.sweep`.
  bool sweep() {
    PyObject* scratch = accounts_.scratch();
    Py_ssize_t size = PyDict_GET_SIZE(scratch);
    int64_t evictions = count_.number(eviction_.get());
    if (size == 0 || evictions - swept_.number(deallocation_.get()) < size >> 4) return false;
    swept_.set_number(deallocation_.get(), evictions + 1);
    Ref keys = checked(PyDict_Keys(scratch));
    for (Py_ssize_t i = size - 1; i >= 0; i--) {
      PyObject* one = PyDict_GetItem(scratch, PyList_GET_ITEM(keys.get(), i));
      if (one == nullptr || version_.locks.number(one) != 0) continue;
      bool read_by_others = Py_REFCNT(one) > 1 + !version_.bound.is_none(one);  // the ledger's table, the policy's
      if (read_by_others) continue;
      Ref kept = Ref::copy(one);
      accounts_.rule.discard(one);
      accounts_.drop_scratch(one);
    }
    return true;
  }

  // `Deallocation.keep_inputs`.
  void keep_inputs(PyObject* one) {
    operation_.kept_inputs.take(version_.operation.get(one), dear_inputs(one).release());
    std::unordered_set<PyObject*> seen;
    std::vector<PyObject*> pending{one};
    for (size_t i = 0; i < pending.size(); i++) {
      each_dependent(pending[i], [&](PyObject* reader) {
        PyObject* maker = version_.operation.get(reader);
        if (maker == Py_None || !seen.insert(reader).second) return;
        if (PyTuple_GET_SIZE(operation_.kept_inputs.get(maker)) != 0) {
          Ref others = checked(PyList_New(0));
          for (PyObject* content : Items(operation_.kept_inputs.get(maker)))
            if (key_of(content) != version_.key.number(one)) PyList_Append(others.get(), content);
          operation_.kept_inputs.take(maker, checked(PyList_AsTuple(others.get())).release());
        }
        if (is_released(reader) && pending.size() < FARTHEST) pending.push_back(reader);
      });
    }
  }
  // `Deallocation._dear_inputs`, as a tuple.
  Ref dear_inputs(PyObject* one) {
    using Wide = __int128;
    Wide nbytes = version_.nbytes.number(one);
    Ref kept = checked(PyList_New(0));
    std::unordered_set<PyObject*> seen;
    std::vector<std::pair<PyObject*, int64_t>> pending{{one, version_.cost.number(one)}};
    for (size_t i = 0; i < pending.size(); i++) {
      auto [node, cost] = pending[i];
      for (PyObject* source : operation_.inputs(version_.operation.get(node))) {
        if (version_.operation.is_none(source) || !seen.insert(source).second) continue;
        if (!version_.resident.is_true(source) || !version_.scratch.is_none(source)) {
          if (is_released(source) && pending.size() < FARTHEST)
            pending.emplace_back(source, cost + version_.cost.number(source));
          continue;
        }
        Wide own = Wide{KEPT} * cost * version_.nbytes.number(source);
        if (accounts_.rule.projected_cost(source) * nbytes <= own) continue;
        if (StorageRef content = Accounts::storage_of(source))
          PyList_Append(kept.get(), object_of(c10::Storage(std::move(content))).get());
      }
    }
    return checked(PyList_AsTuple(kept.get()));
  }
  // Whether the program has let go of it.
  bool is_released(PyObject* one) const {
    return version_.superseded.is_true(one) || !Accounts::has_storage(one);
  }

  // -- recipes --

  // `Recipes.secure`.
  bool secure(PyObject* wanted) {
    struct Frame {
      Ref node;
      Py_ssize_t position;
      std::vector<Ref> constants;
    };
    if (version_.operation.is_none(wanted)) return false;
    std::vector<Frame> stack;
    stack.push_back({Ref::copy(wanted), 0, {}});
    while (!stack.empty()) {
      Frame frame = std::move(stack.back());
      stack.pop_back();
      PyObject* node = frame.node.get();
      Ref maker = Ref::copy(version_.operation.get(node));
      if (maker.get() == Py_None || operation_.secured.is_true(maker.get())) continue;
      Items inputs = operation_.inputs(maker.get());
      bool broken = false, deeper = false;
      for (; frame.position < inputs.size(); frame.position++) {
        PyObject* source = inputs[frame.position];
        PyObject* below = version_.operation.get(source);
        if (below != Py_None) {
          if (operation_.secured.is_true(below)) continue;
          stack.push_back(std::move(frame));
          stack.push_back({Ref::copy(source), 0, {}});
          deeper = true;
          break;
        }
        c10::Storage content = version_.resident.is_true(source) ? accounts_.memory_of(source) : c10::Storage();
        if (content && version_.escaped.is_true(source) &&
            checked(PyObject_CallMethod(foreign_.get(), "may_be_read", "O", source)).get() != Py_True)
          content = c10::Storage();
        // A gradient is released soon: keeping it for a replay would take the memory that the eviction frees.
        if (!content || is_gradient(source)) {
          broken = true;
          break;
        }
        frame.constants.push_back(object_of(content));
      }
      if (deeper) continue;
      if (!broken) {
        settle(node, maker.get(), inputs, frame.constants);
      } else if (version_.resident.is_true(node) && version_.scratch.is_none(node)) {
        checked(PyObject_CallMethod(recipes_.get(), "make_constant", "Os", node, "input lost"));
      } else {
        checked(PyObject_CallMethod(recipes_.get(), "lose", "O", node));
      }
    }
    return !version_.operation.is_none(wanted);
  }
  bool is_gradient(PyObject* source) const {
    PyObject* pin = version_.pin.get(source);
    return pin == gradient_.get() || (pin != Py_None && PyUnicode_Compare(pin, gradient_.get()) == 0);
  }
  // Everything that an operation reads stays replayable: so does what it makes.
  void settle(PyObject* node, PyObject* maker, const Items& inputs, std::vector<Ref>& constants) {
    Ref all = checked(PyTuple_New(static_cast<Py_ssize_t>(constants.size())));
    for (size_t i = 0; i < constants.size(); i++) PyTuple_SET_ITEM(all.get(), i, constants[i].release());
    operation_.constants.take(maker, all.release());
    operation_.each_made(maker, node, [&](int64_t, PyObject* output) { note_dependent(inputs, output); });
    operation_.secured.set(maker, true);
  }
  // `_note_dependent`, for each of these.
  void note_dependent(const Items& inputs, PyObject* node) {
    Ref reference = checked(PyWeakref_NewRef(node, nullptr));
    for (PyObject* source : inputs) {
      if (version_.needed_by.is_none(source)) version_.needed_by.take(source, checked(PyList_New(0)).release());
      PyObject* dependents = version_.needed_by.get(source);
      if (PyList_Append(dependents, reference.get()) < 0) raise();
      Py_ssize_t size = PyList_GET_SIZE(dependents);
      if ((size & (size - 1)) != 0 || size < 64) continue;
      Ref alive = checked(PyList_New(0));
      for (PyObject* one : Items(dependents))
        if (Accounts::referent(one) != nullptr) PyList_Append(alive.get(), one);
      if (PyList_SetSlice(dependents, 0, size, alive.get()) < 0) raise();
    }
  }
  template <class Function>
  void each_dependent(PyObject* one, const Function& function) {
    if (version_.needed_by.is_none(one)) return;
    for (PyObject* reference : Items(version_.needed_by.get(one)))
      if (PyObject* node = Accounts::referent(reference)) function(node);
  }

  Ref eviction_, deallocation_, recipes_, foreign_, reserved_, overhead_, evicted_by_, came_back_, may_be_evicted_;
  bool warn_only_, in_python_;
  Ref garbage_, rematerializer_;
  Accounts& accounts_;
  VersionFields version_;
  OperationFields operation_;
  SignatureFields signature_;
  CounterFields ledger_;
  Slot count_, nbytes_, making_room_ns_, replaying_, due_ns_, recomputed_ns_, swept_;
  Ref gradient_;
};

}  // namespace dtrrun

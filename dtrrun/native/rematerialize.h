// Brings evicted versions back: `Rematerializer._materialize` in core/rematerialize.py, which says why it is done so.
//
// Single operations are run by `Replays`; what that does not know, by `Rematerializer.run_alone` in Python.
#pragma once

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <optional>

#include "replays.h"
#include "silence.h"
#include "way_in.h"

namespace dtrrun {

class Rematerializations {
 public:
  Rematerializations(PyObject* slow_path, PyObject* dtr, PyObject* classes, Accounts& accounts, Evictions& evictions,
                     Replays& replays, const Device& device)
      : slow_path_(Ref::copy(slow_path)), rematerializer_(attribute(dtr, "rematerializer")),
        between_(attribute(rematerializer_.get(), "_between")),
        memory_(attribute(accounts.get(), "memory")), next_tick_(type_of(classes, "SlowPath"), "next_tick"),
        began_(type_of(classes, "Rematerializer"), "began"),
        budget_error_(attribute(attribute(dtr, "eviction").get(), "BudgetError")), accounts_(accounts),
        evictions_(evictions), replays_(replays), device_(device) {}

  // `Rematerializer.materialize`: makes all targets resident. Returns false, before anything has changed, if that is for
  // Python. Raises the budget error.
  template <class Refs>
  bool bring_back(const Refs& targets) {
    PyObject* self = rematerializer_.get();
    Off off;
    if (!began_.is_none(self) || !may_run()) return false;
    c10::SmallVector<PyObject*, 6> missing;
    for (const Ref& one : targets)
      if (!version_.resident.is_true(one.get())) missing.push_back(one.get());
    int64_t before = accounts_.number(accounts_.counters.clock);
    {
      Began now(began_, self, evictions_.making_room_ns() + replays_.operators_ns());
      Ref error;
      {
        Silent silent;
        error = budget_error_of(missing);
      }
      if (error && !frugally(targets)) {
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
        raise();
      }
    }
    // `Rematerializer._learn_costs`.
    int64_t cost = accounts_.number(accounts_.counters.clock) - before;
    for (PyObject* one : missing)
      version_.cost.set_number(one, std::max<int64_t>(version_.cost.number(one), cost / int64_t(missing.size())));
    return true;
  }

  // The same, for Python, which has begun it.
  bool run_for_python(PyObject* targets) {
    Off off;
    if (!may_run()) return false;
    c10::SmallVector<PyObject*, 6> missing;
    for (PyObject* one : Items(targets))
      if (!version_.resident.is_true(one)) missing.push_back(one);
    run(missing);
    return true;
  }

  bool is_budget_error(const python_error& error) const {
    return PyErr_GivenExceptionMatches(error.type, budget_error_.get());
  }

 private:
  static constexpr int MAX_RELAXATIONS = 10, LAST_PLANNED = 7, TURNED = 6;  // as in core/rematerialize.py
  static constexpr size_t MOST_ALONE = 4, FEW_ALONE = 64;

  // An operation about to run, with the numbers of its inputs locked and unlocked so far.
  struct Entered {
    Ref version, operation;
    Py_ssize_t locked = 0, unlocked = 0;
  };

  // The operations to be run: for each a version that it makes, and the inputs locked for it. In order of entry.
  class Plan {
   public:
    struct One {
      Ref version;
      std::vector<Ref> locked;
      size_t unlocked = 0;  // how many of these have been unlocked since
    };
    One* find(PyObject* operation) {
      auto place = places_.find(operation);
      return place == places_.end() ? nullptr : &*all_[place->second];
    }
    One& add(PyObject* operation, PyObject* version) {
      places_[operation] = all_.size();
      all_.push_back(One{Ref::copy(version)});
      return *all_.back();
    }
    void remove(PyObject* operation) {
      auto place = places_.find(operation);
      all_[place->second].reset();
      places_.erase(place);
      if (places_.empty()) all_.clear();
    }
    bool empty() const { return places_.empty(); }
    size_t size() const { return places_.size(); }
    void clear() {
      places_.clear();
      all_.clear();
    }
    std::vector<std::optional<One>>& all() { return all_; }

   private:
    std::unordered_map<PyObject*, size_t> places_;
    std::vector<std::optional<One>> all_;
  };

  struct Work {
    std::vector<Ref> stack;  // versions, and operations that are planned
    std::vector<Entered> entered;
    Plan plan;
    int relaxations = MAX_RELAXATIONS;
    Ref without_workspace;  // the operation that may run without it
    size_t planned = 0, alone = 0;  // operations of the first plan; those that have run since plans were given up
    Ref error;  // the last budget error
    std::vector<Ref> targets;
  };

  // While a rematerialization is in progress (`Rematerializer.began`).
  class Began {
   public:
    Began(const Slot& began, PyObject* rematerializer, int64_t accounted) : began_(began), rematerializer_(rematerializer) {
      began.take(rematerializer, checked(Py_BuildValue("(LL)", static_cast<long long>(now_ns()),
                                                       static_cast<long long>(accounted))).release());
    }
    ~Began() { began_.set(rematerializer_, Py_None); }
    Began(const Began&) = delete;

   private:
    const Slot& began_;
    PyObject* rematerializer_;
  };

  bool may_run() const {
    return !evictions_.in_python() && c10::impl::TorchDispatchModeTLS::stack_len() == 0 && device_.is_bound() &&
           device_.is_current() && device_.on_main_stream();
  }

  // `Rematerializer._error_of`: the error without frames, which hold references to versions. Null if there is none.
  Ref budget_error_of(const c10::SmallVector<PyObject*, 6>& missing) {
    try {
      run(missing);
      return Ref();
    } catch (const python_error& error) {
      if (!is_budget_error(error)) throw;
      return without_frames(std::current_exception());
    }
  }
  static Ref without_frames(const std::exception_ptr& exception) {
    Ref error = as_error(exception);
    if (PyObject_SetAttrString(error.get(), "__traceback__", Py_None) < 0) raise();
    return error;
  }

  // `Rematerializer.frugally`, for targets that the caller has locked: what did not fit may fit in another way.
  template <class Refs>
  bool frugally(const Refs& targets) {
    return checked(PyObject_CallMethod(rematerializer_.get(), "frugally", "(O)", as_tuple(targets).get())).get() == Py_True;
  }

  // missing: what is evicted.
  void run(const c10::SmallVector<PyObject*, 6>& missing) {
    if (missing.empty()) return;
    Work work;
    for (PyObject* one : missing) work.stack.push_back(Ref::copy(one));
    for (PyObject* one : missing) work.targets.push_back(Ref::copy(one));
    c10::InferenceMode no_inference(false);  // as `runtime.guards.below`, like the next
    c10::impl::ExcludeDispatchKeyGuard beneath_the_program(way_in.above);
    evictions_.replaying(1);
    try {
      materialize(work);
    } catch (...) {
      end(work);
      throw;
    }
    end(work);
  }

  void materialize(Work& work) {
    auto& [stack, entered, plan, relaxations, without_workspace, planned, alone, last, targets] = work;
    while (!stack.empty()) {
      Ref version = Ref::copy(stack.back().get());
      if (Py_TYPE(version.get()) == operation_type) {
        stack.pop_back();
        if (Plan::One* planned = plan.find(version.get())) stack.push_back(Ref::copy(planned->version.get()));
        continue;
      }
      bool waiting = !entered.empty() && entered.back().version.get() == version.get();
      if (version_.resident.is_true(version.get())) {
        stack.pop_back();
        if (waiting) {
          unplan(plan, entered.back().operation.get());
          leave(entered);
        }
        continue;
      }
      Ref maker = Ref::copy(version_.operation.get(version.get()));
      if (maker.get() == Py_None) checked(PyObject_CallMethod(rematerializer_.get(), "refuse", "O", version.get()));
      if (!waiting) {
        if (relaxations >= LAST_PLANNED && plan.find(maker.get()) == nullptr) {
          add_to(plan, version.get(), stack);
          if (planned == 0) planned = plan.size();
          if (stack.back().get() != version.get()) continue;
        }
        entered.push_back({Ref::copy(version.get()), Ref::copy(maker.get())});
        enter(entered.back());
      }
      accounts_.collect_dead();
      Items inputs = operation_.inputs(maker.get());
      size_t before = stack.size();
      for (Py_ssize_t i = inputs.size() - 1; i >= 0; i--)
        if (!version_.resident.is_true(inputs[i])) stack.push_back(Ref::copy(inputs[i]));
      if (stack.size() != before) {
        if (relaxations == TURNED) std::reverse(stack.begin() + before, stack.end());
        continue;
      }
      unplan(plan, maker.get());
      if (relaxations < LAST_PLANNED && last && ++alone > MOST_ALONE * planned + FEW_ALONE) {
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(last.get())), last.get());
        raise();  // it could take exponentially long: `frugally` is better
      }
      try {
        if (!run(version.get(), maker.get(), without_workspace.get() == maker.get())) continue;
      } catch (const python_error& error) {
        if (!is_budget_error(error)) throw;
        last = without_frames(std::current_exception());
        if (relaxations == MAX_RELAXATIONS && ends_at_once(work)) throw;
        if ((entered.size() < 2 && plan.empty()) || relaxations == 0) {
          if (without_workspace.get() == maker.get() || !replays_.has_workspace(maker.get())) throw;
          does_without(work, std::move(maker));  // the library can
          continue;
        }
        // What is needed only later need not be locked yet and can be brought back in its turn.
        relaxations--;
        give_up(plan);
        for (size_t i = 0; i + 1 < entered.size(); i++) back_out(entered[i]);
        entered.erase(entered.begin(), entered.end() - 1);
        continue;
      }
      if (now_ns() > next_tick_.number(slow_path_.get())) checked(PyObject_CallNoArgs(between_.get()));
      stack.pop_back();
      leave(entered);
      evictions_.came_back(maker.get());
    }
  }

  // `Rematerializer.ends_at_once`.
  bool ends_at_once(const Work& work) {
    Ref targets = as_tuple(work.targets);
    return checked(PyObject_CallMethod(rematerializer_.get(), "ends_at_once", "(O)", targets.get())).get() == Py_True;
  }

  // Returns false if an input has gone.
  bool run(PyObject* version, PyObject* maker, bool without_workspace) {
    Replays::End end = replays_.run(version, maker, without_workspace);
    if (end != Replays::End::FOR_PYTHON) return end == Replays::End::DONE;
    return checked(PyObject_CallMethod(rematerializer_.get(), "run_alone", "OO", version, maker)).get() == Py_True;
  }

  // `Rematerializer._without_workspace`, which `run_alone` reads.
  void does_without(Work& work, Ref operation) {
    PyObject* told = operation ? operation.get() : Py_None;
    if (PyObject_SetAttrString(rematerializer_.get(), "_without_workspace", told) < 0) raise();
    work.without_workspace = std::move(operation);
  }

  void end(Work& work) {
    if (work.without_workspace) does_without(work, Ref());
    try {
      abandon(work);
    } catch (...) {  // an interrupt, in a rule that is in Python
      abandon(work);
      evictions_.replaying(-1);
      throw;
    }
    evictions_.replaying(-1);
    if (!evictions_.any_replaying()) evictions_.release_kept_inputs();
  }
  // Releases all remaining locks, of which there are none if the rematerialization has finished. May be called again.
  void abandon(Work& work) {
    give_up(work.plan);
    while (!work.entered.empty()) leave(work.entered);
  }

  // `_add_to`: plans what must run to make `wanted`, and stacks it.
  void add_to(Plan& plan, PyObject* wanted, std::vector<Ref>& stack) {
    struct Planned {
      int64_t age, mutations;
      Ref operation;
    };
    std::vector<Planned> planned;
    std::vector<PyObject*> pending{wanted};
    plan.add(version_.operation.get(wanted), wanted);
    while (!pending.empty()) {
      PyObject* version = pending.back();
      pending.pop_back();
      PyObject* maker = version_.operation.get(version);
      if (version != wanted)
        planned.push_back({version_.age.number(version), version_.mutations.number(version), Ref::copy(maker)});
      for (PyObject* source : operation_.inputs(maker)) {
        PyObject* below = version_.operation.get(source);
        if (version_.resident.is_true(source) || below == Py_None) continue;
        lock(source, 1);
        plan.find(maker)->locked.push_back(Ref::copy(source));
        if (plan.find(below) != nullptr) continue;
        plan.add(below, source);
        pending.push_back(source);
      }
    }
    std::stable_sort(planned.begin(), planned.end(), [](const Planned& a, const Planned& b) {
      return std::pair(a.age, a.mutations) > std::pair(b.age, b.mutations);
    });
    for (Planned& one : planned) stack.push_back(std::move(one.operation));
  }

  void lock(PyObject* version, int64_t more) { version_.locks.add(version, more); }
  void enter(Entered& entered) {
    Items inputs = operation_.inputs(entered.operation.get());
    int64_t clock = accounts_.number(accounts_.counters.clock);
    for (; entered.locked < inputs.size(); entered.locked++) {
      lock(inputs[entered.locked], 1);
      version_.last_access.set_number(inputs[entered.locked], clock);
    }
  }
  void unplan(Plan& plan, PyObject* operation) {
    Plan::One* planned = plan.find(operation);
    if (planned == nullptr) return;
    for (const Ref& source : planned->locked) lock(source.get(), -1);
    plan.remove(operation);
  }
  void give_up(Plan& plan) {
    for (auto& planned : plan.all()) {
      while (planned && planned->unlocked < planned->locked.size()) {
        PyObject* source = planned->locked[planned->unlocked++].get();
        lock(source, -1);
        idle(source);
      }
    }
    plan.clear();
  }
  void back_out(Entered& entered) {
    Items inputs = operation_.inputs(entered.operation.get());
    while (entered.unlocked < entered.locked) {
      PyObject* source = inputs[entered.unlocked++];
      lock(source, -1);
      idle(source);
    }
  }
  void idle(PyObject* source) {
    if (is_recomputed(source) && version_.locks.number(source) == 0 && accounts_.is_true(accounts_.counters.pressure))
      accounts_.rule.insert(source);
  }
  // Whether it has memory that was recomputed for it, and is not a copy.
  bool is_recomputed(PyObject* source) const {
    return !version_.scratch.is_none(source) && !version_.operation.is_none(source);
  }
  // Leaves the operation entered last: unlocks its inputs, and frees those that were recomputed for it alone.
  void leave(std::vector<Entered>& all) {
    Entered& entered = all.back();
    PyObject* operation = entered.operation.get();
    Items inputs = operation_.inputs(operation);
    while (entered.unlocked < entered.locked) {
      PyObject* source = inputs[entered.unlocked++];
      lock(source, -1);
      if (!is_recomputed(source) || version_.locks.number(source) != 0) continue;
      Py_ssize_t known = 1 + operation_.references_to(operation, source);  // the ledger's table
      evictions_.was_read(source, Py_REFCNT(source) > known);
    }
    evictions_.trim();
    all.pop_back();
  }

  Ref slow_path_, rematerializer_, between_, memory_;
  Slot next_tick_, began_;
  Ref budget_error_;
  Accounts& accounts_;
  Evictions& evictions_;
  Replays& replays_;
  const Device& device_;
  VersionFields version_;
  OperationFields operation_;
};

}  // namespace dtrrun

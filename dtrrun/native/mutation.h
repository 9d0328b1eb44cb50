// Constants that an operator is about to write to, and what depends on them: core/mutation.py.
#pragma once

#include <unordered_set>

#include "ledger.h"

namespace dtrrun {

class Dependents {
 public:
  Dependents(PyObject* dtr, PyObject* classes, Accounts& accounts)
      : recipes_(attribute(dtr, "recipes")), copies_(attribute(dtr, "copies")),
        why_(checked(PyUnicode_InternFromString("input mutated"))), accounts_(accounts),
        until_(type_of(classes, "Copies"), "until"), most_(type_of(classes, "Copies"), "most"),
        chosen_(type_of(classes, "Copies"), "chosen") {}

  // Whether what is about to be written to has a copy, or may be worth one (`Copies.wants`): that is for Python.
  bool may_be_copied(PyObject* one) {
    if (!version_.copy.is_none(one)) return true;
    if (!accounts_.is_true(ledger_.pressure) || !version_.used.is_true(one)) return false;
    if (!version_.operation.is_none(one)) return true;  // it is about to become a constant
    PyObject* copies = copies_.get();
    if (accounts_.number(ledger_.age) <= until_.number(copies)) {
      if (version_.nbytes.number(one) > most_.number(copies)) return false;
      if (!chosen_.is_none(copies)) {
        Ref key(PyLong_FromLongLong(version_.key.number(one)));
        int found = PySet_Contains(chosen_.get(copies), key.get());
        if (found < 0) raise();
        if (found == 0) return false;
      }
    }
    return checked(PyObject_CallMethod(copies, "wants", "O", one)).get() == Py_True;
  }

  // `Recipes.make_constant`.
  void make_constant(PyObject* one, PyObject* pin) {
    if (!version_.operation.is_none(one)) {
      if (!version_.needed_by.is_none(one)) {  // their recipes may have to keep its memory
        checked(PyObject_CallMethod(recipes_.get(), "make_constant", "OO", one, pin));
        return;
      }
      accounts_.decided(Decision::PINNED, one);
      if (accounts_.is_true(ledger_.pressure)) accounts_.rule.discard(one);
      version_.operation.clear(one);
    }
    if (version_.pin.is_none(one)) version_.pin.set(one, pin);
  }

  // `rescue_dependents`: keeps what was computed from the present content of a constant. Returns false, having done nothing, if something
  // evicted would have to be brought back for that: then Python does all of it.
  bool rescue(PyObject* constant) {
    if (version_.needed_by.is_none(constant)) return true;
    accounts_.collect_dead();
    std::vector<std::pair<Ref, c10::Storage>> resident;  // with their contents: the recipe of one may be all that keeps another's
    std::vector<Ref> released, stack;
    std::unordered_set<PyObject*> seen;
    stack.push_back(Ref::copy(constant));
    while (!stack.empty()) {
      Ref one = std::move(stack.back());
      stack.pop_back();
      if (version_.needed_by.is_none(one.get())) continue;
      Ref dependents = Ref::copy(version_.needed_by.get(one.get()));
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(dependents.get()); i++) {
        Ref node = Ref::copy(Accounts::referent(PyList_GET_ITEM(dependents.get(), i)));
        if (!node || version_.operation.is_none(node.get()) || !seen.insert(node.get()).second) continue;
        bool is_resident = version_.resident.is_true(node.get());
        c10::Storage content =
            is_resident && version_.scratch.is_none(node.get()) ? accounts_.memory_of(node.get()) : c10::Storage();
        if (content) {
          resident.emplace_back(std::move(node), std::move(content));
        } else if (!is_resident && !version_.superseded.is_true(node.get()) && Accounts::has_storage(node.get())) {
          return false;
        } else {
          released.push_back(Ref::copy(node.get()));
          stack.push_back(std::move(node));
        }
      }
    }
    for (const auto& [node, content] : resident) make_constant(node.get(), why_.get());
    for (const Ref& node : released) accounts_.lose(node.get());
    version_.needed_by.clear(constant);
    return true;
  }

 private:
  Ref recipes_, copies_, why_;
  Accounts& accounts_;
  Slot until_, most_, chosen_;
  CounterFields ledger_;
  VersionFields version_;
};

}  // namespace dtrrun

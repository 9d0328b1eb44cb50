// The operators that have come to a session, and what is known of each (`runtime/operators.py`).
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/PyInterpreter.h>

#include <array>
#include <unordered_map>

#include "facts.h"

namespace dtrrun {

class Operators {
 public:
  // mode: `Interposer`, which is asked.
  explicit Operators(PyObject* mode) : mode_(Ref::copy(mode)) {}
  Operators(const Operators&) = delete;

  Facts& of(const c10::OperatorHandle& op) {
    const void* schema = &op.schema();
    auto& [recent, its] = recent_[(reinterpret_cast<uintptr_t>(schema) >> 6) % recent_.size()];
    if (recent != schema) {
      its = &facts_[schema];
      recent = schema;
    }
    Facts& facts = *its;
    if (facts.func && !facts.foreign) return facts;
    Ref func = Ref::copy(torch::detail::getTorchApiFunction(op).ptr());
    if (facts.func.get() == func.get()) return facts;
    // New, or a library of the program's has been removed and its memory used again.
    Facts found = learned(op, std::move(func));
    if (facts.func.get() != found.func.get()) facts = std::move(found);  // or another thread has learned it meanwhile
    return facts;
  }

  // Null if it has not come.
  Facts* find(const c10::OperatorHandle& op) {
    auto known = facts_.find(&op.schema());
    return known == facts_.end() ? nullptr : &known->second;
  }

  // How often each operator went to Python, or was handled here, by name.
  Ref calls(int64_t Facts::*counter) const {
    Ref calls = checked(PyDict_New());
    for (const auto& [schema, facts] : facts_) {
      if (facts.*counter == 0) continue;
      Ref count(PyLong_FromLongLong(facts.*counter)), name = attribute(facts.operator_.get(), "name");
      Ref before = Ref::copy(PyDict_GetItem(calls.get(), name.get()));  // of another overload
      if (before) count = checked(PyNumber_Add(before.get(), count.get()));
      PyDict_SetItem(calls.get(), name.get(), count.get());
    }
    return calls;
  }

 private:
  // An interrupt leaves nothing half learned.
  Facts learned(const c10::OperatorHandle& op, Ref func) const {
    Facts facts;
    Ref learned = checked(PyObject_CallMethod(mode_.get(), "facts_of", "O", func.get()));
    bool simple = truth(learned.get(), "simple"), is_view = simple && truth(learned.get(), "view");
    facts.composite = !truth(learned.get(), "higher_order") && truth(learned.get(), "composite");
    facts.untouching = truth(learned.get(), "untouching");
    if (simple && !facts.composite) {
      bool writes = truth(learned.get(), "mutates");
      facts.way = is_view ? Facts::Way::VIEW : writes ? Facts::Way::WRITES : Facts::Way::PLAIN;
      if (writes) facts.written = PyLong_AsSize_t(PyTuple_GET_ITEM(attribute(learned.get(), "mutates").get(), 0));
    }
    facts.opaque = facts.way == Facts::Way::PLAIN && attribute_number(learned.get(), "opaque_output") >= 0;
    if (op.schema().name().rfind("profiler::", 0) == 0) facts.way = Facts::Way::NO_TENSORS;
    if (truth(learned.get(), "updates_lists")) {
      facts.way = Facts::Way::LISTS;
      Ref mutates = attribute(learned.get(), "mutates");
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(mutates.get()); i++)
        facts.mutates.push_back(PyLong_AsSize_t(PyTuple_GET_ITEM(mutates.get(), i)));
      facts.recorded = facts.mutates == std::vector<size_t>{0} && truth(learned.get(), "replayable");
    }
    facts.foreign = truth(learned.get(), "foreign");
    facts.random = truth(learned.get(), "random");
    facts.overwrites = truth(learned.get(), "overwrites");
    facts.makes_tensors = truth(learned.get(), "makes_tensors");
    facts.sized_by_numbers = truth(learned.get(), "sized_by_numbers");
    facts.uninitialised = truth(learned.get(), "uninitialised");
    Ref statistics = attribute(learned.get(), "statistics");
    if (statistics.get() != Py_None) {
      if (!PyArg_ParseTuple(attribute(statistics.get(), "positions").get(), "ii", facts.statistics, facts.statistics + 1))
        raise();
      Ref flag = attribute(statistics.get(), "flag");
      if (flag.get() != Py_None) facts.trains = static_cast<int>(as_number(flag.get()));
      facts.updates = truth(statistics.get(), "updates");
      facts.replay = attribute(statistics.get(), "replay");
      if (facts.replay.get() == Py_None) facts.replay = Ref::copy(func.get());
    }
    Ref formula = checked(PyObject_CallMethod(mode_.get(), "formula_of", "O", func.get()));
    if (formula.get() != Py_None) facts.formula = formula_named(PyUnicode_AsUTF8(formula.get()));
    facts.family = attribute(learned.get(), "family");
    facts.general = PyUnicode_CompareWithASCIIString(facts.family.get(), "general") == 0;
    bool numbers = takes_numbers(op.operator_name());
    for (const auto& argument : op.schema().arguments()) facts.enumerations->push_back(enumeration_of(argument, numbers));
    facts.operator_ = std::move(learned);
    facts.func = std::move(func);
    return facts;
  }

  Ref mode_;
  std::unordered_map<const void*, Facts> facts_;  // by the operator's schema, which PyTorch never moves
  std::array<std::pair<const void*, Facts*>, 128> recent_{};
};

}  // namespace dtrrun

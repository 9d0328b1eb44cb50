// The operators that a session has seen, and what is known about each (`runtime/operators.py`).
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <atomic>
#include <unordered_map>

#include "operator_info.h"

namespace dtrrun {

class OperatorTable {
 public:
  // python: the Python `Interposer`, which is asked.
  explicit OperatorTable(PyObject* python) : python_(Ref::copy(python)) {}
  OperatorTable(const OperatorTable&) = delete;

  OperatorInfo& of(const c10::OperatorHandle& op) {
    const void* schema = &op.schema();
    auto& [recent, its] = recent_[(reinterpret_cast<uintptr_t>(schema) >> 6) % recent_.size()];
    if (recent != schema) {
      its = &facts_[schema];
      recent = schema;
    }
    OperatorInfo& info = *its;
    if (info.func && !info.foreign && !info.is_old) return info;
    Ref func = function_of(op);
    if (info.func.get() == func.get() && !info.is_old) return info;
    // New, or old, or a library of the program's has been removed and its memory reused.
    OperatorInfo found = learned(op, std::move(func));
    bool is_same = info.func.get() == found.func.get();
    if (is_same) found.number = info.number;
    if (!is_same || info.is_old) info = std::move(found);  // or another thread has learned it meanwhile
    return info;
  }

  // Makes the table ask about each operator once more.
  void relearn() {
    for (auto& [schema, info] : facts_) info.is_old = true;
  }

  // Returns null if the session has not seen it.
  OperatorInfo* find(const c10::OperatorHandle& op) {
    auto known = facts_.find(&op.schema());
    return known == facts_.end() ? nullptr : &known->second;
  }

  // Calls function(schema, info) for each operator that the session has seen.
  template <class Function>
  void each(const Function& function) {
    for (auto& [schema, info] : facts_) function(schema, info);
  }

  // Returns how often each operator went to Python, or was handled here, by name.
  Ref calls(int64_t OperatorInfo::* counter) const {
    Ref calls = checked(PyDict_New());
    for (const auto& [schema, info] : facts_) {
      if (info.*counter == 0) continue;
      Ref count(PyLong_FromLongLong(info.*counter)), name = attribute(info.operator_.get(), "name");
      Ref before = Ref::copy(PyDict_GetItem(calls.get(), name.get()));  // of another overload
      if (before) count = checked(PyNumber_Add(before.get(), count.get()));
      PyDict_SetItem(calls.get(), name.get(), count.get());
    }
    return calls;
  }

 private:
  // An interrupt leaves nothing half learned.
  OperatorInfo learned(const c10::OperatorHandle& op, Ref func) const {
    static std::atomic<uint64_t> last{0};
    OperatorInfo info;
    info.number = ++last;
    Ref learned = checked(PyObject_CallMethod(python_.get(), "facts_of", "O", func.get()));
    bool simple = truth(learned.get(), "simple"), is_view = simple && truth(learned.get(), "view");
    info.composite = !truth(learned.get(), "higher_order") && truth(learned.get(), "composite");
    info.untouching = truth(learned.get(), "untouching");
    if (simple && !info.composite) {
      bool writes = truth(learned.get(), "mutates");
      info.handler = is_view ? HandlerKind::VIEW : writes ? HandlerKind::WRITES : HandlerKind::PLAIN;
      if (writes) info.mutates = written_by(op.schema(), learned.get());
    }
    info.workspace = static_cast<int>(attribute_number(learned.get(), "opaque_output"));
    info.opaque = (info.handler == HandlerKind::PLAIN || info.handler == HandlerKind::OTHER) && info.workspace >= 0;
    if (op.schema().name().rfind("profiler::", 0) == 0) info.handler = HandlerKind::NO_TENSORS;
    if (truth(learned.get(), "updates_lists")) {
      info.handler = HandlerKind::LISTS;
      info.mutates = written_by(op.schema(), learned.get());
    }
    info.views = truth(learned.get(), "view");
    info.only_views = truth(learned.get(), "only_views");
    info.foreign = truth(learned.get(), "foreign");
    info.reads_opaque = truth(learned.get(), "reads_opaque");
    info.shrinks = !(info.views || (truth(learned.get(), "mutates") && !truth(learned.get(), "grows")));
    if (info.handler == HandlerKind::OTHER) {
      info.collective = truth(learned.get(), "collective");
      info.reshapes = truth(learned.get(), "reshapes_storage");
      info.takes_storage = truth(learned.get(), "takes_storage");
      info.shares_memory = truth(learned.get(), "shares_memory");
      info.calls_others = truth(learned.get(), "calls_others");
      info.compares_tensors = truth(learned.get(), "compares_tensors");
      info.is_classified = info.foreign || info.collective || truth(learned.get(), "keeps_state") ||
                           attribute_number(learned.get(), "read_unseen") >= 0;
      info.mutates = info.collective ? tensors_of(op.schema()) : written_by(op.schema(), learned.get());
    }
    info.random = truth(learned.get(), "random");
    info.overwrites = truth(learned.get(), "overwrites");
    info.blank = truth(learned.get(), "overwrites_blank");
    info.allocates_first = truth(learned.get(), "allocates_first");
    info.writes_beside = truth(learned.get(), "writes_beside");
    info.makes_tensors = truth(learned.get(), "makes_tensors");
    info.sized_by_numbers = truth(learned.get(), "sized_by_numbers");
    info.uninitialised = truth(learned.get(), "uninitialised");
    info.replayable = truth(learned.get(), "replayable") && !info.uninitialised;
    info.grows = truth(learned.get(), "grows");
    info.dynamic = truth(learned.get(), "dynamic");
    info.varies = info.grows || info.dynamic;
    info.convolves = truth(learned.get(), "convolves");
    info.chooses_kernels = truth(learned.get(), "chooses_kernels");
    Ref statistics = attribute(learned.get(), "statistics");
    if (statistics.get() != Py_None) {
      if (!PyArg_ParseTuple(attribute(statistics.get(), "positions").get(), "ii", info.statistics, info.statistics + 1)) raise();
      Ref flag = attribute(statistics.get(), "flag");
      if (flag.get() != Py_None) info.trains = static_cast<int>(as_number(flag.get()));
      info.updates = truth(statistics.get(), "updates");
      info.replay = attribute(statistics.get(), "replay");
      if (info.replay.get() == Py_None) info.replay = Ref::copy(func.get());
    }
    Ref formula = checked(PyObject_CallMethod(python_.get(), "formula_of", "O", func.get()));
    if (formula.get() != Py_None) info.formula = formula_named(PyUnicode_AsUTF8(formula.get()));
    Ref flops = checked(PyObject_CallMethod(python_.get(), "counts_flops", "O", func.get()));
    info.counts_flops = flops.get() == Py_True;
    info.general = truth(learned.get(), "general");
    info.splits = truth(learned.get(), "splits");
    bool numbers = takes_numbers(op.operator_name());
    for (const auto& argument : op.schema().arguments()) info.enumerations->push_back(enumeration_of(argument, numbers));
    info.operator_ = std::move(learned);
    info.func = std::move(func);
    return info;
  }

  // Returns the places of all tensors, and lists of them.
  static std::vector<size_t> tensors_of(const c10::FunctionSchema& schema) {
    std::vector<size_t> places;
    for (size_t place = 0; place < schema.arguments().size(); place++)
      if (schema.arguments()[place].type()->str().find("Tensor") != std::string::npos) places.push_back(place);
    return places;
  }
  // Returns the places of the arguments that it writes to. Python gives keyword arguments by name.
  static std::vector<size_t> written_by(const c10::FunctionSchema& schema, PyObject* learned) {
    std::vector<size_t> places;
    Ref mutates = attribute(learned, "mutates");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(mutates.get()); i++) {
      PyObject* one = PyTuple_GET_ITEM(mutates.get(), i);
      auto named = PyUnicode_Check(one) ? schema.argumentIndexWithName(PyUnicode_AsUTF8(one)) : std::nullopt;
      places.push_back(static_cast<size_t>(named ? *named : as_number(one)));
    }
    return places;
  }

  Ref python_;
  std::unordered_map<const void*, OperatorInfo> facts_;  // by the operator's schema, which PyTorch never moves
  std::array<std::pair<const void*, OperatorInfo*>, 128> recent_{};
};

}  // namespace dtrrun

// A replay as a Python object, for `simulator/replay.py`.
#pragma once

#include "../core/paper/semantics.h"
#include "policy.h"

namespace dtrrun {

// Foresight over a replay's storages.
class ReplayedForesight final : public RecordedForesight {
 public:
  using RecordedForesight::RecordedForesight;
  ~ReplayedForesight() override {
    for (PyObject* one : uses_) Py_XDECREF(one);
  }

 protected:
  PyObject*& place_of(Node* node) const override {
    size_t place = static_cast<Replay::Storage*>(node)->name;
    if (uses_.size() <= place) uses_.resize(place + 1, nullptr);
    return uses_[place];
  }

 private:
  mutable std::vector<PyObject*> uses_;  // by storage
};

inline const char* name_of(Status status) { return std::array{"ok", "oom", "thrash"}[static_cast<size_t>(status)]; }

inline DeallocationPolicy as_deallocation(const std::string& name) {
  if (name == "eager") return DeallocationPolicy::EAGER;
  if (name == "banish") return DeallocationPolicy::BANISH;
  if (name == "ignore") return DeallocationPolicy::IGNORE;
  throw std::invalid_argument(name + " is no way of deallocation");
}

inline Replay::Observer as_observer(py::object observer) {
  if (observer.is_none()) return nullptr;
  return [observer = std::move(observer)](Replay::Event event, Replay::Number number) {
    observer(std::array{"run", "compute", "evict"}[static_cast<size_t>(event)], number);
  };
}

inline std::unique_ptr<Replay> make_replay(py::handle heuristic, std::optional<int64_t> budget, double limit, bool paper_ties,
                                           bool scan, const std::string& deallocation, const py::object& observer) {
  Replay::Options options{budget.value_or(INT64_MAX), limit, paper_ties, as_deallocation(deallocation)};
  return std::make_unique<Replay>(as_heuristic(heuristic), Policy::Options{paper_ties, scan, 0, nullptr}, options,
                                  as_observer(observer));
}

// operators: `simulator.schedule.Operator`s.
inline Replay::Schedule make_schedule(std::vector<int64_t> nbytes, const Replay::Numbers& storage_of,
                                      const Replay::Numbers& roots, const py::list& operators, const std::string& constant) {
  Replay::Schedule made{std::move(nbytes), {}, {}};
  for (Replay::Number storage : storage_of) {
    bool is_view = roots.at(storage) != made.tensors.size();
    made.tensors.emplace_back(storage, is_view ? 0 : made.nbytes.at(storage));
  }
  for (py::handle one : operators) {
    auto name = one.attr("name").cast<std::string>();
    bool is_constant = name == constant;
    Replay::Operator op{std::move(name),
                        one.attr("cost").cast<int64_t>(),
                        0,
                        one.attr("workspace").cast<int64_t>(),
                        one.attr("inputs").cast<Replay::Numbers>(),
                        one.attr("outputs").cast<Replay::Numbers>(),
                        is_constant};
    for (Replay::Number input : op.inputs) made.tensors.at(input);
    for (Replay::Number output : op.outputs) op.nbytes += made.tensors.at(output).second;
    op.peak_bytes += op.nbytes;
    made.operators.push_back(std::make_shared<Replay::Operator>(std::move(op)));
  }
  return made;
}

inline Status run_schedule(Replay& replay, const std::vector<int64_t>& events, const Replay::Numbers& outputs) {
  for (int64_t event : events) {
    if (event < 0)
      replay.release(static_cast<Replay::Number>(~event));
    else if (Status status = replay.call(static_cast<Replay::Number>(event)); status != Status::OK)
      return status;
    if (PyErr_CheckSignals() != 0) raise();
  }
  for (Replay::Number one : outputs)
    if (Status status = replay.keep(one); status != Status::OK) return status;
  return Status::OK;
}

inline py::iterator made_last(const Replay& replay) {
  py::list made;
  for (Replay::Number number : replay.made_last) {
    const Replay::Storage& storage = replay.storage(number);
    made.append(py::make_tuple(storage.age, replay.maker_of(storage), storage.nbytes));
  }
  return py::iter(made);
}

inline void bind_replay(py::module_& module) {
  py::class_<Replay::Schedule>(module, "Schedule", ITS_OWN, "What replays need of a `simulator.schedule.Schedule`.")
      .def(py::init(&make_schedule), "nbytes"_a, "storage_of"_a, "roots"_a, "operators"_a, "constant"_a,
           "constant: the name of constants.");
  py::class_<Replay>(module, "Replay", ITS_OWN, "A `simulator.replay.Replay`.")
      .def(py::init(&make_replay), "heuristic"_a, "budget"_a, "limit"_a, "paper_ties"_a, "scan"_a, "deallocation"_a, "observer"_a)
      .def("add", [](Replay& self, const Replay::Schedule& schedule) { self.add(schedule); })
      .def("run", [](Replay& self, const std::vector<int64_t>& events,
                     const Replay::Numbers& outputs) { return name_of(run_schedule(self, events, outputs)); })
      .def("add_storage", &Replay::add_storage)
      .def("add_tensor", &Replay::add_tensor)
      .def("add_operator",
           [](Replay& self, std::string name, int64_t cost, Replay::Numbers inputs, Replay::Numbers outputs, bool is_constant) {
             return self.add_operator(std::move(name), cost, std::move(inputs), std::move(outputs), 0, is_constant);
           })
      .def("call", [](Replay& self, Replay::Number number) { return name_of(self.call(number)); })
      .def("release", &Replay::release)
      .def("state",
           [](const Replay& self, Replay::Number number) {
             const Replay::Storage& one = self.storage(number);
             return std::tuple(one.resident, one.pinned, one.waits, one.banished);
           })
      .def("made_last", &made_last)
      .def("foresee", [](Replay& self,
                         py::object foresight) { self.policy.follow(std::make_unique<ReplayedForesight>(std::move(foresight))); })
      .def_readonly("memory", &Replay::memory)
      .def_readonly("peak_bytes", &Replay::peak_bytes)
      .def_readonly("clock", &Replay::clock)
      .def_readonly("evictions", &Replay::evictions)
      .def_readonly("chosen", &Replay::chosen)
      .def_readonly("rematerializations", &Replay::rematerializations)
      .def_readonly("age", &Replay::age)
      .def_property_readonly("score_evaluations", [](Replay& self) { return self.policy.score_evaluations(); })
      .def_property_readonly("accesses", [](const Replay& self) { return self.policy.accesses(); });
}

}  // namespace dtrrun

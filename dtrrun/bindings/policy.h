// A policy as a Python object. All of this runs with the GIL held.
#pragma once

#include "../core/policy/policy.h"
#include "foresight.h"

namespace dtrrun {

inline Neighbours as_neighbours(const std::string& name) {
  if (name == "eqclass") return Neighbours::EQCLASS;
  if (name == "ancestors") return Neighbours::ANCESTORS;
  return name == "e_star" ? Neighbours::E_STAR : Neighbours::NONE;
}

// Converts a `core.heuristics.Heuristic`.
inline Heuristic as_heuristic(py::handle given) {
  Heuristic made{};
  made.neighbours = as_neighbours(given.attr("neighbourhood").cast<std::string>());
  made.released = given.attr("released").cast<double>();
  made.foresight = given.attr("foresight").cast<double>();
  if (given.attr("powers").is_none()) {
    made.function = [score = py::object(given.attr("score"))](int64_t size, int64_t staleness, int64_t cost, int64_t projected) {
      return score(size, staleness, cost, projected).cast<double>();
    };
    return made;
  }
  auto [cost, size, staleness] = given.attr("powers").cast<std::tuple<bool, bool, py::object>>();
  made.cost = cost;
  made.size = size;
  made.exponent = staleness.cast<double>();
  made.staleness = made.exponent != 0;
  made.root = py::isinstance<py::float_>(staleness);
  if (!made.staleness) made.exponent = 1;
  return made;
}

// Wraps the method `sample` of a `random.Random`, called as sample(range(n), k).
inline Scan::Sample as_sample(py::object sample) {
  if (sample.is_none()) return nullptr;
  return [sample = std::move(sample)](size_t n, size_t k) {
    py::handle range(reinterpret_cast<PyObject*>(&PyRange_Type));
    return sample(range(n), k).cast<std::vector<size_t>>();
  };
}

struct PythonPolicy : Policy {
  py::object heuristic;
  RecordedForesight* foresight = nullptr;  // that of the base class, or null

  PythonPolicy(py::object given, bool latest, bool scan, double ignore_small, const py::object& sample)
      : Policy(as_heuristic(given), {latest, scan, ignore_small, as_sample(sample)}), heuristic(std::move(given)) {}

  void set_foresight(const py::object& given) {
    std::unique_ptr<RecordedForesight> made;
    if (!given.is_none()) made = std::make_unique<RecordedForesight>(given);
    foresight = made.get();
    follow(std::move(made));
  }
  // Returns the nodes in the order in which they were inserted.
  std::vector<KeptNode> nodes() const {
    std::vector<KeptNode> found;
    for (int64_t number : pool().numbers()) found.push_back(KeptNode(pool().find(number)->node.get()));
    return found;
  }

  template <class Function>
  void each_link(const Function& function) {
    function(heuristic);
    if (foresight != nullptr) function(foresight->object), function(foresight->stretches);
  }
  void unlink() {
    clear();
    set_foresight(py::none());
  }
};

inline PyTypeObject* policy_type = nullptr;

inline void bind_policy(py::module_& module) {
  // Returns a property that can be set, of a method that returns a reference.
  auto count = [](py::class_<PythonPolicy>& type, const char* name, int64_t& (Policy::*of)()) {
    type.def_property(
        name, [of](PythonPolicy& self) { return (self.*of)(); },
        [of](PythonPolicy& self, int64_t value) { (self.*of)() = value; });
  };
  py::class_<PythonPolicy> type(module, "Policy", ITS_OWN, collected<PythonPolicy>(),
                                "A `core.backend.Policy`, like its methods.");
  type.def(py::init<py::object, bool, bool, double, py::object>(), "heuristic"_a, py::kw_only(), "latest"_a = false,
           "scan"_a = false, "ignore_small"_a = 0.0, "sample"_a = py::none())
      .def("insert", &Policy::insert)
      .def("discard", &Policy::discard)
      .def("evicted", &Policy::evicted)
      .def("released", &Policy::released)
      .def("rematerialized", &Policy::left)
      .def("forget", &Policy::left)
      .def("cost_changed", &Policy::cost_changed)
      .def("projected_cost", &Policy::projected_cost)
      .def("let_copy",
           [](PythonPolicy& self, py::object cost) {
             self.let_copy([cost = std::move(cost)](const Node* node) {
               return cost(node).cast<std::optional<int64_t>>().value_or(NEVER);
             });
           })
      .def("select",
           [](PythonPolicy& self, int64_t now, const py::object& evictable) {
             return self.select(now, [&](Node* node) { return py::bool_(evictable(node)).cast<bool>(); });
           })
      .def("__len__", &Policy::size)
      .def("__iter__", [](const PythonPolicy& self) { return py::iter(py::cast(self.nodes())); })
      .def_property_readonly("nbytes", [](const PythonPolicy& self) { return self.pool().nbytes; })
      .def_property_readonly("accesses", &Policy::accesses)
      .def_property(
          "foresight", [](const PythonPolicy& self) { return self.foresight ? self.foresight->object : py::none(); },
          &PythonPolicy::set_foresight)
      .def_readonly("heuristic", &PythonPolicy::heuristic);
  count(type, "score_evaluations", &Policy::score_evaluations);
  count(type, "scoring_ns", &Policy::scoring_ns);
  count(type, "search_ns", &Policy::search_ns);
  policy_type = reinterpret_cast<PyTypeObject*>(type.ptr());
}

}  // namespace dtrrun

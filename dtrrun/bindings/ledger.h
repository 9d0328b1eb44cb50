// The C++ base class of `core.ledger.Ledger`. It owns the core of a session or of a simulation.
#pragma once

#include "../core/history.h"
#include "../core/operator.h"
#include "bind.h"
#include "policy.h"
#include "signature.h"
#include "tallies.h"

namespace dtrrun {

// What Python has given to a ledger. They are Python's attributes of these names; dtr: the `core.dtr.DTR`.
struct Links {
  py::object policy = py::none(), heap = py::none(), fingerprints = py::none(), outside = py::none(), dtr = py::none();
  py::list observers, decision_observers;
};

// The core, assembled from its parts. Python's object is the ledger's.
struct Core {
  virtual ~Core() = default;
  Links links;
  std::unique_ptr<Backend> backend;
  Ledger ledger;
  Recipes recipes{ledger};
  Deallocation deallocation{ledger};
  Eviction eviction{ledger, recipes, deallocation};
  Recomputer recomputer{ledger, deallocation, eviction};
  Rematerializer rematerializer{ledger, deallocation, eviction, recomputer};
  Copies copies{ledger, eviction};
  Rescue rescue{ledger, recipes, rematerializer};
  Mutation mutation{ledger, recipes, copies, rescue};
  Operators operators{ledger, recipes, eviction, rematerializer, mutation};
  Tallies tallies;

  Core(std::unique_ptr<Backend> given, void (*forget)(Version*)) : backend(std::move(given)), ledger(*backend, forget) {}

  template <class Function>
  void each_link(const Function& function) {
    for (py::object* one : {&links.policy, &links.heap, &links.fingerprints, &links.outside, &links.dtr}) function(*one);
    for (py::list* one : {&links.observers, &links.decision_observers}) function(*one);
  }
  void unlink() { std::exchange(links, Links()); }
};

inline PyTypeObject* ledger_type = nullptr;

inline Core& core_of(PyObject* ledger) { return *bound<Core>(ledger); }

// Defined by each extension. ledger: the object that will own it.
std::unique_ptr<Core> make_core(PyObject* ledger);

// -- deaths ---------------------------------------------------------------------------------------------------

// Receives the deaths that Python's weak references report. Outlives the ledger.
struct Told {
  std::shared_ptr<DeadVersions> dead;
  std::shared_ptr<Debts> debts;

  // Called at any moment and in any thread, so it only queues. one: a version or a `core.ledger.Block`.
  void tell(py::handle one) const {
    if (Py_TYPE(one.ptr()) == version_type)
      dead->append(node_of(one.ptr()));
    else
      debts->counted_bytes += attribute_number(one.ptr(), "nbytes");
  }
};

inline Told told_by(const Ledger& ledger) { return {ledger.dead, ledger.debts}; }

// -- classes whose methods are those of parts of a core -------------------------------------------------------------

// The base class of a part in Python. Part: distinguishes it.
template <class Part>
struct PartOf {
  py::object ledger;

  explicit PartOf(py::object given) : ledger(std::move(given)) {
    if (!PyObject_TypeCheck(ledger.ptr(), ledger_type)) throw py::type_error("the ledger of the same extension is wanted");
  }
  template <class Function>
  void each_link(const Function& function) {
    function(ledger);
  }
  void unlink() { ledger = py::none(); }
};

}  // namespace dtrrun

namespace pybind11::detail {

template <>
struct type_caster<dtrrun::Told> : dtrrun::own_caster<dtrrun::Told> {};
template <>
struct type_caster<dtrrun::Core> : dtrrun::own_caster<dtrrun::Core> {};
template <class Part>
struct type_caster<dtrrun::PartOf<Part>> : dtrrun::own_caster<dtrrun::PartOf<Part>> {};

}  // namespace pybind11::detail

namespace dtrrun {

inline Core& core_in(Core& self) { return self; }
template <class Part>
Core& core_in(PartOf<Part>& self) {
  return core_of(self.ledger.ptr());
}

// Binds a class. Self: `Core` or a `PartOf`.
template <class Self>
class Binding {
 public:
  Binding(py::module_& module, const char* name, const char* doc) : type(own_class<Self>(module, name, collected<Self>(), doc)) {}

  py::class_<Self> type;

  // A method of a part.
  template <class Part, class Result, class... Args>
  Binding& method(const char* name, Part Core::* part, Result (Part::*function)(Args...), const char* doc) {
    return add<Result, Args...>(name, part, function, doc);
  }
  template <class Part, class Result, class... Args>
  Binding& method(const char* name, Part Core::* part, Result (Part::*function)(Args...) const, const char* doc) {
    return add<Result, Args...>(name, part, function, doc);
  }
  // A method of the core as a whole. more: names of arguments.
  template <class Result, class... Args, class... More>
  Binding& method(const char* name, Result (*function)(Core&, Args...), const char* doc, const More&... more) {
    type.def(
        name,
        [function](Self& self, Given<Args>... args) -> Result {
          return function(core_in(self), std::forward<Given<Args>>(args)...);
        },
        doc, more...);
    return *this;
  }
  // An attribute that is a member of a part.
  template <class Part, class Value>
  Binding& attribute(const char* name, Part Core::* part, Value Part::* member) {
    type.def_property(
        name, [part, member](Self& self) { return core_in(self).*part.*member; },
        [part, member](Self& self, Value value) { core_in(self).*part.*member = std::move(value); });
    return *this;
  }
  template <class Part, class Value>
  Binding& readonly(const char* name, Part Core::* part, Value Part::* member) {
    type.def_property_readonly(name, [part, member](Self& self) { return core_in(self).*part.*member; });
    return *this;
  }
  // An attribute that a function of the core returns.
  template <class Result>
  Binding& readonly(const char* name, Result (*function)(Core&)) {
    type.def_property_readonly(name, [function](Self& self) { return function(core_in(self)); });
    return *this;
  }

 private:
  // pybind11 would pass a reason as a string of its own, whose address is another.
  template <class Arg>
  using Given = std::conditional_t<std::is_same_v<Arg, Pin>, GivenPin, Arg>;

  template <class Result, class... Args, class Part, class Function>
  Binding& add(const char* name, Part Core::* part, Function function, const char* doc) {
    type.def(
        name,
        [part, function](Self& self, Given<Args>... args) -> Result {
          return (core_in(self).*part.*function)(std::forward<Given<Args>>(args)...);
        },
        doc);
    return *this;
  }
};

// -- `Ledger.versions`, a mapping -----------------------------------------------------------------------------

struct VersionsMapping {
  py::object ledger;
  Versions& versions() const { return core_of(ledger.ptr()).ledger.versions; }
};

// An iterator over a mapping's values or items.
struct VersionsIterator : VersionsMapping {
  bool items, backward;
  Version* next = backward ? versions().last() : versions().first();
  uint64_t changes = versions().changes();

  py::object step() {
    if (changes != versions().changes()) throw std::runtime_error("versions changed during iteration");
    Version* one = next;
    if (one == nullptr) throw py::stop_iteration();
    next = backward ? one->before : one->after;
    return items ? py::make_tuple(one->key, one) : py::cast(one);
  }
};

// Its values or items.
struct VersionsView : VersionsMapping {
  bool items;
};

inline void bind_versions(py::module_& module) {
  using M = VersionsMapping;
  py::class_<VersionsIterator>(module, "Iterator", ITS_OWN)
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", &VersionsIterator::step);
  py::class_<VersionsView>(module, "View", ITS_OWN)
      .def("__len__", [](const VersionsView& self) { return self.versions().size(); })
      .def("__iter__", [](const VersionsView& self) { return VersionsIterator{self, self.items, false}; })
      .def("__reversed__", [](const VersionsView& self) { return VersionsIterator{self, self.items, true}; });
  py::class_<M>(module, "Versions", ITS_OWN)
      .def("__len__", [](const M& self) { return self.versions().size(); })
      .def("__contains__", [](const M& self, int64_t key) { return self.versions().find(key) != nullptr; })
      .def("__getitem__",
           [](const M& self, int64_t key) {
             if (Version* found = self.versions().find(key)) return found;
             throw py::key_error(std::to_string(key));
           })
      .def("__setitem__",
           [](const M& self, int64_t key, Version* one) {
             if (one->key != key) throw py::type_error("a version, by its key, is wanted");
             self.versions().put(one);
           })
      .def("__delitem__",
           [](const M& self, int64_t key) {
             if (!self.versions().remove(key)) throw py::key_error(std::to_string(key));
           })
      .def("get", [](const M& self, int64_t key) { return self.versions().find(key); })
      .def("values", [](const M& self) { return VersionsView{self, false}; })
      .def("items", [](const M& self) { return VersionsView{self, true}; });
}

// -- for Python -----------------------------------------------------------------------------------------------

inline py::object host_figures(Core& core) {
  const HostTier* tier = core.ledger.tier.get();
  if (tier == nullptr) return py::none();
  return py::dict("most_bytes"_a = tier->most_bytes, "bytes"_a = tier->nbytes, "peak_bytes"_a = tier->peak_bytes,
                  "copies_out"_a = tier->out().copies, "bytes_out"_a = tier->out().nbytes, "ahead_out"_a = tier->out().ahead,
                  "copies_in"_a = tier->in().copies, "bytes_in"_a = tier->in().nbytes, "ahead_in"_a = tier->in().ahead,
                  "waited_ns"_a = tier->waited_ns(), "overlaps"_a = tier->overlaps);
}

inline std::optional<std::pair<double, double>> host_costs(Core& core) {
  const HostTier* tier = core.ledger.tier.get();
  if (tier == nullptr) return std::nullopt;
  return std::pair(tier->out().ns_per_byte, tier->in().ns_per_byte);
}

inline int64_t use_device(Core& core, int64_t device) {
  if (device < 0 || device > UINT8_MAX) throw std::out_of_range("no such device");
  int64_t before = core.ledger.device;
  core.ledger.use(device);
  return before;
}

inline void bind_ledger(py::module_& module) {
  bind_versions(module);
  own_class<Told>(module, "OnDeath", "Is called when the storage of a version, or the owner of a block, has died.")
      .def("__call__", &Told::tell);

  Binding<Core> ledger(module, "Ledger", "See `core.ledger.Ledger`.");
  ledger_type = reinterpret_cast<PyTypeObject*>(ledger.type.ptr());
  ledger.type.def(
      "__init__",
      [](py::detail::value_and_holder& self) { self.value_ptr() = make_core(reinterpret_cast<PyObject*>(self.inst)).release(); },
      py::detail::is_new_style_constructor());
  constexpr auto LEDGER = &Core::ledger;
  using L = Ledger;
  ledger
      .method(
          "decided",
          +[](Core& core, int64_t decision, int64_t nbytes, int64_t age, int64_t mutations) {
            core.ledger.decided(static_cast<Decision>(decision), nbytes, age, mutations);
          },
          "Note a decision about a version with these attributes.")
      .method("evictable", LEDGER, &L::evictable, "Add a resident version with a recipe to the policy, if it is large enough.")
      .method("enter", LEDGER, &L::enter, "Count a storage that has memory now.")
      .method("keep_copy", LEDGER, &L::keep_copy,
              "Keep a copy of a constant that is about to change, as long as some recipe reads this version.")
      .method(
          "forget_host_copy", +[](Core&, Version* one) { L::forget_host_copy(one); },
          "A version is about to be written to, or to change its size: drop its copy on the host.")
      .method("let_constants_leave", LEDGER, &L::let_constants_leave,
              "Let constants leave for the host from now on, instead of once nothing else could make room.")
      .method("restored", LEDGER, &L::restored, "An evicted version of the program has its memory again.")
      .method("use_copy", LEDGER, &L::use_copy,
              "Another version has the storage of this one, which has its copy instead, if there is one.")
      .method("begin_pressure", &Core::eviction, &Eviction::begin_pressure,
              "Memory runs short for the first time: report everything so far to the policy.")
      .method("known", LEDGER, &L::known,
              "All versions: those with memory, or whose memory is evicted, and what they are made from.")
      .method("note_peak", LEDGER, &L::note_peak, "Update the peak with the bytes in memory at this moment.")
      .method("collect_dead", LEDGER, &L::collect_dead, "Account for the storages that died since the last call.")
      .method(
          "reserve",
          +[](Core& core, int64_t call, int64_t nbytes) { core.ledger.reserve(call, PyThread_get_thread_ident(), nbytes); },
          "Reserve room for an operator in progress in this thread, by the id of its call.")
      .method("give_back", LEDGER, &L::give_back, "Give back what a call has reserved. Returns whether it had reserved anything.")
      .method(
          "others_reserve", +[](Core& core) { return core.ledger.any_reserved_by_others(PyThread_get_thread_ident()); },
          "Return whether operators of other threads are in progress.")
      .method("use", &use_device,
              "Use a device from now on: the figures are those of its tensors. Returns the one that was in use.")
      .method("take_away", LEDGER, &L::take_away, "Note that the program takes a constant away, and will bring it back.")
      // Searches of all versions. No Python code runs meanwhile, so the versions do not change.
      .method(
          "largest_copy", +[](Core& core) { return largest_copy(core.ledger.versions.all(), core.ledger.backend); },
          "The bytes that a copy of a constant may take.")
      .method(
          "weigh",
          +[](Core& core) {
            Weighed found = weigh(core.ledger.versions.all(), core.ledger.backend);
            return std::pair(std::move(found.keys), found.looked_at);
          },
          "The keys of the constants worth a copy, and how many versions have been looked at.")
      .method(
          "carried",
          +[](Core& core, int64_t cut_age) { return carried(core.ledger.versions.all(), core.ledger.backend, cut_age); },
          "The versions that would be recomputed from released storages older than `cut_age`, the youngest first.")
      .method(
          "mutated",
          +[](Core& core, int64_t age, const std::vector<Version*>& trusted) {
            return mutated(core.ledger.versions.all(), core.ledger.backend, age, {trusted.begin(), trusted.end()});
          },
          "The versions in memory, since `age`, whose recipes have lost an input, the youngest first.");
  for (auto [name, figure] :
       std::initializer_list<std::pair<const char*, int64_t L::*>>{{"age", &L::age},
                                                                   {"clock", &L::clock},
                                                                   {"step_age", &L::step_age},
                                                                   {"step_began", &L::step_began},
                                                                   {"step_work", &L::step_work},
                                                                   {"resident_bytes", &L::resident_bytes},
                                                                   {"census_bytes", &L::census_bytes},
                                                                   {"evicted_bytes", &L::evicted_bytes},
                                                                   {"scratch_bytes", &L::scratch_bytes},
                                                                   {"copied_bytes", &L::copied_bytes},
                                                                   {"brought_bytes", &L::brought_bytes},
                                                                   {"peak_bytes", &L::peak_bytes},
                                                                   {"step_peak_bytes", &L::step_peak_bytes},
                                                                   {"plain_peak_bytes", &L::plain_peak_bytes},
                                                                   {"freed_bytes", &L::freed_bytes},
                                                                   {"recomputed_ns", &L::recomputed_ns},
                                                                   {"recomputed_cost", &L::recomputed_cost},
                                                                   {"collection_due_ns", &L::collection_due_ns},
                                                                   {"paused", &L::paused},
                                                                   {"operators_counted", &L::operators_counted},
                                                                   {"least_bytes", &L::least_bytes},
                                                                   {"least_copy_bytes", &L::least_copy_bytes}})
    ledger.attribute(name, LEDGER, figure);
  ledger.attribute("pressure", LEDGER, &L::pressure)
      .readonly("reserved_bytes", LEDGER, &L::reserved_bytes)
      .readonly("device", LEDGER, &L::device)
      .readonly("left_bytes", LEDGER, &L::left_bytes)
      .readonly("left_peak_bytes", LEDGER, &L::left_peak_bytes)
      .readonly("decisions", LEDGER, &L::decisions)
      .readonly("digest", LEDGER, &L::digest)
      .readonly("constants_leave", LEDGER, &L::constants_leave)
      .readonly(
          "devices", +[](Core& core) { return core.ledger.devices(); })
      .readonly(
          "live_storages",
          +[](Core& core) {
            int64_t alive = core.ledger.census == nullptr ? 0 : core.ledger.census->alive.load();
            return std::max<int64_t>(alive, static_cast<int64_t>(core.ledger.versions.size()));
          })
      .readonly(
          "counting", +[](Core& core) { return core.ledger.counting(); })
      .readonly("host", &host_figures)
      .readonly("host_costs", &host_costs)
      .readonly(
          "dead", +[](Core& core) { return core.ledger.some_died(); })
      .readonly(
          "on_death", +[](Core& core) { return told_by(core.ledger); })
      .readonly("scratch", +[](Core& core) { return py::cast(core.ledger.scratch.all()); });
  ledger.type
      .def_property(
          "limit", [](Core& core) { return core.ledger.limit; },
          [](Core& core, int64_t nbytes) { core.ledger.set_limit(nbytes); })
      .def_property(
          "results_leave", [](Core& core) { return static_cast<int64_t>(core.ledger.results_leave); },
          [](Core& core, int64_t which) { core.ledger.results_leave = static_cast<ResultsLeave>(which); })
      .def_property(
          "budget_bytes",
          [](Core& core) { return core.ledger.budget_bytes < 0 ? std::nullopt : std::optional(core.ledger.budget_bytes); },
          [](Core& core, std::optional<int64_t> nbytes) { core.ledger.budget_bytes = nbytes.value_or(-1); })
      .def_property(
          "policy", [](Core& core) { return core.links.policy; },
          [](Core& core, const py::object& policy) {
            core.ledger.policy = policy.cast<PythonPolicy*>();
            core.links.policy = policy;
          })
      .def_property_readonly("versions", [](py::object self) { return VersionsMapping{std::move(self)}; });
  for (auto [name, link] : std::initializer_list<std::pair<const char*, py::object Links::*>>{
           {"heap", &Links::heap}, {"fingerprints", &Links::fingerprints}, {"outside", &Links::outside}, {"dtr", &Links::dtr}})
    ledger.attribute(name, &Core::links, link);
  ledger.attribute("observers", &Core::links, &Links::observers);
  ledger.attribute("decision_observers", &Core::links, &Links::decision_observers);
}

}  // namespace dtrrun

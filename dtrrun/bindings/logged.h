// A log of `dtrrun record`, compiled once, and its runs (`simulator/live.py`): the operators of a log go through the core without
// Python. Other events are handled in Python.
#pragma once

#include <numeric>

#include "../core/splitting.h"
#include "standins.h"

namespace dtrrun {

struct LoggedFlags {
  bool view, untouching, reshapes, opaque, uninitialised, shrinks, updates, once, sparse, is_short, fixes;
};

// An operator of a log, with the facts that the runtime recorded of a call.
struct LoggedOperator : LoggedFlags {
  Ref signature, again;  // `SignatureObject`s of the call and of its replays
  std::vector<int64_t> inputs, taken;  // numbers of storages; taken: those that other code can reach afterwards
  std::vector<std::vector<size_t>> written;  // the holes of each version that is written to
  std::vector<size_t> leaves, statistics;  // holes
  std::vector<std::pair<size_t, int64_t>> overwritten, resized;  // (index in `written`, bytes); (hole, bytes)
  struct Made {
    int64_t where, number, nbytes;
    NewStorage::Kind kind;
  };
  std::vector<Made> made;
  std::vector<std::vector<size_t>> lists;  // by place of its lists, the holes there; none if it can't be split
  int64_t cost, device = 0;
};

// Returns the part of an operator on lists that handles the places from `begin` to `end`. cost: of this part, in ns.
inline LoggedOperator part_of(const LoggedOperator& whole, size_t begin, size_t end, int64_t cost) {
  std::vector<bool> omitted(whole.inputs.size());
  for (size_t place = 0; place < whole.lists.size(); place++)
    for (size_t hole : whole.lists[place]) omitted[hole] = place < begin || place >= end;
  LoggedOperator part{};
  static_cast<LoggedFlags&>(part) = whole;
  part.device = whole.device;
  part.taken = whole.taken;
  std::vector<size_t> hole_of(whole.inputs.size());  // in the part
  for (size_t hole = 0; hole < whole.inputs.size(); hole++) {
    hole_of[hole] = part.inputs.size();
    if (!omitted[hole]) part.inputs.push_back(whole.inputs[hole]);
  }
  auto keep = [&](const std::vector<size_t>& holes, std::vector<size_t>& kept) {
    for (size_t hole : holes)
      if (!omitted[hole]) kept.push_back(hole_of[hole]);
  };
  keep(whole.leaves, part.leaves);
  keep(whole.statistics, part.statistics);
  for (size_t place = 0; place < whole.written.size(); place++) {
    std::vector<size_t> holes;
    keep(whole.written[place], holes);
    if (holes.empty()) continue;
    for (auto [written, nbytes] : whole.overwritten)
      if (written == place) part.overwritten.emplace_back(part.written.size(), nbytes);
    part.written.push_back(std::move(holes));
  }
  for (auto [hole, nbytes] : whole.resized)
    if (!omitted[hole]) part.resized.emplace_back(hole_of[hole], nbytes);
  int64_t made = 0;
  for (LoggedOperator::Made one : whole.made) {
    if (one.where < static_cast<int64_t>(begin) || one.where >= static_cast<int64_t>(end)) continue;
    one.where -= static_cast<int64_t>(begin);
    made += one.nbytes;
    part.made.push_back(one);
  }
  PyObject* signature = whole.signature.get();
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(signature));
  part.signature = checked(PyObject_CallFunction(type, "O()", as_signature(signature)->operator_));
  part.again = Ref::copy(part.signature.get());
  Signature& figures = as_signature(part.signature.get())->figures;
  figures.cost = part.cost = cost;
  figures.output_bytes = whole.made.empty() ? as_signature(signature)->figures.output_bytes : made;
  return part;
}

class LoggedCall final : public Call {
 public:
  std::vector<Version*> versions;
  std::vector<Write> written;
  const std::vector<size_t>& statistics;
  std::vector<VersionRef> handed_out;
  bool locked = false;
  std::vector<Version*> changing;

  LoggedCall(const LoggedOperator& of, std::vector<Version*> its_versions)
      : versions(std::move(its_versions)), statistics(of.statistics), of_(of) {
    id = reinterpret_cast<int64_t>(this);
    signature = &as_signature(of.signature.get())->figures;
    for (Version* one : versions) kept_.emplace_back(one);
    for (const auto& holes : of.written) written.push_back({versions.at(holes.at(0)), holes.at(0)});
    cost = of.cost;
    replayable = !of.once;
    view = of.view;
    untouching = of.untouching;
    reshapes = of.reshapes;
    opaque = of.opaque;
    uninitialised = of.uninitialised;
    shrinks = of.shrinks;
    updates_statistics = of.updates;
  }

  bool is_leaf(size_t place) { return std::find(of_.leaves.begin(), of_.leaves.end(), written[place].hole) != of_.leaves.end(); }
  bool overwrites(size_t place) { return found(of_.overwritten, place) != nullptr; }
  std::optional<int64_t> resized(size_t hole, Version*) {
    const int64_t* nbytes = found(of_.resized, hole);
    return nbytes == nullptr ? std::nullopt : std::optional(*nbytes);
  }
  void made(int64_t) {}
  template <class Entries>
  OperationRef record(const Entries& entries) {
    OperationRef made = blank_operation();
    set_signature(enclosing(made.get()), of_.again.get());
    auto tensors = std::make_unique<std::vector<TensorEntry>>();
    std::vector<Version*> reads;
    std::unordered_set<Version*> seen;
    std::unordered_map<size_t, int64_t> blank;  // the first entry for each overwritten version
    auto read = [&](Version* version) {
      tensors->push_back({version});
      if (seen.insert(version).second) reads.push_back(version);
    };
    auto overwritten = [&](size_t place) {
      auto [first, is_first] = blank.emplace(place, tensors->size());
      tensors->push_back({nullptr, *found(of_.overwritten, place), 0, is_first ? -1 : first->second});
    };
    entries(read, overwritten);
    if (reads.size() != tensors->size()) made->tensors = std::move(tensors);
    set_reads(made.get(), reads);
    return made;
  }

  void admitted() {}
  void abandoned() {}
  void failed() {}
  void finished() {}
  std::nullptr_t about_to_shrink() { return nullptr; }

 private:
  static const int64_t* found(const std::vector<std::pair<size_t, int64_t>>& pairs, size_t key) {
    for (const auto& [one, value] : pairs)
      if (one == key) return &value;
    return nullptr;
  }
  const LoggedOperator& of_;
  std::vector<VersionRef> kept_;
};

struct LoggedInstruction {
  enum Kind { OPERATOR, FAILED, RELEASE, CONSTANT, EVENT } kind;
  size_t place = 0;  // in `LoggedProgram::operators`
  int64_t number = 0, nbytes = 0;  // of a storage
  int64_t plain_cost = 0;  // ns
  py::object facts{};  // of a constant or an event
  py::object text{};  // of an event
};

// -- reading facts ----------------------------------------------------------------------------------------------

// Returns a fact; an empty handle if there is none of this name.
inline py::handle fact(py::handle facts, const char* name) { return PyDict_GetItemString(facts.ptr(), name); }
inline bool is_fact(py::handle facts, const char* name) {
  py::handle found = fact(facts, name);
  return found && PyObject_IsTrue(found.ptr()) == 1;
}
// Returns a number. Raises TypeError for anything else, also for what could be converted.
inline int64_t number_of(py::handle object) {
  if (!PyLong_Check(object.ptr())) throw py::type_error("a number is wanted");
  return as_number(object.ptr());
}
inline int64_t number_fact(py::handle facts, const char* name) {
  py::handle found = fact(facts, name);
  if (!found) throw py::key_error(name);
  return number_of(found);
}
// Returns the device of an operator or of a storage.
inline int64_t device_fact(py::handle facts) { return fact(facts, "device") ? number_fact(facts, "device") : 0; }
// Calls `function` with each item of a list.
template <class Function>
void each_of(py::handle list, const Function& function) {
  Ref items = checked(PySequence_Fast(list.ptr(), "a list is wanted"));
  for (PyObject* one : Items(items.get())) function(py::handle(one));
}
// The same for a fact, if there is one of this name.
template <class Function>
void each_fact(py::handle facts, const char* name, const Function& function) {
  if (py::handle found = fact(facts, name)) each_of(found, function);
}
template <class Number>
std::vector<Number> numbers_fact(py::handle facts, const char* name) {
  std::vector<Number> found;
  each_fact(facts, name, [&](py::handle one) { found.push_back(static_cast<Number>(number_of(one))); });
  return found;
}

inline LoggedOperator read_operator(Ref signature, Ref again, int64_t cost, py::handle facts) {
  LoggedOperator made{};
  made.signature = std::move(signature);
  made.again = std::move(again);
  made.cost = cost;
  if (!fact(facts, "in")) throw py::key_error("in");
  made.inputs = numbers_fact<int64_t>(facts, "in");
  made.taken = numbers_fact<int64_t>(facts, "taken");
  made.leaves = numbers_fact<size_t>(facts, "leaves");
  made.statistics = numbers_fact<size_t>(facts, "statistics");
  auto check_hole = [&](size_t hole) {
    if (hole >= made.inputs.size()) throw py::index_error("a hole that there is not");
    return hole;
  };
  for (size_t hole : made.leaves) check_hole(hole);
  for (size_t hole : made.statistics) check_hole(hole);
  each_fact(facts, "written", [&](py::handle holes) {
    std::vector<size_t> its;
    each_of(holes, [&](py::handle one) { its.push_back(check_hole(static_cast<size_t>(number_of(one)))); });
    if (its.empty()) check_hole(made.inputs.size());
    made.written.push_back(std::move(its));
  });
  each_fact(facts, "overwritten", [&](py::handle pair) {
    auto [place, nbytes] = pair.cast<std::tuple<int64_t, int64_t>>();
    made.overwritten.emplace_back(static_cast<size_t>(place), nbytes);
  });
  if (py::handle sizes = fact(facts, "resized"); sizes && PyDict_Check(sizes.ptr()))
    for (auto [hole, nbytes] : py::reinterpret_borrow<py::dict>(sizes))
      made.resized.emplace_back(py::int_(py::str(hole)).cast<size_t>(), number_of(nbytes));
  each_fact(facts, "out", [&](py::handle output) {
    auto [where, number, nbytes, kind] = output.cast<std::tuple<int64_t, int64_t, int64_t, std::string>>();
    made.made.push_back({where, number, nbytes, as_kind(kind)});
  });
  made.device = device_fact(facts);
  made.view = is_fact(facts, "view");
  made.untouching = is_fact(facts, "untouching");
  made.reshapes = is_fact(facts, "reshapes");
  made.opaque = is_fact(facts, "opaque");
  made.uninitialised = is_fact(facts, "uninitialised");
  made.shrinks = is_fact(facts, "shrinks");
  made.updates = is_fact(facts, "updates");
  made.once = is_fact(facts, "once");
  made.sparse = is_fact(facts, "sparse");
  made.is_short = is_fact(facts, "short");
  made.fixes = is_fact(facts, "fixes");
  std::vector<int64_t> places = numbers_fact<int64_t>(facts, "places");
  for (size_t hole = 0; hole < places.size(); hole++) {
    check_hole(hole);
    if (places[hole] < 0) continue;
    auto place = static_cast<size_t>(places[hole]);
    if (place >= made.lists.size()) made.lists.resize(check_hole(place) + 1);
    made.lists[place].push_back(hole);
  }
  return made;
}

// A log. Instructions without facts are skipped.
struct LoggedProgram {
  std::vector<LoggedOperator> operators;
  std::vector<LoggedInstruction> instructions;
  int64_t launch_ns = 0, bytes_per_ns = 0;  // of the cost model; 0: costs were measured

  // Returns the cost in ns of a part of an operator on lists. nbytes, of: what the part and the whole operator read and make.
  int64_t cost_of_part(const LoggedOperator& whole, int64_t nbytes, int64_t of) const {
    if (bytes_per_ns != 0) return launch_ns + nbytes / bytes_per_ns;
    return static_cast<int64_t>(static_cast<double>(whole.cost) * static_cast<double>(nbytes) /
                                static_cast<double>(std::max<int64_t>(of, 1)));
  }
};

// One run of a log: its storages by number, and how far it has got.
class LoggedRun {
 public:
  py::object ledger, events, watch = py::none();
  std::unordered_map<int64_t, StorageRef> contents;
  int64_t place = 0, plain_ns = 0;

  LoggedRun(const LoggedProgram& program, py::object ledger, py::object events, double limit)
      : ledger(std::move(ledger)), events(std::move(events)), program_(program), core_(core_of(this->ledger.ptr())) {
    static_cast<StandIns&>(*core_.backend).limit = limit;
  }

  Version* version(int64_t number) const {
    auto found = contents.find(number);
    Version* version =
        found == contents.end() ? nullptr : core_.ledger.versions.find(reinterpret_cast<int64_t>(found->second.get()));
    if (version == nullptr) throw py::key_error(std::to_string(number));
    return version;
  }
  void enter(int64_t number, py::handle content, Version* version) {
    if (Py_TYPE(content.ptr()) != content_type) throw py::type_error("a Content is wanted");
    contents[number] = as_storage(content.ptr());
    core_.ledger.enter(version);
  }
  std::vector<Version*> versions(const std::vector<int64_t>& numbers) const {
    std::vector<Version*> found;
    found.reserve(numbers.size());
    for (int64_t number : numbers) found.push_back(version(number));
    return found;
  }

  void go() {
    for (; place < static_cast<int64_t>(program_.instructions.size()); place++)
      step(program_.instructions[static_cast<size_t>(place)]);
  }

 private:
  void step(const LoggedInstruction& one) {
    plain_ns += one.plain_cost;
    switch (one.kind) {
      case LoggedInstruction::OPERATOR:
        if (!run_in_parts(program_.operators[one.place])) run(program_.operators[one.place]);
        return;
      case LoggedInstruction::FAILED: return fail(program_.operators[one.place]);
      case LoggedInstruction::RELEASE:
        if (contents.erase(one.number) == 0) version(one.number);  // raises
        return;
      case LoggedInstruction::CONSTANT: return enter_constant(one);
      case LoggedInstruction::EVENT:
        if (one.text) events(one.text, one.facts);
    }
  }
  // Runs an operator in parts, if a session would (`native/split_lists.h`). Returns whether it has done so.
  bool run_in_parts(const LoggedOperator& of) {
    Ledger& accounts = core_.ledger;
    if (of.lists.empty() || !accounts.tier) return false;
    accounts.collect_dead();
    std::vector<Version*> all = versions(of.inputs);
    auto each = [&](size_t place, const auto& function) {
      for (size_t hole : of.lists[place]) function(all[hole]);
    };
    std::vector<size_t> ends = parts_of(accounts, of.lists.size(), !of.made.empty(), each, [] { return true; });
    if (ends.empty()) return false;
    std::vector<int64_t> nbytes;  // of each place
    int64_t common = 0, total = 0;
    for (const Version* one : all) common += one->nbytes;
    for (size_t place = 0; place < of.lists.size(); place++) {
      int64_t its = 0;
      each(place, [&](const Version* one) { its += one->nbytes; });
      common -= its;
      nbytes.push_back(its);
    }
    for (const auto& one : of.made)
      if (static_cast<size_t>(one.where) < nbytes.size()) nbytes[static_cast<size_t>(one.where)] += one.nbytes;
    total = std::accumulate(nbytes.begin(), nbytes.end(), common);
    size_t begin = 0;
    for (size_t end : ends) {
      int64_t its = common;
      for (size_t place = begin; place < end; place++) its += nbytes[place];
      run(part_of(of, begin, end, program_.cost_of_part(of, its, total)));
      begin = end;
    }
    return true;
  }
  void run(const LoggedOperator& of) {
    Ledger::Using now(core_.ledger, of.device);
    core_.ledger.collect_dead();
    if (of.is_short) {  // a view that is in memory
      Version* first = version(of.inputs.at(0));
      if (first->resident || of.untouching) {
        first->last_access = core_.ledger.clock;
        core_.ledger.age++;
        return;
      }
    }
    LoggedCall call(of, versions(of.inputs));
    admit(of, call);
    for (int64_t number : of.taken) call.handed_out.emplace_back(version(number));
    std::vector<NewStorage> made;
    for (const auto& one : of.made) {
      Place where = one.kind == NewStorage::ELSEWHERE ? Place::OTHER_DEVICE
                    : one.kind == NewStorage::FOREIGN ? Place::FOREIGN_MEMORY
                                                      : Place::OURS;
      StorageRef content = new_content(one.nbytes, where, of.device);
      contents[one.number] = content;
      made.push_back({one.where, content.get(), one.kind});
    }
    if (of.fixes)
      for (Version* one : call.versions) one->fixed = true;
    core_.operators.finish(call, made, !of.sparse);
    if (of.fixes)
      for (const auto& one : of.made) version(one.number)->fixed = true;
    if (!watch.is_none() && !of.view) watch(py::handle(operator_of(call.signature)).attr("name"), of.cost, call.versions);
  }
  void fail(const LoggedOperator& of) {
    Ledger::Using now(core_.ledger, of.device);
    core_.ledger.collect_dead();
    LoggedCall call(of, versions(of.inputs));
    admit(of, call);
    core_.operators.fail(call);
  }
  void admit(const LoggedOperator& of, LoggedCall& call) {
    for (size_t hole : of.leaves)
      if (call.versions[hole]->pin == nullptr) call.versions[hole]->pin = pins::PARAMETER;
    core_.operators.admit(call);
  }
  void enter_constant(const LoggedInstruction& one) {
    Pin pin = as_pin(fact(one.facts, "pin").ptr());
    core_.ledger.collect_dead();
    StorageRef content = new_content(one.nbytes,
                                     pin == pins::OTHER_DEVICE     ? Place::OTHER_DEVICE
                                     : pin == pins::FOREIGN_MEMORY ? Place::FOREIGN_MEMORY
                                                                   : Place::OURS,
                                     device_fact(one.facts));
    contents[one.number] = content;
    VersionRef version = core_.operators.adopt(content.get(), pins::CONSTANT);
    version->pin = pin;
    version->escaped = is_fact(one.facts, "exposed");
  }

  const LoggedProgram& program_;
  Core& core_;
};

// -- for Python -------------------------------------------------------------------------------------------------

inline Ref signature_in(py::handle given) {
  if (!PyObject_TypeCheck(given.ptr(), signature_type)) throw py::type_error("a Signature of this extension is wanted");
  return Ref::copy(given.ptr());
}

}  // namespace dtrrun

namespace pybind11::detail {

template <>
struct type_caster<dtrrun::LoggedProgram> : dtrrun::own_caster<dtrrun::LoggedProgram> {};
template <>
struct type_caster<dtrrun::LoggedRun> : dtrrun::own_caster<dtrrun::LoggedRun> {};

}  // namespace pybind11::detail

namespace dtrrun {

inline void bind_logged(py::module_& module) {
  using I = LoggedInstruction;
  own_class<LoggedProgram>(module, "LoggedProgram",
                           "A log of `dtrrun record`, whose runs need not read it again.\n\n"
                           "launch_ns, bytes_per_ns: of the cost model, 0 if costs were measured.")
      .def(py::init([](int64_t launch_ns, int64_t bytes_per_ns) { return LoggedProgram{{}, {}, launch_ns, bytes_per_ns}; }),
           "launch_ns"_a = 0, "bytes_per_ns"_a = 0)
      .def(
          "add_operator",
          [](LoggedProgram& self, py::handle signature, py::handle again, int64_t cost, const py::dict& facts, bool fails) {
            bool is_free = fails || is_fact(facts, "view");  // views come back with their storage
            I one{fails ? I::FAILED : I::OPERATOR, self.operators.size(), 0, 0, is_free ? 0 : cost};
            self.operators.push_back(read_operator(signature_in(signature), signature_in(again), cost, facts));
            self.instructions.push_back(std::move(one));
          },
          "signature, again: of the call, and of its replays. cost: ns. fails: the operator raises an error.")
      .def(
          "add_release",
          [](LoggedProgram& self, py::handle number) { self.instructions.push_back({I::RELEASE, 0, number_of(number)}); },
          "The program releases a storage.")
      .def(
          "add_constant",
          [](LoggedProgram& self, int64_t nbytes, const py::dict& facts) {
            self.instructions.push_back({I::CONSTANT, 0, number_fact(facts, "storage"), nbytes, 0, facts});
          },
          "A storage that no operator of the log has made.")
      .def(
          "add_event",
          [](LoggedProgram& self, const py::object& text, const py::object& facts) {
            self.instructions.push_back({I::EVENT, 0, 0, 0, 0, facts, text});
          },
          "Something else.")
      .def(
          "add_nothing", [](LoggedProgram& self) { self.instructions.push_back({I::EVENT}); },
          "An instruction that tells nothing.");
  own_class<LoggedRun>(module, "LoggedRun", collected<LoggedRun, &LoggedRun::ledger, &LoggedRun::events, &LoggedRun::watch>(),
                       "events: called as events(text, facts) for what is no operator. limit: ns that may be recomputed; beyond\n"
                       "that, the executor is told to stop. watch: called with the name, the cost and the versions of each\n"
                       "operator that has run.")
      .def(py::init([](const LoggedProgram& program, py::object ledger, py::object events, double limit) {
             if (!PyObject_TypeCheck(ledger.ptr(), ledger_type)) throw py::type_error("a Ledger of this extension is wanted");
             return std::make_unique<LoggedRun>(program, std::move(ledger), std::move(events), limit);
           }),
           py::keep_alive<1, 2>())
      .def("go", &LoggedRun::go, "Run all instructions. Raises what an operator or an event raises.")
      .def(
          "version", [](const LoggedRun& self, py::handle number) { return self.version(number_of(number)); },
          "Return that of a storage now. Raises KeyError.")
      .def("enter", &LoggedRun::enter, "A storage, which has this version, is in the program.")
      .def(
          "content",
          [](const LoggedRun& self, py::handle number) {
            auto found = self.contents.find(number_of(number));
            if (found == self.contents.end()) throw py::key_error("no such storage");
            return found->second;
          },
          "Return the stand-in of a storage. Raises KeyError.")
      .def_readonly("place", &LoggedRun::place)
      .def_readonly("plain_ns", &LoggedRun::plain_ns)
      .def_readwrite("watch", &LoggedRun::watch);
}

}  // namespace dtrrun

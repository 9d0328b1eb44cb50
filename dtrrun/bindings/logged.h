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
  Ref facts{};  // of a constant or an event
  Ref text{};  // of an event
};

// -- reading facts ----------------------------------------------------------------------------------------------

// Returns a fact, borrowed; null if there is none of this name.
inline PyObject* fact(PyObject* facts, const char* name) { return PyDict_GetItemString(facts, name); }
inline bool is_fact(PyObject* facts, const char* name) {
  PyObject* found = fact(facts, name);
  return found != nullptr && PyObject_IsTrue(found) == 1;
}
[[noreturn]] inline void raise_key_error(const char* name) {
  PyErr_SetString(PyExc_KeyError, name);
  raise();
}
inline int64_t number_of(PyObject* object) {
  if (!PyLong_Check(object)) {
    PyErr_SetString(PyExc_TypeError, "a number is wanted");
    raise();
  }
  return as_number(object);
}
inline int64_t number_fact(PyObject* facts, const char* name) {
  PyObject* found = fact(facts, name);
  if (found == nullptr) raise_key_error(name);
  return number_of(found);
}
// Returns the device of an operator or of a storage.
inline int64_t device_fact(PyObject* facts) { return fact(facts, "device") == nullptr ? 0 : number_fact(facts, "device"); }
// Calls `function` with each item of a fact that is a list, if there is one of this name.
template <class Function>
void each_fact(PyObject* facts, const char* name, const Function& function) {
  PyObject* found = fact(facts, name);
  if (found == nullptr) return;
  Ref items = checked(PySequence_Fast(found, "a list is wanted"));
  for (PyObject* one : Items(items.get())) function(one);
}
template <class Number>
std::vector<Number> numbers_fact(PyObject* facts, const char* name) {
  std::vector<Number> found;
  each_fact(facts, name, [&](PyObject* one) { found.push_back(static_cast<Number>(number_of(one))); });
  return found;
}

inline LoggedOperator read_operator(PyObject* signature, PyObject* again, int64_t cost, PyObject* facts) {
  LoggedOperator made{};
  made.signature = Ref::copy(signature);
  made.again = Ref::copy(again);
  made.cost = cost;
  if (fact(facts, "in") == nullptr) raise_key_error("in");
  made.inputs = numbers_fact<int64_t>(facts, "in");
  made.taken = numbers_fact<int64_t>(facts, "taken");
  made.leaves = numbers_fact<size_t>(facts, "leaves");
  made.statistics = numbers_fact<size_t>(facts, "statistics");
  auto check_hole = [&](size_t hole) {
    if (hole < made.inputs.size()) return hole;
    PyErr_SetString(PyExc_IndexError, "a hole that there is not");
    raise();
  };
  for (size_t hole : made.leaves) check_hole(hole);
  for (size_t hole : made.statistics) check_hole(hole);
  each_fact(facts, "written", [&](PyObject* holes) {
    std::vector<size_t> its;
    Ref items = checked(PySequence_Fast(holes, "a list is wanted"));
    for (PyObject* one : Items(items.get())) its.push_back(check_hole(static_cast<size_t>(number_of(one))));
    if (its.empty()) check_hole(made.inputs.size());
    made.written.push_back(std::move(its));
  });
  each_fact(facts, "overwritten", [&](PyObject* pair) {
    long long place, nbytes;
    if (!PyArg_ParseTuple(checked(PySequence_Tuple(pair)).get(), "LL", &place, &nbytes)) raise();
    made.overwritten.emplace_back(static_cast<size_t>(place), nbytes);
  });
  if (PyObject* sizes = fact(facts, "resized")) {
    PyObject *hole, *nbytes;
    for (Py_ssize_t place = 0; PyDict_Check(sizes) && PyDict_Next(sizes, &place, &hole, &nbytes);) {
      Ref number = checked(PyLong_FromUnicodeObject(hole, 10));
      made.resized.emplace_back(static_cast<size_t>(as_number(number.get())), number_of(nbytes));
    }
  }
  each_fact(facts, "out", [&](PyObject* output) {
    long long where, number, nbytes;
    const char* kind;
    if (!PyArg_ParseTuple(checked(PySequence_Tuple(output)).get(), "LLLs", &where, &number, &nbytes, &kind)) raise();
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

// -- for Python -------------------------------------------------------------------------------------------------

struct LoggedProgramObject {
  PyObject_HEAD
  LoggedProgram* program;
};

inline PyTypeObject* logged_program_type = nullptr;

inline LoggedProgram& program_of(PyObject* self) { return *reinterpret_cast<LoggedProgramObject*>(self)->program; }

inline PyTypeObject* make_logged_program_type(const std::string& module) {
  auto create = [](PyTypeObject* type, PyObject* args, PyObject*) -> PyObject* {
    long long launch_ns = 0, bytes_per_ns = 0;
    if (!PyArg_ParseTuple(args, "|LL", &launch_ns, &bytes_per_ns)) return nullptr;
    PyObject* made = type->tp_alloc(type, 0);
    if (made == nullptr) return nullptr;
    reinterpret_cast<LoggedProgramObject*>(made)->program = new LoggedProgram;
    program_of(made).launch_ns = launch_ns;
    program_of(made).bytes_per_ns = bytes_per_ns;
    return made;
  };
  static PyMethodDef methods[] = {
      {"add_operator",
       [](PyObject* self, PyObject* args) -> PyObject* {
         PyObject *signature, *again, *facts;
         long long cost;
         int fails;
         if (!PyArg_ParseTuple(args, "O!O!LO!p", signature_type, &signature, signature_type, &again, &cost, &PyDict_Type, &facts,
                               &fails))
           return nullptr;
         return done([&] {
           LoggedProgram& program = program_of(self);
           LoggedInstruction one{fails ? LoggedInstruction::FAILED : LoggedInstruction::OPERATOR};
           one.place = program.operators.size();
           one.plain_cost = fails || is_fact(facts, "view") ? 0 : cost;  // views come back with their storage
           program.operators.push_back(read_operator(signature, again, cost, facts));
           program.instructions.push_back(std::move(one));
         });
       },
       METH_VARARGS,
       "add_operator(signature, again, cost, facts, fails): signature, again: of the call, and of its replays. cost: ns. fails: the "
       "operator raises an error."},
      {"add_release",
       [](PyObject* self, PyObject* number) -> PyObject* {
         return done([&] {
           LoggedInstruction one{LoggedInstruction::RELEASE};
           one.number = number_of(number);
           program_of(self).instructions.push_back(std::move(one));
         });
       },
       METH_O, "add_release(number): the program releases a storage."},
      {"add_constant",
       [](PyObject* self, PyObject* args) -> PyObject* {
         long long nbytes;
         PyObject* facts;
         if (!PyArg_ParseTuple(args, "LO!", &nbytes, &PyDict_Type, &facts)) return nullptr;
         return done([&] {
           LoggedInstruction one{LoggedInstruction::CONSTANT};
           one.nbytes = nbytes;
           one.number = number_fact(facts, "storage");
           one.facts = Ref::copy(facts);
           program_of(self).instructions.push_back(std::move(one));
         });
       },
       METH_VARARGS, "add_constant(nbytes, facts): a storage that no operator of the log has made."},
      {"add_event",
       [](PyObject* self, PyObject* args) -> PyObject* {
         PyObject *text, *facts;
         if (!PyArg_ParseTuple(args, "OO", &text, &facts)) return nullptr;
         return done([&] {
           LoggedInstruction one{LoggedInstruction::EVENT};
           one.text = Ref::copy(text);
           one.facts = Ref::copy(facts);
           program_of(self).instructions.push_back(std::move(one));
         });
       },
       METH_VARARGS, "add_event(text, facts): something else."},
      {"add_nothing",
       [](PyObject* self, PyObject*) -> PyObject* {
         return done([&] { program_of(self).instructions.push_back(LoggedInstruction{LoggedInstruction::EVENT}); });
       },
       METH_NOARGS, "An instruction that tells nothing."},
      {nullptr, nullptr, 0, nullptr},
  };
  PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(+create)},
      {Py_tp_dealloc,
       reinterpret_cast<void*>(deallocate_owner<LoggedProgramObject, LoggedProgram, &LoggedProgramObject::program>)},
      {Py_tp_methods, methods},
      {Py_tp_doc,
       const_cast<char*>("LoggedProgram(launch_ns=0, bytes_per_ns=0): a log of `dtrrun record`, whose runs need not read it "
                         "again. launch_ns, bytes_per_ns: of the cost model, 0 if costs were measured.")},
      {0, nullptr},
  };
  static std::string name = module + ".LoggedProgram";
  PyType_Spec spec = {name.c_str(), sizeof(LoggedProgramObject), 0, Py_TPFLAGS_DEFAULT, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

// One run of a log: its storages by number, and how far it has got.
struct LoggedRunObject {
  PyObject_HEAD
  PyObject *program, *ledger, *events, *watch;
  std::unordered_map<int64_t, StorageRef>* contents;
  int64_t place, plain_ns;

  static void end(PyObject* self) { delete std::exchange(reinterpret_cast<LoggedRunObject*>(self)->contents, nullptr); }

  Version* version(int64_t number) const {
    auto found = contents->find(number);
    Version* version =
        found == contents->end() ? nullptr : core_of(ledger).ledger.versions.find(reinterpret_cast<int64_t>(found->second.get()));
    if (version == nullptr) {
      PyErr_Format(PyExc_KeyError, "%lld", static_cast<long long>(number));
      raise();
    }
    return version;
  }
  std::vector<Version*> versions(const std::vector<int64_t>& numbers) const {
    std::vector<Version*> found;
    for (int64_t number : numbers) found.push_back(version(number));
    return found;
  }

  void go() {
    for (; place < static_cast<int64_t>(program_of(program).instructions.size()); place++)
      step(program_of(program).instructions[static_cast<size_t>(place)]);
  }
  void step(const LoggedInstruction& one) {
    plain_ns += one.plain_cost;
    switch (one.kind) {
      case LoggedInstruction::OPERATOR:
        if (!run_in_parts(program_of(program).operators[one.place])) run(program_of(program).operators[one.place]);
        return;
      case LoggedInstruction::FAILED: return fail(program_of(program).operators[one.place]);
      case LoggedInstruction::RELEASE:
        if (contents->erase(one.number) == 0) version(one.number);  // raises
        return;
      case LoggedInstruction::CONSTANT: return enter_constant(one);
      case LoggedInstruction::EVENT:
        if (one.text) checked(PyObject_CallFunctionObjArgs(events, one.text.get(), one.facts.get(), nullptr));
    }
  }
  // Runs an operator in parts, if a session would (`native/split_lists.h`). Returns whether it has done so.
  bool run_in_parts(const LoggedOperator& of) {
    Ledger& accounts = core_of(ledger).ledger;
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
      run(part_of(of, begin, end, program_of(program).cost_of_part(of, its, total)));
      begin = end;
    }
    return true;
  }
  void run(const LoggedOperator& of) {
    Core& core = core_of(ledger);
    Ledger::Using now(core.ledger, of.device);
    core.ledger.collect_dead();
    if (of.is_short) {  // a view that is in memory
      Version* first = version(of.inputs.at(0));
      if (first->resident || of.untouching) {
        first->last_access = core.ledger.clock;
        core.ledger.age++;
        return;
      }
    }
    LoggedCall call(of, versions(of.inputs));
    admit(core, of, call);
    for (int64_t number : of.taken) call.handed_out.emplace_back(version(number));
    std::vector<NewStorage> made;
    for (const auto& one : of.made) {
      Place where = one.kind == NewStorage::ELSEWHERE ? Place::OTHER_DEVICE
                    : one.kind == NewStorage::FOREIGN ? Place::FOREIGN_MEMORY
                                                      : Place::OURS;
      StorageRef content = new_content(one.nbytes, where, of.device);
      (*contents)[one.number] = content;
      made.push_back({one.where, content.get(), one.kind});
    }
    if (of.fixes)
      for (Version* one : call.versions) one->fixed = true;
    core.operators.finish(call, made, !of.sparse);
    if (of.fixes)
      for (const auto& one : of.made) version(one.number)->fixed = true;
    if (watch == nullptr || watch == Py_None || of.view) return;
    Ref name = attribute(operator_of(call.signature), "name"), list = checked(PyList_New(0));
    for (Version* one : call.versions)
      if (PyList_Append(list.get(), as_object(one).get()) < 0) raise();
    checked(PyObject_CallFunction(watch, "OLO", name.get(), static_cast<long long>(of.cost), list.get()));
  }
  void fail(const LoggedOperator& of) {
    Core& core = core_of(ledger);
    Ledger::Using now(core.ledger, of.device);
    core.ledger.collect_dead();
    LoggedCall call(of, versions(of.inputs));
    admit(core, of, call);
    core.operators.fail(call);
  }
  static void admit(Core& core, const LoggedOperator& of, LoggedCall& call) {
    for (size_t hole : of.leaves)
      if (call.versions[hole]->pin == nullptr) call.versions[hole]->pin = pins::PARAMETER;
    core.operators.admit(call);
  }
  void enter_constant(const LoggedInstruction& one) {
    Core& core = core_of(ledger);
    Pin pin = as_pin(fact(one.facts.get(), "pin"));
    core.ledger.collect_dead();
    StorageRef content = new_content(one.nbytes,
                                     pin == pins::OTHER_DEVICE     ? Place::OTHER_DEVICE
                                     : pin == pins::FOREIGN_MEMORY ? Place::FOREIGN_MEMORY
                                                                   : Place::OURS,
                                     device_fact(one.facts.get()));
    (*contents)[one.number] = content;
    VersionRef version = core.operators.adopt(content.get(), pins::CONSTANT);
    version->pin = pin;
    version->escaped = is_fact(one.facts.get(), "exposed");
  }
};

inline LoggedRunObject* as_run(PyObject* self) { return reinterpret_cast<LoggedRunObject*>(self); }

inline PyTypeObject* make_logged_run_type(const std::string& module) {
  using R = LoggedRunObject;
  auto create = [](PyTypeObject* type, PyObject* args, PyObject*) -> PyObject* {
    PyObject *program, *ledger, *events;
    double limit;
    if (!PyArg_ParseTuple(args, "O!O!Od", logged_program_type, &program, ledger_type, &ledger, &events, &limit)) return nullptr;
    static_cast<StandIns&>(*core_of(ledger).backend).limit = limit;
    PyObject* made = type->tp_alloc(type, 0);
    if (made == nullptr) return nullptr;
    as_run(made)->program = Ref::copy(program).release();
    as_run(made)->ledger = Ref::copy(ledger).release();
    as_run(made)->events = Ref::copy(events).release();
    as_run(made)->contents = new std::unordered_map<int64_t, StorageRef>;
    return made;
  };
  static PyMethodDef methods[] = {
      {"go", [](PyObject* self, PyObject*) -> PyObject* { return done([&] { as_run(self)->go(); }); }, METH_NOARGS,
       "Run all instructions. Raises what an operator or an event raises."},
      {"version",
       [](PyObject* self, PyObject* number) -> PyObject* {
         return guarded([&] { return as_object(as_run(self)->version(number_of(number))).release(); });
       },
       METH_O, "version(number): that of a storage now. Raises KeyError."},
      {"put",
       [](PyObject* self, PyObject* args) -> PyObject* {
         long long number;
         PyObject* content;
         if (!PyArg_ParseTuple(args, "LO!", &number, content_type, &content)) return nullptr;
         return done([&] { (*as_run(self)->contents)[number] = as_storage(content); });
       },
       METH_VARARGS, "put(number, content): a storage is in the program."},
      {"content",
       [](PyObject* self, PyObject* number) -> PyObject* {
         return guarded([&] {
           auto found = as_run(self)->contents->find(number_of(number));
           if (found == as_run(self)->contents->end()) raise_key_error("no such storage");
           return as_object(found->second).release();
         });
       },
       METH_O, "content(number): the stand-in of a storage. Raises KeyError."},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyMemberDef members[] = {
      {"place", T_LONGLONG, offsetof(R, place), READONLY, nullptr},
      {"plain_ns", T_LONGLONG, offsetof(R, plain_ns), READONLY, nullptr},
      {"watch", T_OBJECT, offsetof(R, watch), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  return Base<R, &R::program, &R::ledger, &R::events, &R::watch>::make(
      module + ".LoggedRun", create, members, methods, nothing_computed,
      "LoggedRun(program, ledger, events, limit): `events(text, facts)` is called for what is no operator. limit: ns that may be "
      "recomputed; beyond that, the executor is told to stop. watch: called with the name, the "
      "cost and the versions of each operator that has run.");
}

}  // namespace dtrrun

// What the core asks of Python, in a session as in a simulation.
#pragma once

#include "ledger.h"
#include "operators.h"

namespace dtrrun {

class PythonBackend : public Backend {
 public:
  explicit PythonBackend(PyObject* ledger) : ledger_(ledger) {}  // it owns this object

  bool has_heap() const override { return !links().heap.is_none(); }
  void check_heap() override {
    const Ledger& ledger = core().ledger;
    call(links().heap, "check", ledger.resident_bytes, ledger.budget_bytes < 0 ? ledger.peak_bytes : ledger.limit);
  }

  StorageRef copy(Storage* storage) override { return as_storage(call(part("executor"), "copy", as_python(storage)).get()); }

  uint64_t thread() const override { return PyThread_get_thread_ident(); }
  void keep_small(Storage* storage) override { call(of_ledger("small_constants"), "append", as_python(storage)); }
  void met(Storage* storage) override {
    if (!links().outside.is_none()) call(links().outside, "met", as_python(storage));
  }
  std::vector<VersionRef> overlapped(Version* version, Storage* storage) override {
    return versions_in(call(foreign(), "adopted", version, as_python(storage)).get());
  }
  void resized(Version* version, int64_t nbytes) override { call(ledger_, "resized", version, nbytes); }
  int64_t size_of(Storage* storage) const override { return as_number(call(memory(), "size_of", as_python(storage)).get()); }
  Place place_of(Storage* storage) override {
    py::object object = as_python(storage), type = object_in(call(memory(), "device_type_of", object));
    if (!type.equal(of_ledger("device_type"))) {
      call(part("operators"), "met_device", type);
      return Place::OTHER_DEVICE;
    }
    return is_true(call(memory(), "is_ours", object)) ? Place::OURS : Place::FOREIGN_MEMORY;
  }

  // -- foreign memory --

  bool trusts(const Version* version) const override { return is_true(call(foreign(), "trusts", version)); }
  void escaped_changes(Version* version) override { call(foreign(), "about_to_change", version); }
  void give_up(Version* version) override { call(foreign(), "give_up", version); }
  bool may_be_read(Version* version) override { return is_true(call(foreign(), "may_be_read", version)); }
  void check_unchanged(Version* version) override { call(part("rematerializer"), "check_unchanged", version); }
  void look_outside() override {
    if (!links().outside.is_none()) call(ledger_, "look_outside");
  }

  // -- when there is no room --

  void no_room(int64_t nbytes, const Signature* of, const char* other) override {
    py::object what = of == nullptr ? py::object(py::str(other)) : borrowed(reinterpret_cast<PyObject*>(enclosing(of)));
    call(part("eviction"), "no_room", nbytes, what);
  }
  void constants_leave() override { call(part("eviction"), "constants_leave"); }
  void adopt_counted() override { call(part("eviction"), "adopt_counted"); }
  bool exceeds() override { return is_true(call(part("eviction"), "exceeds")); }
  bool is_budget_error() const override { return is_error_of(attribute(part("eviction").ptr(), "BudgetError").get()); }
  bool is_loss() const override { return is_error_of(attribute(part("mutation").ptr(), "LostError").get()); }
  std::exception_ptr budget_error() override { return without_frames(); }
  void collection_due() override { call(part("garbage"), "when_due"); }
  bool collect_garbage() override { return is_true(call(part("eviction"), "collect_garbage")); }
  bool collect_before_rescue(int64_t nbytes) override { return is_true(call(part("garbage"), "before_rescue", nbytes)); }
  [[noreturn]] void refuse(Version* version) override {
    call(part("rematerializer"), "refuse", version);
    throw std::logic_error("dtrrun: internal error: `refuse` has returned");
  }
  [[noreturn]] void made_otherwise(const Run& run, Storage* storage, int64_t nbytes) override {
    auto name = py::handle(operator_of(run.maker)).attr("name").cast<std::string>(), size = std::to_string(size_of(storage));
    PyErr_Format(PyExc_AssertionError, "dtrrun: internal error: %s, run again, made %s bytes in place of %lld", name.c_str(),
                 size.c_str(), static_cast<long long>(nbytes));
    raise();
  }

  // -- observers --

  void take_fingerprint(Version* version) override {
    if (links().fingerprints.is_none()) return;
    Ref digest = call(links().fingerprints, "of", version);
    Py_XSETREF(enclosing(version)->fingerprint, digest.release());
  }
  void compare_fingerprint(Version* version) override {
    PyObject* known = enclosing(version)->fingerprint;
    if (known != nullptr && known != Py_None && !links().fingerprints.is_none()) call(links().fingerprints, "compare", version);
  }
  void changes(Change change, Version* version, Pin why, bool escapes) override {
    static const char* names[] = {"EXPOSE", "OUTSIDE", "PIN"};  // of `core.observer`
    each_in(links().observers.ptr(), [&](PyObject* one) -> PyObject* {
      py::dict facts("why"_a = object_in(as_object(why)));
      if (change == Change::WRITTEN_OUTSIDE) facts["exposes"] = escapes;
      Ref method = attribute(one, "changes");
      return PyObject_Call(method.get(), py::make_tuple(names[static_cast<int>(change)], version).ptr(), facts.ptr());
    });
  }
  void room_given_back() override { call(part("operators"), "room_given_back"); }
  void died(Version* version) override { tell(links().observers, "died", version); }
  int64_t begins() const override { return PyList_GET_SIZE(links().decision_observers.ptr()) == 0 ? 0 : now_ns(); }
  void searched(Version* victim, int64_t began) override { tell(links().decision_observers, "searched", victim, began); }
  void evicted(Version* version, int64_t began) override { tell(links().decision_observers, "evicted", version, began); }
  void left(Version* version, int64_t began) override { tell(links().decision_observers, "left", version, began); }
  void returned(Version* version, int64_t began) override { tell(links().decision_observers, "returned", version, began); }
  void rematerialized(const Run& run, int64_t began) override {
    tell(links().decision_observers, "rematerialized", run.wanted, run.maker, began, run.cost);
  }
  void tally_eviction(const Recorded* maker) override { core().tallies.of(operator_of(maker)).evictions++; }
  void ran(const Run& run) override {
    Tally& tally = core().tallies.of(operator_of(run.maker));
    tally.runs++;
    tally.ns += run.cost;
    tally.nbytes += run.wanted->nbytes;
  }
  void superseded(Version* old, Version*) override {
    Py_XSETREF(enclosing(old)->uses, Ref::copy(nothing).release());  // the program will not use it again
  }

 protected:
  const Links& links() const { return core().links; }
  Core& core() const {
    if (core_ == nullptr) core_ = &core_of(ledger_);
    return *core_;
  }
  // Returns a part of the `core.dtr.DTR`.
  py::object part(const char* name) const { return object_in(attribute(links().dtr.ptr(), name)); }
  py::object of_ledger(const char* name) const { return object_in(attribute(ledger_, name)); }
  py::object memory() const { return of_ledger("memory"); }
  py::object foreign() const { return object_in(attribute(part("recipes").ptr(), "foreign")); }
  static py::object as_python(Storage* storage) { return object_in(checked(storage_object(storage))); }

 private:
  static bool is_true(const Ref& answer) { return answer.get() == Py_True; }
  // Notifies observers, which may change meanwhile.
  template <class... Args>
  static void tell(const py::list& observers, const char* what, const Args&... about) {
    each_in(observers.ptr(), [&](PyObject* one) { return call(one, what, about...).release(); });
  }
  PyObject* const ledger_;
  mutable Core* core_ = nullptr;  // its, once it has been asked for: this is made first
};

}  // namespace dtrrun

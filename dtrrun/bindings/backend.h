// What the core asks of Python, in a session as in a simulation.
#pragma once

#include "operators.h"

namespace dtrrun {

class PythonBackend : public Backend {
 public:
  explicit PythonBackend(PyObject* ledger) : ledger_(ledger) {}  // it owns this object

  bool has_heap() const override { return has(links().heap); }
  void check_heap() override {
    Ledger& ledger = core().ledger;
    int64_t limit = ledger.budget_bytes < 0 ? ledger.peak_bytes : ledger.limit;
    checked(PyObject_CallMethod(links().heap, "check", "LL", static_cast<long long>(ledger.resident_bytes),
                                static_cast<long long>(limit)));
  }

  StorageRef copy(Storage* storage) override {
    Ref object = checked(storage_object(storage)), executor = attribute(or_none(links().dtr), "executor");
    return as_storage(checked(PyObject_CallMethod(executor.get(), "copy", "O", object.get())).get());
  }

  uint64_t thread() const override { return PyThread_get_thread_ident(); }
  void keep_small(Storage* storage) override {
    checked(PyObject_CallMethod(attribute(ledger_, "small_constants").get(), "append", "O", as_python(storage).get()));
  }
  void met(Storage* storage) override {
    if (has(links().outside)) checked(PyObject_CallMethod(links().outside, "met", "O", as_python(storage).get()));
  }
  std::vector<VersionRef> overlapped(Version* version, Storage* storage) override {
    Ref one = as_object(version), object = as_python(storage);
    return versions_in(checked(PyObject_CallMethod(foreign().get(), "adopted", "OO", one.get(), object.get())).get());
  }
  void resized(Version* version, int64_t nbytes) override {
    checked(PyObject_CallMethod(ledger_, "resized", "OL", as_object(version).get(), static_cast<long long>(nbytes)));
  }
  int64_t size_of(Storage* storage) const override {
    return as_number(checked(PyObject_CallMethod(memory().get(), "size_of", "O", as_python(storage).get())).get());
  }
  Place place_of(Storage* storage) override {
    Ref object = as_python(storage), type = checked(PyObject_CallMethod(memory().get(), "device_type_of", "O", object.get()));
    int is_ours = PyObject_RichCompareBool(type.get(), attribute(ledger_, "device_type").get(), Py_EQ);
    if (is_ours < 0) raise();
    if (is_ours == 0) {
      checked(PyObject_CallMethod(part("operators").get(), "met_device", "O", type.get()));
      return Place::OTHER_DEVICE;
    }
    Ref owned = checked(PyObject_CallMethod(memory().get(), "is_ours", "O", object.get()));
    return PyObject_IsTrue(owned.get()) ? Place::OURS : Place::FOREIGN_MEMORY;
  }

  // -- foreign memory --

  bool trusts(const Version* version) const override {
    return checked(PyObject_CallMethod(foreign().get(), "trusts", "O", as_object(version).get())).get() == Py_True;
  }
  void escaped_changes(Version* version) override { call(foreign().get(), "about_to_change", version); }
  void give_up(Version* version) override { call(foreign().get(), "give_up", version); }
  bool may_be_read(Version* version) override { return call(foreign().get(), "may_be_read", version).get() == Py_True; }
  void check_unchanged(Version* version) override { call(part("rematerializer").get(), "check_unchanged", version); }
  void look_outside() override {
    if (has(links().outside)) checked(PyObject_CallMethod(ledger_, "look_outside", nullptr));
  }

  // -- when there is no room --

  void no_room(int64_t nbytes, const Signature* of, const char* other) override {
    Ref what = of == nullptr ? checked(PyUnicode_FromString(other)) : Ref::copy(reinterpret_cast<PyObject*>(enclosing(of)));
    checked(PyObject_CallMethod(part("eviction").get(), "no_room", "LO", static_cast<long long>(nbytes), what.get()));
  }
  void constants_leave() override { checked(PyObject_CallMethod(part("eviction").get(), "constants_leave", nullptr)); }
  void adopt_counted() override { checked(PyObject_CallMethod(part("eviction").get(), "adopt_counted", nullptr)); }
  bool exceeds() override { return checked(PyObject_CallMethod(part("eviction").get(), "exceeds", nullptr)).get() == Py_True; }
  bool is_budget_error() const override { return is_error_of(attribute(part("eviction").get(), "BudgetError").get()); }
  bool is_loss() const override { return is_error_of(attribute(part("mutation").get(), "LostError").get()); }
  std::exception_ptr budget_error() override { return without_frames(); }
  void collection_due() override { checked(PyObject_CallMethod(part("garbage").get(), "when_due", nullptr)); }
  bool collect_garbage() override {
    return checked(PyObject_CallMethod(part("eviction").get(), "collect_garbage", nullptr)).get() == Py_True;
  }
  bool collect_before_rescue(int64_t nbytes) override {
    Ref found = checked(PyObject_CallMethod(part("garbage").get(), "before_rescue", "L", static_cast<long long>(nbytes)));
    return found.get() == Py_True;
  }
  [[noreturn]] void refuse(Version* version) override {
    call(part("rematerializer").get(), "refuse", version);
    throw std::logic_error("dtrrun: internal error: `refuse` has returned");
  }
  [[noreturn]] void made_otherwise(const Run& run, Storage* storage, int64_t nbytes) override {
    Ref size = checked(PyLong_FromLongLong(size_of(storage))), name = attribute(operator_of(run.maker), "name");
    PyErr_Format(PyExc_AssertionError, "dtrrun: internal error: %U, run again, made %S bytes in place of %lld", name.get(),
                 size.get(), static_cast<long long>(nbytes));
    raise();
  }

  // -- observers --

  void take_fingerprint(Version* version) override {
    if (!has(links().fingerprints)) return;
    Ref digest = call(links().fingerprints, "of", version);
    Py_XSETREF(enclosing(version)->fingerprint, digest.release());
  }
  void compare_fingerprint(Version* version) override {
    if (has(links().fingerprints) && has(enclosing(version)->fingerprint)) call(links().fingerprints, "compare", version);
  }
  void changes(Change change, Version* version, Pin why, bool escapes) override {
    static const char* names[] = {"EXPOSE", "OUTSIDE", "PIN"};  // of `core.observer`
    each_in(links().observers, [&](PyObject* one) -> PyObject* {
      Ref method = attribute(one, "changes"), reason = as_object(why);
      Ref facts = change == Change::WRITTEN_OUTSIDE
                      ? checked(Py_BuildValue("{sOsO}", "why", reason.get(), "exposes", escapes ? Py_True : Py_False))
                      : checked(Py_BuildValue("{sO}", "why", reason.get()));
      Ref given = checked(Py_BuildValue("(sO)", names[static_cast<int>(change)], dtrrun::as_object(version).get()));
      return PyObject_Call(method.get(), given.get(), facts.get());
    });
  }
  void room_given_back() override { checked(PyObject_CallMethod(part("operators").get(), "room_given_back", nullptr)); }
  void died(Version* version) override {
    each_in(links().observers, [&](PyObject* one) { return PyObject_CallMethod(one, "died", "O", as_object(version).get()); });
  }
  int64_t begins() const override { return any(links().decision_observers) ? now_ns() : 0; }
  void searched(Version* victim, int64_t began) override { tell("searched", victim, began); }
  void evicted(Version* version, int64_t began) override { tell("evicted", version, began); }
  void left(Version* version, int64_t began) override { tell("left", version, began); }
  void returned(Version* version, int64_t began) override { tell("returned", version, began); }
  void rematerialized(const Run& run, int64_t began) override {
    each_in(links().decision_observers, [&](PyObject* one) {
      return PyObject_CallMethod(one, "rematerialized", "OOLL", as_object(run.wanted).get(), as_object(run.maker).get(),
                                 static_cast<long long>(began), static_cast<long long>(run.cost));
    });
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
  const LedgerObject& links() const { return *as_ledger(ledger_); }
  Core& core() const { return core_of(ledger_); }
  // Returns a part of the `core.dtr.DTR`.
  Ref part(const char* name) const { return attribute(or_none(links().dtr), name); }
  Ref memory() const { return attribute(ledger_, "memory"); }
  static Ref as_python(Storage* storage) { return checked(storage_object(storage)); }
  Ref foreign() const { return attribute(part("recipes").get(), "foreign"); }
  static Ref call(PyObject* object, const char* method, Version* version) {
    return checked(PyObject_CallMethod(object, method, "O", as_object(version).get()));
  }

 private:
  // Notifies observers of decisions.
  void tell(const char* what, Version* about, int64_t began) {
    each_in(links().decision_observers, [&](PyObject* one) {
      return PyObject_CallMethod(one, what, "OL", as_object(about).get(), static_cast<long long>(began));
    });
  }
  static bool has(PyObject* link) { return link != nullptr && link != Py_None; }
  static bool any(PyObject* list) { return list != nullptr && PyList_GET_SIZE(list) != 0; }
  PyObject* const ledger_;
};

}  // namespace dtrrun

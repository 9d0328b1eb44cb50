// The environment of a simulation: storages with a size but no content, and operators that only take time.
#pragma once

#include <cmath>

#include "backend.h"

namespace dtrrun {

// Stands in for a storage. Like one, it dies when nothing refers to it any more, and then notifies its versions. Its class is made by
// hand: each operator of a simulation makes some, and the core counts references to the Python object itself.
struct ContentObject {
  PyObject_HEAD
  int64_t nbytes;
  Place place;
  int64_t device;
  std::vector<Version*>*
      versions;  // the present one, and others that check whether this still exists; neither side owns the other
};

struct StandInVersion : VersionObject {
  ContentObject* content;  // null once it has died, or has another version in the ledger. For other kinds of storages, `watch`
                           // tells that
  Told* told;              // where deaths are reported; null: nowhere
};

inline PyTypeObject* content_type = nullptr;

inline ContentObject* as_content(PyObject* object) { return reinterpret_cast<ContentObject*>(object); }
inline ContentObject* as_content(Storage* storage) { return reinterpret_cast<ContentObject*>(storage); }
inline StandInVersion* as_stand_in(const Version* version) { return static_cast<StandInVersion*>(enclosing(version)); }
inline PyObject* as_python(Storage* storage) { return reinterpret_cast<PyObject*>(storage); }
inline Storage* as_storage_of(PyObject* object) { return reinterpret_cast<Storage*>(object); }

// Detaches a version from its content.
inline void forget_content(Version* version) {
  ContentObject* content = std::exchange(as_stand_in(version)->content, nullptr);
  if (content == nullptr) return;
  auto& all = *content->versions;
  all.erase(std::remove(all.begin(), all.end(), version), all.end());
}

inline StorageRef new_content(int64_t nbytes, Place place = Place::OURS, int64_t device = 0) {
  Ref made = checked(content_type->tp_alloc(content_type, 0));
  as_content(made.get())->nbytes = nbytes;
  as_content(made.get())->place = place;
  as_content(made.get())->device = device;
  as_content(made.get())->versions = new std::vector<Version*>;
  return StorageRef::take(as_storage_of(made.release()));
}

// Makes a version of a stand-in, or of any object that supports weak references. on_death: a `Told`, as `told` or not, or another
// function, or None.
inline VersionRef version_of_stand_in(PyObject* storage, py::handle on_death, const Told* told) {
  VersionRef made = new_version<StandInVersion>();
  Version* version = made.get();
  if (Py_TYPE(storage) != content_type) {
    watch_death(version, storage, on_death.ptr());
    return made;
  }
  as_content(storage)->versions->push_back(version);
  as_stand_in(version)->content = as_content(storage);
  version->key = reinterpret_cast<int64_t>(storage);
  version->device = static_cast<uint8_t>(as_content(storage)->device);
  if (told != nullptr) as_stand_in(version)->told = new Told(*told);
  return made;
}

inline bool has_stand_in(const StandInVersion* one) {
  return one->watch == nullptr ? one->content != nullptr : PyWeakref_GetObject(one->watch) != Py_None;
}

class StandIns final : public PythonBackend {
 public:
  using PythonBackend::PythonBackend;

  double limit = HUGE_VAL;  // ns that may be spent on recomputation and on copies to the host and back

  bool has_storage(const Version* version) const override { return has_stand_in(as_stand_in(version)); }
  StorageRef storage_of(const Version* version) const override {
    const StandInVersion* one = as_stand_in(version);
    if (one->watch == nullptr) return StorageRef::copy(reinterpret_cast<Storage*>(one->content));
    PyObject* found = PyWeakref_GetObject(one->watch);
    return found == Py_None ? StorageRef() : StorageRef::copy(as_storage_of(found));
  }
  VersionRef version_over(Storage* storage) override {
    if (!on_death_) {
      on_death_ = py::cast(told_by(core().ledger));
      told_ = on_death_.cast<const Told*>();
    }
    return version_of_stand_in(dtrrun::as_python(storage), on_death_, told_);
  }
  VersionRef successor(Version* version) override { return version_over(storage_of(version).get()); }
  int64_t size_of(Storage* storage) const override { return content_of(storage)->nbytes; }
  Place place_of(Storage* storage) override { return content_of(storage)->place; }
  void resized(Version* version, int64_t nbytes) override {
    if (ContentObject* content = as_stand_in(version)->content) content->nbytes = nbytes;
    PythonBackend::resized(version, nbytes);
  }
  void empty(Storage*) override {}
  void refill(Storage*, Storage*) override {}
  bool holds(Storage*, int64_t) const override { return true; }  // results of a replay have no size
  StorageRef copy(Storage* storage) override { return new_content(content_of(storage)->nbytes); }

  void beneath(void (*function)(void*), void* argument) override { function(argument); }
  void between() override {}
  void room_given_back() override {}
  void execute(Run& run) override {
    run.cost = run.maker->signature->cost;
    stop_above_limit(static_cast<double>(run.cost));
    auto made_at = [&](int64_t where) {
      if (where >= 0) return new_content(0);
      TensorEntry entry = run.maker->tensor(static_cast<size_t>(~where));
      if (run.uses[static_cast<size_t>(~where)] == Use::TAKE) return entry.version->scratch;
      return new_content(entry.version == nullptr ? entry.nbytes : entry.version->nbytes);
    };
    if (!run.maker->outputs)
      run.made.push_back(made_at(run.maker->where));
    else
      for (const Output& output : *run.maker->outputs) run.made.push_back(made_at(output.where));
  }
  void ran(const Run&) override {}
  void tally_eviction(const Recorded*) override {}

  // Notes that a copy takes so long.
  void copies(double ns) {
    copied_ns_ += ns;
    stop_above_limit(0);
  }

 private:
  // Raises `Stopped` if the limit is exceeded, with so many ns more.
  void stop_above_limit(double ns) {
    if (static_cast<double>(core().ledger.recomputed_ns) + copied_ns_ + ns > limit) call(part("executor"), "stop");
  }
  static ContentObject* content_of(Storage* storage) {
    if (Py_TYPE(dtrrun::as_python(storage)) == content_type) return as_content(storage);
    PyErr_SetString(PyExc_TypeError, "a stand-in for a storage is wanted");
    raise();
  }

  py::object on_death_;
  const Told* told_ = nullptr;  // the C++ object of that
  double copied_ns_ = 0;
};

// A host tier in which nothing is copied.
class StandInTier final : public HostTier {
 public:
  StandInTier(StandIns& backend, int64_t most_bytes, double ns_out, double ns_in, bool overlaps)
      : HostTier(most_bytes, ns_out, ns_in, /*modelled=*/true, overlaps), backend_(backend) {}

 protected:
  int64_t size_of(Storage* storage) const override { return as_content(storage)->nbytes; }
  std::optional<int64_t> write(Storage*, int64_t size, std::shared_ptr<void>*) override {
    if (!overlaps) backend_.copies(out().ns_per_byte * static_cast<double>(size));
    return 0;
  }
  StorageRef read(int64_t, int64_t size, Storage*, std::shared_ptr<void>*) override {
    if (!overlaps) backend_.copies(in().ns_per_byte * static_cast<double>(size));
    return new_content(size);
  }
  void move(Storage*, Storage*) override {}
  void release(int64_t, int64_t) override {}
  void waits(int64_t ns) override { backend_.copies(static_cast<double>(ns)); }

 private:
  StandIns& backend_;
};

// -- for Python -----------------------------------------------------------------------------------------------

inline PyTypeObject* make_content_type(const std::string& module) {
  auto create = [](PyTypeObject*, PyObject* args, PyObject* named) -> PyObject* {
    long long nbytes;
    long long device = 0;
    static const char* names[] = {"nbytes", "device", nullptr};
    if (!PyArg_ParseTupleAndKeywords(args, named, "L|$L", const_cast<char**>(names), &nbytes, &device)) return nullptr;
    return guarded([&] { return as_object(new_content(nbytes, Place::OURS, device)).release(); });
  };
  auto destroy = [](PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    std::unique_ptr<std::vector<Version*>> versions(std::exchange(as_content(self)->versions, nullptr));
    for (Version* one : *versions) as_stand_in(one)->content = nullptr;
    for (Version* one : *versions)
      if (Told* told = as_stand_in(one)->told) told->dead->append(one);
    type->tp_free(self);
    Py_DECREF(type);
  };
  static PyMemberDef members[] = {
      {"nbytes", T_LONGLONG, offsetof(ContentObject, nbytes), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(+create)},
      {Py_tp_dealloc, reinterpret_cast<void*>(+destroy)},
      {Py_tp_members, members},
      {Py_tp_doc, const_cast<char*>("Content(nbytes, *, device=0): stands in for a storage.")},
      {0, nullptr},
  };
  static std::string name = module + ".Content";
  PyType_Spec spec = {name.c_str(), sizeof(ContentObject), 0, Py_TPFLAGS_DEFAULT, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

}  // namespace dtrrun

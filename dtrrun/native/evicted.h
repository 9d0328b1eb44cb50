// Evicted storages, and which of them are computed from which: `core.neighbourhoods.Evicted`, `link`, `depended_on`.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "graph.h"

namespace dtrrun {

// Numbers of nodes in the pool, some of them twice.
class Numbers {
 public:
  template <class IsStale>
  void add(int64_t number, const IsStale& is_stale) {
    if (!all_.empty() && all_.back() == number) return;
    all_.push_back(number);
    if (all_.size() < limit_) return;
    std::sort(all_.begin(), all_.end());
    all_.erase(std::unique(all_.begin(), all_.end()), all_.end());
    all_.erase(std::remove_if(all_.begin(), all_.end(), is_stale), all_.end());
    limit_ = std::max<size_t>(64, 2 * all_.size());
  }
  void take(Numbers& other) {  // the smaller set into the larger one
    if (all_.size() < other.all_.size()) std::swap(all_, other.all_);
    all_.insert(all_.end(), other.all_.begin(), other.all_.end());
    limit_ = std::max(limit_, 2 * all_.size());
    other.clear();
  }
  void clear() {
    all_.clear();
    all_.shrink_to_fit();
  }
  const std::vector<int64_t>& all() const { return all_; }

 private:
  std::vector<int64_t> all_;
  size_t limit_ = 64;
};

struct Evicted;

// A reference to an evicted storage, which lives as long as there is one. Counted without atomics: we hold the GIL.
class Reference {
 public:
  Reference() = default;
  explicit Reference(Evicted* evicted);
  Reference(const Reference& other) : Reference(other.evicted_) {}
  Reference(Reference&& other) noexcept : evicted_(std::exchange(other.evicted_, nullptr)) {}
  Reference& operator=(Reference other) noexcept {
    std::swap(evicted_, other.evicted_);
    return *this;
  }
  ~Reference();
  Evicted* get() const { return evicted_; }

 private:
  Evicted* evicted_ = nullptr;
};

struct Evicted {
  int64_t references = 0, cost;
  PyObject* node;  // null once it has died
  bool dormant = true, gone = false;
  Numbers watchers;
  Evicted(PyObject* one, int64_t own) : cost(own), node(one) {}
  virtual ~Evicted() = default;
};

inline Reference::Reference(Evicted* evicted) : evicted_(evicted) {
  if (evicted_ != nullptr) evicted_->references++;
}
inline Reference::~Reference() {
  if (evicted_ != nullptr && --evicted_->references == 0) delete evicted_;
}

// Those that died. Deaths occur at any moment, so they are only queued.
using Dead = std::shared_ptr<std::vector<Reference>>;

// `Version.component`: dies with the version, and then says so.
struct EvictedObject {
  PyObject_HEAD
  Reference evicted;
  Dead dead;
  ~EvictedObject() {
    evicted.get()->node = nullptr;
    if (!evicted.get()->gone) dead->push_back(evicted);
  }
};

// `Version.dependents`.
struct DependentsObject {
  PyObject_HEAD
  std::vector<Reference> members;
  size_t limit = 8;
};

// `Version.neighbourhood`.
struct NumbersObject {
  PyObject_HEAD
  Numbers numbers;
};

// The type of such objects, which only C++ makes.
template <class Object>
PyTypeObject*& type_for() {
  static PyTypeObject* type = nullptr;
  return type;
}

template <class Object>
bool make_type(const char* name) {
  auto destroy = [](PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    reinterpret_cast<Object*>(self)->~Object();
    type->tp_free(self);
    Py_DECREF(type);
  };
  PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(+destroy)}, {0, nullptr}};
  PyType_Spec spec = {name, sizeof(Object), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  type_for<Object>() = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type_for<Object>() != nullptr;
}

// Makes one, puts it into a slot, and returns it.
template <class Object, class Slot, class... Given>
Object* make_in(const Slot& slot, PyObject* node, Given&&... given) {
  PyTypeObject* type = type_for<Object>();
  Ref made = checked(type->tp_alloc(type, 0));
  auto* object = reinterpret_cast<Object*>(made.get());
  PyObject head = *made.get();
  new (object) Object{head, std::forward<Given>(given)...};
  slot.take(node, made.release());
  return object;
}

// What the policy reads and writes of its nodes.
struct Nodes {
  VersionFields version;
  OperationFields operation;

  bool constant(PyObject* node) const { return version.operation.is_none(node); }
  Items inputs(PyObject* node) const {
    PyObject* maker = version.operation.get(node);
    return maker == Py_None ? Items() : operation.inputs(maker);
  }
  // Null while it is resident.
  Evicted* evicted(PyObject* node) const {
    auto* holder = object<EvictedObject>(version.component, node);
    return holder == nullptr ? nullptr : holder->evicted.get();
  }
  // Those computed from it that have been evicted. Some may be gone.
  const std::vector<Reference>& dependents(PyObject* node) const {
    static const std::vector<Reference> none;
    auto* found = object<DependentsObject>(version.dependents, node);
    return found == nullptr ? none : found->members;
  }
  bool depended_on(PyObject* node) const {
    const auto& members = dependents(node);
    return std::any_of(members.begin(), members.end(), [](const Reference& member) { return !member.get()->gone; });
  }
  // Enters a node among the evicted dependents of its inputs. It is no longer dormant.
  void link(PyObject* node, Evicted* member) const {
    member->dormant = false;
    for (PyObject* parent : inputs(node)) {
      if (constant(parent)) continue;
      auto* dependents = object<DependentsObject>(version.dependents, parent);
      if (dependents == nullptr) dependents = make_in<DependentsObject>(version.dependents, parent);
      auto& members = dependents->members;
      if (members.size() >= dependents->limit) {
        members.erase(std::remove_if(members.begin(), members.end(), [](const Reference& one) { return one.get()->gone; }),
                      members.end());
        dependents->limit = std::max<size_t>(8, 2 * members.size());
      }
      if (members.empty() || members.back().get() != member) members.emplace_back(member);
    }
  }
  template <class Object, class Slot>
  static Object* object(const Slot& slot, PyObject* node) {
    PyObject* found = slot.get(node);
    return found == Py_None ? nullptr : reinterpret_cast<Object*>(found);
  }
};

}  // namespace dtrrun

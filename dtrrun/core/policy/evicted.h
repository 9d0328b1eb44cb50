// Evicted storages, and which of them are computed from which.
//
// A storage that the program has released is *dormant* while nothing that depends on it is evicted. While dormant it is not
// needed, so it is not in the neighbourhood of what it was computed from. The neighbourhoods of its dependents do include its
// cost, since it would have to be rematerialized before them. (The paper counts a released storage as evicted at once. An
// activation updated in place then counts against the eviction of what it was computed from.)
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "node.h"
#include "node_memory.h"

namespace dtrrun {

// Numbers of nodes in the pool. May contain duplicates.
class Numbers : public InNodeMemory {
 public:
  // drop: drops from a vector of numbers those that occur twice, or whose nodes are no longer in the pool.
  template <class Drop>
  void add(int64_t number, const Drop& drop) {
    if (!all_.empty() && all_.back() == number) return;
    if (all_.capacity() == 0) all_.reserve(FEW);
    all_.push_back(number);
    if (all_.size() < limit_) return;
    drop(all_);
    limit_ = std::max(MANY, 2 * all_.size());
  }
  void take(Numbers& other) {  // moves the smaller set into the larger one
    if (all_.size() < other.all_.size()) std::swap(all_, other.all_);
    all_.insert(all_.end(), other.all_.begin(), other.all_.end());
    limit_ = std::max(limit_, 2 * all_.size());
    other.clear();
  }
  void clear() {
    all_.clear();
    all_.shrink_to_fit();
  }
  const ShortVector<int64_t>& all() const { return all_; }

 private:
  static constexpr size_t FEW = 16, MANY = 64;
  ShortVector<int64_t> all_;
  size_t limit_ = MANY;
};

// An owning reference to an evicted storage. Counted without atomics: for one thread at a time.
class Reference {
 public:
  Reference() = default;
  inline explicit Reference(Evicted* evicted);
  Reference(const Reference& other) : Reference(other.evicted_) {}
  Reference(Reference&& other) noexcept : evicted_(std::exchange(other.evicted_, nullptr)) {}
  Reference& operator=(Reference other) noexcept {
    std::swap(evicted_, other.evicted_);
    return *this;
  }
  inline ~Reference();
  Evicted* get() const { return evicted_; }

 private:
  Evicted* evicted_ = nullptr;
};

// Evicted storages that died. Deaths can occur at any moment, so they are only queued.
using Dead = std::shared_ptr<std::vector<Reference>>;

// One evicted storage, from its eviction to its rematerialization or death. Its inputs list it among their dependents, but do
// not keep its node alive.
struct Evicted : InNodeMemory {
  int64_t references = 0;
  const int64_t cost;  // c_0 when it was evicted
  Node* node;          // null once it has died
  bool dormant = true;
  bool gone = false;  // rematerialized or dead: remaining references must be ignored
  Numbers watchers;   // numbers of the nodes in the pool whose projected cost assumes that it is evicted
  Dead dead;
  Evicted(Node* one, Dead dead) : cost(one->cost), node(one), dead(std::move(dead)) {}
  virtual ~Evicted() = default;

  // Makes its node refer to it.
  void enter() {
    node->evicted = this;
    references++;
  }
  // Called when a node is no longer evicted, or dies.
  static void leave(Node* node) {
    Evicted* evicted = std::exchange(node->evicted, nullptr);
    evicted->node = nullptr;
    if (--evicted->references == 0) delete evicted;
  }
};

inline Reference::Reference(Evicted* evicted) : evicted_(evicted) {
  if (evicted_ != nullptr) evicted_->references++;
}
inline Reference::~Reference() {
  if (evicted_ != nullptr && --evicted_->references == 0) delete evicted_;
}

// A list of evicted storages, some of which may be gone. Its members follow it in one block of memory, since most lists have one or
// two, and each eviction makes some.
class EvictedDependents {
 public:
  explicit EvictedDependents(size_t capacity = 0) : capacity_(capacity) {}
  // Adds a member to a list, which may be null, and may move.
  static void add(EvictedDependents*& list, Evicted* member) {
    if (list == nullptr) list = made(FEW);
    if (list->count_ >= list->limit_) list->drop_those_gone();
    if (list->count_ != 0 && list->members()[list->count_ - 1].get() == member) return;
    if (list->count_ == list->capacity_) {
      EvictedDependents* larger = made(2 * list->capacity_);
      larger->limit_ = list->limit_;
      larger->count_ = list->count_;
      std::uninitialized_move(list->members(), list->members() + list->count_, larger->members());
      free(std::exchange(list, larger));
    }
    new (list->members() + list->count_++) Reference(member);
  }
  static void free(EvictedDependents* list) {
    if (list == nullptr) return;
    std::destroy_n(list->members(), list->count_);
    NodeMemory::give_back(list, size_with(list->capacity_));
  }
  const Reference* begin() const { return reinterpret_cast<const Reference*>(this + 1); }
  const Reference* end() const { return begin() + count_; }
  size_t size() const { return count_; }

 private:
  static constexpr size_t FEW = 2, MANY = 8;

  static EvictedDependents* made(size_t capacity) {
    return new (NodeMemory::take(size_with(capacity))) EvictedDependents(capacity);
  }
  static size_t size_with(size_t capacity) { return sizeof(EvictedDependents) + capacity * sizeof(Reference); }
  Reference* members() { return reinterpret_cast<Reference*>(this + 1); }
  void drop_those_gone() {
    Reference* end = std::remove_if(members(), members() + count_, [](const Reference& one) { return one.get()->gone; });
    std::destroy(end, members() + count_);
    count_ = static_cast<size_t>(end - members());
    limit_ = std::max(MANY, 2 * count_);
  }

  size_t count_ = 0, capacity_, limit_ = MANY;
};

inline const EvictedDependents& dependents_of(const Node* node) {
  static const EvictedDependents none;
  return node->dependents == nullptr ? none : *node->dependents;
}

// Returns whether anything evicted is computed from a node.
inline bool depended_on(const Node* node) {
  const EvictedDependents& all = dependents_of(node);
  return std::any_of(all.begin(), all.end(), [](const Reference& one) { return !one.get()->gone; });
}

// Enters a node among the evicted dependents of its inputs. It is no longer dormant.
inline void link(const Node* node, Evicted* member) {
  member->dormant = false;
  for (Node* parent : node->inputs()) {
    if (!parent->constant()) EvictedDependents::add(parent->dependents, member);
  }
}

inline void Node::forget_policy() {
  pool_id = 0;
  EvictedDependents::free(std::exchange(dependents, nullptr));
  delete std::exchange(walks, nullptr);
  if (evicted == nullptr) return;
  if (!evicted->gone) evicted->dead->emplace_back(evicted);
  Evicted::leave(this);
}

}  // namespace dtrrun

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

namespace dtrrun {

// Numbers of nodes in the pool. May contain duplicates.
class Numbers {
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
  const std::vector<int64_t>& all() const { return all_; }

 private:
  static constexpr size_t FEW = 16, MANY = 64;
  std::vector<int64_t> all_;
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
struct Evicted {
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

struct EvictedDependents {
  std::vector<Reference> members;  // some may be gone
  size_t limit = 8;
};

inline const std::vector<Reference>& dependents_of(const Node* node) {
  static const std::vector<Reference> none;
  return node->dependents == nullptr ? none : node->dependents->members;
}

// Returns whether anything evicted is computed from a node.
inline bool depended_on(const Node* node) {
  const auto& members = dependents_of(node);
  return std::any_of(members.begin(), members.end(), [](const Reference& member) { return !member.get()->gone; });
}

// Enters a node among the evicted dependents of its inputs. It is no longer dormant.
inline void link(const Node* node, Evicted* member) {
  member->dormant = false;
  for (Node* parent : node->inputs()) {
    if (parent->constant()) continue;
    if (parent->dependents == nullptr) parent->dependents = new EvictedDependents;
    auto& [members, limit] = *parent->dependents;
    if (members.size() >= limit) {
      members.erase(std::remove_if(members.begin(), members.end(), [](const Reference& one) { return one.get()->gone; }),
                    members.end());
      limit = std::max<size_t>(8, 2 * members.size());
    }
    if (members.empty() || members.back().get() != member) members.emplace_back(member);
  }
}

inline void Node::forget_policy() {
  pool_id = 0;
  delete std::exchange(dependents, nullptr);
  delete std::exchange(walks, nullptr);
  if (evicted == nullptr) return;
  if (!evicted->gone) evicted->dead->emplace_back(evicted);
  Evicted::leave(this);
}

}  // namespace dtrrun

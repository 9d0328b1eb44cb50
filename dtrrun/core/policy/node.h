// A node of the graph, as the policy sees it: one version of a storage (App. C.1), whoever owns it.
//
// Nothing in this folder knows PyTorch or Python. A session's nodes, and a simulation's, are in `bindings/nodes.h`.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dtrrun {

struct Node;
struct Evicted;
class Numbers;
struct EvictedDependents;

// The recipe of a node. It keeps alive what it reads: deps(S), where a node may occur twice.
struct Operation {
  Node** reads;
  uint32_t count;
  bool secured = false;  // the recipe stays replayable, whatever the program releases

  Node** begin() const { return reads; }
  Node** end() const { return reads + count; }
};

// The owner sets all but the last four members, and tells the policy what happens to the node. All zeros: a constant that has
// no memory.
struct Node {
  int64_t nbytes;        // size(S), in bytes; fixed while the node is in the pool
  int64_t cost;          // cost(S), the c_0 of Sec. 2, in units of the clock; fixed while the node is evicted
  int64_t last_access;   // last_access(S), a value of the clock; never decreases
  int64_t age;           // how many operators the program had run when the storage was made, with its maker
  Operation* operation;  // null: a constant, which is never evicted and is in no neighbourhood
  bool resident;
  bool released;  // by the program; fixed while the node is in the pool

  int64_t pool_id;         // its number in the pool, by order of insertion; 0: it is not there
  Evicted* evicted;        // what it is among the evicted and released; null while it is resident
  EvictedDependents* dependents;  // deps_e^T(S): the evicted nodes that are computed from it
  Numbers* walks;          // of the nodes in the pool whose cached e* ends here

  bool constant() const { return operation == nullptr; }
  Operation inputs() const { return operation == nullptr ? Operation{nullptr, 0} : *operation; }

  // What the policy knows of it is no longer true: before it is freed, or when another policy takes over.
  inline void forget_policy();
};

// How an owner keeps a node from being freed.
struct Lifetime {
  void (*hold)(Node*);
  void (*let_go)(Node*);
};

// A node that is kept for as long as this.
class KeptNode {
 public:
  KeptNode() = default;
  KeptNode(Node* node, const Lifetime& lifetime) : node_(node), lifetime_(&lifetime) { lifetime.hold(node); }
  KeptNode(KeptNode&& other) noexcept : node_(other.node_), lifetime_(other.lifetime_) { other.node_ = nullptr; }
  KeptNode& operator=(KeptNode&& other) noexcept {
    Node* node = node_;
    const Lifetime* lifetime = lifetime_;
    node_ = other.node_;
    lifetime_ = other.lifetime_;
    other.node_ = node;
    other.lifetime_ = lifetime;
    return *this;
  }
  ~KeptNode() {
    if (node_ != nullptr) lifetime_->let_go(node_);
  }
  Node* get() const { return node_; }
  Node* operator->() const { return node_; }
  explicit operator bool() const { return node_ != nullptr; }

 private:
  Node* node_ = nullptr;
  const Lifetime* lifetime_ = nullptr;
};

}  // namespace dtrrun

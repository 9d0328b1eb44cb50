// A node of the graph, as the policy sees it: one version of a storage (App. C.1), in a session or a simulation.
//
// Nothing in this folder depends on PyTorch or Python. The nodes of sessions and of simulations are in `bindings/nodes.h`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace dtrrun {

struct Node;
struct Evicted;
class Numbers;
struct EvictedDependents;

// The recipe of a node. It keeps what it reads alive: deps(S), in which a node may occur twice.
struct Operation {
  Node** reads;
  uint32_t count;
  uint32_t kept = 0;     // reference count
  bool secured = false;  // the recipe stays replayable, whatever the program releases

  Node** begin() const { return reads; }
  Node** end() const { return reads + count; }
};

// The owner sets all but the last four members, and notifies the policy of what happens to the node. All zeros: a constant that
// has no memory and no references.
struct Node {
  int64_t kept;          // reference count: see `keep`
  int64_t nbytes;        // size(S), in bytes; fixed while the node is in the pool
  int64_t cost;          // cost(S), the c_0 of Sec. 2, in units of the clock; fixed while the node is evicted
  int64_t last_access;   // last_access(S), a value of the clock; never decreases
  int64_t age;           // how many operators the program had run when the storage was made, including its maker
  Operation* operation;  // null: a constant, which is never evicted and is in no neighbourhood
  bool resident;
  bool released;  // by the program; fixed while the node is in the pool

  int64_t pool_id;         // its number in the pool, by order of insertion; 0: not in the pool
  Evicted* evicted;        // its entry among the evicted and released storages; null while it is resident
  EvictedDependents* dependents;  // deps_e^T(S): the evicted nodes that are computed from it
  Numbers* walks;          // numbers of the nodes in the pool whose cached e* ends here

  bool constant() const { return operation == nullptr; }
  Operation inputs() const { return operation == nullptr ? Operation{nullptr, 0} : *operation; }

  // Drops what the policy knows about the node. Called before it is freed, or when another policy takes over.
  inline void forget_policy();
};

// Frees a node whose last reference is gone. Set by the extension that owns the nodes.
inline void (*free_node)(Node*) = nullptr;

inline void keep(Node* node) { node->kept++; }
inline void let_go(Node* node) {
  if (--node->kept == 0) free_node(node);
}

// An owning reference to a node.
class KeptNode {
 public:
  KeptNode() = default;
  explicit KeptNode(Node* node) : node_(node) {
    if (node != nullptr) keep(node);
  }
  KeptNode(KeptNode&& other) noexcept : node_(std::exchange(other.node_, nullptr)) {}
  KeptNode& operator=(KeptNode&& other) noexcept {
    std::swap(node_, other.node_);
    return *this;
  }
  ~KeptNode() {
    if (node_ != nullptr) let_go(node_);
  }
  Node* get() const { return node_; }
  Node* operator->() const { return node_; }
  explicit operator bool() const { return node_ != nullptr; }

 private:
  Node* node_ = nullptr;
};

}  // namespace dtrrun

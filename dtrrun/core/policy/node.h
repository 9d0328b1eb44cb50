// A node of the graph, as the policy sees it: one version of a storage (App. C.1), whoever owns it.
//
// Nothing in this folder knows PyTorch or Python. A session's nodes, and a simulation's, are in `bindings/nodes.h`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace dtrrun {

struct Node;
struct Evicted;
class Numbers;
struct EvictedDependents;

// The recipe of a node. It keeps what it reads: deps(S), where a node may occur twice.
struct Operation {
  Node** reads;
  uint32_t count;
  uint32_t kept = 0;     // by so many
  bool secured = false;  // the recipe stays replayable, whatever the program releases

  Node** begin() const { return reads; }
  Node** end() const { return reads + count; }
};

// The owner sets all but the last four members, and tells the policy what happens to the node. All zeros: a constant that has
// no memory, and that nobody keeps.
struct Node {
  int64_t kept;          // by so many: see `keep`
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

// Frees a node that nobody keeps any more. Set by the extension whose nodes are counted.
inline void (*free_node)(Node*) = nullptr;

inline void keep(Node* node) { node->kept++; }
inline void let_go(Node* node) {
  if (--node->kept == 0) free_node(node);
}

// A node that is kept for as long as this.
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

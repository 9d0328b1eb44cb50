// Evicted neighbourhoods: what would have to be recomputed along with a storage (Sec. 4.1, App. C.2, C.5). The interface and the
// exact neighbourhood, e*.
#pragma once

#include "foresight.h"

namespace dtrrun {

// The base class is for heuristics that consider only the storage itself.
class Neighbourhood {
 public:
  explicit Neighbourhood(Pool& pool) : pool_(pool) {}
  virtual ~Neighbourhood() = default;

  int64_t visited = 0;  // number of storages visited, as a measure of work (App. D.3)

  virtual void evicted(Node*) {}
  virtual void released(Node*) {}
  // Called when a node was rematerialized, or never will be.
  void left(Node* node) {
    settle();
    if (node->evicted == nullptr) return;
    Reference kept(node->evicted);
    leave(node->evicted);
    Evicted::leave(node);
  }
  // Removes the evicted storages that died.
  void settle() {
    while (!dead_->empty()) {
      Reference evicted = std::move(dead_->back());
      dead_->pop_back();
      leave(evicted.get());
    }
  }
  // Called when the inputs of a node may have changed.
  virtual void changed(Item&) {}
  virtual int64_t projected_cost(Node* node, int64_t, Item&) { return node->cost; }
  // Returns the projected cost, and a lower bound of it that holds until the node is made due.
  virtual std::pair<int64_t, double> watched_cost(Node* node, int64_t number, Item& item) {
    int64_t cost = projected_cost(node, number, item);
    return {cost, static_cast<double>(cost)};
  }
  // Returns when a node is next needed, by the program or for an evicted descendant, or NEVER.
  virtual int64_t next_use(Node* node, int64_t, Item&, const Foresight& foresight) { return foresight.next_use(node); }

 protected:
  // Called when a storage is no longer evicted: makes the nodes due whose projected cost relies on it.
  virtual void leave(Evicted*) {}

  Pool& pool_;
  Dead dead_ = std::make_shared<std::vector<Reference>>();
};

struct Member final : Evicted {
  using Evicted::Evicted;
  Numbers watchers_below;  // numbers of the nodes that have it among their evicted ancestors
  uint64_t walk = 0;       // the last walk that visited it
};

// e*(S) of every storage: its evicted ancestors and (unless `ancestors_only`) evicted descendants. Both are cached in the
// pool, and dropped separately when an eviction or a rematerialization changes them. To make this possible, a node leaves its
// number at every storage that its walk visits.
class ExactNeighbourhood final : public Neighbourhood {
 public:
  // ancestors_only: costs are those of e_R. foresees: `next_use` will be called.
  ExactNeighbourhood(Pool& pool, bool ancestors_only, bool foresees)
      : Neighbourhood(pool), ancestors_only_(ancestors_only), looks_below_(foresees || !ancestors_only) {}

  void evicted(Node* wanted) override {
    if (Member* member = member_of(wanted); member != nullptr && !member->dormant) return;
    settle();
    std::vector<Node*> pending{wanted};
    while (!pending.empty()) {
      Node* node = pending.back();
      pending.pop_back();
      Member* member = member_of(node);
      if (member == nullptr) member = enter(node);
      if (!member->dormant || !looks_below_) continue;
      link(node, member);
      for (Node* parent : node->inputs()) {
        if (Member* above = member_of(parent)) {
          forget_below(above->watchers);
          if (above->dormant) pending.push_back(parent);
        } else if (Item* item = pool_.find(parent)) {
          forget_below(*item);
        }
      }
    }
  }
  void released(Node* node) override {
    if (depended_on(node)) {
      evicted(node);
    } else if (member_of(node) == nullptr) {
      settle();
      enter(node);
    }
  }
  void changed(Item& item) override { forget_above(item); }

  int64_t projected_cost(Node* node, int64_t number, Item& item) override {
    Reach& reach = walked_above(node, number, item);
    if (ancestors_only_) return node->cost + reach.cost_above;
    walked_below(node, number, item);
    if (!reach.cost_known) {
      reach.cost = 0;
      walks_++;
      for (const auto* members : {&reach.above, &reach.below}) {
        for (const Reference& one : *members) {  // storages that are mutated using one another can be on both sides
          auto* member = static_cast<Member*>(one.get());
          if (std::exchange(member->walk, walks_) != walks_) reach.cost += member->cost;
        }
      }
      reach.cost_known = true;
    }
    return node->cost + reach.cost;
  }
  int64_t next_use(Node* node, int64_t number, Item& item, const Foresight& foresight) override {
    int64_t first = foresight.next_use(node);
    for (const Reference& member : walked_below(node, number, item).below)
      if (Node* storage = member.get()->node) first = std::min(first, foresight.next_use(storage));
    return first;
  }

 private:
  static Member* member_of(const Node* node) { return static_cast<Member*>(node->evicted); }
  Member* enter(Node* node) {
    if (node->walks != nullptr) {
      forget_above(*node->walks);
      node->walks->clear();
    }
    auto* member = new Member(node, dead_);
    member->enter();
    return member;
  }
  void leave(Evicted* evicted) override {
    auto* member = static_cast<Member*>(evicted);
    if (member->gone) return;
    member->gone = true;
    pool_.make_due(member->watchers);
    pool_.make_due(member->watchers_below);
    forget_below(member->watchers);
    forget_above(member->watchers_below);
  }

  // -- what is cached --

  static void forget_above(Item& item) { item.reach.above_known = item.reach.cost_known = false; }
  static void forget_below(Item& item) { item.reach.below_known = item.reach.cost_known = false; }
  void forget_above(const Numbers& numbers) {
    visited += static_cast<int64_t>(numbers.all().size());
    for (int64_t number : numbers.all())
      if (Item* item = pool_.find(number)) forget_above(*item);
  }
  void forget_below(const Numbers& numbers) {
    visited += static_cast<int64_t>(numbers.all().size());
    for (int64_t number : numbers.all())
      if (Item* item = pool_.find(number)) forget_below(*item);
  }
  Reach& walked_above(Node* node, int64_t number, Item& item) {
    Reach& reach = item.reach;
    if (reach.above_known) return reach;
    reach.above_known = true;
    reach.cost_known = false;
    reach.above.clear();
    reach.cost_above = 0;
    walks_++;
    Operation first = node->inputs();
    pending_.assign(first.begin(), first.end());
    visited += first.count;
    while (!pending_.empty()) {
      Node* storage = pending_.back();
      pending_.pop_back();
      if (Member* member = member_of(storage)) {
        if (std::exchange(member->walk, walks_) == walks_) continue;
        reach.cost_above += member->cost;
        if (!ancestors_only_) reach.above.emplace_back(member);
        pool_.watch(member->watchers_below, number);
        Operation inputs = storage->inputs();
        for (Node* parent : inputs) pending_.push_back(parent);
        visited += inputs.count;
      } else if (!storage->constant()) {
        if (storage->walks == nullptr) storage->walks = new Numbers;
        pool_.watch(*storage->walks, number);
      }
    }
    return reach;
  }
  Reach& walked_below(Node* node, int64_t number, Item& item) {
    Reach& reach = item.reach;
    if (reach.below_known) return reach;
    reach.below_known = true;
    reach.cost_known = false;
    reach.below.clear();
    walks_++;
    pending_.assign(1, node);
    while (!pending_.empty()) {
      Node* storage = pending_.back();
      pending_.pop_back();
      visited += static_cast<int64_t>(dependents_of(storage).size());
      for (const Reference& one : dependents_of(storage)) {
        auto* member = static_cast<Member*>(one.get());
        if (member->node == nullptr || member->gone || std::exchange(member->walk, walks_) == walks_) continue;
        reach.below.push_back(one);
        pool_.watch(member->watchers, number);
        pending_.push_back(member->node);
      }
    }
    return reach;
  }

  bool ancestors_only_, looks_below_;
  uint64_t walks_ = 0;
  std::vector<Node*> pending_;  // used by the current walk
};

}  // namespace dtrrun

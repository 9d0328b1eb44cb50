// The relaxed evicted neighbourhood ẽ*: components in a union-find structure, with running sums (App. C.2).
#pragma once

#include "neighbourhood.h"

namespace dtrrun {

// One evicted storage, as an element of the union-find forest. A root represents its component.
// A dormant storage is a component by itself.
struct Component final : Evicted {
  int64_t above = 1;  // if dormant: an upper bound on the number of dormant storages it is computed from, including itself
  Reference parent;
  // Valid for a root:
  int64_t members = 1, total;  // the sum of its members' costs
  double floor = 0;            // the bounds of `watchers_of_all` are valid while the total is at least this
  Numbers watchers_of_all;     // numbers of the nodes in the pool that are adjacent to any member
  Component(Node* one, const Dead& dead) : Evicted(one, dead), total(one->cost) {}
};

inline Component* component(const Reference& reference) { return static_cast<Component*>(reference.get()); }

inline Component* unite(Component* a, Component* b) {
  if (a == b) return a;
  if (a->members < b->members) std::swap(a, b);
  b->parent = Reference(a);
  a->members += b->members;
  a->total += b->total;
  a->floor += b->floor;  // a node that is adjacent to both relied on both
  a->watchers_of_all.take(b->watchers_of_all);
  return a;
}

// The fraction by which a component's cost may fall before the bounds that rely on it are renewed. A larger value loosens the
// bounds, so more scores are computed per search; a smaller one renews more bounds after rematerializations.
constexpr double SLACK = 1.0 / 64;
// How many dormant storages a projected cost may count. Beyond that, they are joined to components like evicted ones.
constexpr int64_t DORMANT = 64;

// When a storage leaves a component, its cost is removed but no connection is, so phantom connections remain, as in the paper.
class Components final : public Neighbourhood {
 public:
  using Neighbourhood::Neighbourhood;

  void evicted(Node* wanted) override {
    if (Component* element = component_of(wanted); element != nullptr && !element->dormant) return;
    settle();
    pending_.assign(1, wanted);
    while (!pending_.empty()) {
      Node* node = pending_.back();
      pending_.pop_back();
      Component* element = component_of(node);
      if (element == nullptr) element = enter(node);
      if (!element->dormant) continue;
      link(node, element);
      Component* root = find(element);
      for (Node* parent : node->inputs()) {
        Component* other = component_of(parent);
        if (other == nullptr) continue;
        if (other->dormant)
          pending_.push_back(parent);  // when it is processed, it finds this node among its dependents
        else
          root = unite(root, find(other));
      }
      for (const Reference& other : dependents_of(node))
        if (!other.get()->gone) root = unite(root, find(component(other)));
    }
  }
  void released(Node* node) override {
    if (component_of(node) != nullptr) return;
    if (depended_on(node)) {
      evicted(node);
      return;
    }
    settle();
    Component* element = enter(node);
    for (Node* parent : node->inputs())
      if (Component* other = component_of(parent)) element->above += other->dormant ? other->above : 0;
    if (element->above > DORMANT) evicted(node);
  }
  int64_t projected_cost(Node* node, int64_t, Item&) override {
    int64_t cost = node->cost;
    find_neighbours(node);
    roots_.clear();
    for (Component* neighbour : neighbours_) {
      Component* root = find(neighbour);
      if (std::find(roots_.begin(), roots_.end(), root) != roots_.end()) continue;
      roots_.push_back(root);
      cost += root->total;
    }
    return cost;
  }
  std::pair<int64_t, double> watched_cost(Node* node, int64_t number, Item&) override {
    int64_t cost = node->cost;
    auto lower = static_cast<double>(cost);
    find_neighbours(node);
    roots_.clear();
    for (Component* neighbour : neighbours_) {
      pool_.watch(neighbour->watchers, number);
      Component* root = find(neighbour);
      if (std::find(roots_.begin(), roots_.end(), root) != roots_.end()) continue;
      roots_.push_back(root);
      pool_.watch(root->watchers_of_all, number);
      root->floor = std::max(root->floor, static_cast<double>(root->total) * (1 - SLACK));
      cost += root->total;
      lower += root->floor;
    }
    return {cost, lower};
  }

 private:
  // Returns the root of an element's component, halving the path on the way.
  Component* find(Component* element) {
    visited++;
    while (Component* parent = component(element->parent)) {
      visited++;
      Component* above = component(parent->parent);
      if (above == nullptr) return parent;
      visited++;
      element->parent = Reference(above);
      element = above;
    }
    return element;
  }
  static Component* component_of(const Node* node) { return static_cast<Component*>(node->evicted); }
  Component* enter(Node* node) {
    auto* element = new Component(node, dead_);
    element->enter();
    return element;
  }
  void leave(Evicted* evicted) override {
    auto* element = static_cast<Component*>(evicted);
    if (element->gone) return;
    element->gone = true;
    pool_.make_due(element->watchers);
    element->watchers.clear();
    Component* root = find(element);
    root->total -= element->cost;
    if (static_cast<double>(root->total) < root->floor) {
      pool_.make_due(root->watchers_of_all);
      root->watchers_of_all.clear();
      root->floor = 0;
    }
  }
  // Sets `neighbours_` to the evicted storages that are adjacent to a node.
  void find_neighbours(Node* node) {
    neighbours_.clear();
    for (Node* parent : node->inputs()) {
      Component* element = component_of(parent);
      if (element == nullptr) continue;
      neighbours_.push_back(element);
      if (element->dormant) behind(parent);
    }
    for (const Reference& member : dependents_of(node))
      if (!member.get()->gone) neighbours_.push_back(component(member));
  }
  // Adds to `neighbours_` the non-resident storages that a dormant one is computed from.
  void behind(Node* wanted) {
    pending_.assign(1, wanted);
    while (!pending_.empty()) {
      Node* node = pending_.back();
      pending_.pop_back();
      for (Node* parent : node->inputs()) {
        Component* element = component_of(parent);
        if (element == nullptr || std::find(neighbours_.begin(), neighbours_.end(), element) != neighbours_.end()) continue;
        neighbours_.push_back(element);
        if (element->dormant) pending_.push_back(parent);
      }
    }
  }

  std::vector<Component*> neighbours_, roots_;  // scratch space for the node under consideration
  std::vector<Node*> pending_;                  // the same for the search at hand
};

}  // namespace dtrrun

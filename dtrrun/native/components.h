// The relaxed evicted neighbourhood of the default heuristic: `core.neighbourhoods.EvictedComponents`.
#pragma once

#include "neighbourhood.h"

namespace dtrrun {

// One evicted storage, as an element of the union-find forest. A root represents its component.
struct Component final : Evicted {
  int64_t above = 1, members = 1, total;
  double floor = 0;
  Reference parent;
  Numbers watchers_of_all;
  Component(PyObject* one, int64_t own) : Evicted(one, own), total(own) {}
};

inline Component* component(const Reference& reference) { return static_cast<Component*>(reference.get()); }

inline Component* find(Component* element) {
  Component* parent = component(element->parent);
  if (parent == nullptr) return element;
  while (Component* above = component(parent->parent)) {
    element->parent = Reference(above);
    element = above;
    parent = component(element->parent);
    if (parent == nullptr) return element;
  }
  return parent;
}

inline Component* unite(Component* a, Component* b) {
  if (a == b) return a;
  if (a->members < b->members) std::swap(a, b);
  b->parent = Reference(a);
  a->members += b->members;
  a->total += b->total;
  a->floor += b->floor;
  a->watchers_of_all.take(b->watchers_of_all);
  return a;
}

constexpr double SLACK = 1.0 / 64;  // as in core/neighbourhoods.py, like the next
constexpr int64_t DORMANT = 64;

class Components final : public Neighbourhood {
 public:
  using Neighbourhood::Neighbourhood;

  void evicted(PyObject* wanted) override {
    if (Component* element = component_of(wanted); element != nullptr && !element->dormant) return;
    settle();
    std::vector<PyObject*> pending{wanted};
    while (!pending.empty()) {
      PyObject* node = pending.back();
      pending.pop_back();
      Component* element = component_of(node);
      if (element == nullptr) element = enter(node);
      if (!element->dormant) continue;
      nodes_.link(node, element);
      Component* root = find(element);
      for (PyObject* parent : nodes_.inputs(node)) {
        Component* other = component_of(parent);
        if (other == nullptr) continue;
        if (other->dormant)
          pending.push_back(parent);  // it finds us among its dependents
        else
          root = unite(root, find(other));
      }
      for (const Reference& other : nodes_.dependents(node))
        if (!other.get()->gone) root = unite(root, find(component(other)));
    }
  }
  void released(PyObject* node) override {
    if (component_of(node) != nullptr) return;
    if (nodes_.depended_on(node)) {
      evicted(node);
      return;
    }
    settle();
    Component* element = enter(node);
    for (PyObject* parent : nodes_.inputs(node))
      if (Component* other = component_of(parent)) element->above += other->dormant ? other->above : 0;
    if (element->above > DORMANT) evicted(node);
  }
  void left(PyObject* node) override {
    settle();
    if (Component* element = component_of(node)) {
      Reference kept(element);
      leave(element);
      nodes_.version.component.clear(node);
    }
  }
  void settle() override {
    while (!dead_->empty()) {
      Reference element = std::move(dead_->back());
      dead_->pop_back();
      leave(component(element));
    }
  }
  int64_t projected_cost(PyObject* node, int64_t, Item&) override {
    int64_t cost = nodes_.version.cost.number(node);
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
  std::pair<int64_t, double> watched_cost(PyObject* node, int64_t number, Item&) override {
    int64_t cost = nodes_.version.cost.number(node);
    auto lower = static_cast<double>(cost);
    auto is_stale = [&](int64_t other) { return !pool_.has(other); };
    find_neighbours(node);
    roots_.clear();
    for (Component* neighbour : neighbours_) {
      neighbour->watchers.add(number, is_stale);
      Component* root = find(neighbour);
      if (std::find(roots_.begin(), roots_.end(), root) != roots_.end()) continue;
      roots_.push_back(root);
      root->watchers_of_all.add(number, is_stale);
      root->floor = std::max(root->floor, static_cast<double>(root->total) * (1 - SLACK));
      cost += root->total;
      lower += root->floor;
    }
    return {cost, lower};
  }

 private:
  Component* component_of(PyObject* node) const { return static_cast<Component*>(nodes_.evicted(node)); }
  Component* enter(PyObject* node) {
    auto* element = new Component(node, nodes_.version.cost.number(node));
    make_in<EvictedObject>(nodes_.version.component, node, Reference(element), dead_);
    return element;
  }
  void leave(Component* element) {
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
  // Lists in `neighbours_` the evicted storages that are adjacent to a node.
  void find_neighbours(PyObject* node) {
    neighbours_.clear();
    for (PyObject* parent : nodes_.inputs(node)) {
      Component* element = component_of(parent);
      if (element == nullptr) continue;
      neighbours_.push_back(element);
      if (element->dormant) behind(parent);
    }
    for (const Reference& member : nodes_.dependents(node))
      if (!member.get()->gone) neighbours_.push_back(component(member));
  }
  // Adds the non-resident storages that a dormant one is computed from.
  void behind(PyObject* wanted) {
    std::vector<PyObject*> pending{wanted};
    while (!pending.empty()) {
      PyObject* node = pending.back();
      pending.pop_back();
      for (PyObject* parent : nodes_.inputs(node)) {
        Component* element = component_of(parent);
        if (element == nullptr || std::find(neighbours_.begin(), neighbours_.end(), element) != neighbours_.end())
          continue;
        neighbours_.push_back(element);
        if (element->dormant) pending.push_back(parent);
      }
    }
  }

  Dead dead_ = std::make_shared<std::vector<Reference>>();
  std::vector<Component*> neighbours_, roots_;  // of the node that is being looked at
};

}  // namespace dtrrun

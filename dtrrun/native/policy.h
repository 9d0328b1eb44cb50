// The default rule: the pool of evictable storages, their evicted neighbourhoods and the search, for h_dtr_eq.
//
// What it chooses is what `core.search.make_policy("h_dtr_eq")` chooses: `Components` is
// `core.neighbourhoods.EvictedComponents`, and `Policy` is `core.search.HeapSearch`, whose docstrings say why it is
// right. Those remain the reference, which the simulator runs. All of this is done with the GIL.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <unordered_map>
#include <vector>

#include "slots.h"

namespace dtrrun {

// -- the evicted neighbourhoods --------------------------------------------------------------------------

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

struct Component;

// A reference to a component, which lives as long as there is one. Counted without atomics: we hold the GIL.
class Reference {
 public:
  Reference() = default;
  explicit Reference(Component* component);
  Reference(const Reference& other) : Reference(other.component_) {}
  Reference(Reference&& other) noexcept : component_(std::exchange(other.component_, nullptr)) {}
  Reference& operator=(Reference other) noexcept {
    std::swap(component_, other.component_);
    return *this;
  }
  ~Reference();
  Component* get() const { return component_; }

 private:
  Component* component_ = nullptr;
};

// One evicted storage, as an element of the union-find forest. A root represents its component.
struct Component {
  int64_t references = 0, cost, above = 1, members = 1, total;
  double floor = 0;
  bool dormant = true, gone = false;
  Reference parent;
  Numbers watchers, watchers_of_all;
  explicit Component(int64_t own) : cost(own), total(own) {}
};

inline Reference::Reference(Component* component) : component_(component) {
  if (component_ != nullptr) component_->references++;
}
inline Reference::~Reference() {
  if (component_ != nullptr && --component_->references == 0) delete component_;
}

inline Component* find(Component* element) {
  Component* parent = element->parent.get();
  if (parent == nullptr) return element;
  while (Component* above = parent->parent.get()) {
    element->parent = Reference(above);
    element = above;
    parent = element->parent.get();
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

// `Version.component`: dies with the version, and then says so.
struct ComponentObject {
  PyObject_HEAD
  Reference component;
  std::shared_ptr<std::vector<Reference>> dead;
};

// `Version.dependents`.
struct DependentsObject {
  PyObject_HEAD
  std::vector<Reference> members;
  size_t limit;
};

inline PyTypeObject *component_type = nullptr, *dependents_type = nullptr;

template <class Object>
void delete_object(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  if constexpr (std::is_same_v<Object, ComponentObject>) {
    auto* holder = reinterpret_cast<ComponentObject*>(self);
    if (!holder->component.get()->gone) holder->dead->push_back(holder->component);
  }
  reinterpret_cast<Object*>(self)->~Object();
  type->tp_free(self);
  Py_DECREF(type);
}

template <class Object>
PyTypeObject* make_type(const char* name) {
  PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(delete_object<Object>)}, {0, nullptr}};
  PyType_Spec spec = {name, sizeof(Object), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

constexpr double SLACK = 1.0 / 64;  // as in core/neighbourhoods.py, like the next
constexpr int64_t DORMANT = 64;

// -- the score -------------------------------------------------------------------------------------------

// cost / (size * staleness), rounded once, as Python divides whole numbers.
inline double score(int64_t cost, int64_t size, int64_t staleness) {
  constexpr int64_t EXACT = int64_t{1} << 53;
  using Wide = unsigned __int128;
  Wide divisor = static_cast<Wide>(size) * static_cast<Wide>(staleness);
  if (cost <= EXACT && divisor <= static_cast<Wide>(EXACT))
    return static_cast<double>(cost) / static_cast<double>(static_cast<int64_t>(divisor));
  auto bits = [](Wide number) {
    auto high = static_cast<uint64_t>(number >> 64), low = static_cast<uint64_t>(number);
    return high != 0 ? 128 - __builtin_clzll(high) : low != 0 ? 64 - __builtin_clzll(low) : 0;
  };
  if (bits(divisor) > 72)  // a terabyte, unused for an hour
    return static_cast<double>(static_cast<long double>(cost) / static_cast<long double>(divisor));
  int shift = std::max(56 + bits(divisor) - bits(static_cast<Wide>(cost)), 0);
  if (cost == 0) return 0;
  Wide dividend = static_cast<Wide>(cost) << shift;
  auto quotient = static_cast<uint64_t>(dividend / divisor);  // at least 56 bits, of which a double keeps 53
  if (dividend % divisor != 0) quotient |= 1;                 // so that half-way cases are rounded rightly
  return std::ldexp(static_cast<double>(quotient), -shift);
}

// -- the pool and the search -----------------------------------------------------------------------------

class Policy {
 public:
  Policy(PyObject* heuristic, PyObject* version_class, PyObject* operation_class)
      : version_(version_class), operation_(operation_class), heuristic_(Ref::copy(heuristic)) {}

  int64_t nbytes = 0, score_evaluations = 0, scoring_ns = 0, search_ns = 0;
  size_t size() const { return pool_.size(); }
  PyObject* heuristic() const { return heuristic_.get(); }

  // The nodes in the order in which they were inserted, as a list.
  Ref nodes() const {
    std::vector<int64_t> numbers;
    for (const auto& [number, item] : pool_) numbers.push_back(number);
    std::sort(numbers.begin(), numbers.end());
    Ref list = checked(PyList_New(static_cast<Py_ssize_t>(numbers.size())));
    for (size_t i = 0; i < numbers.size(); i++)
      PyList_SET_ITEM(list.get(), i, Ref::copy(pool_.at(numbers[i]).node.get()).release());
    return list;
  }
  int traverse(visitproc visit, void* arg) const {
    for (const auto& [number, item] : pool_) Py_VISIT(item.node.get());
    return 0;
  }
  void clear() { std::unordered_map<int64_t, Item>().swap(pool_); }

  // -- events --

  void insert(PyObject* node) {
    if (!version_.bound.is_none(node)) return;
    int64_t size = version_.nbytes.number(node);
    if (size <= 0) return;
    int64_t number = ++last_number_;
    version_.bound.set_number(node, number);
    Item& item = pool_[number];
    item.node = Ref::copy(node);
    nbytes += size;
    make_due(number, item);
  }
  void discard(PyObject* node) {
    if (version_.bound.is_none(node)) return;
    int64_t number = version_.bound.number(node);
    version_.bound.set(node, Py_None);
    auto place = pool_.find(number);
    if (place == pool_.end()) return;  // the collector has cleared it
    nbytes -= version_.nbytes.number(node);
    Ref last = std::move(place->second.node);
    pool_.erase(place);
  }
  void evicted(PyObject* node) {
    Ref kept = Ref::copy(node);
    discard(node);
    if (!constant(node)) join(node);
  }
  void released(PyObject* node) {
    Ref kept = Ref::copy(node);
    discard(node);
    if (constant(node) || component_of(node) != nullptr) return;
    if (depended_on(node)) {
      join(node);
      return;
    }
    settle();
    Component* element = enter(node);
    for (PyObject* parent : inputs(node))
      if (Component* other = component_of(parent)) element->above += other->dormant ? other->above : 0;
    if (element->above > DORMANT) join(node);
  }
  // It was rematerialized, or will never be.
  void left(PyObject* node) {
    settle();
    if (Component* element = component_of(node)) {
      Reference kept(element);
      leave(element);
      version_.component.set(node, Py_None);
    }
  }
  void cost_changed(PyObject* node) {
    if (version_.bound.is_none(node)) return;
    int64_t number = version_.bound.number(node);
    make_due(number, pool_.at(number));
  }
  int64_t projected_cost(PyObject* node) {
    int64_t cost = version_.cost.number(node);
    if (version_.bound.is_none(node)) return cost;
    neighbours(node);
    roots_.clear();
    for (Component* neighbour : neighbours_) {
      Component* root = find(neighbour);
      if (std::find(roots_.begin(), roots_.end(), root) != roots_.end()) continue;
      roots_.push_back(root);
      cost += root->total;
    }
    return cost;
  }

  // -- the search --

  // Returns the node with the least score of those for which `evictable(node)` is true, or null.
  template <class Evictable>
  Ref select(int64_t now, const Evictable& evictable) {
    int64_t started = now_ns(), scoring = scoring_ns;
    Ref chosen;
    try {
      settle();
      chosen = choose(now, evictable);
    } catch (...) {  // the nodes under consideration must not be lost
      for (auto& [number, item] : pool_) make_due(number, item);
      throw;
    }
    search_ns += now_ns() - started - (scoring_ns - scoring);
    return chosen;
  }

 private:
  struct Item {
    Ref node;
    bool due = false;
    bool asleep = false;
    uint64_t entry = 0;     // the valid one in `bounds_`, while asleep
    int64_t until = 0;      // the last clock value at which its bound holds
    double share = 0;       // its value at staleness 1
    bool known = false;     // whether that includes the neighbourhood's cost
    int64_t waking = NEVER;  // the valid clock value in `wakings_`
  };
  struct Bound {
    double bound;
    int64_t number;
    uint64_t entry;
    bool operator<(const Bound& other) const {  // the least on top of a heap
      return bound != other.bound ? bound > other.bound : number > other.number;
    }
  };
  struct Candidate {
    double score;
    int64_t number;
    double share;
    bool operator<(const Candidate& other) const {
      return score != other.score ? score > other.score : number > other.number;
    }
  };
  struct Waking {
    int64_t time, number;
    bool operator<(const Waking& other) const { return time > other.time; }
  };
  static constexpr int64_t NEVER = INT64_MAX;
  static constexpr double UNKNOWN = -1, ROUNDING = 1 - 1e-12, FAR = 4;

  // -- nodes --

  bool constant(PyObject* node) const { return version_.operation.is_none(node); }
  Component* component_of(PyObject* node) const {
    PyObject* holder = version_.component.get(node);
    return holder == Py_None ? nullptr : reinterpret_cast<ComponentObject*>(holder)->component.get();
  }
  DependentsObject* dependents_of(PyObject* node) const {
    PyObject* found = version_.dependents.get(node);
    return found == Py_None ? nullptr : reinterpret_cast<DependentsObject*>(found);
  }
  Items inputs(PyObject* node) const {
    PyObject* operation = version_.operation.get(node);
    return operation == Py_None ? Items() : Items(operation_.inputs.get(operation));
  }

  // -- components --

  bool depended_on(PyObject* node) const {
    DependentsObject* dependents = dependents_of(node);
    if (dependents == nullptr) return false;
    return std::any_of(dependents->members.begin(), dependents->members.end(),
                       [](const Reference& member) { return !member.get()->gone; });
  }
  Component* enter(PyObject* node) {
    Reference element(new Component(version_.cost.number(node)));
    Ref holder = checked(component_type->tp_alloc(component_type, 0));
    auto* object = reinterpret_cast<ComponentObject*>(holder.get());
    new (&object->component) Reference(element);
    new (&object->dead) std::shared_ptr<std::vector<Reference>>(dead_);
    version_.component.take(node, holder.release());
    return element.get();
  }
  // Enters a node among the evicted dependents of its inputs.
  void link(PyObject* node, Component* element) {
    element->dormant = false;
    for (PyObject* parent : inputs(node)) {
      if (constant(parent)) continue;
      DependentsObject* dependents = dependents_of(parent);
      if (dependents == nullptr) {
        Ref made = checked(dependents_type->tp_alloc(dependents_type, 0));
        dependents = reinterpret_cast<DependentsObject*>(made.get());
        new (&dependents->members) std::vector<Reference>();
        dependents->limit = 8;
        version_.dependents.take(parent, made.release());
      }
      auto& members = dependents->members;
      if (members.size() >= dependents->limit) {
        members.erase(std::remove_if(members.begin(), members.end(),
                                     [](const Reference& member) { return member.get()->gone; }),
                      members.end());
        dependents->limit = std::max<size_t>(8, 2 * members.size());
      }
      if (members.empty() || members.back().get() != element) members.emplace_back(element);
    }
  }
  // A node is evicted, and so joins the components of its evicted neighbours.
  void join(PyObject* wanted) {
    if (Component* element = component_of(wanted); element != nullptr && !element->dormant) return;
    settle();
    std::vector<PyObject*> pending{wanted};
    while (!pending.empty()) {
      PyObject* node = pending.back();
      pending.pop_back();
      Component* element = component_of(node);
      if (element == nullptr) element = enter(node);
      if (!element->dormant) continue;
      link(node, element);
      Component* root = find(element);
      for (PyObject* parent : inputs(node)) {
        Component* other = component_of(parent);
        if (other == nullptr) continue;
        if (other->dormant)
          pending.push_back(parent);  // it finds us among its dependents
        else
          root = unite(root, find(other));
      }
      if (DependentsObject* dependents = dependents_of(node))
        for (const Reference& other : dependents->members)
          if (!other.get()->gone) root = unite(root, find(other.get()));
    }
  }
  // Removes those that died. Deaths occur at any moment, so they are only queued.
  void settle() {
    while (!dead_->empty()) {
      Reference element = std::move(dead_->back());
      dead_->pop_back();
      leave(element.get());
    }
  }
  void leave(Component* element) {
    if (element->gone) return;
    element->gone = true;
    all_due(element->watchers);
    Component* root = find(element);
    root->total -= element->cost;
    if (static_cast<double>(root->total) < root->floor) {
      all_due(root->watchers_of_all);
      root->floor = 0;
    }
  }
  void all_due(Numbers& watchers) {
    for (int64_t number : watchers.all())
      if (auto place = pool_.find(number); place != pool_.end()) make_due(number, place->second);
    watchers.clear();
  }
  // Lists in `neighbours_` the evicted storages that are adjacent to a node.
  void neighbours(PyObject* node) {
    neighbours_.clear();
    for (PyObject* parent : inputs(node)) {
      Component* element = component_of(parent);
      if (element == nullptr) continue;
      neighbours_.push_back(element);
      if (element->dormant) behind(parent);
    }
    if (DependentsObject* dependents = dependents_of(node))
      for (const Reference& member : dependents->members)
        if (!member.get()->gone) neighbours_.push_back(member.get());
  }
  // Adds the non-resident storages that a dormant one is computed from.
  void behind(PyObject* wanted) {
    std::vector<PyObject*> pending{wanted};
    while (!pending.empty()) {
      PyObject* node = pending.back();
      pending.pop_back();
      for (PyObject* parent : inputs(node)) {
        Component* element = component_of(parent);
        if (element == nullptr || std::find(neighbours_.begin(), neighbours_.end(), element) != neighbours_.end())
          continue;
        neighbours_.push_back(element);
        if (element->dormant) pending.push_back(parent);
      }
    }
  }
  // The projected cost, and a lower bound of it that holds until the node is made due.
  std::pair<int64_t, double> watched_cost(PyObject* node, int64_t number) {
    int64_t cost = version_.cost.number(node);
    auto lower = static_cast<double>(cost);
    auto is_stale = [&](int64_t other) { return pool_.count(other) == 0; };
    neighbours(node);
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

  // -- choosing --

  void make_due(int64_t number, Item& item) {
    if (item.due) return;
    item.due = true;
    due_.push_back(number);
  }

  template <class Evictable>
  Ref choose(int64_t now, const Evictable& evictable) {
    set_longest(now);
    std::vector<Candidate> candidates, refused;
    std::vector<std::pair<int64_t, double>> woken = wake(now);
    consider_below(candidates, now);
    consider_all(woken, candidates, now);
    woken.clear();
    for (int64_t number : due_) woken.emplace_back(number, UNKNOWN);
    for (int64_t number : due_)
      if (auto place = pool_.find(number); place != pool_.end()) place->second.due = false;
    due_.clear();
    consider_all(woken, candidates, now);
    Ref chosen;
    double least = 0;
    while (!chosen) {
      consider_below(candidates, now);
      if (candidates.empty()) break;
      std::pop_heap(candidates.begin(), candidates.end());
      Candidate candidate = candidates.back();
      candidates.pop_back();
      auto place = pool_.find(candidate.number);
      if (place != pool_.end()) {
        Ref node = Ref::copy(place->second.node.get());
        if (version_.resident.is_true(node.get()) && evictable(node.get())) {
          chosen = std::move(node);
          least = candidate.score;
          if (auto still = pool_.find(candidate.number); still != pool_.end())
            make_due(candidate.number, still->second);  // in case it is not evicted after all
          break;
        }
      }
      refused.push_back(candidate);
    }
    for (const Candidate& one : candidates) put_to_sleep(one.number, one.share, now, least, true);
    for (const Candidate& one : refused) put_to_sleep(one.number, one.share, now, least, true);
    sweep();
    return chosen;
  }

  void set_longest(int64_t now) {
    if (origin_ == NEVER)
      for (const auto& [number, item] : pool_)
        origin_ = std::min(origin_, version_.last_access.number(item.node.get()));
    if (origin_ != NEVER)
      longest_ = static_cast<int64_t>(static_cast<__int128>(now - origin_) * static_cast<__int128>(pool_.size()) /
                                      last_number_);
  }

  // Removes the bounds that have expired. Returns their numbers and their values at staleness 1.
  std::vector<std::pair<int64_t, double>> wake(int64_t now) {
    for (int64_t number : due_)
      if (auto place = pool_.find(number); place != pool_.end()) place->second.asleep = false;
    std::vector<std::pair<int64_t, double>> woken;
    while (!wakings_.empty() && wakings_.front().time < now) {
      auto [time, number] = wakings_.front();
      std::pop_heap(wakings_.begin(), wakings_.end());
      wakings_.pop_back();
      auto place = pool_.find(number);
      if (place == pool_.end() || place->second.waking != time) continue;
      Item& item = place->second;
      if (!item.asleep) {
        item.waking = NEVER;
      } else if (item.until < now) {
        item.waking = NEVER;
        item.asleep = false;
        woken.emplace_back(number, item.known ? item.share : UNKNOWN);
      } else {  // its bound has been renewed since
        push_waking(item.until, number, item);
      }
    }
    return woken;
  }
  void push_waking(int64_t time, int64_t number, Item& item) {
    item.waking = time;
    wakings_.push_back({time, number});
    std::push_heap(wakings_.begin(), wakings_.end());
  }

  struct Above {
    int64_t number;
    double share;
    bool known;
  };

  // Considers every node whose bound is below the first candidate.
  void consider_below(std::vector<Candidate>& candidates, int64_t now) {
    std::vector<Above> above;
    while (!bounds_.empty()) {
      Bound top = bounds_.front();
      if (!candidates.empty()) {
        const Candidate& first = candidates.front();
        if (top.bound > first.score || (top.bound == first.score && top.number > first.number)) break;
      }
      std::pop_heap(bounds_.begin(), bounds_.end());
      bounds_.pop_back();
      auto place = pool_.find(top.number);
      if (place == pool_.end() || !place->second.asleep || place->second.entry != top.entry) continue;
      place->second.asleep = false;
      consider(top.number, place->second.known ? place->second.share : UNKNOWN, candidates, above, now);
    }
    all_asleep(above, candidates, now);
  }
  void consider_all(const std::vector<std::pair<int64_t, double>>& numbers, std::vector<Candidate>& candidates,
                    int64_t now) {
    std::vector<Above> above;
    for (auto [number, share] : numbers) consider(number, share, candidates, above, now);
    all_asleep(above, candidates, now);
  }
  void all_asleep(const std::vector<Above>& above, const std::vector<Candidate>& candidates, int64_t now) {
    double best = candidates.empty() ? 0 : candidates.front().score;
    for (const Above& one : above) put_to_sleep(one.number, one.share, now, best, one.known);
  }
  // Makes a node a candidate if it may score less than the first one.
  void consider(int64_t number, double share, std::vector<Candidate>& candidates, std::vector<Above>& above,
                int64_t now) {
    auto place = pool_.find(number);
    if (place == pool_.end()) return;
    PyObject* node = place->second.node.get();
    int64_t size = version_.nbytes.number(node);
    int64_t staleness = std::max<int64_t>(now - version_.last_access.number(node), 1);
    if (!candidates.empty()) {
      double best_share = candidates.front().score * static_cast<double>(staleness);
      if (share != UNKNOWN) {
        if (share * ROUNDING > best_share) {
          above.push_back({number, share, true});
          return;
        }
      } else {
        double own = static_cast<double>(version_.cost.number(node)) / static_cast<double>(size);
        if (own * ROUNDING > best_share * FAR) {
          above.push_back({number, own, false});
          return;
        }
      }
    }
    int64_t started = now_ns();
    auto [cost, lower] = watched_cost(node, number);
    candidates.push_back({score(cost, size, staleness), number, lower / static_cast<double>(size)});
    std::push_heap(candidates.begin(), candidates.end());
    scoring_ns += now_ns() - started;
    score_evaluations++;
  }

  // Stores a lower bound for a node. best: the least score now, 0 if there is none.
  void put_to_sleep(int64_t number, double share, int64_t now, double best, bool known) {
    auto place = pool_.find(number);
    if (place == pool_.end()) return;
    Item& item = place->second;
    int64_t last_access = version_.last_access.number(item.node.get());
    int64_t staleness = std::max<int64_t>(now - last_access, 1), stalest;
    double threshold = best * static_cast<double>(staleness);
    if (share > threshold && threshold > 0) {
      double sleep = (share / best - static_cast<double>(staleness)) / 2;
      stalest = staleness + (sleep < static_cast<double>(longest_) ? static_cast<int64_t>(sleep) : longest_);
    } else {
      stalest = staleness + staleness / 64 + 1;
    }
    item.asleep = true;
    item.entry = ++entries_;
    item.until = last_access + stalest;
    item.share = share;
    item.known = known;
    bounds_.push_back({share / static_cast<double>(stalest) * ROUNDING, number, item.entry});
    std::push_heap(bounds_.begin(), bounds_.end());
    if (item.waking > item.until) push_waking(item.until, number, item);
  }

  // Drops stale entries when they outnumber the valid ones.
  void sweep() {
    size_t limit = 64 + 2 * pool_.size();
    if (std::max(bounds_.size(), wakings_.size()) <= limit) return;
    auto of = [&](int64_t number) -> const Item* {
      auto place = pool_.find(number);
      return place == pool_.end() || !place->second.asleep ? nullptr : &place->second;
    };
    bounds_.erase(std::remove_if(bounds_.begin(), bounds_.end(),
                                 [&](const Bound& one) {
                                   const Item* item = of(one.number);
                                   return item == nullptr || item->entry != one.entry;
                                 }),
                  bounds_.end());
    std::make_heap(bounds_.begin(), bounds_.end());
    wakings_.clear();
    for (auto& [number, item] : pool_) {
      if (!item.asleep) item.waking = NEVER;
      if (item.waking != NEVER) wakings_.push_back({item.waking, number});
    }
    std::make_heap(wakings_.begin(), wakings_.end());
  }

  VersionSlots version_;
  OperationSlots operation_;
  Ref heuristic_;
  std::unordered_map<int64_t, Item> pool_;
  int64_t last_number_ = 0;
  std::vector<int64_t> due_;  // whose score must be computed before the next choice
  std::shared_ptr<std::vector<Reference>> dead_ = std::make_shared<std::vector<Reference>>();
  std::vector<Component*> neighbours_, roots_;  // of the node that is being looked at
  std::vector<Bound> bounds_;                   // heaps
  std::vector<Waking> wakings_;
  uint64_t entries_ = 0;
  int64_t origin_ = NEVER, longest_ = 0;
};

// -- for Python ------------------------------------------------------------------------------------------

// A `core.pool.Policy`.
struct PolicyObject {
  PyObject_HEAD
  Policy* policy;
};

inline PyTypeObject* policy_type = nullptr;

inline Policy& policy_of(PyObject* self) { return *reinterpret_cast<PolicyObject*>(self)->policy; }

template <void (Policy::*event)(PyObject*)>
PyObject* told(PyObject* self, PyObject* node) {
  return guarded([&]() -> PyObject* {
    (policy_of(self).*event)(node);
    Py_RETURN_NONE;
  });
}

template <int64_t Policy::*counter>
PyObject* counted(PyObject* self, void*) {
  return PyLong_FromLongLong(policy_of(self).*counter);
}

template <int64_t Policy::*counter>
int set_count(PyObject* self, PyObject* value, void*) {
  int64_t number = value == nullptr ? -1 : as_number(value);
  if (number == -1) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "not a count");
    return -1;
  }
  policy_of(self).*counter = number;
  return 0;
}

inline PyObject* new_policy(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *heuristic, *version_class, *operation_class;
  if (!PyArg_ParseTuple(args, "OOO", &heuristic, &version_class, &operation_class)) return nullptr;
  return guarded([&]() -> PyObject* {
    auto made = std::make_unique<Policy>(heuristic, version_class, operation_class);
    Ref self = checked(type->tp_alloc(type, 0));
    reinterpret_cast<PolicyObject*>(self.get())->policy = made.release();
    return self.release();
  });
}

inline PyTypeObject* make_policy_type() {
  static PyMethodDef methods[] = {
      {"insert", told<&Policy::insert>, METH_O, "See core.pool.Policy, like the others."},
      {"discard", told<&Policy::discard>, METH_O, nullptr},
      {"evicted", told<&Policy::evicted>, METH_O, nullptr},
      {"released", told<&Policy::released>, METH_O, nullptr},
      {"rematerialized", told<&Policy::left>, METH_O, nullptr},
      {"forget", told<&Policy::left>, METH_O, nullptr},
      {"cost_changed", told<&Policy::cost_changed>, METH_O, nullptr},
      {"projected_cost",
       [](PyObject* self, PyObject* node) -> PyObject* {
         return guarded([&] { return PyLong_FromLongLong(policy_of(self).projected_cost(node)); });
       },
       METH_O, nullptr},
      {"select",
       [](PyObject* self, PyObject* args) -> PyObject* {
         long long now;
         PyObject* evictable;
         if (!PyArg_ParseTuple(args, "LO", &now, &evictable)) return nullptr;
         return guarded([&]() -> PyObject* {
           Ref chosen = policy_of(self).select(now, [&](PyObject* node) {
             int is_true = PyObject_IsTrue(checked(PyObject_CallOneArg(evictable, node)).get());
             if (is_true < 0) raise();
             return is_true == 1;
           });
           return chosen ? chosen.release() : Ref::copy(Py_None).release();
         });
       },
       METH_VARARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyGetSetDef attributes[] = {
      {"nbytes", counted<&Policy::nbytes>, nullptr, nullptr, nullptr},
      {"score_evaluations", counted<&Policy::score_evaluations>, set_count<&Policy::score_evaluations>, nullptr, nullptr},
      {"scoring_ns", counted<&Policy::scoring_ns>, set_count<&Policy::scoring_ns>, nullptr, nullptr},
      {"search_ns", counted<&Policy::search_ns>, set_count<&Policy::search_ns>, nullptr, nullptr},
      {"foresight", [](PyObject*, void*) { return Ref::copy(Py_None).release(); }, nullptr, nullptr, nullptr},
      {"heuristic", [](PyObject* self, void*) { return Ref::copy(policy_of(self).heuristic()).release(); }, nullptr,
       nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  auto length = [](PyObject* self) { return static_cast<Py_ssize_t>(policy_of(self).size()); };
  auto iterate = [](PyObject* self) -> PyObject* {
    return guarded([&] { return PyObject_GetIter(policy_of(self).nodes().get()); });
  };
  auto traverse = [](PyObject* self, visitproc visit, void* arg) -> int {
    Py_VISIT(Py_TYPE(self));
    Policy* policy = reinterpret_cast<PolicyObject*>(self)->policy;
    return policy == nullptr ? 0 : policy->traverse(visit, arg);
  };
  auto clear = [](PyObject* self) -> int {
    if (Policy* policy = reinterpret_cast<PolicyObject*>(self)->policy) policy->clear();
    return 0;
  };
  auto destroy = [](PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    delete reinterpret_cast<PolicyObject*>(self)->policy;
    type->tp_free(self);
    Py_DECREF(type);
  };
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(new_policy)},
      {Py_tp_methods, methods},
      {Py_tp_getset, attributes},
      {Py_sq_length, reinterpret_cast<void*>(+length)},
      {Py_tp_iter, reinterpret_cast<void*>(+iterate)},
      {Py_tp_traverse, reinterpret_cast<void*>(+traverse)},
      {Py_tp_clear, reinterpret_cast<void*>(+clear)},
      {Py_tp_dealloc, reinterpret_cast<void*>(+destroy)},
      {Py_tp_doc, const_cast<char*>("Policy(heuristic, Version, Operation): `core.search.HeapSearch` for h_dtr_eq.")},
      {0, nullptr},
  };
  static PyType_Spec spec = {"_dtrrun_native.Policy", sizeof(PolicyObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  component_type = make_type<ComponentObject>("_dtrrun_native.Component");
  dependents_type = make_type<DependentsObject>("_dtrrun_native.Dependents");
  if (component_type == nullptr || dependents_type == nullptr) return nullptr;
  return policy_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

}  // namespace dtrrun

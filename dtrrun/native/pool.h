// The pool of evictable storages, by number: `core.pool.Policy`, without what it is composed of.
#pragma once

#include <unordered_map>

#include "evicted.h"

namespace dtrrun {

constexpr int64_t NEVER = INT64_MAX;

// What is cached of a node's exact neighbourhood.
struct Reach {
  bool above_known = false, below_known = false, cost_known = false;
  int64_t cost = 0;  // of all of them together
  std::vector<Reference> above, below;
};

struct Item {
  Ref node;
  bool due = false;
  // Of the search.
  bool asleep = false;
  bool known = false;          // whether its share includes the neighbourhood's cost
  uint64_t entry = 0;          // the valid one of its bounds, while asleep
  int64_t until = 0;           // the last clock value at which its bound holds
  double share = 0;            // a lower bound of its score at staleness 1
  int64_t waking = NEVER;      // the valid clock value of its wakings
  int64_t expected = NEVER;    // the valid time of the recorded step at which its score may fall
  std::unique_ptr<Reach> reach;  // null until it is asked for
};

class Pool {
 public:
  explicit Pool(const Nodes& nodes) : version_(nodes.version) {}

  int64_t nbytes = 0;
  int64_t last_number = 0;
  std::unordered_map<int64_t, Item> items;
  std::vector<int64_t> due;  // numbers whose score must be computed before the next choice

  Item* find(int64_t number) {
    auto place = items.find(number);
    return place == items.end() ? nullptr : &place->second;
  }
  // Where a node is in the pool: null if it is not.
  Item* find(PyObject* node) { return version_.bound.is_none(node) ? nullptr : find(version_.bound.number(node)); }
  bool has(int64_t number) const { return items.count(number) != 0; }

  void insert(PyObject* node) {
    if (!version_.bound.is_none(node)) return;
    int64_t size = version_.nbytes.number(node);
    if (size <= 0) return;
    int64_t number = ++last_number;
    version_.bound.set_number(node, number);
    Item& item = items[number];
    item.node = Ref::copy(node);
    nbytes += size;
    make_due(number, item);
  }
  void discard(PyObject* node) {
    if (version_.bound.is_none(node)) return;
    int64_t number = version_.bound.number(node);
    version_.bound.clear(node);
    auto place = items.find(number);
    if (place == items.end()) return;  // the collector has cleared it
    nbytes -= version_.nbytes.number(node);
    Ref last = std::move(place->second.node);
    items.erase(place);
  }
  void make_due(int64_t number, Item& item) {
    if (item.due) return;
    item.due = true;
    due.push_back(number);
  }
  void make_due(const Numbers& numbers) {
    for (int64_t number : numbers.all())
      if (Item* item = find(number)) make_due(number, *item);
  }
  void make_all_due() {
    for (auto& [number, item] : items) make_due(number, item);
  }

  // The nodes in the order in which they were inserted, as a list.
  Ref nodes() const {
    std::vector<int64_t> numbers;
    for (const auto& [number, item] : items) numbers.push_back(number);
    std::sort(numbers.begin(), numbers.end());
    Ref list = checked(PyList_New(static_cast<Py_ssize_t>(numbers.size())));
    for (size_t i = 0; i < numbers.size(); i++)
      PyList_SET_ITEM(list.get(), i, Ref::copy(items.at(numbers[i]).node.get()).release());
    return list;
  }
  int traverse(visitproc visit, void* arg) const {
    for (const auto& [number, item] : items) Py_VISIT(item.node.get());
    return 0;
  }
  void clear() { std::unordered_map<int64_t, Item>().swap(items); }

 private:
  const VersionFields& version_;
};

}  // namespace dtrrun

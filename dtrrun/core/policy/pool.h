// The pool of evictable storages (App. C.4), keyed by the numbers of their nodes.
#pragma once

#include <cstdlib>
#include <unordered_map>

#include "evicted.h"

namespace dtrrun {

constexpr int64_t NEVER = INT64_MAX;

// What is cached of a node's exact neighbourhood.
struct Reach {
  bool above_known = false, below_known = false, cost_known = false;
  int64_t cost = 0;  // their total cost
  std::vector<Reference> above, below;
};

struct Item {
  KeptNode node;
  bool due = false;
  // Used by the search:
  bool asleep = false;
  bool known = false;          // whether `share` includes the neighbourhood's cost
  uint64_t entry = 0;          // which of its bounds in the heap is valid, while asleep
  int64_t until = 0;           // the last clock value at which its bound holds
  double share = 0;            // a lower bound of its score at staleness 1
  int64_t waking = NEVER;      // the time of its valid entry in `wakings_`
  int64_t expected = NEVER;    // that in `expected_`: the time in the recorded step at which its score may fall
  std::unique_ptr<Reach> reach;  // null until it is needed
};

class Pool {
 public:
  // latest: of equal scores, that of the node inserted last counts as the least, not that of the first.
  explicit Pool(bool latest) : step_(latest ? -1 : 1) {}

  int64_t nbytes = 0;
  std::unordered_map<int64_t, Item> items;
  std::vector<int64_t> due;  // numbers whose score must be computed before the next choice

  // Returns how many nodes have been inserted so far.
  int64_t inserted() const { return std::abs(last_number_); }

  Item* find(int64_t number) {
    auto place = items.find(number);
    return place == items.end() ? nullptr : &place->second;
  }
  // Returns a node's item, or null if it is not in the pool.
  Item* find(const Node* node) { return node->pool_id == 0 ? nullptr : find(node->pool_id); }
  bool has(int64_t number) const { return items.count(number) != 0; }

  // No effect if the node is in the pool already, or has no bytes.
  void insert(Node* node) {
    if (node->pool_id != 0 || node->nbytes <= 0) return;
    last_number_ += step_;
    node->pool_id = last_number_;
    Item& item = items[last_number_];
    item.node = KeptNode(node);
    nbytes += node->nbytes;
    make_due(last_number_, item);
  }
  // No effect if it is not in the pool.
  void discard(Node* node) {
    if (node->pool_id == 0) return;
    auto place = items.find(std::exchange(node->pool_id, 0));
    if (place == items.end()) return;  // the pool has been cleared
    nbytes -= node->nbytes;
    KeptNode last = std::move(place->second.node);
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
  // Returns the numbers in the order in which the nodes were inserted.
  std::vector<int64_t> numbers() const {
    std::vector<int64_t> all;
    for (const auto& [number, item] : items) all.push_back(number);
    std::sort(all.begin(), all.end(), [](int64_t a, int64_t b) { return std::abs(a) < std::abs(b); });
    return all;
  }
  // Drops the references to all nodes, without updating the nodes.
  void clear() { std::unordered_map<int64_t, Item>().swap(items); }

 private:
  const int64_t step_;
  int64_t last_number_ = 0;
};

}  // namespace dtrrun

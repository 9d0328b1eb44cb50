// The pool of evictable storages (App. C.4), keyed by the numbers of their nodes.
#pragma once

#include <cstdlib>

#include "evicted.h"
#include "table.h"

namespace dtrrun {

constexpr int64_t NEVER = INT64_MAX;

// What is cached of a node's exact neighbourhood.
struct Reach {
  bool above_known = false, below_known = false, cost_known = false;
  int64_t cost = 0, cost_above = 0;     // the total cost of both, and of those above
  std::vector<Reference> above, below;  // above: empty if only its cost is asked for
};

struct Item : InNodeMemory {
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
  Reach reach;
  uint64_t seen = 0;           // by the last `drop_repeated` that has met its number
  // Used by `Prices`:
  bool priced = false;         // whether a bound of its price is kept that does not know yet that it may have fallen
  uintptr_t address = 0;       // by which it is kept
};

class Pool {
 public:
  // latest: of equal scores, that of the node inserted last counts as the least, not that of the first.
  explicit Pool(bool latest) : step_(latest ? -1 : 1) {}
  ~Pool() { clear(); }
  Pool(const Pool&) = delete;

  int64_t nbytes = 0;
  std::vector<int64_t> due;     // numbers whose score must be computed before the next choice
  std::vector<int64_t> fallen;  // numbers of priced items whose projected cost may have fallen

  // Returns how many nodes have been inserted so far.
  int64_t inserted() const { return std::abs(last_number_); }

  size_t size() const { return items_.size(); }
  Item* find(int64_t number) const { return items_.find(number); }
  // Returns a node's item, or null if it is not in the pool.
  Item* find(const Node* node) const { return node->pool_id == 0 ? nullptr : find(node->pool_id); }
  // Calls function(number, item) for each, in no particular order.
  template <class Function>
  void each(const Function& function) const {
    items_.each(function);
  }
  // Calls function(number, item) for each that was inserted after the first `count`, in no particular order.
  template <class Function>
  void each_since(int64_t count, const Function& function) const {
    if (inserted() - count > static_cast<int64_t>(size())) {
      each([&](int64_t number, Item& item) {
        if (std::abs(number) > count) function(number, item);
      });
    } else {
      while (count++ < inserted())
        if (Item* item = find(step_ * count)) function(step_ * count, *item);
    }
  }

  // No effect if the node is in the pool already, or has no bytes.
  void insert(Node* node) {
    if (node->pool_id != 0 || node->nbytes <= 0) return;
    last_number_ += step_;
    node->pool_id = last_number_;
    auto* item = new Item;
    items_.put(last_number_, item);
    item->node = KeptNode(node);
    nbytes += node->nbytes;
    make_due(last_number_, *item);
  }
  // No effect if it is not in the pool.
  void discard(Node* node) {
    if (node->pool_id == 0) return;
    std::unique_ptr<Item> item(items_.remove(std::exchange(node->pool_id, 0)));
    if (item) nbytes -= node->nbytes;  // otherwise the pool has been cleared
  }
  void make_due(int64_t number, Item& item) {
    if (std::exchange(item.priced, false)) fallen.push_back(number);
    if (item.due) return;
    item.due = true;
    if (due.size() > 64 + 2 * size())  // nothing has been chosen for long
      due.erase(std::remove_if(due.begin(), due.end(), [&](int64_t one) { return find(one) == nullptr; }), due.end());
    due.push_back(number);
  }
  void make_due(const Numbers& numbers) {
    for (int64_t number : numbers.all())
      if (Item* item = find(number)) make_due(number, *item);
  }
  void make_all_due() {
    each([&](int64_t number, Item& item) { make_due(number, item); });
  }
  // Notes that a node with this number relies on something.
  void watch(Numbers& watchers, int64_t number) {
    watchers.add(number, [&](ShortVector<int64_t>& all) { drop_repeated(all); });
  }
  // Returns the numbers in the order in which the nodes were inserted.
  std::vector<int64_t> numbers() const {
    std::vector<int64_t> all;
    each([&](int64_t number, const Item&) { all.push_back(number); });
    std::sort(all.begin(), all.end(), [](int64_t a, int64_t b) { return std::abs(a) < std::abs(b); });
    return all;
  }
  // Drops the references to all nodes, without updating the nodes.
  void clear() {
    std::exchange(items_, {}).each([](int64_t, Item& item) { delete &item; });
  }

 private:
  // Drops numbers that occur twice, or whose nodes are no longer here.
  void drop_repeated(ShortVector<int64_t>& numbers) {
    drops_++;
    auto is_superfluous = [&](int64_t number) {
      Item* item = find(number);
      return item == nullptr || std::exchange(item->seen, drops_) == drops_;
    };
    numbers.erase(std::remove_if(numbers.begin(), numbers.end(), is_superfluous), numbers.end());
  }

  Table<Item> items_;  // which this owns
  uint64_t drops_ = 0;
  const int64_t step_;
  int64_t last_number_ = 0;
};

}  // namespace dtrrun

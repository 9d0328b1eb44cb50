// What nodes in the pool would cost if they were evicted for the bytes of others, by the addresses of their memory.
//
// For windows of neighbours (`native/windows.h`), which may be asked for before each allocation. To compute all prices would
// take most of the time of a step that has ten thousand nodes in memory. So a lower bound is kept of each projected cost, which
// holds until the pool says that the cost may have fallen. Prices themselves are computed only of what may be in the cheapest
// window. Bounds lie in a row, without pointers.
#pragma once

#include <cmath>
#include <iterator>
#include <vector>

#include "search.h"

namespace dtrrun {

// A node, by its number in the pool, which it may have left meanwhile; its memory may have moved, too.
struct Priced {
  uintptr_t address;
  int64_t number;
  double share;         // a lower bound of its price at staleness 1
  int64_t last_access;  // or an earlier one
};

// Upper bounds of powers of whole numbers, from a table: a power takes longer than all else that a bound of a price needs.
class Powers {
 public:
  // Returns number ** exponent, or at most a 64th more. number: above 0. exponent: above 0, at most 1.
  double at_least(int64_t number, double exponent) {
    if (exponent != exponent_) fill(exponent);
    auto bits = static_cast<uint64_t>(number);
    int left_out = std::max(63 - __builtin_clzll(bits) - KEPT, 0);  // of its lowest bits
    return powers_[place_of(left_out, bits >> left_out)];
  }

 private:
  static constexpr int KEPT = 6;  // bits after the highest one
  static constexpr uint64_t FIRST = uint64_t{1} << KEPT;

  // For numbers of at most KEPT + 1 bits, of which none is left out, there are twice as many places.
  static size_t place_of(int left_out, uint64_t high) { return (static_cast<size_t>(left_out) << KEPT) + high; }
  void fill(double exponent) {
    exponent_ = exponent;
    powers_.resize(place_of(64 - KEPT, FIRST));
    for (uint64_t number = 1; number < 2 * FIRST; number++) powers_[number] = std::pow(static_cast<double>(number), exponent);
    for (int left_out = 1; left_out < 64 - KEPT; left_out++)
      for (uint64_t high = FIRST; high < 2 * FIRST; high++)
        powers_[place_of(left_out, high)] = std::pow(std::ldexp(static_cast<double>(high + 1), left_out), exponent);
  }

  double exponent_ = 0;  // 0: the table is not there yet
  std::vector<double> powers_;
};

class Prices {
 public:
  Prices(Pool& pool, Neighbourhood& neighbourhood, const Search& search, const Heuristic& heuristic)
      : pool_(pool), neighbourhood_(neighbourhood), search_(search), heuristic_(heuristic) {}

  // Returns a node's price. cost: its projected cost.
  double of(const Node* node, int64_t cost, int64_t now) const {
    int64_t since = std::max<int64_t>(now - node->last_access, 1);
    if (heuristic_.function) return divided(node->cost, 1, since);
    return heuristic_.score(search_.cheaper(node, cost), 1, since);
  }

  // Returns a lower bound of `Heuristic::score` for one byte.
  double score_at_least(int64_t cost, int64_t since) {
    if (!heuristic_.root) return heuristic_.score(cost, 1, since);
    return static_cast<double>(cost) / aged_at_most(since) * Search::ROUNDING;
  }

  // Returns all nodes in the pool by address, and perhaps some that are no longer there, until it is called again.
  // address_of(node): where its memory is now, or 0.
  template <class AddressOf>
  std::vector<Priced>& all(const AddressOf& address_of) {
    std::vector<Priced> added;
    pool_.each_since(known_, [&](int64_t number, Item& item) {
      item.address = address_of(item.node.get());
      if (item.address != 0) added.push_back(first_bound(number, item));
    });
    known_ = pool_.inserted();
    lower_fallen();
    merge(added);
    return all_;
  }
  // Returns a lower bound of a node's price.
  double at_least(const Priced& one, int64_t now) {
    if (!heuristic_.staleness && !heuristic_.function) return one.share * Search::ROUNDING;
    int64_t since = std::max<int64_t>(now - one.last_access, 1);
    return one.share / aged_at_most(since) * Search::ROUNDING;
  }
  // Returns the node, or null if it is not in the pool any more.
  Node* node_of(const Priced& one) const {
    Item* item = pool_.find(one.number);
    return item == nullptr ? nullptr : item->node.get();
  }
  // Computes the price of a node that is in the pool.
  double exact(Priced& one, int64_t now) {
    Item* item = pool_.find(one.number);
    Node* node = item->node.get();
    auto [cost, lower] = neighbourhood_.watched_cost(node, one.number, *item);
    one.last_access = node->last_access;
    one.share =
        heuristic_.function ? static_cast<double>(node->cost) : share_of(node, std::min(lower, static_cast<double>(cost)));
    return of(node, cost, now);
  }

 private:
  // Returns an upper bound of `Heuristic::aged`.
  double aged_at_most(int64_t since) {
    return heuristic_.exponent == 1 ? static_cast<double>(since) : powers_.at_least(since, heuristic_.exponent);
  }
  double share_of(const Node* node, double cost) const {
    return heuristic_.share(std::min(cost, static_cast<double>(search_.cheaper(node, NEVER))), 1);
  }
  // A bound that considers the node alone.
  Priced first_bound(int64_t number, Item& item) {
    const Node* node = item.node.get();
    item.priced = true;
    auto cost = static_cast<double>(node->cost);
    return {item.address, number, heuristic_.function ? cost : share_of(node, cost), node->last_access};
  }
  void lower_fallen() {
    for (int64_t number : pool_.fallen) {
      Item* item = pool_.find(number);
      if (item == nullptr) continue;
      auto found = std::lower_bound(all_.begin(), all_.end(), item->address, is_below);
      if (found != all_.end() && found->number == number) *found = first_bound(number, *item);
    }
    pool_.fallen.clear();
  }
  // Of two at one address, the one that was inserted last is there.
  void merge(std::vector<Priced>& added) {
    bool purges = all_.size() > 64 + 2 * pool_.size();
    if (added.empty() && !purges) return;
    std::sort(added.begin(), added.end(), [](const Priced& a, const Priced& b) {
      return a.address != b.address ? a.address < b.address : std::abs(a.number) > std::abs(b.number);
    });
    merged_.clear();
    auto before = all_.begin();
    auto take_before = [&](uintptr_t address) {
      auto end = std::lower_bound(before, all_.end(), address, is_below);
      if (purges)
        std::copy_if(before, end, std::back_inserter(merged_), [&](const Priced& one) { return node_of(one) != nullptr; });
      else
        merged_.insert(merged_.end(), before, end);
      before = end;
    };
    for (const Priced& one : added) {
      if (!merged_.empty() && merged_.back().address == one.address) continue;
      take_before(one.address);
      if (before != all_.end() && before->address == one.address) ++before;
      merged_.push_back(one);
    }
    take_before(UINTPTR_MAX);
    std::swap(all_, merged_);
  }
  static bool is_below(const Priced& one, uintptr_t address) { return one.address < address; }

  Pool& pool_;
  Neighbourhood& neighbourhood_;
  const Search& search_;
  const Heuristic& heuristic_;
  Powers powers_;
  std::vector<Priced> all_, merged_;  // by address; the latter is empty, or of no interest
  int64_t known_ = 0;                 // how many nodes had been inserted into the pool
};

}  // namespace dtrrun

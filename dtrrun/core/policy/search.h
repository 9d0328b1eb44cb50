// The search for the storage with the least score: the interface, and the search that computes all scores.
#pragma once

#include <cmath>

#include "clock.h"
#include "heuristic.h"
#include "neighbourhood.h"

namespace dtrrun {

using Evictable = std::function<bool(Node*)>;
// Returns what it costs to copy a node to the host and back, in units of the clock; NEVER if that is not possible.
using CopyCost = std::function<int64_t(const Node*)>;

class Search {
 public:
  // copy_cost: null if nothing can be copied.
  Search(Pool& pool, Neighbourhood& neighbourhood, const std::unique_ptr<Foresight>& foresight, const Heuristic& heuristic,
         const CopyCost& copy_cost)
      : pool_(pool), neighbourhood_(neighbourhood), foresight_(foresight), heuristic_(heuristic), copy_cost_(copy_cost) {}
  virtual ~Search() = default;

  static constexpr double ROUNDING = 1 - 1e-12;  // keeps a bound computed in another order below the score itself

  int64_t score_evaluations = 0;
  int64_t scoring_ns = 0;  // spent computing scores, including reading neighbourhoods

  // Returns how many storages have been considered.
  virtual int64_t looked_at() const { return score_evaluations; }
  // Updates the position in the recorded step.
  virtual void look_ahead() = 0;
  // Returns the resident node with the least score among those that are `evictable`, or null. Of equal scores, the one with the
  // least number wins.
  virtual KeptNode choose(int64_t now, const Evictable& evictable) = 0;

  // Returns what it costs to bring a node back, in the cheaper of two ways. cost: that of recomputing it.
  int64_t cheaper(const Node* node, int64_t cost) const { return copy_cost_ ? std::min(cost, copy_cost_(node)) : cost; }

 protected:
  // Returns the factor on the score. It can only rise until `next`, when the node is used, or until the node is made due.
  // whole: if false, returns a lower bound that considers the node alone.
  double factor(Node* node, int64_t number, Item& item, bool whole, int64_t& next) const {
    double found = node->released ? heuristic_.released : 1;
    if (!foresight_->predicts()) return found;
    next = whole ? neighbourhood_.next_use(node, number, item, *foresight_) : foresight_->next_use(node);
    int64_t distance = next == NEVER ? foresight_->horizon() : next - foresight_->position();
    return found / heuristic_.nearness(distance);
  }

  Pool& pool_;
  Neighbourhood& neighbourhood_;
  const std::unique_ptr<Foresight>& foresight_;
  const Heuristic& heuristic_;
  const CopyCost& copy_cost_;
};

// Scores the whole pool, or a random √n of its n nodes (App. E.2). Works with any heuristic.
class Scan final : public Search {
 public:
  // Returns k distinct places out of n, chosen at random.
  using Sample = std::function<std::vector<size_t>(size_t n, size_t k)>;

  // ignore_small: nodes below this fraction of the pool's mean size are chosen last (App. E.2). sample: null for all nodes.
  Scan(Pool& pool, Neighbourhood& neighbourhood, const std::unique_ptr<Foresight>& foresight, const Heuristic& heuristic,
       const CopyCost& copy_cost, double ignore_small, Sample sample)
      : Search(pool, neighbourhood, foresight, heuristic, copy_cost), ignore_small_(ignore_small), sample_(std::move(sample)) {}

  void look_ahead() override { foresight_->look(); }

  KeptNode choose(int64_t now, const Evictable& evictable) override {
    for (int64_t number : pool_.due)
      if (Item* item = pool_.find(number)) item->due = false;
    pool_.due.clear();
    std::vector<int64_t> large, small, sampled;
    double least_nbytes = this->least_nbytes();
    for (int64_t number : pool_.numbers())
      (static_cast<double>(pool_.find(number)->node->nbytes) >= least_nbytes ? large : small).push_back(number);
    if (sample_ && !large.empty()) {
      auto root = static_cast<size_t>(std::ceil(std::sqrt(static_cast<double>(large.size()))));
      std::vector<size_t> places = sample_(large.size(), root);
      std::sort(places.begin(), places.end());
      for (auto place = places.rbegin(); place != places.rend(); ++place) {
        sampled.push_back(large[*place]);
        large.erase(large.begin() + static_cast<ptrdiff_t>(*place));
      }
      std::reverse(sampled.begin(), sampled.end());
    }
    for (const auto* candidates : {&sampled, &large, &small})  // each is used only if none of those before can be evicted
      if (KeptNode chosen = least(*candidates, now, evictable)) return chosen;
    return KeptNode();
  }

 private:
  double least_nbytes() const {
    if (ignore_small_ == 0 || pool_.size() == 0) return 0;
    return ignore_small_ * static_cast<double>(pool_.nbytes) / static_cast<double>(pool_.size());
  }
  KeptNode least(const std::vector<int64_t>& candidates, int64_t now, const Evictable& evictable) {
    std::vector<std::pair<double, int64_t>> scored;
    int64_t started = now_ns();
    for (int64_t number : candidates) {
      Item* item = pool_.find(number);
      if (item == nullptr) continue;  // it died while the user's function ran
      scored.emplace_back(score(*item, number, now), number);
    }
    score_evaluations += static_cast<int64_t>(scored.size());
    scoring_ns += now_ns() - started;
    auto later = [](const auto& a, const auto& b) { return b < a; };  // reversed, so that the least is on top of a heap
    std::make_heap(scored.begin(), scored.end(), later);
    for (; !scored.empty(); scored.pop_back()) {
      std::pop_heap(scored.begin(), scored.end(), later);
      Item* item = pool_.find(scored.back().second);
      if (item == nullptr) continue;
      KeptNode node(item->node.get());
      if (node->resident && evictable(node.get())) return node;
    }
    return KeptNode();
  }
  double score(Item& item, int64_t number, int64_t now) {
    KeptNode node(item.node.get());
    int64_t staleness = std::max<int64_t>(now - node->last_access, 1), next = NEVER;
    int64_t cost = cheaper(node.get(), neighbourhood_.projected_cost(node.get(), number, item));
    if (heuristic_.function) return heuristic_.function(node->nbytes, staleness, node->cost, cost);
    double found = heuristic_.score(cost, node->nbytes, staleness);
    return heuristic_.adjusts() ? found * factor(node.get(), number, item, true, next) : found;
  }

  const double ignore_small_;
  const Sample sample_;
};

}  // namespace dtrrun

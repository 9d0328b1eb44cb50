// The search for the storage with the least score, without computing all scores.
//
// It keeps lower bounds, each with the time up to which it is valid. Between the events that touch a storage's neighbourhood, its
// score only falls, as 1/staleness does. So once a score has been computed, the node sleeps: a lower bound is stored that holds
// until its waking time, a quarter of the way to the time when its score could become the least. A search considers the nodes that
// are due (new, or reported by the neighbourhood because their cost may have fallen), those that wake, and those whose bound is not
// above the least score found. Of these, it computes only the scores that may be the least. The choice is exactly that of `Scan`.
#pragma once

#include "search.h"

namespace dtrrun {

// For heuristics whose score falls with staleness or does not depend on it, and never falls when the projected cost rises.
class HeapSearch final : public Search {
 public:
  HeapSearch(Pool& pool, Neighbourhood& neighbourhood, const std::unique_ptr<Foresight>& foresight, const Heuristic& heuristic,
             const CopyCost& copy_cost)
      : Search(pool, neighbourhood, foresight, heuristic, copy_cost), far_(heuristic.neighbours == Neighbours::NONE ? 1 : FAR) {}

  void look_ahead() override {
    if (foresight_->look()) {  // the expected times are for another step or position
      pool_.make_all_due();
      expected_.clear();
      pool_.each([](int64_t, Item& item) { item.expected = NEVER; });
    } else if (foresight_->predicts()) {
      while (!expected_.empty() && expected_.front().time <= foresight_->position()) {
        auto [time, number] = pop(expected_);
        Item* item = pool_.find(number);
        if (item == nullptr || item->expected != time) continue;
        item->expected = NEVER;
        pool_.make_due(number, *item);
      }
    }
  }

  KeptNode choose(int64_t now, const Evictable& evictable) override {
    set_longest(now);
    auto& [candidates, refused, woken, above] = scratch_;
    candidates.clear();
    refused.clear();
    wake(now);
    consider_below(candidates, now);
    consider_all(woken, candidates, now);
    woken.clear();
    for (int64_t number : pool_.due) woken.emplace_back(number, UNKNOWN);
    for (int64_t number : pool_.due)
      if (Item* item = pool_.find(number)) item->due = false;
    pool_.due.clear();
    consider_all(woken, candidates, now);
    KeptNode chosen;
    double least = 0;
    while (!chosen) {
      consider_below(candidates, now);
      if (candidates.empty()) break;
      Candidate candidate = pop(candidates);
      if (Item* item = pool_.find(candidate.number)) {
        KeptNode node(item->node.get());
        if (node->resident && evictable(node.get())) {
          chosen = std::move(node);
          least = candidate.score;
          if (Item* still = pool_.find(candidate.number))
            pool_.make_due(candidate.number, *still);  // in case it is not evicted after all
          break;
        }
      }
      refused.push_back(candidate);
    }
    for (const Candidate& one : candidates) put_to_sleep(one.number, one.share, now, least, true);
    for (const Candidate& one : refused) put_to_sleep(one.number, one.share, now, least, true);
    drop_stale_entries();
    return chosen;
  }

  int64_t looked_at() const override { return looked_at_; }

 private:
  struct Bound {
    double bound;
    int64_t number;
    uint64_t entry;
    bool operator<(const Bound& other) const {  // reversed, so that the least is on top of a heap
      return bound != other.bound ? bound > other.bound : number > other.number;
    }
  };
  struct Candidate {
    double score;
    int64_t number;
    double share;
    bool operator<(const Candidate& other) const { return score != other.score ? score > other.score : number > other.number; }
  };
  struct Timed {
    int64_t time, number;
    bool operator<(const Timed& other) const { return time > other.time; }
  };
  struct Above {
    int64_t number;
    double share;
    bool known;
  };
  static constexpr double UNKNOWN = -1;
  // If a node's own cost alone gives a score this many times the least score, its neighbourhood is not read.
  static constexpr double FAR = 4;

  template <class One>
  static void push(std::vector<One>& heap, const One& one) {
    heap.push_back(one);
    std::push_heap(heap.begin(), heap.end());
  }
  template <class One>
  static One pop(std::vector<One>& heap) {
    std::pop_heap(heap.begin(), heap.end());
    One first = heap.back();
    heap.pop_back();
    return first;
  }

  void set_longest(int64_t now) {
    if (origin_ == NEVER) pool_.each([&](int64_t, const Item& item) { origin_ = std::min(origin_, item.node->last_access); });
    if (origin_ != NEVER)
      longest_ =
          static_cast<int64_t>(static_cast<__int128>(now - origin_) * static_cast<__int128>(pool_.size()) / pool_.inserted());
  }

  // Removes the bounds that have expired. Sets `woken` to the numbers of their nodes, and the bounds at staleness 1.
  void wake(int64_t now) {
    for (int64_t number : pool_.due)
      if (Item* item = pool_.find(number)) item->asleep = false;
    scratch_.woken.clear();
    while (!wakings_.empty() && wakings_.front().time < now) {
      auto [time, number] = pop(wakings_);
      Item* item = pool_.find(number);
      if (item == nullptr || item->waking != time) continue;
      if (!item->asleep) {
        item->waking = NEVER;
      } else if (item->until < now) {
        item->waking = NEVER;
        item->asleep = false;
        scratch_.woken.emplace_back(number, item->known ? item->share : UNKNOWN);
      } else {  // its bound has been renewed since
        push_waking(item->until, number, *item);
      }
    }
  }
  void push_waking(int64_t time, int64_t number, Item& item) {
    item.waking = time;
    push(wakings_, {time, number});
  }

  // Considers every node whose bound is below the first candidate.
  void consider_below(std::vector<Candidate>& candidates, int64_t now) {
    while (!bounds_.empty()) {
      Bound top = bounds_.front();
      if (!candidates.empty()) {
        const Candidate& first = candidates.front();
        if (top.bound > first.score || (top.bound == first.score && top.number > first.number)) break;
      }
      pop(bounds_);
      Item* item = pool_.find(top.number);
      if (item == nullptr || !item->asleep || item->entry != top.entry) continue;
      item->asleep = false;
      consider(top.number, item->known ? item->share : UNKNOWN, candidates, now);
    }
    all_asleep(candidates, now);
  }
  void consider_all(const std::vector<std::pair<int64_t, double>>& numbers, std::vector<Candidate>& candidates, int64_t now) {
    for (auto [number, share] : numbers) consider(number, share, candidates, now);
    all_asleep(candidates, now);
  }
  // Puts to sleep those that did not become candidates.
  void all_asleep(const std::vector<Candidate>& candidates, int64_t now) {
    double best = candidates.empty() ? 0 : candidates.front().score;
    for (const Above& one : scratch_.above) put_to_sleep(one.number, one.share, now, best, one.known);
    scratch_.above.clear();
  }
  int64_t staleness_of(const Node* node, int64_t now) const {
    return heuristic_.staleness ? std::max<int64_t>(now - node->last_access, 1) : 1;
  }
  // Makes a node a candidate if its score may be less than that of the first candidate.
  void consider(int64_t number, double share, std::vector<Candidate>& candidates, int64_t now) {
    Item* item = pool_.find(number);
    if (item == nullptr) return;
    Node* node = item->node.get();
    int64_t size = node->nbytes, staleness = staleness_of(node, now);
    looked_at_++;
    if (!candidates.empty()) {
      double best_share = candidates.front().score * heuristic_.aged(staleness);
      if (share != UNKNOWN) {
        if (share * ROUNDING > best_share) {
          scratch_.above.push_back({number, share, true});
          return;
        }
      } else {
        double own = heuristic_.score(cheaper(node, node->cost), size, 1);
        if (heuristic_.adjusts()) own *= factor(node, number, *item, false);
        if (own * ROUNDING > best_share * far_) {
          scratch_.above.push_back({number, own, far_ == 1});
          return;
        }
      }
    }
    int64_t started = now_ns();
    double adjusted = heuristic_.adjusts() ? factor(node, number, *item, true) : 1;
    auto [whole, lower] = neighbourhood_.watched_cost(node, number, *item);
    int64_t cost = cheaper(node, whole);
    lower = std::min(lower, static_cast<double>(cost));
    double least = lower < static_cast<double>(cost) ? heuristic_.share(lower, size) : heuristic_.score(cost, size, 1);
    push(candidates, {heuristic_.score(cost, size, staleness) * adjusted, number, least * adjusted});
    scoring_ns += now_ns() - started;
    score_evaluations++;
  }
  double factor(Node* node, int64_t number, Item& item, bool whole) {
    int64_t next = NEVER;
    double found = Search::factor(node, number, item, whole, next);
    if (next != NEVER && item.expected != next) {
      item.expected = next;
      push(expected_, {next, number});
    }
    return found;
  }

  // Stores a lower bound for a node. best: the least score now, 0 if there is none.
  void put_to_sleep(int64_t number, double share, int64_t now, double best, bool known) {
    Item* item = pool_.find(number);
    if (item == nullptr) return;
    item->asleep = true;
    item->entry = ++entries_;
    item->share = share;
    item->known = known;
    if (!heuristic_.staleness) {
      item->until = NEVER;
      push(bounds_, {share, number, item->entry});
      return;
    }
    int64_t staleness = staleness_of(item->node.get(), now), stalest;
    double threshold = best * heuristic_.aged(staleness);
    if (share > threshold && threshold > 0) {
      double sleep = (heuristic_.staleness_of(share / best) - static_cast<double>(staleness)) / 4;
      stalest = staleness + (sleep < static_cast<double>(longest_) ? static_cast<int64_t>(sleep) : longest_);
    } else {
      stalest = staleness + staleness / 64 + 1;
    }
    item->until = item->node->last_access + stalest;
    push(bounds_, {share / heuristic_.aged(stalest) * ROUNDING, number, item->entry});
    if (item->waking > item->until) push_waking(item->until, number, *item);
  }

  // Drops stale entries when they outnumber the valid ones.
  void drop_stale_entries() {
    size_t limit = 64 + 2 * pool_.size();
    if (expected_.size() > limit) {
      expected_.clear();
      pool_.each([&](int64_t number, const Item& item) {
        if (item.expected != NEVER) expected_.push_back({item.expected, number});
      });
      std::make_heap(expected_.begin(), expected_.end());
    }
    if (std::max(bounds_.size(), wakings_.size()) <= limit) return;
    bounds_.erase(std::remove_if(bounds_.begin(), bounds_.end(),
                                 [&](const Bound& one) {
                                   const Item* item = pool_.find(one.number);
                                   return item == nullptr || !item->asleep || item->entry != one.entry;
                                 }),
                  bounds_.end());
    std::make_heap(bounds_.begin(), bounds_.end());
    wakings_.clear();
    pool_.each([&](int64_t number, Item& item) {
      if (!item.asleep) item.waking = NEVER;
      if (item.waking != NEVER) wakings_.push_back({item.waking, number});
    });
    std::make_heap(wakings_.begin(), wakings_.end());
  }

  // What one search needs, kept for its memory.
  struct Scratch {
    std::vector<Candidate> candidates, refused;
    std::vector<std::pair<int64_t, double>> woken;
    std::vector<Above> above;  // their scores are above the first candidate's
  };

  const double far_;
  Scratch scratch_;
  std::vector<Bound> bounds_;  // heaps
  std::vector<Timed> wakings_, expected_;
  uint64_t entries_ = 0;
  int64_t looked_at_ = 0;
  int64_t origin_ = NEVER;  // the clock value at which the program began
  int64_t longest_ = 0;  // the longest sleep: the time in which as many nodes are inserted as are in the pool
};

}  // namespace dtrrun

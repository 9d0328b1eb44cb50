// The search for the node with the least score: `core.search.HeapSearch`, whose docstring says why it is right.
#pragma once

#include "neighbourhood.h"
#include "scores.h"

namespace dtrrun {

class Search {
 public:
  Search(const Nodes& nodes, Pool& pool, Neighbourhood& neighbourhood, Foresight& foresight, const Score& score, bool alone)
      : version_(nodes.version), pool_(pool), neighbourhood_(neighbourhood), foresight_(foresight), score_(score),
        far_(alone ? 1 : FAR) {}

  int64_t score_evaluations = 0, scoring_ns = 0;

  // The position in the recorded step moves on.
  void look_ahead() {
    if (foresight_.look()) {  // the expected times belong to another step or place
      pool_.make_all_due();
      expected_.clear();
      for (auto& [number, item] : pool_.items) item.expected = NEVER;
    } else if (foresight_.predicts()) {
      while (!expected_.empty() && expected_.front().time <= foresight_.position()) {
        auto [time, number] = pop(expected_);
        Item* item = pool_.find(number);
        if (item == nullptr || item->expected != time) continue;
        item->expected = NEVER;
        pool_.make_due(number, *item);
      }
    }
  }

  // Returns the node with the least score of those that are `evictable`, or null.
  template <class Evictable>
  Ref choose(int64_t now, const Evictable& evictable) {
    set_longest(now);
    std::vector<Candidate> candidates, refused;
    std::vector<std::pair<int64_t, double>> woken = wake(now);
    consider_below(candidates, now);
    consider_all(woken, candidates, now);
    woken.clear();
    for (int64_t number : pool_.due) woken.emplace_back(number, UNKNOWN);
    for (int64_t number : pool_.due)
      if (Item* item = pool_.find(number)) item->due = false;
    pool_.due.clear();
    consider_all(woken, candidates, now);
    Ref chosen;
    double least = 0;
    while (!chosen) {
      consider_below(candidates, now);
      if (candidates.empty()) break;
      Candidate candidate = pop(candidates);
      if (Item* item = pool_.find(candidate.number)) {
        Ref node = Ref::copy(item->node.get());
        if (version_.resident.is_true(node.get()) && evictable(node.get())) {
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
    sweep();
    return chosen;
  }

 private:
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
  struct Timed {
    int64_t time, number;
    bool operator<(const Timed& other) const { return time > other.time; }
  };
  struct Above {
    int64_t number;
    double share;
    bool known;
  };
  static constexpr double UNKNOWN = -1, ROUNDING = 1 - 1e-12, FAR = 4;

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
    if (origin_ == NEVER)
      for (const auto& [number, item] : pool_.items)
        origin_ = std::min(origin_, version_.last_access.number(item.node.get()));
    if (origin_ != NEVER)
      longest_ = static_cast<int64_t>(static_cast<__int128>(now - origin_) * static_cast<__int128>(pool_.items.size()) /
                                      pool_.last_number);
  }

  // Removes the bounds that have expired. Returns their numbers and their values at staleness 1.
  std::vector<std::pair<int64_t, double>> wake(int64_t now) {
    for (int64_t number : pool_.due)
      if (Item* item = pool_.find(number)) item->asleep = false;
    std::vector<std::pair<int64_t, double>> woken;
    while (!wakings_.empty() && wakings_.front().time < now) {
      auto [time, number] = pop(wakings_);
      Item* item = pool_.find(number);
      if (item == nullptr || item->waking != time) continue;
      if (!item->asleep) {
        item->waking = NEVER;
      } else if (item->until < now) {
        item->waking = NEVER;
        item->asleep = false;
        woken.emplace_back(number, item->known ? item->share : UNKNOWN);
      } else {  // its bound has been renewed since
        push_waking(item->until, number, *item);
      }
    }
    return woken;
  }
  void push_waking(int64_t time, int64_t number, Item& item) {
    item.waking = time;
    push(wakings_, {time, number});
  }

  // Considers every node whose bound is below the first candidate.
  void consider_below(std::vector<Candidate>& candidates, int64_t now) {
    std::vector<Above> above;
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
      consider(top.number, item->known ? item->share : UNKNOWN, candidates, above, now);
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
  int64_t staleness_of(PyObject* node, int64_t now) const {
    return score_.ages ? std::max<int64_t>(now - version_.last_access.number(node), 1) : 1;
  }
  // Makes a node a candidate if it may score less than the first one.
  void consider(int64_t number, double share, std::vector<Candidate>& candidates, std::vector<Above>& above,
                int64_t now) {
    Item* item = pool_.find(number);
    if (item == nullptr) return;
    PyObject* node = item->node.get();
    int64_t size = version_.nbytes.number(node), staleness = staleness_of(node, now);
    if (!candidates.empty()) {
      double best_share = candidates.front().score * score_.aged(staleness);
      if (share != UNKNOWN) {
        if (share * ROUNDING > best_share) {
          above.push_back({number, share, true});
          return;
        }
      } else {
        double own = score_(version_.cost.number(node), size, 1);
        if (score_.adjusts) own *= factor(node, number, *item, false);
        if (own * ROUNDING > best_share * far_) {
          above.push_back({number, own, far_ == 1});
          return;
        }
      }
    }
    int64_t started = now_ns();
    double adjusted = score_.adjusts ? factor(node, number, *item, true) : 1;
    auto [cost, lower] = neighbourhood_.watched_cost(node, number, *item);
    double least = lower < static_cast<double>(cost) ? score_.share(lower, size) : score_(cost, size, 1);
    push(candidates, {score_(cost, size, staleness) * adjusted, number, least * adjusted});
    scoring_ns += now_ns() - started;
    score_evaluations++;
  }
  // The factor on the score. It can only rise until the time that is expected, or until the node is made due.
  // whole: false for a lower bound that considers the node alone.
  double factor(PyObject* node, int64_t number, Item& item, bool whole) {
    double found = version_.scratch.is_none(node) ? 1 : score_.released;
    if (!foresight_.predicts()) return found;
    int64_t next = whole ? neighbourhood_.next_use(node, number, item, foresight_) : foresight_.next_use(node);
    int64_t distance = foresight_.horizon();
    if (next != NEVER) {
      distance = next - foresight_.position();
      if (item.expected != next) {
        item.expected = next;
        push(expected_, {next, number});
      }
    }
    return found / score_.nearness(distance);
  }

  // Stores a lower bound for a node. best: the least score now, 0 if there is none.
  void put_to_sleep(int64_t number, double share, int64_t now, double best, bool known) {
    Item* item = pool_.find(number);
    if (item == nullptr) return;
    item->asleep = true;
    item->entry = ++entries_;
    item->share = share;
    item->known = known;
    if (!score_.ages) {
      item->until = NEVER;
      push(bounds_, {share, number, item->entry});
      return;
    }
    int64_t staleness = staleness_of(item->node.get(), now), stalest;
    double threshold = best * score_.aged(staleness);
    if (share > threshold && threshold > 0) {
      double sleep = (score_.staleness_of(share / best) - static_cast<double>(staleness)) / 2;
      stalest = staleness + (sleep < static_cast<double>(longest_) ? static_cast<int64_t>(sleep) : longest_);
    } else {
      stalest = staleness + staleness / 64 + 1;
    }
    item->until = version_.last_access.number(item->node.get()) + stalest;
    push(bounds_, {share / score_.aged(stalest) * ROUNDING, number, item->entry});
    if (item->waking > item->until) push_waking(item->until, number, *item);
  }

  // Drops stale entries when they outnumber the valid ones.
  void sweep() {
    size_t limit = 64 + 2 * pool_.items.size();
    if (expected_.size() > limit) {
      expected_.clear();
      for (auto& [number, item] : pool_.items)
        if (item.expected != NEVER) expected_.push_back({item.expected, number});
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
    for (auto& [number, item] : pool_.items) {
      if (!item.asleep) item.waking = NEVER;
      if (item.waking != NEVER) wakings_.push_back({item.waking, number});
    }
    std::make_heap(wakings_.begin(), wakings_.end());
  }

  const VersionFields& version_;
  Pool& pool_;
  Neighbourhood& neighbourhood_;
  Foresight& foresight_;
  const Score& score_;
  const double far_;
  std::vector<Bound> bounds_;  // heaps
  std::vector<Timed> wakings_, expected_;
  uint64_t entries_ = 0;
  int64_t origin_ = NEVER, longest_ = 0;
};

}  // namespace dtrrun

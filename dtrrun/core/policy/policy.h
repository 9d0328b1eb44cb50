// Chooses which storage to evict: a heuristic, the pool of what can be evicted, and the search in it.
#pragma once

#include "prices.h"
#include "search.h"

namespace dtrrun {

// Chooses among the nodes that are inserted into it. Its owner reports what happens to the nodes, each event once and in order.
// Accesses are not reported: `last_access` is read when a score is computed. For one thread at a time, and not reentrant; but an
// evicted node may die at any moment without notice.
class Policy {
 public:
  struct Options {
    bool latest = false;      // of equal scores, choose the node inserted last, not first
    bool scan = false;        // compute all scores; the choices are the same
    double ignore_small = 0;  // see `Scan`, also for `sample`
    Scan::Sample sample;
  };

  Policy(Heuristic heuristic, Options options)
      : heuristic_(std::move(heuristic)), pool_(options.latest), foresight_(std::make_unique<Foresight>()),
        neighbourhood_(make_neighbourhood()), search_(make_search(std::move(options))),
        prices_(pool_, *neighbourhood_, *search_, heuristic_) {}

  size_t size() const { return pool_.size(); }
  const Pool& pool() const { return pool_; }
  int64_t& score_evaluations() { return search_->score_evaluations; }
  int64_t& scoring_ns() { return search_->scoring_ns; }
  int64_t& search_ns() { return search_ns_; }  // time in `select` apart from scoring
  // Returns how many storages have been considered for a score or visited for a neighbourhood (App. D.3).
  int64_t accesses() const { return search_->looked_at() + neighbourhood_->visited; }
  // Sets the foresight, for heuristics that use it. Null: predict nothing.
  void follow(std::unique_ptr<Foresight> foresight) {
    foresight_ = foresight ? std::move(foresight) : std::make_unique<Foresight>();
  }
  // Lets nodes be copied to the host where that costs less than recomputing them. Null: nothing can be copied. Call it again when
  // copies cost less than before.
  void let_copy(CopyCost cost) {
    copy_cost_ = std::move(cost);
    pool_.make_all_due();
  }
  bool may_copy() const { return copy_cost_ != nullptr; }
  // Returns the bytes of all nodes that may be evicted.
  int64_t evictable_bytes() const { return pool_.nbytes; }
  // Drops the references to all nodes, without updating the nodes.
  void clear() { pool_.clear(); }

  // -- events --

  // A node became resident and evictable.
  void insert(Node* node) { pool_.insert(node); }
  // A node can no longer be evicted: it died or was pinned.
  void discard(Node* node) { pool_.discard(node); }
  void evicted(Node* node) {
    KeptNode kept(node);
    pool_.discard(node);
    if (!node->constant()) neighbourhood_->evicted(node);
  }
  // The program released a node and its memory is freed, while something evictable depends on it.
  void released(Node* node) {
    KeptNode kept(node);
    pool_.discard(node);
    if (!node->constant()) neighbourhood_->released(node);
  }
  // A node is in memory again, or can no longer be brought back. Deaths need no report.
  void left(Node* node) { neighbourhood_->left(node); }
  // A resident node has a new cost or other inputs.
  void cost_changed(Node* node) {
    Item* item = pool_.find(node);
    if (item == nullptr) return;
    pool_.make_due(node->pool_id, *item);
    neighbourhood_->changed(*item);
  }
  // Returns c(node), including what must be computed before it; if the node is not in the pool, its own cost.
  int64_t projected_cost(Node* node) {
    neighbourhood_->settle();
    Item* item = pool_.find(node);
    return item == nullptr ? node->cost : neighbourhood_->projected_cost(node, node->pool_id, *item);
  }
  // Returns a node's score times its bytes: what is lost if it is evicted for the bytes of others.
  double price(Node* node, int64_t now) { return prices_.of(node, projected_cost(node), now); }
  // The same for many nodes, by the addresses of their memory.
  Prices& prices() {
    neighbourhood_->settle();
    return prices_;
  }

  // Returns the score of one byte of something with this cost, whose next use is as far away as one would assume at this staleness.
  double score_of(int64_t cost, int64_t staleness) const {
    return heuristic_.function ? divided(cost, 1, staleness) : heuristic_.score(cost, 1, staleness);
  }
  // Returns a lower bound of that.
  double score_at_least(int64_t cost, int64_t staleness) {
    return heuristic_.function ? divided(cost, 1, staleness) : prices_.score_at_least(cost, staleness);
  }

  // Returns the resident node with the least score, or null if there is none. `evictable` is called with the node that is about
  // to be chosen, which is passed over if it returns false; it may discard nodes. The chosen node stays in the pool until its
  // eviction is reported.
  KeptNode select(int64_t now, const Evictable& evictable);

 private:
  std::unique_ptr<Neighbourhood> make_neighbourhood();
  std::unique_ptr<Search> make_search(Options options);

  const Heuristic heuristic_;
  CopyCost copy_cost_;
  Pool pool_;
  std::unique_ptr<Foresight> foresight_;
  std::unique_ptr<Neighbourhood> neighbourhood_;
  std::unique_ptr<Search> search_;
  Prices prices_;
  int64_t search_ns_ = 0;
};

}  // namespace dtrrun

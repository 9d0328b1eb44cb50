// What a policy does when memory is short. Searches and neighbourhoods are compiled here only.
#include "policy.h"

#include "components.h"
#include "heap_search.h"

namespace dtrrun {

KeptNode Policy::select(int64_t now, const Evictable& evictable) {
  int64_t started = now_ns(), scoring = scoring_ns();
  KeptNode chosen;
  try {
    neighbourhood_->settle();
    search_->look_ahead();
    chosen = search_->choose(now, evictable);
  } catch (...) {  // the nodes under consideration must not be lost
    pool_.make_all_due();
    throw;
  }
  search_ns_ += now_ns() - started - (scoring_ns() - scoring);
  return chosen;
}

std::unique_ptr<Neighbourhood> Policy::make_neighbourhood() {
  if (heuristic_.neighbours == Neighbours::EQCLASS) return std::make_unique<Components>(pool_);
  if (heuristic_.neighbours == Neighbours::NONE) return std::make_unique<Neighbourhood>(pool_);
  bool ancestors_only = heuristic_.neighbours == Neighbours::ANCESTORS;
  return std::make_unique<ExactNeighbourhood>(pool_, ancestors_only, heuristic_.foresight > 0);
}

std::unique_ptr<Search> Policy::make_search(Options options) {
  if (options.scan || options.sample || options.ignore_small != 0 || heuristic_.function)
    return std::make_unique<Scan>(pool_, *neighbourhood_, foresight_, heuristic_, copy_cost_, options.ignore_small,
                                  std::move(options.sample));
  return std::make_unique<HeapSearch>(pool_, *neighbourhood_, foresight_, heuristic_, copy_cost_);
}

}  // namespace dtrrun

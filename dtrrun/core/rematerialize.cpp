#include "rematerialize.h"

#include "frugal.h"

namespace dtrrun {

// Exists while a rematerialization is in progress.
class Rematerializer::Began {
 public:
  explicit Began(Rematerializer& owner) : owner_(owner) {
    owner.accounted_before_ = owner.accounted_ns();
    owner.began_ns_ = now_ns();
  }
  ~Began() { owner_.began_ns_ = 0; }
  Began(const Began&) = delete;

 private:
  Rematerializer& owner_;
};

// An operation about to run, and how many of its inputs have been locked and unlocked so far.
struct Rematerializer::Entered {
  VersionRef version;  // the output that is needed
  OperationRef maker;
  uint32_t locked = 0, unlocked = 0;
};

// The operations to run, in order of entry: for each, a version that it makes and the inputs locked for it.
class Rematerializer::Plan {
 public:
  struct One {
    VersionRef version;
    ShortVector<VersionRef> locked;
    size_t unlocked = 0;  // how many of `locked` have been unlocked since
  };
  One* find(const Recorded* maker) {
    auto place = places_.find(maker);
    return place == places_.end() ? nullptr : &*all_[place->second];
  }
  One& add(const Recorded* maker, Version* version) {
    places_[maker] = all_.size();
    all_.push_back(One{VersionRef(version), {}});
    return *all_.back();
  }
  void remove(const Recorded* maker) {
    auto place = places_.find(maker);
    all_[place->second].reset();
    places_.erase(place);
    if (places_.empty()) all_.clear();
  }
  bool empty() const { return places_.empty(); }
  size_t size() const { return places_.size(); }
  void clear() {
    places_.clear();
    all_.clear();
  }
  std::vector<std::optional<One>>& all() { return all_; }

 private:
  ShortMap<const Recorded*, size_t> places_;
  std::vector<std::optional<One>> all_;
};

// A version to make, or a planned operation.
struct Rematerializer::Item {
  VersionRef version;
  OperationRef planned;
};

struct Rematerializer::Work {
  std::vector<Item> stack;
  std::vector<Entered> entered;
  Plan plan;
  int relaxations = MAX_RELAXATIONS;
  OperationRef without_workspace;  // the operation that may run without its workspace
  size_t planned = 0, alone = 0;   // operations in the first plan; operations run since plans were given up
  std::exception_ptr error;        // the last budget error
  Targets targets;

  // Called when everything has been made. It can be used again.
  void clear() {
    targets.clear();
    plan.clear();
    relaxations = MAX_RELAXATIONS;
    without_workspace = OperationRef();
    planned = alone = 0;
    error = nullptr;
  }
};

Rematerializer::Rematerializer(Ledger& ledger, Deallocation& deallocation, Eviction& eviction, Recomputer& recomputer)
    : ledger_(ledger), deallocation_(deallocation), eviction_(eviction), recomputer_(recomputer) {}
Rematerializer::~Rematerializer() = default;

void Rematerializer::materialize(const Targets& targets, bool locked) {
  std::vector<Version*> missing = missing_of(targets);
  if (began_ns_ != 0) return run_beneath(missing);  // nested: an operation of the outer one is making room
  int64_t before = ledger_.clock;
  {
    Began now(*this);
    std::exception_ptr error = budget_error_of(missing);
    while (error) {
      if (frugally(targets, locked)) break;
      if (!ledger_.backend.exceeds()) std::rethrow_exception(error);
      error = budget_error_of(missing_of(targets));  // the attempt may have evicted others of them
    }
  }
  if (missing.empty()) return;
  // From now on these cost what it took to bring them back, if that is more. A projected cost covers only what is evicted at that
  // moment. A gradient whose inputs are in memory looks cheap; once these are evicted as well, and there is no room for the rest
  // of the backward pass, recomputing it costs many times the sum of its recipes. It would be evicted again and again, and the
  // step would never end.
  int64_t cost = (ledger_.clock - before) / static_cast<int64_t>(missing.size());
  for (Version* one : missing) one->cost = std::max(one->cost, cost);
}

std::vector<Version*> Rematerializer::missing_of(const Targets& targets) {
  std::vector<Version*> missing;
  for (const VersionRef& one : targets)
    if (!one->resident) missing.push_back(one.get());
  return missing;
}

std::exception_ptr Rematerializer::budget_error_of(const std::vector<Version*>& missing) {
  try {
    run_beneath(missing);
    return nullptr;
  } catch (...) {
    if (!ledger_.backend.is_budget_error()) throw;
    return ledger_.backend.budget_error();
  }
}

bool Rematerializer::frugally(const Targets& targets, bool locked) {
  auto given = std::tuple(this, &targets, locked, false);
  ledger_.backend.beneath(
      [](void* all) {
        auto& [self, targets, locked, done] = *static_cast<decltype(given)*>(all);
        done = self->run_frugally(*targets, locked);
      },
      &given);
  return std::get<3>(given);
}

bool Rematerializer::run_frugally(const Targets& targets, bool locked) {
  bool done;
  ledger_.replaying++;
  try {
    done = FrugalRun(ledger_, deallocation_, eviction_, recomputer_).bring_back(targets, locked);
  } catch (...) {
    ended();
    throw;
  }
  if (done) frugal_runs++;
  ended();
  return done;
}

bool Rematerializer::ends_at_once(const Targets& targets) const { return frugal_runs != 0 || !fits_one_by_one(ledger_, targets); }

void Rematerializer::run_beneath(const std::vector<Version*>& missing) {
  if (missing.empty()) return;
  std::unique_ptr<Work> work = spare_ ? std::move(spare_) : std::make_unique<Work>();
  for (Version* one : missing) {
    work->stack.push_back({VersionRef(one), OperationRef()});
    work->targets.emplace_back(one);
  }
  auto given = std::pair(this, work.get());
  ledger_.backend.beneath(
      [](void* both) {
        auto& [self, work] = *static_cast<std::pair<Rematerializer*, Work*>*>(both);
        self->run(*work);
      },
      &given);
  work->clear();
  spare_ = std::move(work);
}

void Rematerializer::run(Work& work) {
  ledger_.replaying++;
  try {
    carry_out(work);
  } catch (...) {
    end(work);
    throw;
  }
  end(work);
}

void Rematerializer::end(Work& work) {
  try {
    abandon(work);
  } catch (...) {  // an interrupt, in a heuristic written in Python
    abandon(work);
    ledger_.replaying--;
    throw;
  }
  ended();
}

void Rematerializer::ended() {
  ledger_.replaying--;
  if (ledger_.replaying == 0) deallocation_.release_kept_inputs();
}

void Rematerializer::abandon(Work& work) {
  give_up(work.plan);
  while (!work.entered.empty()) leave(work.entered);
}

void Rematerializer::carry_out(Work& work) {
  auto& stack = work.stack;
  while (!stack.empty()) {
    if (stack.back().planned) {
      OperationRef maker = std::move(stack.back().planned);
      stack.pop_back();
      if (Plan::One* one = work.plan.find(maker.get())) stack.push_back({VersionRef(one->version.get()), OperationRef()});
      continue;  // if it is no longer in the plan, it has run
    }
    VersionRef version(stack.back().version.get());
    bool waiting = !work.entered.empty() && work.entered.back().version.get() == version.get();
    if (version->resident) {
      stack.pop_back();
      if (!waiting) continue;
      unplan(work.plan, work.entered.back().maker.get());
      leave(work.entered);
      continue;
    }
    OperationRef maker(version->has_left() ? nullptr : maker_of(version.get()));
    if (!maker && !version->host) ledger_.backend.refuse(version.get());
    if (maker && !waiting) {
      if (work.relaxations >= last_planned && work.plan.find(maker.get()) == nullptr) {
        // In the program's order, which needs as little memory at a time as the original run.
        add_to(work.plan, version.get(), stack);
        if (work.planned == 0) work.planned = work.plan.size();
        if (stack.back().version.get() != version.get()) continue;
      }
      work.entered.push_back({VersionRef(version.get()), OperationRef(maker.get())});
      enter(work.entered.back());
    }
    ledger_.collect_dead();
    size_t before = stack.size();
    for (uint32_t i = maker ? maker->count : 0; i-- > 0;) {
      Version* source = as_version(maker->reads[i]);
      if (!source->resident) stack.push_back({VersionRef(source), OperationRef()});
    }
    if (stack.size() != before) {
      if (work.relaxations == TURNED) std::reverse(stack.begin() + static_cast<ptrdiff_t>(before), stack.end());
      continue;
    }
    if (maker) unplan(work.plan, maker.get());
    if (maker && work.relaxations < last_planned && work.error && ++work.alone > MOST_ALONE * work.planned + FEW_ALONE)
      std::rethrow_exception(work.error);  // it could take exponential time: `frugally` is better
    try {
      if (!maker)
        eviction_.bring_back(version.get());
      else if (!recomputer_.run(version.get(), maker.get(), work.without_workspace.get() == maker.get()))
        continue;  // an input has gone
      ledger_.backend.between();
    } catch (...) {
      if (!ledger_.backend.is_budget_error()) throw;
      work.error = ledger_.backend.budget_error();
      if (work.relaxations == MAX_RELAXATIONS && ends_at_once(work.targets)) throw;
      if ((work.entered.size() < 2 && work.plan.empty()) || work.relaxations == 0) {
        if (!maker || work.without_workspace.get() == maker.get() || maker->signature->workspace == 0) throw;
        work.without_workspace = std::move(maker);  // the library can do without it
        continue;
      }
      // What is needed only later need not be locked yet, and can be brought back in its turn.
      work.relaxations--;
      give_up(work.plan);
      for (size_t i = 0; i + 1 < work.entered.size(); i++) back_out(work.entered[i]);
      work.entered.erase(work.entered.begin(), work.entered.end() - 1);
      continue;
    }
    if (!maker) continue;  // it is in memory now
    stack.pop_back();
    leave(work.entered);
    deallocation_.came_back(maker.get());
  }
}

void Rematerializer::add_to(Plan& plan, Version* wanted, std::vector<Item>& stack) {
  struct Planned {
    int64_t age, mutations;
    OperationRef maker;
  };
  std::vector<Planned> planned;
  std::vector<Version*> pending{wanted};
  plan.add(maker_of(wanted), wanted);
  while (!pending.empty()) {
    Version* version = pending.back();
    pending.pop_back();
    Recorded* maker = maker_of(version);
    if (version != wanted) planned.push_back({version->age, version->mutations, OperationRef(maker)});
    for (Node* read : *maker) {
      Version* source = as_version(read);
      Recorded* below = maker_of(source);
      if (!source->is_dropped() || below == nullptr) continue;
      source->locks++;
      plan.find(maker)->locked.emplace_back(source);
      if (plan.find(below) != nullptr) continue;
      plan.add(below, source);
      pending.push_back(source);
    }
  }
  std::stable_sort(planned.begin(), planned.end(), [](const Planned& a, const Planned& b) {
    return std::pair(a.age, a.mutations) > std::pair(b.age, b.mutations);
  });
  for (Planned& one : planned) stack.push_back({VersionRef(), std::move(one.maker)});
}

void Rematerializer::enter(Entered& entered) const {
  const Recorded& maker = *entered.maker.get();
  for (; entered.locked < maker.count; entered.locked++) {
    Version* source = as_version(maker.reads[entered.locked]);
    source->locks++;
    source->last_access = ledger_.clock;
  }
}

void Rematerializer::unplan(Plan& plan, const Recorded* maker) {
  Plan::One* planned = plan.find(maker);
  if (planned == nullptr) return;
  for (const VersionRef& source : planned->locked) source->locks--;
  plan.remove(maker);
}

void Rematerializer::give_up(Plan& plan) {
  for (auto& planned : plan.all()) {
    while (planned && planned->unlocked < planned->locked.size()) {
      Version* source = planned->locked[planned->unlocked++].get();
      source->locks--;
      recomputer_.idle(source);
    }
  }
  plan.clear();
}

void Rematerializer::back_out(Entered& entered) {
  while (entered.unlocked < entered.locked) {
    Version* source = as_version(entered.maker->reads[entered.unlocked++]);
    source->locks--;
    recomputer_.idle(source);
  }
}

void Rematerializer::leave(std::vector<Entered>& all) {
  Entered& entered = all.back();
  const Recorded* maker = entered.maker.get();
  while (entered.unlocked < entered.locked) {
    Version* source = as_version(maker->reads[entered.unlocked++]);
    source->locks--;
    recomputer_.read(source, maker);
  }
  deallocation_.cap_scratch();
  all.pop_back();
}

}  // namespace dtrrun

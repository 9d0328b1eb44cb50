// Rematerialization in as little memory as possible, in place of an error.
//
// `core/rematerialize.h` recomputes nothing twice while memory suffices: what its plan needs later is locked as soon as it is in
// memory. Where that does not fit, the targets are brought back here as a program with little memory would compute them. Operations
// run in the program's order. When memory runs short, what is cheap for its size and, according to the plans, needed last may be
// evicted, targets included. If it is missing when it is needed, a plan for it is carried out first. So little more than what one
// operation takes must be in memory.
#pragma once

#include <optional>

#include "recompute.h"

namespace dtrrun {

// Returns false if some operation that must run again for the targets can't, even with everything else evicted.
inline bool fits_one_by_one(Ledger& ledger, const std::vector<VersionRef>& targets) {
  std::vector<int64_t> room;  // by device
  ledger.each_device([&] { room.push_back(ledger.limit - ledger.reserved_bytes - ledger.resident_bytes); });
  auto stays = [&](const Version* one) { return one->constant() && !(ledger.tier && Constants::has(one)); };
  auto count = [&](const Version* one) {
    if (one->resident && !stays(one)) room[one->device] += one->nbytes;
  };
  for (const Version* one : ledger.versions.all()) count(one);
  for (const VersionRef& one : ledger.scratch.all()) count(one.get());
  std::unordered_set<const Version*> seen;
  std::vector<const Version*> pending;
  for (const VersionRef& one : targets) {
    seen.insert(one.get());
    if (!one->resident) pending.push_back(one.get());
  }
  while (!pending.empty()) {
    const Version* one = pending.back();
    const Recorded* maker = maker_of(one);
    pending.pop_back();
    if (maker == nullptr || one->has_left()) continue;
    int64_t need = maker->signature->output_bytes - maker->signature->workspace;
    std::unordered_set<const Version*> read;
    for (Node* node : *maker) {
      const Version* source = as_version(node);
      if (stays(source) || !read.insert(source).second) continue;
      if (source->device == one->device) need += source->nbytes;
      if (!source->resident && seen.insert(source).second) pending.push_back(source);
    }
    if (need > room[one->device]) return false;
  }
  return true;
}

// One such rematerialization.
class FrugalRun {
 public:
  FrugalRun(Ledger& ledger, Deallocation& deallocation, Eviction& eviction, Recomputer& recomputer)
      : ledger_(ledger), deallocation_(deallocation), eviction_(eviction), recomputer_(recomputer) {}
  FrugalRun(const FrugalRun&) = delete;

  // Makes all targets resident, one operation at a time. Returns false if that was not possible. locked: whether the caller has
  // locked them. These locks are lifted meanwhile: a resident target may have to be evicted and brought back.
  bool bring_back(const std::vector<VersionRef>& targets, bool locked) {
    Lifted lifted(targets, locked);
    if (!fits_one_by_one(ledger_, targets)) return false;
    bool done = false;
    try {
      done = carry_out(targets);
    } catch (...) {
      if (!ledger_.backend.is_budget_error()) {
        end();
        throw;
      }
    }
    end();
    return done;
  }

 private:
  static constexpr int MOST_TURNS = 6;  // plans for the inputs of one operation; each may evict what the previous one made
  static constexpr int MOST_REFUSALS = 16;  // more is unlocked after each
  static constexpr size_t MOST_REPEATS = 8;  // limit on operations in all: this many times the size of the first plan,
  static constexpr size_t FEW = 300;  // plus this many: it could take exponential time

  // Exists while the locks of the targets are lifted.
  class Lifted {
   public:
    Lifted(const std::vector<VersionRef>& targets, bool locked) : targets_(targets), change_(locked ? 1 : 0) {
      for (const VersionRef& one : targets_) one->locks -= change_;
    }
    ~Lifted() {
      for (const VersionRef& one : targets_) one->locks += change_;
    }
    Lifted(const Lifted&) = delete;

   private:
    const std::vector<VersionRef>& targets_;
    const int64_t change_;
  };

  // An operation in a plan, and the versions that it is to make. The last step of all has no operation, but targets.
  struct Step {
    OperationRef maker;
    std::vector<VersionRef> targets;  // of the last step of all
    std::vector<WeakVersion> made;
    std::pair<int64_t, int64_t> order = UNORDERED;
    int turns = 0;  // number of plans so far for inputs that were missing
    int refusals = 0;  // how often it has found no room so far

    template <class Function>
    void each_input(const Function& function) const {
      for (const VersionRef& one : targets) function(one.get());
      if (maker)
        for (Node* source : *maker.get()) function(as_version(source));
    }
  };
  static constexpr std::pair<int64_t, int64_t> UNORDERED{-2, 0}, FIRST{-1, -1};
  using Steps = std::vector<std::unique_ptr<Step>>;

  // Steps in the program's order, and the places of those that read a version.
  struct Plan {
    Steps steps;
    size_t place = 0;
    std::unordered_map<const Version*, std::vector<size_t>> uses;

    explicit Plan(Steps given) : steps(std::move(given)) {
      for (size_t i = 0; i < steps.size(); i++) steps[i]->each_input([&](const Version* source) { uses[source].push_back(i); });
    }
    bool is_over() const { return place == steps.size(); }
    Step& present() const { return *steps[place]; }
    // Returns the place of the next step that reads a version, including the present one.
    std::optional<size_t> next_use(const Version* version) const {
      auto found = uses.find(version);
      if (found == uses.end()) return std::nullopt;
      auto next = std::lower_bound(found->second.begin(), found->second.end(), place);
      return next == found->second.end() ? std::nullopt : std::optional(*next);
    }
  };

  // -- steps --

  bool carry_out(const std::vector<VersionRef>& targets) {
    auto last = std::make_unique<Step>();
    for (const VersionRef& one : targets) last->targets.emplace_back(one.get());
    Steps steps;
    steps.push_back(std::move(last));
    plans_.emplace_back(std::move(steps));
    while (!plans_.empty()) {
      if (plans_.back().is_over())
        plans_.pop_back();
      else if (!go_on(plans_.back().present()))
        return false;
    }
    return true;
  }

  // Runs the present step of the last plan, or plans for what it lacks. Returns false if it can't be run.
  bool go_on(Step& step) {
    if (!step.maker) {
      if (!has_inputs(step)) return plan_again(step);
      plans_.back().place++;
      return true;
    }
    Recorded* maker = step.maker.get();
    if (VersionRef wanted = missing_of(step)) {
      if (maker_of(wanted.get()) != maker) return false;
      if (!has_inputs(step)) return plan_again(step);
      if (left_ == 0) return false;
      left_--;
      Ledger::Using now(ledger_, wanted.get());
      make_room(step);
      try {
        if (!run(wanted.get(), maker)) return false;
      } catch (...) {
        if (!ledger_.backend.is_budget_error() || ledger_.backend.is_loss() || !give_up_more(step)) throw;
        return true;  // again; what it was to write to may have to be made first
      }
      deallocation_.came_back(maker);
    }
    done(step);
    return true;
  }
  static VersionRef missing_of(const Step& step) {
    for (const WeakVersion& one : step.made)
      if (Version* version = one.get(); version != nullptr && !version->resident) return VersionRef(version);
    return VersionRef();
  }
  // Locks those of a step's inputs that are in memory. Returns whether all of them are.
  bool lock_inputs(const Step& step) {
    bool complete = true;
    step.each_input([&](Version* source) {
      if (source->resident)
        lock(source);
      else
        complete = false;
    });
    return complete;
  }
  // Locks a step's inputs. If only versions that have left for the host are missing, brings them back. Returns whether all inputs
  // are in memory.
  bool has_inputs(const Step& step) {
    if (lock_inputs(step)) return true;
    bool lacks_others = false;
    step.each_input([&](const Version* source) { lacks_others = lacks_others || source->is_dropped(); });
    if (lacks_others) return false;
    step.each_input([&](Version* source) {
      if (source->resident) return;
      Ledger::Using now(ledger_, source);
      make_room_for(source->nbytes, step);
      eviction_.bring_back(source);
      if (source->resident) lock(source);
    });
    return lock_inputs(step);
  }
  // Runs an operation whose inputs are locked, without a workspace if there is too little room. Returns false if an input has gone.
  bool run(Version* wanted, Recorded* maker) {
    bool done;
    try {
      done = recomputer_.run(wanted, maker, false);
    } catch (...) {
      if (maker->signature->workspace == 0 || !ledger_.backend.is_budget_error()) throw;
      done = recomputer_.run(wanted, maker, true);
    }
    if (done) ledger_.backend.between();
    return done;
  }
  // Goes to the next step, and unlocks what is no longer needed.
  void done(Step& step) {
    plans_.back().place++;
    for (Node* node : *step.maker.get()) {
      Version* source = as_version(node);
      if (locked_.count(source) == 0 || next_use(source)) continue;
      unlock(source);
      recomputer_.read(source, step.maker.get());
    }
    step.made.clear();
    step.maker = OperationRef();  // it no longer counts as a reader
    deallocation_.cap_scratch();
  }

  // -- plans --

  // Plans for the inputs that a step lacks. Returns false if that has not helped before.
  bool plan_again(Step& step) { return ++step.turns <= MOST_TURNS && plan_for(step); }

  // Plans what must run to make the missing inputs of a step from what is in memory. Returns false if something is lost.
  bool plan_for(const Step& step) {
    Steps steps;
    std::unordered_map<const Recorded*, Step*> known;
    std::vector<Version*> pending;
    std::unordered_set<const Version*> seen;
    step.each_input([&](Version* source) {
      if (!source->is_dropped()) return;
      pending.push_back(source);
      seen.insert(source);
    });
    while (!pending.empty()) {
      Version* version = pending.back();
      pending.pop_back();
      Recorded* maker = maker_of(version);
      if (maker == nullptr) return false;
      lock(version);  // so that it is kept once it has been made
      Step*& its = known[maker];
      if (its == nullptr) {
        steps.push_back(std::make_unique<Step>());
        its = steps.back().get();
        its->maker = OperationRef(maker);
        its->each_input([&](Version* source) {
          if (source->resident)
            lock(source);
          else if (!source->has_left() && seen.insert(source).second)
            pending.push_back(source);
        });
      }
      its->made.emplace_back(version);
    }
    put_in_order(steps, known);
    int64_t cost = 0;
    for (const auto& one : steps) {
      cost += one->maker->signature->cost;
      for (const WeakVersion& made : one->made)
        costs_[made.get()] = {cost, made.get()->age};  // what precedes it may run again, too
    }
    if (plans_.size() == 1 && left_ == 0) left_ = MOST_REPEATS * steps.size() + FEW;
    plans_.emplace_back(std::move(steps));
    return true;
  }
  // Sorts steps into the program's order. What is written in place has the age of its storage, so it comes after the latest of its
  // inputs.
  static void put_in_order(Steps& steps, const std::unordered_map<const Recorded*, Step*>& known) {
    std::vector<Step*> stack;
    for (const auto& one : steps) stack.push_back(one.get());
    while (!stack.empty()) {
      Step* step = stack.back();
      auto latest = FIRST;
      bool waits = false;
      if (step->order == UNORDERED) {
        step->each_input([&](const Version* source) {
          if (!source->is_dropped()) return;
          Step* before = known.at(maker_of(source));
          latest = std::max(latest, before->order);
          if (before->order != UNORDERED) return;
          stack.push_back(before);
          waits = true;
        });
      }
      if (waits) continue;
      stack.pop_back();
      if (step->order != UNORDERED) continue;
      std::pair<int64_t, int64_t> own{step->made.front().get()->age, 0};
      step->order = own > latest ? own : std::pair(latest.first, latest.second + 1);
    }
    std::stable_sort(steps.begin(), steps.end(), [](const auto& a, const auto& b) { return a->order < b->order; });
  }
  // Returns after how many steps a version is needed, if any plan needs it.
  std::optional<size_t> next_use(const Version* version) const {
    size_t before = 0;
    for (auto plan = plans_.rbegin(); plan != plans_.rend(); ++plan) {
      if (auto place = plan->next_use(version)) return before + *place - plan->place;
      before += plan->steps.size() - plan->place;
    }
    return std::nullopt;
  }

  // -- memory --

  int64_t needs(const Step& step) const { return recomputer_.needs(step.maker.get(), /*without_workspace=*/false); }
  // Makes room for a step whose inputs are in memory, if that is possible. Otherwise its run reports what does not fit.
  void make_room(const Step& step) { make_room_for(needs(step), step); }
  void make_room_for(int64_t need, const Step& step) {
    while (!eviction_.try_room(need)) {
      int64_t excess = ledger_.resident_bytes + ledger_.reserved_bytes + need - ledger_.limit;
      if (!give_up(excess, step)) return;
    }
  }
  // Unlocks more after a step has found no room: a device's allocator may have enough free memory, but not in one piece. Returns
  // false if nothing is left.
  bool give_up_more(Step& step) {
    if (step.refusals > MOST_REFUSALS) return false;
    int64_t need = std::max<int64_t>(needs(step), 1);
    if (step.refusals < MOST_REFUSALS) {
      const int64_t wanted = need << step.refusals;
      step.refusals++;
      if (give_up(wanted, step)) return true;
    }
    step.refusals = MOST_REFUSALS + 1;
    eviction_.evict_to(0);  // then all but its inputs is free
    return true;
  }
  // Unlocks versions that take this many bytes: those that are cheap for their size and needed last. Returns false if there is
  // nothing to unlock. Inputs that a waiting step already holds go last if it has been planned for repeatedly: otherwise they could
  // keep evicting one another.
  bool give_up(int64_t nbytes, const Step& present) {
    std::unordered_set<const Version*> kept, here;
    for (const Plan& plan : plans_)
      if (plan.present().turns > 1) plan.present().each_input([&](const Version* source) { kept.insert(source); });
    present.each_input([&](const Version* source) { here.insert(source); });
    struct Candidate {
      bool kept;
      double score;
      int64_t nbytes;
      Version* version;
    };
    std::vector<Candidate> found;
    for (Version* one : in_order()) {
      if (!one->resident || here.count(one) != 0 || !may_go(one)) continue;
      auto distance = next_use(one);
      double score = distance ? divided(cost_of(one), std::max<int64_t>(one->nbytes, 1), static_cast<int64_t>(*distance) + 1) : 0;
      found.push_back({kept.count(one) != 0, score, one->nbytes, one});
    }
    std::stable_sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
      return std::tuple(a.kept, a.score, a.nbytes) < std::tuple(b.kept, b.score, b.nbytes);
    });
    size_t chosen = 0;
    while (chosen < found.size() && nbytes > 0) nbytes -= found[chosen++].nbytes;
    for (size_t i = chosen; i-- > 0;) {
      if (found[i].nbytes <= -nbytes)  // without it, the others suffice
        nbytes += found[i].nbytes;
      else
        unlock_idle(found[i].version);
    }
    return chosen != 0;
  }
  bool may_go(const Version* one) const {
    if (one->locks != 1 || one->device != ledger_.device) return false;
    return one->constant() ? eviction_.could_leave(one) : one->nbytes >= ledger_.least_bytes;
  }
  // Returns roughly what recomputing a version costs, as of when it was made or found.
  int64_t cost_of(Version* version) {
    auto& [cost, age] = costs_[version];
    if (age == version->age) return cost;
    age = version->age;
    cost = version->constant() ? eviction_.cost_of_leaving(version) : 0;
    int64_t copy = eviction_.cost_of_copy(version);
    std::unordered_set<const Version*> seen{version};
    std::vector<const Version*> stack{version};
    while (!stack.empty()) {
      const Recorded* maker = maker_of(stack.back());
      stack.pop_back();
      if (maker == nullptr) continue;
      cost += maker->signature->cost;
      for (Node* node : *maker) {
        const Version* source = as_version(node);
        if (source->is_dropped() && seen.insert(source).second) stack.push_back(source);
      }
    }
    return cost = std::min(cost, copy);
  }

  // -- locks --

  void lock(Version* version) {
    if (locked_.count(version) != 0) return;
    locked_.emplace(version, Locked{VersionRef(version), ++locks_taken_});
    version->locks++;
  }
  VersionRef unlock(Version* version) {
    auto found = locked_.find(version);
    VersionRef kept = std::move(found->second.version);
    locked_.erase(found);
    version->locks--;
    return kept;
  }
  // Unlocks a version before the operation that it was locked for has run.
  void unlock_idle(Version* version) {
    VersionRef kept = unlock(version);
    recomputer_.idle(version);
  }
  // Returns what is locked, in the order in which it was locked.
  std::vector<Version*> in_order() const {
    std::vector<std::pair<int64_t, Version*>> numbered;
    for (const auto& [version, locked] : locked_) numbered.emplace_back(locked.number, version);
    std::sort(numbered.begin(), numbered.end());
    std::vector<Version*> found;
    for (const auto& [number, version] : numbered) found.push_back(version);
    return found;
  }
  void unlock_all() {
    for (Version* one : in_order()) unlock_idle(one);
  }
  void end() {
    try {
      unlock_all();
    } catch (...) {  // an interrupt, in a heuristic written in Python
      unlock_all();
      throw;
    }
  }

  Ledger& ledger_;
  Deallocation& deallocation_;
  Eviction& eviction_;
  Recomputer& recomputer_;
  std::vector<Plan> plans_;  // each is for inputs that the present step of the one before lacks
  struct Locked {
    VersionRef version;
    int64_t number;  // in the order of locking
  };
  std::unordered_map<Version*, Locked> locked_;  // once each
  int64_t locks_taken_ = 0;
  struct Cost {
    int64_t cost = 0, age = -1;  // age: of the version, since another one may have taken its address
  };
  std::unordered_map<const Version*, Cost> costs_;
  size_t left_ = 0;  // number of operations that may still run
};

}  // namespace dtrrun

// Rematerialization: running recorded operations again (paper, Sec. 2 and App. C.4).
//
// It uses an explicit stack, so a chain of ten thousand evicted operations needs no deep recursion. The operations to run are
// planned first, and run in the program's order. Resident inputs are locked while an operation waits for its other inputs;
// recomputed ones are locked until the last operation of the plan has read them. So nothing is recomputed twice while memory
// suffices, and a rematerialization costs the sum of its recipes, as the paper's c(t) assumes.
#pragma once

#include "recompute.h"

namespace dtrrun {

class Rematerializer {
 public:
  using Targets = std::vector<VersionRef>;

  Rematerializer(Ledger& ledger, Deallocation& deallocation, Eviction& eviction, Recomputer& recomputer);
  ~Rematerializer();

  int64_t frugal_runs = 0;  // how often what did not fit was brought back in as little memory as possible
  int64_t last_planned = 7;  // relaxations left when the last plan is made; variable for experiments (`tests/bench/replays.py`)

  // Makes all targets resident. locked: whether the caller has locked them. Raises the budget error. Locks taken here are released.
  void materialize(const Targets& targets, bool locked);

  // Returns the bookkeeping time so far of the current rematerialization, which is counted only at its end.
  int64_t under_way_ns() const { return began_ns_ == 0 ? 0 : now_ns() - began_ns_ - (accounted_ns() - accounted_before_); }

 private:
  static constexpr int MAX_RELAXATIONS = 10;  // per rematerialization: inputs that never fit together would alternate forever
  static constexpr int TURNED = 6;  // when this many relaxations are left, inputs are brought back in the opposite order
  static constexpr size_t MOST_ALONE = 4;  // limit on operations run without a plan: this many times the size of the first plan,
  static constexpr size_t FEW_ALONE = 64;  // plus this many

  class Began;
  struct Entered;
  class Plan;
  struct Item;
  struct Work;

  static std::vector<Version*> missing_of(const Targets& targets);

  // Returns the time in ns that is counted elsewhere.
  int64_t accounted_ns() const { return ledger_.recomputed_ns + eviction_.making_room_ns; }

  // Brings back what is missing. Returns the budget error, or null if there was none.
  std::exception_ptr budget_error_of(const std::vector<Version*>& missing);

  // Brings back what did not fit, in as little memory as possible. Returns whether that was possible.
  bool frugally(const Targets& targets, bool locked);
  bool run_frugally(const Targets& targets, bool locked);
  // Returns whether to give up on a rematerialization that has found no room, instead of trying again in the same way: it can't
  // succeed in any way, or an earlier one had to be frugal.
  bool ends_at_once(const Targets& targets) const;

  // missing: the targets that are evicted.
  void run_beneath(const std::vector<Version*>& missing);
  void run(Work& work);
  void end(Work& work);
  void ended();
  // Releases all remaining locks; none remain if the rematerialization has finished. May be called again.
  void abandon(Work& work);

  // -- the plan --

  void carry_out(Work& work);

  // Plans what must run to make `wanted` and pushes it on the stack, the last in the program's order first. Versions that these
  // operations make for one another are locked until the last reader has run. So everything is recomputed once; otherwise what two
  // operations read could be evicted between them, again at every depth.
  static void add_to(Plan& plan, Version* wanted, std::vector<Item>& stack);

  void enter(Entered& entered) const;
  // Removes an operation from the plan: its inputs are locked in another way, or it is no longer needed.
  static void unplan(Plan& plan, const Recorded* maker);
  void give_up(Plan& plan);
  // Unlocks the inputs of an operation that has not run and will have to lock them again.
  void back_out(Entered& entered);
  // Leaves the operation entered last: unlocks its inputs and frees those that were recomputed for it alone.
  void leave(std::vector<Entered>& all);

  Ledger& ledger_;
  Deallocation& deallocation_;
  Eviction& eviction_;
  Recomputer& recomputer_;
  std::unique_ptr<Work> spare_;  // of the last rematerialization, kept for its memory
  int64_t began_ns_ = 0, accounted_before_ = 0;  // start of the one in progress (0: none), and `accounted_ns` at that time
};

}  // namespace dtrrun

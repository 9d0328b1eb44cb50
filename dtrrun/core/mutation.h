// Constants that are about to change, and what depends on them (paper, Sec. 3.2 and App. C.6).
#pragma once

#include <optional>

#include "away.h"
#include "copies.h"
#include "rematerialize.h"

namespace dtrrun {

// Decides which constants are copied before they change, and makes the copies: weights in an optimizer's step, running statistics.
//
// What was computed from the old content and is still referred to, such as the graph of an evaluation, can't be recomputed once the
// content is overwritten. All of it would have to stay in memory. If the constants are small in comparison, copies of them are kept
// instead, for as long as a recipe reads them: when a version is superseded, its copy becomes its memory.
//
// When the weights change, an ordinary step still refers to its loss and its outputs. These are a fraction of the size of the
// weights, so nothing is copied for them. Finding that out means looking at what the program has, and sometimes at all recipes. So
// the answer is reused for as many operators as versions were looked at: that amortizes to at most one version per operator. An answer
// that was found in a backward pass, when a gradient was added to in place, is not reused after it: by then, the program has let go of
// what it was about, and all weights would be copied for nothing.
class Copies {
 public:
  Copies(Ledger& ledger, Eviction& eviction) : ledger_(ledger), eviction_(eviction) {}

  // Called when a constant is about to change. Returns whether recipes can go on reading its present content.
  bool keep(Version* constant) { return constant->copy || ((wants(constant) || must(constant)) && make(constant)); }

  // Copies a constant, if there is room.
  bool make(Version* constant);

  // Returns whether a constant that is about to change is worth a copy. None is before memory has run short, since its dependents
  // need not be evicted until then.
  bool wants(const Version* constant);

 private:
  // Returns whether something evicted can't be brought back before a constant changes, since it needs another that is away, too.
  bool must(const Version* constant) const {
    return ledger_.some_away && constant->needed_by && constant->resident && !constant->escaped && is_read_with_away(constant);
  }

  static constexpr int64_t SHORTEST = 64;  // minimum number of operators for which an answer is reused

  void look_counts_for(size_t looked_at) {
    until_ = ledger_.age + std::max(static_cast<int64_t>(looked_at), SHORTEST);
    found_in_backward_ = ledger_.in_backward;
  }

  Ledger& ledger_;
  Eviction& eviction_;
  int64_t until_ = -1;  // the ledger's age up to which the last answer is reused
  bool found_in_backward_ = false;
  int64_t most_ = 0;    // bytes that a copy may take
  std::optional<std::unordered_set<int64_t>> chosen_;  // keys of the versions worth a copy, once they have been determined
  int64_t chosen_at_ = -1;  // the ledger's age at that time: storages made since then may have the keys of others
};

// Keeps versions locked while it exists.
class Locked {
 public:
  explicit Locked(const std::vector<VersionRef>& versions) : versions_(versions) {
    for (const VersionRef& one : versions_) one->locks++;
  }
  ~Locked() {
    for (const VersionRef& one : versions_) one->locks--;
  }
  Locked(const Locked&) = delete;

 private:
  const std::vector<VersionRef>& versions_;
};

// Rescues what was computed from the present content of a constant that is about to change: evicted versions that the program still
// has are brought back, and resident ones become constants.
class Rescue {
 public:
  Rescue(Ledger& ledger, Recipes& recipes, Rematerializer& rematerializer)
      : ledger_(ledger), recipes_(recipes), rematerializer_(rematerializer) {}

  // Rescues all dependents of a constant. Raises the budget error.
  void dependents_of(Version* constant) {
    if (constant->needed_by) rescue(constant);
  }

  // Does the same if nothing has to be brought back. Otherwise rescues nothing and returns false.
  bool resident_dependents_of(Version* constant);

 private:
  // evicted: evicted versions that the program has. released: those that it no longer has. kept: in memory or on the host, together with
  // their storages, since the recipe of one may be all that keeps the memory of another alive.
  struct Found {
    std::vector<VersionRef> evicted, released;
    std::vector<std::pair<VersionRef, StorageRef>> kept;
  };

  void rescue(Version* constant);
  // Turns small results that the program has and no recipe reads into constants. Otherwise a loss that is held until the next one
  // replaces it would keep in memory what it is recomputed from: the logits, which become constants once the weights change.
  void settle_small_results();
  // Finds what depends on a constant. Does not search beyond resident dependents, since what depends on those is safe.
  Found find(Version* constant);
  // Turns the resident dependents into constants. Returns whether nothing has to be brought back.
  bool settle(Version* constant, const Found& found);

  static constexpr int SMALL_SHIFT = 10;  // a result is small up to a thousandth of the limit

  Ledger& ledger_;
  Recipes& recipes_;
  Rematerializer& rematerializer_;
  int64_t settled_until_ = -1;  // the ledger's age up to which small results are not looked for again
};

// Decides which mutations get a recipe, and rescues versions that the other mutations would make unrecoverable. The write may come
// from an operator or from other code.
class Mutation {
 public:
  static constexpr int64_t CHAIN_LIMIT = 32;  // mutations that a recipe may replay; beyond that the storage becomes a constant

  Mutation(Ledger& ledger, Recipes& recipes, Copies& copies, Rescue& rescue)
      : ledger_(ledger), recipes_(recipes), copies_(copies), rescue_(rescue) {}

  // Returns whether a pin remains when the whole storage is overwritten.
  static bool is_sticky(Pin pin) {
    return pin == pins::PARAMETER || pin == pins::GRADIENT || pin == pins::PINNED || pin == pins::LOADED ||
           pin == pins::FOREIGN_MEMORY;
  }
  // Called when a constant is written to: its memory no longer counts as uninitialised, so no recipe can start from blank memory.
  static void no_longer_blank(Version* constant) {
    if (constant->pin == pins::UNINITIALISED) constant->pin = pins::UPDATED_IN_PLACE;
  }
  // Returns whether the history of a recomputable version is worth keeping. That of state that persists over steps (running
  // averages) is not.
  bool is_recent(const Version* version) const { return version->age >= ledger_.step_age && version->mutations < CHAIN_LIMIT; }

  // Called when an operator is about to write to a version. leaf: it is a leaf of autograd, written through that leaf. overwrites:
  // returns whether the operator overwrites all of it without reading it. Returns whether the new content can be recomputed.
  template <class Overwrites>
  bool may_record(Version* version, bool leaf, const Overwrites& overwrites) {
    if (leaf) {
      if (!version->constant() || version->pin != pins::PARAMETER) pin(version, pins::PARAMETER);
      return false;
    }
    return version->constant() ? !is_sticky(version->pin) && overwrites() : is_recent(version);
  }

  // Rescues what depends on constants that an operator is about to write to. each(function) calls `function` with each of them.
  // Some are copied for this. The others are added to `changing`: until the write is done, nothing else may come to depend on them.
  // Raises the budget error.
  template <class Constants, class Changing>
  void about_to_change(const Constants& each, Changing& changing) {
    each([&](Version* one) {
      Ledger::forget_host_copy(one);
      copies_.keep(one);
    });
    each([&](Version* one) {
      if (one->copy) return;
      if (!one->escaped) {
        one->escaped = true;
        changing.emplace_back(one);
      } else {
        ledger_.backend.escaped_changes(one);
      }
    });
    each([&](Version* one) {
      if (!one->copy) rescue_.dependents_of(one);
    });
  }

  // Keeps a resident version in memory from now on.
  void pin(Version* version, Pin why);

  // Called when other code can reach the memory from now on: it stays, and nothing is recomputed from it. Raises the budget error.
  void escape(Version* version, Pin why);
  // Does the same for several resident versions. All are locked meanwhile, since bringing back what was computed from one might
  // otherwise evict another.
  void escape_together(const std::vector<VersionRef>& versions, Pin why);

  // Called when code that is not an operator is about to write to the memory. escapes: it may also do so later. Raises the budget
  // error.
  void written_outside(Version* version, Pin why, bool escapes);

 private:
  // Makes a version a constant and rescues what depends on its content. Raises the budget error if that needs too much room.
  void constant_about_to_change(Version* version, Pin why);

  Ledger& ledger_;
  Recipes& recipes_;
  Copies& copies_;
  Rescue& rescue_;
};

}  // namespace dtrrun

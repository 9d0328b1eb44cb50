// Recipes: which versions can be recomputed, and what keeps them recomputable.
//
// A version without a recipe is a constant: it is never dropped, though it may leave for the host (`host.h`). Before a version is
// evicted for the first time its recipe is secured, down to the constants. From then on it stays replayable, whatever the program
// releases.
#pragma once

#include "ledger.h"

namespace dtrrun {

class Recipes {
 public:
  explicit Recipes(Ledger& ledger) : ledger_(ledger) {}

  // Drops the recipe of a version that is in memory or on the host: it can no longer be evicted. pin: the reason.
  void make_constant(Version* one, Pin pin);

  // Makes sure that a version stays recomputable, whatever the program releases or mutates from now on: recipes keep alive the
  // constants that they read. Returns false if an input is lost already, so that the version must stay in memory. Searches the
  // unsecured part of the graph with an explicit stack.
  bool secure(Version* wanted);

  // Gives up a version that is not in memory and can no longer be recomputed.
  void lose(Version* one);

  // Makes a new version, which takes over the storage of `target`, since it has been mutated. maker: the recipe of the mutation,
  // or null if there is none. cost: that of the operation, in ns.
  VersionRef supersede(Version* target, Recorded* maker, int64_t cost);

  // Called when a failed operator may have written to the storage of a version. Returns the storage's new version, a constant, or
  // null if the storage is gone. The old version keeps its recipe.
  VersionRef half_written(const Version* target);

  // From now on, operators are recorded again, and what they make can be evicted. What there is stays in memory: what was made
  // while operators were only counted has no recipe, and what has one may have been computed from what has changed meanwhile.
  void end_counting();

  // Called when nothing will be recomputed any more. Releases the storages that recipes have kept alive; otherwise the next session
  // would assume that the program itself holds them.
  void end();

 private:
  // Marks an operation as secured: everything that it reads stays replayable, so what it makes does, too.
  static void settle(Version* node, Recorded* maker, std::vector<StorageRef> constants);
  static void note_dependent(Version* source, Version* node);

  Ledger& ledger_;
};

}  // namespace dtrrun

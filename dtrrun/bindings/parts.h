// The parts of a core that Python calls, besides the ledger. Each is the base class of the one in dtrrun/core.
#pragma once

#include "ledger.h"

namespace dtrrun {

template <class Part>
Binding<PartOf<Part>> bind_part(py::module_& module, const char* name) {
  Binding<PartOf<Part>> made(module, name, nullptr);
  // The other arguments are for the derived class.
  made.type.def(py::init([](py::object ledger) { return PartOf<Part>(std::move(ledger)); }), "ledger"_a);
  return made;
}

inline void bind_parts(py::module_& module) {
  bind_part<Recipes>(module, "Recipes")
      .method("make_constant", &Core::recipes, &Recipes::make_constant,
              "Drop the recipe of a resident version, so that it can't be evicted any more, for a reason.")
      .method("secure", &Core::recipes, &Recipes::secure,
              "Make sure that a version stays recomputable, or return False: an input is lost.")
      .method("pin", &Core::mutation, &Mutation::pin, "Keep a resident version in memory from now on, for a reason.")
      .method("lose", &Core::recipes, &Recipes::lose, "A version that is not in memory can't be recomputed any more.")
      .method("supersede", &Core::recipes, &Recipes::supersede,
              "Make a new version that takes over the storage of one that has been mutated, and return it.\n\n"
              "Takes the mutation as a recipe, or None if there is none, and its cost in ns.")
      .method(
          "half_written", &Core::recipes, &Recipes::half_written,
          "A failed operator may have written to the storage. Return the version that it has now, a constant, or None; the old "
          "version keeps its recipe.")
      .method("end_counting", &Core::recipes, &Recipes::end_counting,
              "Record operators again, if they are only counted at present. What there is stays in memory.")
      .method("end", &Core::recipes, &Recipes::end,
              "Nothing will be recomputed any more: let go of the storages that recipes have kept alive.");
  bind_part<Deallocation>(module, "Deallocation")
      .attribute("kept", &Core::deallocation, &Deallocation::kept)
      .attribute("scratch_shift", &Core::deallocation, &Deallocation::scratch_shift)
      .method(
          "free_all_unread_scratch", +[](Core& core) { core.deallocation.free_all_unread_scratch(core.eviction.evictions); },
          "Free the scratch versions that no recipe reads any more.");
  bind_part<Eviction>(module, "Eviction")
      .method("try_room", &Core::eviction, &Eviction::try_room,
              "Evict until so many bytes more fit into the budget. Returns whether they do.")
      .method("evict_to", &Core::eviction, &Eviction::evict_to,
              "Evict until at most so many bytes are resident. Returns False if nothing is left to evict.")
      .method("may_be_evicted", &Core::eviction, &Eviction::may_be_evicted,
              "Return whether a version may be evicted, provided that its recipe can be secured.")
      .method("could_leave", &Core::eviction, &Eviction::could_leave,
              "Return whether a constant, locked or not, may leave for the host: only operators can reach its memory.")
      .method("evict_if_possible", &Core::eviction, &Eviction::evict_if_possible,
              "Evict this version, whatever its score. Returns whether that was possible.")
      .attribute("evictions", &Core::eviction, &Eviction::evictions)
      .attribute("evicted_bytes_total", &Core::eviction, &Eviction::evicted_bytes_total)
      .attribute("over_budget", &Core::eviction, &Eviction::over_budget)
      .attribute("making_room_ns", &Core::eviction, &Eviction::making_room_ns)
      .attribute("dear_part", &Core::eviction, &Eviction::dear_part)
      .attribute("replaying", &Core::ledger, &Ledger::replaying)
      .attribute("warn_only", &Core::eviction, &Eviction::warn_only)
      .attribute("adapts", &Core::eviction, &Eviction::adapts)
      .readonly("evicted_by", +[](Core& core) { return core.tallies.evictions(); });
  bind_part<Rematerializer>(module, "Rematerializer")
      .method(
          "materialize",
          +[](Core& core, const std::vector<VersionRef>& targets, bool locked) {
            core.rematerializer.materialize(targets, locked);
          },
          "Make all targets resident. locked: whether the caller has locked them.\n\n"
          "Raises the budget error. Locks taken here are released.",
          "targets"_a, py::kw_only(), "locked"_a = true)
      .method("under_way_ns", &Core::rematerializer, &Rematerializer::under_way_ns,
              "Bookkeeping time of the current rematerialization, which is counted only at its end.")
      .attribute("rematerializations", &Core::recomputer, &Recomputer::rematerializations)
      .attribute("rematerialized_bytes", &Core::recomputer, &Recomputer::rematerialized_bytes)
      .attribute("operators_ns", &Core::ledger, &Ledger::recomputed_ns)
      .attribute("frugal_runs", &Core::rematerializer, &Rematerializer::frugal_runs)
      .attribute("last_planned", &Core::rematerializer, &Rematerializer::last_planned)
      .readonly("by_operator", +[](Core& core) { return core.tallies.runs(); });
  bind_part<Mutation>(module, "Mutation")
      .method(
          "rescue_dependents", &Core::rescue, &Rescue::dependents_of,
          "Rescue what was computed from the present content of a constant that is about to change.\n\n"
          "Evicted versions that the program still has are brought back; resident ones become constants. Raises the budget error.")
      .method("escape", &Core::mutation, &Mutation::escape,
              "Other code can reach the memory from now on: it stays, and nothing is recomputed from it. Takes the reason.\n\n"
              "Raises the budget error.")
      .method("escape_together", &Core::mutation, &Mutation::escape_together,
              "Let several resident versions escape. Takes the reason. Raises the budget error.")
      .method(
          "written_outside",
          +[](Core& core, Version* version, Pin why, bool escapes) { core.mutation.written_outside(version, why, escapes); },
          "Code that is not an operator is about to write to the memory.\n\n"
          "escapes: it may also do so later. Raises the budget error.",
          "version"_a, "why"_a, py::kw_only(), "escapes"_a);
  bind_part<Operators>(module, "Operators")
      .method(
          "adopt",
          +[](Core& core, const StorageRef& storage, Pin pin) {
            return core.operators.adopt(storage.get(), pin == nullptr ? pins::CONSTANT : pin);
          },
          "Enter a storage that no recorded operator made, as a constant, and return its version.\n\n"
          "pin: why it can't be evicted.",
          "storage"_a, py::kw_only(), "pin"_a = py::none());
}

}  // namespace dtrrun

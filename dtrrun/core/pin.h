// Why a version can't be evicted: an interned string, so that pins are compared by address.
#pragma once

#include <string>
#include <string_view>
#include <unordered_set>

namespace dtrrun {

using Pin = const std::string*;  // null: none

inline Pin as_pin(std::string_view text) {
  static std::unordered_set<std::string>& all = *new std::unordered_set<std::string>;
  return &*all.emplace(text).first;
}

namespace pins {
inline const Pin AWAY = as_pin("computed from weights that are away");
inline const Pin CONSTANT = as_pin("constant");
inline const Pin COUNTED = as_pin("only counted");
inline const Pin FOREIGN_MEMORY = as_pin("foreign memory");
inline const Pin GRADIENT = as_pin("gradient");
inline const Pin HANDED_OUT = as_pin("handed out");
inline const Pin INPUT_EXPOSED = as_pin("input exposed");
inline const Pin INPUT_LOST = as_pin("input lost");
inline const Pin INPUT_MUTATED = as_pin("input mutated");
inline const Pin LOADED = as_pin("loaded or copied");
inline const Pin MUTATED = as_pin("mutated");
inline const Pin NOT_REPLAYABLE = as_pin("not replayable");
inline const Pin OTHER_DEVICE = as_pin("other device");
inline const Pin PARAMETER = as_pin("parameter");
inline const Pin PINNED = as_pin("pinned");
inline const Pin READ_UNSEEN = as_pin("read unseen");
inline const Pin RUNNING_STATISTICS = as_pin("running statistics");
inline const Pin SHARED = as_pin("shared with a tensor without plain storage");
inline const Pin SHARED_BY_THREADS = as_pin("written by one thread while another uses it");
inline const Pin UNINITIALISED = as_pin("uninitialised");
inline const Pin UPDATED_IN_PLACE = as_pin("updated in place");
}  // namespace pins

}  // namespace dtrrun

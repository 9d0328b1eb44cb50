// Why a version can't be evicted: a text that exists once, so that pins are compared by address.
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
inline const Pin CONSTANT = as_pin("constant"), FOREIGN_MEMORY = as_pin("foreign memory"), GRADIENT = as_pin("gradient"),
                 HANDED_OUT = as_pin("handed out"), INPUT_LOST = as_pin("input lost"),
                 INPUT_MUTATED = as_pin("input mutated"), LOADED = as_pin("loaded or copied"), MUTATED = as_pin("mutated"),
                 NOT_REPLAYABLE = as_pin("not replayable"), OTHER_DEVICE = as_pin("other device"), PARAMETER = as_pin("parameter"),
                 PINNED = as_pin("pinned"), READ_UNSEEN = as_pin("read unseen"), RUNNING_STATISTICS = as_pin("running statistics"), SHARED = as_pin("shared with a tensor without plain storage"),
                 SHARED_BY_THREADS = as_pin("written by one thread while another uses it"), UNINITIALISED = as_pin("uninitialised"),
                 UPDATED_IN_PLACE = as_pin("updated in place");
}  // namespace pins

}  // namespace dtrrun

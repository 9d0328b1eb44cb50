// The most memory that a kernel has had at once on a GPU: of what its thread has taken from the allocator meanwhile.
//
// The allocator tells of each block in the thread that asks for it (`device_blocks.h`). Its statistics would say the same, but
// take 20 µs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace dtrrun {

class Meter {
 public:
  Meter() : outer_(std::exchange(innermost, this)) {}
  ~Meter() { innermost = outer_; }
  Meter(const Meter&) = delete;

  static inline thread_local Meter* innermost = nullptr;

  int64_t most() const { return most_; }  // bytes
  void taken(uintptr_t address, int64_t nbytes) {
    blocks_.emplace_back(address, nbytes);
    now_ += nbytes;
    most_ = std::max(most_, now_);
  }
  void freed(uintptr_t address) {
    auto found = std::find_if(blocks_.begin(), blocks_.end(), [&](const auto& one) { return one.first == address; });
    if (found == blocks_.end()) return;  // it was taken before, and has been evicted
    now_ -= found->second;
    blocks_.erase(found);
  }

 private:
  Meter* const outer_;
  std::vector<std::pair<uintptr_t, int64_t>> blocks_;  // that are still taken
  int64_t now_ = 0, most_ = 0;
};

}  // namespace dtrrun

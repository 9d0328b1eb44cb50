// A kernel of an operator that is only counted (counting.h), inside a budget: it must not take more memory than there is room for.
#pragma once

#include <cstdint>
#include <utility>

namespace dtrrun {

class CountedKernel {
 public:
  struct TooLarge {};  // thrown into the kernel, which is going to be run again when there is room

  // room: the bytes that it may allocate at once.
  explicit CountedKernel(int64_t room) : room_(room), outer_(std::exchange(innermost_, this)) {}
  ~CountedKernel() { innermost_ = outer_; }
  CountedKernel(const CountedKernel&) = delete;

  // Called when a kernel in this thread, if there is one, is about to allocate memory.
  static void allocates(size_t nbytes) {
    if (innermost_ != nullptr && static_cast<int64_t>(nbytes) > innermost_->room_) throw TooLarge{};
  }

 private:
  const int64_t room_;
  CountedKernel* const outer_;
  static inline thread_local CountedKernel* innermost_ = nullptr;
};

}  // namespace dtrrun

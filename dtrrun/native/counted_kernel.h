// A kernel of an operator that is only counted (counting.h), inside a budget: it must not take more memory than there is room for.
// Where memory is ample, that is so of each block. Inside a tight budget (`Exact`) it is so of all blocks together.
#pragma once

#include <cstdint>
#include <exception>
#include <utility>

namespace dtrrun {

class CountedKernel {
 public:
  // Thrown into the kernel, which is going to be run again when there is room. One that is written in Python calls functions of
  // PyTorch's that pass on only what is a std::exception: anything else would unwind the interpreter.
  struct TooLarge : std::exception {};

  // room: the bytes that it may allocate at once.
  explicit CountedKernel(int64_t room) : CountedKernel(room, false, -1) {}
  ~CountedKernel() { innermost_ = outer_; }
  CountedKernel(const CountedKernel&) = delete;

  class Exact;

  // Called when a kernel in this thread, if there is one, is about to allocate memory.
  static void allocates(size_t nbytes) {
    if (innermost_ != nullptr) innermost_->take(static_cast<int64_t>(nbytes));
  }
  // Returns whether it has been stopped. Code between may have caught the exception, and gone on or raised another one.
  bool has_refused() const { return refused_; }
  // Stops the kernel in this thread, which must be there.
  [[noreturn]] static void refuse() {
    innermost_->refused_ = true;
    throw TooLarge{};
  }
  // Returns whether there is one that must not make the allocator look for memory.
  static bool is_exact() { return innermost_ != nullptr && innermost_->exact_; }

 private:
  CountedKernel(int64_t room, bool exact, int64_t mask)
      : room_(room), exact_(exact), mask_(mask), outer_(std::exchange(innermost_, this)) {}
  void take(int64_t nbytes) {
    nbytes = (nbytes - 1 - mask_) & mask_;
    if (nbytes > room_) refuse();
    if (exact_) room_ -= nbytes;
  }

  int64_t room_;
  bool refused_ = false;
  const bool exact_;
  const int64_t mask_;  // as of `rounded` in storages.h
  CountedKernel* const outer_;
  static inline thread_local CountedKernel* innermost_ = nullptr;
};

class CountedKernel::Exact : public CountedKernel {
 public:
  // room: the bytes that it may allocate together. mask: rounds those of a block.
  Exact(int64_t room, int64_t mask) : CountedKernel(room, true, mask) {}
};

}  // namespace dtrrun

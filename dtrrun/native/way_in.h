// The way in: how PyTorch's dispatcher hands operators to dtrrun.
//
// The dispatcher looks up an operator's kernel by dispatch key, from the highest to the lowest. The way in puts one of our
// kernels at a key below those of autograd, autocast, modes and subclasses, and above those of the backends. A thread whose
// operators are to arrive has that key among its included keys. There are two ways in, each in its own file:
//
//   way_in_fake.h        a fallback at `Fake`, as long as that key has no other fallback
//   way_in_custom_rng.h  a kernel for each operator at `CustomRNGKeyId`, which PyTorch does not use
//
// Both have typed kernels for the operators that programs call most (typed_kernels.h). A process takes one way in when its
// first session begins (`ways_in.py` chooses), and keeps it. The way in calls `arrive` for each operator. Nothing else in this
// folder depends on which one it is.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>
#include <string_view>

namespace dtrrun {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::OperatorHandle;
using torch::jit::Stack;

struct WayIn {
  const char* name = nullptr;  // null until the process has taken one
  DispatchKey key = DispatchKey::Undefined;
  DispatchKeySet own;            // the key, as a set
  DispatchKeySet below;          // where operators continue from here
  DispatchKeySet above;          // everything else, including the key
  bool is_above_python = false;  // the program's modes and subclasses run after us
  // From now on, a composite operator arrives whole wherever it has not been decomposed above the key, as in inference mode.
  void (*take_whole)(const OperatorHandle& op) = [](const OperatorHandle&) {};

  WayIn() = default;
  WayIn(const char* name, DispatchKey key, DispatchKeySet below, bool is_above_python = false)
      : name(name), key(key), own(key), below(below), above(DispatchKeySet(DispatchKeySet::FULL) - below),
        is_above_python(is_above_python) {}
};
inline WayIn way_in;

// Takes the way in with this name, if there is one, and sets `way_in`. Raises c10::Error if it is closed. (ways_in.cpp)
void take_way(std::string_view name);

class Arrival;

// Called when an operator arrives. Of the keys that it was called with, those in `way_in.below` remain. (interposer.cpp)
void arrive(Arrival& arrival);

// While an operator is handled, operators that its kernel calls do not arrive.
class Off {
 public:
  Off() { depth++; }
  ~Off() { depth--; }
  Off(const Off&) = delete;
  static bool none() { return depth == 0; }

 private:
  static inline thread_local int depth = 0;
  c10::impl::ExcludeDispatchKeyGuard guard_{way_in.own};
};

// Whether this thread's operators arrive, and whether something hides them at present.
inline bool is_switched_on() { return c10::impl::tls_is_dispatch_key_included(way_in.key); }
inline bool is_hidden() { return c10::impl::tls_is_dispatch_key_excluded(way_in.key); }

// Lets this thread's operators arrive, or not. Where the key is above Python's, it is excluded in a handler of a mode or a
// subclass that is already running: what this handler calls must arrive, too.
inline void switch_key(bool on) {
  c10::impl::tls_set_dispatch_key_included(way_in.key, on);
  if (way_in.is_above_python && on && Off::none()) c10::impl::tls_set_dispatch_key_excluded(way_in.key, false);
}

}  // namespace dtrrun

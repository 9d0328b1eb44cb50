// The way in: how PyTorch's dispatcher hands operators to dtrrun.
//
// The dispatcher looks for an operator's kernel by dispatch keys, from the highest to the lowest. The way in puts a kernel of
// ours at one of them, below the keys of autograd, autocast, modes and subclasses, and above those of the backends. A thread
// whose operators are to come has the key among those that it includes. There are two such places, each in a file of its own:
//
//   way_in_fake.h        a fallback at `Fake`, as long as that key has no other one
//   way_in_custom_rng.h  kernels of each operator at `CustomRNGKeyId`, which PyTorch uses for nothing
//
// Either one has kernels in front for the operators that programs call most (typed_kernels.h). A process takes one of them when
// its first session begins (`ways_in.py` chooses), and keeps it. It calls `arrive` for each operator. Nothing else in this folder
// knows which it is.
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
  DispatchKeySet below;          // where operators go on from here
  DispatchKeySet above;          // everything else, with the key
  bool is_above_python = false;  // modes and subclasses of the program come after us
  // From now on a composite operator comes as a whole wherever it has not been taken apart above us, as in inference mode.
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

// An operator has come: of the keys that it was called with, `way_in.below` are left to do. (interposer.cpp)
void arrive(Arrival& arrival);

// While an operator is here, what its kernel calls is not.
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

// Whether this thread's operators come, but for those that something hides.
inline bool is_switched_on() { return c10::impl::tls_is_dispatch_key_included(way_in.key); }
inline bool is_hidden() { return c10::impl::tls_is_dispatch_key_excluded(way_in.key); }

// Lets this thread's operators come, or not. Where the key stands above Python's, it is off in the handler of a mode or a
// subclass that has been called before: what that calls is to come, too.
inline void switch_key(bool on) {
  c10::impl::tls_set_dispatch_key_included(way_in.key, on);
  if (way_in.is_above_python && on && Off::none()) c10::impl::tls_set_dispatch_key_excluded(way_in.key, false);
}

}  // namespace dtrrun

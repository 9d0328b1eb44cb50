// The way in: how PyTorch's dispatcher hands operators to dtrrun.
//
// The dispatcher looks up an operator's kernel by dispatch key, from the highest to the lowest. Each operator has a kernel of
// ours at `CustomRNGKeyId`, a key that PyTorch defines but does not use (`way_in.cpp`). It is below those of autograd, autocast,
// modes and subclasses, and above those of backends with dense tensors. A thread whose operators are to arrive has the key among
// its included keys. The kernels call `arrive`.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>
#include <vector>

namespace dtrrun {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::OperatorHandle;
using torch::jit::Stack;

class Arrival;

struct WayIn {
  static constexpr DispatchKey KEY = DispatchKey::CustomRNGKeyId;
  static constexpr DispatchKeySet OWN{KEY};
  // Where operators continue from here. `BackendSelect` is one of these keys, since there are kernels of ours at it, too.
  static constexpr DispatchKeySet BELOW =
      DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::BackendSelect).add(DispatchKey::BackendSelect).remove(KEY);
  static constexpr DispatchKeySet ABOVE = DispatchKeySet(DispatchKeySet::FULL) - BELOW;  // everything else, including the key

  // Registers the kernels for the lifetime of the process. Raises c10::Error if anyone else has a fallback at the key. (way_in.cpp)
  static void open();

  // Called by our kernels. Passes an operator on without handling it if it is hidden from all modes.
  static void interpose(Arrival& arrival);
  // Returns true if an operator at a gate must arrive. keys: include ours, unless it is off or the operator has arrived already.
  static bool is_for_us(DispatchKeySet keys) { return keys.has(KEY) && !is_unseen(); }

  // Where the names of operators are noted that arrive in this thread without a session; null: nowhere.
  static inline thread_local std::vector<std::string>* heard = nullptr;

 private:
  // `torch.tensor` makes a tensor by operators, and fills it by address. It hides these operators from modes of all kinds, but
  // cannot know our key.
  static bool is_unseen() {
    constexpr DispatchKeySet hidden({DispatchKey::Fake, DispatchKey::DeferredInit, DispatchKey::Python});
    return c10::impl::tls_local_dispatch_key_set().excluded_.has_all(hidden);
  }
};

// Called when an operator arrives. Of the keys that it was called with, those in `WayIn::BELOW` remain. (interposer.cpp)
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
  c10::impl::ExcludeDispatchKeyGuard guard_{WayIn::OWN};
};

// Whether this thread's operators arrive, and whether something hides them at present.
inline bool is_switched_on() { return c10::impl::tls_is_dispatch_key_included(WayIn::KEY); }
inline bool is_hidden() { return c10::impl::tls_is_dispatch_key_excluded(WayIn::KEY); }

// Lets this thread's operators arrive, or not.
inline void switch_key(bool on) { c10::impl::tls_set_dispatch_key_included(WayIn::KEY, on); }

}  // namespace dtrrun

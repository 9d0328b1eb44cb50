// Hides the way in from the guards of compiled graphs.
//
// For each tensor that a graph reads, Dynamo's guards compare the dispatch keys that an operator on it would be called with. They
// include those that the thread has switched on: ours, while a session is on. So a graph that was compiled outside of a session
// would be compiled again inside it, and the other way round. PyTorch marks Dynamo's search for a graph whose guards hold as a range
// for profilers: in this range, our key is off.
#pragma once

#include <ATen/record_function.h>

#include <cstring>
#include <memory>

#include "way_in.h"

namespace dtrrun {

class DynamoGuards {
 public:
  // Begins to hide the key, in all threads, or stops. While it does, each operator costs a comparison of names.
  static void watch(bool on) {
    if (on == (handle_ != at::INVALID_CALLBACK_HANDLE)) return;
    if (on)
      handle_ = at::addGlobalCallback(at::RecordFunctionCallback(&begin, &end).scopes({at::RecordScope::FUNCTION}));
    else
      at::removeCallback(std::exchange(handle_, at::INVALID_CALLBACK_HANDLE));
  }

 private:
  static constexpr const char* SEARCH = "TorchDynamo Cache Lookup";

  struct Hidden final : at::ObserverContext {};

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& range) {
    if (std::strcmp(range.name(), SEARCH) != 0 || !is_switched_on()) return nullptr;
    c10::impl::tls_set_dispatch_key_included(WayIn::KEY, false);
    return std::make_unique<Hidden>();
  }
  static void end(const at::RecordFunction&, at::ObserverContext* context) {
    if (context != nullptr) c10::impl::tls_set_dispatch_key_included(WayIn::KEY, true);
  }

  static inline at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
};

}  // namespace dtrrun

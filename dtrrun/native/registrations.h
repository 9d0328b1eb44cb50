// Reports when libraries register operators, as they do while they are loaded, and when operators are removed.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "python.h"

namespace dtrrun {

// PyTorch's dispatcher notifies us with its mutex locked, and before an operator has kernels. So changes are only noted here.
class Registrations {
 public:
  struct Change {
    c10::OperatorName name;
    bool is_removal;
  };

  // From now on, changes are noted for `take`. in_python: called once the main thread is back in Python after some changes.
  static void note_changes(void (*in_python)()) {
    begin();
    in_python_ = in_python;
  }
  static bool has_changes() { return has_changes_.load(std::memory_order_relaxed); }
  static std::vector<Change> take() {
    std::lock_guard<std::mutex> guard(mutex_);
    has_changes_ = false;
    return std::exchange(changes_, {});
  }

  // Calls `callback` with lists of names of operators that are not PyTorch's own: immediately for those that exist, and for
  // those registered later as soon as the main thread is back in Python. None: stops that.
  static void watch(PyObject* callback) {
    Py_XDECREF(std::exchange(callback_, callback == Py_None ? nullptr : Ref::copy(callback).release()));
    begin();
    watched_ = callback_ != nullptr;
    if (!watched_) return;
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames())
      if (c10::Dispatcher::singleton().findSchema(name)) note_name(name);
    if (tell(nullptr) < 0) raise();
  }

 private:
  class Listener final : public c10::OpRegistrationListener {
   public:
    void onOperatorRegistered(const c10::OperatorHandle& op) override {
      note(op.operator_name(), false);
      if (watched_) note_name(op.operator_name());
      schedule();
    }
    // Also called when the process ends, after Python has ended.
    void onOperatorDeregistered(const c10::OperatorHandle& op) override {
      note(op.operator_name(), true);
      if (Py_IsInitialized()) schedule();
    }
  };

  static void begin() {  // never ends
    [[maybe_unused]] static auto& handle =
        *new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>()));
  }

  static void note(const c10::OperatorName& name, bool is_removal) {
    if (in_python_ == nullptr) return;
    std::lock_guard<std::mutex> guard(mutex_);
    changes_.push_back({name, is_removal});
    has_changes_ = true;
  }
  static void note_name(const c10::OperatorName& name) {
    if (name.name.rfind("aten::", 0) == 0) return;
    std::lock_guard<std::mutex> guard(mutex_);
    names_.push_back(c10::toString(name));
  }
  static void schedule() {
    if (in_python_ == nullptr && !watched_) return;
    if (!scheduled_.exchange(true) && Py_AddPendingCall(&tell, nullptr) != 0) scheduled_ = false;
  }

  static int tell(void*) {
    scheduled_ = false;
    if (in_python_ != nullptr && has_changes()) in_python_.load()();
    std::vector<std::string> names;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      names.swap(names_);
    }
    if (callback_ == nullptr || names.empty()) return 0;
    Ref list(PyList_New(0));
    for (const std::string& name : names)
      if (!list || PyList_Append(list.get(), Ref(PyUnicode_FromString(name.c_str())).get()) < 0) return -1;
    return Ref(PyObject_CallOneArg(callback_, list.get())) ? 0 : -1;
  }

  static inline std::mutex& mutex_ = *new std::mutex;
  static inline std::vector<Change>& changes_ = *new std::vector<Change>;
  static inline std::vector<std::string>& names_ = *new std::vector<std::string>;
  static inline std::atomic<bool> has_changes_{false}, scheduled_{false}, watched_{false};
  static inline std::atomic<void (*)()> in_python_{nullptr};
  static inline PyObject* callback_ = nullptr;
};

}  // namespace dtrrun

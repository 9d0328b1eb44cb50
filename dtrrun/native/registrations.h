// Tells when libraries register operators, as they do while they are loaded.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "python.h"

namespace dtrrun {

class Registrations {
 public:
  // `callback` gets a list of names: at once of the operators that exist, later of those that have been registered, as soon as
  // the main thread is back in Python. None: nobody does any more.
  static void watch(PyObject* callback) {
    handle_.reset();
    Py_XDECREF(std::exchange(callback_, callback == Py_None ? nullptr : Ref::copy(callback).release()));
    if (callback_ == nullptr) return;
    handle_.emplace(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>()));
    if (tell(nullptr) < 0) raise();
  }

 private:
  class Listener final : public c10::OpRegistrationListener {
   public:
    void onOperatorRegistered(const c10::OperatorHandle& op) override {
      if (op.operator_name().name.rfind("aten::", 0) == 0) return;
      {
        std::lock_guard<std::mutex> guard(mutex_);
        names_.push_back(c10::toString(op.operator_name()));
      }
      // Not now: the dispatcher is locked, and the kernel is registered after its operator.
      if (!scheduled_.exchange(true) && Py_AddPendingCall(&tell, nullptr) != 0) scheduled_ = false;
    }
    void onOperatorDeregistered(const c10::OperatorHandle&) override {}
  };

  static int tell(void*) {
    scheduled_ = false;
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
  static inline std::vector<std::string>& names_ = *new std::vector<std::string>;
  static inline std::atomic<bool> scheduled_{false};
  static inline std::optional<c10::RegistrationHandleRAII> handle_;
  static inline PyObject* callback_ = nullptr;
};

}  // namespace dtrrun

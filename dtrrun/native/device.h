// The devices of a session: the CPU, whose session gets every operator, or GPUs, whose session gets the operators that use them
// (`runtime/cuda/session.py`). A device's place is the order in which the session has begun to use it, and its number in the ledger.
//
// Uses none of CUDA's headers, which few machines have: PyTorch has one interface to all devices.
#pragma once

#include <ATen/core/stack.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <optional>
#include <vector>

#include "python.h"

namespace dtrrun {

class Device {
 public:
  // model: for tests, an object of Python's that runs kernels, in place of a GPU's if `is_gpu`, on tensors of the CPU; or None.
  Device(const char* type, Ref model, bool is_gpu)
      : ours_(type), model_(model.get() == Py_None ? Ref() : std::move(model)), is_gpu_(is_gpu) {
    places_.fill(-1);
  }

  // A copy, without the model.
  explicit Device(const Device& other)
      : ours_(other.ours_), is_gpu_(other.is_gpu_), guard_(other.guard_), places_(other.places_),
        main_streams_(other.main_streams_) {}

  bool is_cpu() const { return !is_gpu_; }
  bool is_same(const Device& other) const { return ours_ == other.ours_ && main_streams_ == other.main_streams_; }
  bool is_modelled() const { return static_cast<bool>(model_); }
  // Has the model run an operator with these arguments. compute: a Python function that computes it. again: it is a replay.
  void run(PyObject* func, PyObject* args, PyObject* kwargs, PyObject* compute, bool again) const {
    Ref given = kwargs == nullptr ? checked(PyDict_New()) : Ref::copy(kwargs), method = attribute(model_.get(), "run");
    Ref all = checked(PyTuple_Pack(4, func, args, given.get(), compute)), named = checked(PyDict_New());
    if (PyDict_SetItemString(named.get(), "again", again ? Py_True : Py_False) < 0) raise();
    checked(PyObject_Call(method.get(), all.get(), named.get()));
  }
  c10::DeviceType type() const { return ours_.type(); }
  // The session has begun to use this device.
  void bind(c10::DeviceIndex index) {
    if (model_) {
      main_streams_.assign(1, c10::Stream(c10::Stream::DEFAULT, ours_));
      return;
    }
    if (places_.at(static_cast<size_t>(index)) >= 0) return;
    if (!guard_) {
      ours_.set_index(index);
      guard_.emplace(ours_.type());
    }
    places_.at(static_cast<uint8_t>(index)) = static_cast<int8_t>(main_streams_.size());
    main_streams_.push_back(guard_->getDefaultStream(c10::Device(ours_.type(), index)));
  }
  bool is_bound() const { return is_cpu() || !main_streams_.empty(); }
  bool are_several() const { return main_streams_.size() > 1; }

  // Returns the place of a device; -1 if memory there is not the session's.
  int64_t place_of(c10::Device device) const {
    if (ours_.is_cpu()) return device.is_cpu() ? 0 : -1;
    return device.type() == ours_.type() && device.has_index() ? places_[static_cast<uint8_t>(device.index())] : -1;
  }
  c10::Device at(int64_t place) const { return main_streams_[static_cast<size_t>(place)].device(); }
  // Returns true if memory on `device` is the session's.
  bool has(c10::Device device) const { return place_of(device) >= 0; }
  // Returns the device that a program means that may say only `device="cuda"`.
  c10::Device meant_by(c10::Device device) const { return device.has_index() || !guard_ ? device : guard_->getDevice(); }
  // Also returns true if a program that says only `device="cuda"` means one of the session's devices.
  bool is_meant_by(c10::Device device) const {
    return has(device) || (device.type() == ours_.type() && !device.has_index() && is_current());
  }
  // The program's main stream on a device, once the session is bound to a GPU.
  const c10::Stream& main_stream(int64_t place = 0) const { return main_streams_[static_cast<size_t>(place)]; }
  bool is_current() const { return current_place() >= 0; }
  // Returns the place of this thread's current device; -1 if that is not the session's.
  int64_t current_place() const {
    if (is_cpu()) return 0;
    return model_ ? static_cast<int64_t>(asks("is_current")) - 1 : place_of(guard_->getDevice());
  }
  // Returns true if this thread is on the program's main stream of a device.
  bool on_main_stream(int64_t place = 0) const {
    return is_cpu() ||
           (model_ ? !asks("on_side_stream") : guard_->getStream(at(place)) == main_streams_[static_cast<size_t>(place)]);
  }
  // The same, for all devices.
  bool on_main_streams() const {
    for (size_t place = 1; place < main_streams_.size(); place++)
      if (!on_main_stream(static_cast<int64_t>(place))) return false;
    return on_main_stream();
  }
  // Returns the place of the device on which an operator runs and makes its results: the one that it names, or that of its first tensor.
  int64_t place_of(const c10::IValue* values, size_t count) const {
    int64_t found = -1;
    auto look = [&](const at::Tensor& tensor) {
      if (found < 0 && tensor.defined()) found = place_of(tensor.device());
    };
    for (size_t i = 0; i < count; i++) {
      const c10::IValue& value = values[i];
      if (value.isTensor()) {
        look(value.toTensor());
      } else if (value.isTensorList()) {
        if (found < 0)
          for (const c10::IValue& item : value.toListRef()) look(item.toTensor());
      } else if (value.isDevice() && value.toDevice().type() == ours_.type()) {
        return std::max<int64_t>(place_of(meant_by(value.toDevice())), 0);
      }
    }
    return std::max<int64_t>(found, 0);
  }

  // Returns true if one of an operator's arguments is on a GPU, or names one.
  bool is_used_by(const c10::IValue* values, size_t count) const {
    if (model_) return true;
    for (size_t place = 0; place < count; place++) {
      const c10::IValue& value = values[place];
      if (value.isTensor()) {
        if (is_elsewhere(value.toTensor())) return true;
      } else if (value.isTensorList()) {
        for (const c10::IValue& item : value.toListRef())
          if (is_elsewhere(item.toTensor())) return true;
      } else if (value.isOptionalTensorList()) {
        for (const c10::IValue& item : value.toListRef())
          if (item.isTensor() && is_elsewhere(item.toTensor())) return true;
      } else if (value.isDevice() && !value.toDevice().is_cpu()) {
        return true;
      }
    }
    return false;
  }

  static bool is_elsewhere(const at::Tensor& tensor) { return tensor.defined() && !tensor.device().is_cpu(); }

 private:
  bool asks(const char* method) const { return checked(PyObject_CallMethod(model_.get(), method, nullptr)).get() == Py_True; }

  c10::Device ours_;
  Ref model_;
  const bool is_gpu_;
  std::optional<c10::impl::VirtualGuardImpl> guard_;
  std::array<int8_t, 128> places_{};  // by index; -1: not the session's
  std::vector<c10::Stream> main_streams_;  // by place
};

}  // namespace dtrrun

// The device of a session: the CPU, whose session gets every operator, or a GPU, whose session gets the operators that use it
// (`runtime/cuda/session.py`).
//
// Uses none of CUDA's headers, which few machines have: PyTorch has one interface to all devices.
#pragma once

#include <ATen/core/stack.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

#include "python.h"

namespace dtrrun {

class Device {
 public:
  // model: for tests, an object of Python's that runs kernels, in place of a GPU's if `is_gpu`, on tensors of the CPU; or None.
  Device(const char* type, Ref model, bool is_gpu)
      : ours_(type), model_(model.get() == Py_None ? Ref() : std::move(model)), is_gpu_(is_gpu) {}

  // A copy, without the model.
  explicit Device(const Device& other)
      : ours_(other.ours_), is_gpu_(other.is_gpu_), guard_(other.guard_), main_stream_(other.main_stream_) {}

  bool is_cpu() const { return !is_gpu_; }
  bool is_same(const Device& other) const { return ours_ == other.ours_ && main_stream_ == other.main_stream_; }
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
      main_stream_.emplace(c10::Stream::DEFAULT, ours_);
      return;
    }
    ours_.set_index(index);
    guard_.emplace(ours_.type());
    main_stream_ = guard_->getDefaultStream(ours_);
  }
  bool is_bound() const { return is_cpu() || main_stream_.has_value(); }

  // Returns true if memory on `device` is the session's.
  bool has(c10::Device device) const { return ours_.is_cpu() ? device.is_cpu() : device == ours_; }
  // Also returns true if a program that says only `device="cuda"` means the session's device.
  bool is_meant_by(c10::Device device) const {
    return has(device) || (device.type() == ours_.type() && !device.has_index() && is_current());
  }
  // The program's main stream, once the session is bound to a GPU.
  const c10::Stream& main_stream() const { return *main_stream_; }
  bool is_current() const {
    return is_cpu() || (model_ ? asks("is_current") : guard_->getDevice() == ours_);
  }
  // Returns true if this thread is on the program's main stream.
  bool on_main_stream() const {
    return is_cpu() || (model_ ? !asks("on_side_stream") : guard_->getStream(ours_) == *main_stream_);
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
  std::optional<c10::Stream> main_stream_;
};

}  // namespace dtrrun

// The device of a session: the CPU, whose session gets every operator, or a GPU, whose session gets the operators that use it
// (`runtime/cuda/session.py`).
//
// Uses none of CUDA's headers, which few machines have: PyTorch has one interface to all devices.
#pragma once

#include <ATen/core/stack.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

namespace dtrrun {

class Device {
 public:
  explicit Device(const char* type) : ours_(type) {}

  bool is_cpu() const { return ours_.is_cpu(); }
  c10::DeviceType type() const { return ours_.type(); }
  // The session has begun to use this device. Until then, everything that concerns a GPU falls back to Python.
  void bind(c10::DeviceIndex index) {
    ours_.set_index(index);
    guard_.emplace(ours_.type());
    main_stream_ = guard_->getDefaultStream(ours_);
  }
  bool is_bound() const { return is_cpu() || main_stream_.has_value(); }

  // Returns true if memory on `device` is the session's.
  bool has(c10::Device device) const { return is_cpu() ? device.is_cpu() : device == ours_; }
  // Also returns true if a program that says only `device="cuda"` means the session's device.
  bool is_meant_by(c10::Device device) const {
    return has(device) || (device.type() == ours_.type() && !device.has_index() && is_current());
  }
  // The program's main stream, once the session is bound to a GPU.
  const c10::Stream& main_stream() const { return *main_stream_; }
  bool is_current() const { return is_cpu() || guard_->getDevice() == ours_; }
  // Returns true if this thread is on the program's main stream. What a side stream uses must be handled in Python.
  bool on_main_stream() const { return is_cpu() || guard_->getStream(ours_) == *main_stream_; }

  // Returns true if one of an operator's arguments is on a GPU, or names one.
  bool is_used_by(const c10::IValue* values, size_t count) const {
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
  c10::Device ours_;
  std::optional<c10::impl::VirtualGuardImpl> guard_;
  std::optional<c10::Stream> main_stream_;
};

}  // namespace dtrrun

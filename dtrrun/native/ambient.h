// The settings under which an operator runs: grad mode, precision, threads and the like (`runtime/ambient.py`).
#pragma once

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include <array>

#include "python.h"

namespace dtrrun {

// What the settings of `runtime/ambient.py` were when an operator ran, as Python has them. They hardly ever
// change, so the tuple of the last call is usually that of this one.
class Ambient {
 public:
  explicit Ambient(PyObject* readers) : readers_(Ref::copy(readers)) {}

  struct State {
    Ref tuple;
    std::array<int, 14> settings;
  };

  // Returns the state for a family of operators. known: that of its last call, brought up to date.
  PyObject* read(PyObject* family, State& known, bool general) {
    auto now = settings(general);
    if (!known.tuple || now != known.settings) {
      known.tuple = checked(PyObject_CallNoArgs(PyDict_GetItem(readers_.get(), family)));
      known.settings = now;
    }
    return known.tuple.get();
  }

 private:
  // All that the readers of any family read on a CPU.
  static std::array<int, 14> settings(bool general) {
    using at::Float32Backend, at::Float32Op;
    auto& context = at::globalContext();
    volatile double denormal = 4e-320;  // half of it is 0 if the processor flushes denormal numbers
    auto precision = [&](Float32Op op) {
      return general ? 0 : static_cast<int>(context.float32Precision(Float32Backend::MKLDNN, op));
    };
    return {c10::GradMode::is_enabled(),
            context.userEnabledMkldnn(),
            context.deterministicAlgorithms(),
            context.deterministicAlgorithmsWarnOnly(),
            denormal * 0.5 == 0.0,
            at::get_num_threads(),
            static_cast<int>(c10::typeMetaToScalarType(c10::get_default_dtype())),
            precision(Float32Op::MATMUL),
            precision(Float32Op::CONV),
            precision(Float32Op::RNN),
            precision(Float32Op::ALL),
            context.allowFP16ReductionCPU(),
            context.deterministicMkldnn(),
            context.userEnabledNNPACK()};
  }
  Ref readers_;
};

}  // namespace dtrrun

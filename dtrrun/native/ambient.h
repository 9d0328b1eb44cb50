// The settings under which an operator runs: grad mode, precision, threads and the like (`runtime/ambient.py`).
#pragma once

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include <array>

#if defined(__x86_64__)
#include <pmmintrin.h>
#endif

#include "python.h"
#include "pytorch.h"

namespace dtrrun {

// What the settings of `runtime/ambient.py` were when an operator ran, as Python has them. They hardly ever change but
// back and forth, as grad mode does between a model and its optimizer, so one of the last two tuples is usually this call's.
class Ambient {
 public:
  Ambient(PyObject* readers, bool on_cpu) : readers_(Ref::copy(readers)), on_cpu_(on_cpu) {}

  using Settings = std::array<int, 16>;
  struct State {
    struct Known {
      Ref tuple;
      Settings settings;
    } last, before;
  };

  // Returns the state for a family of operators. known: those of its last calls, brought up to date.
  PyObject* read(PyObject* family, State& known, bool general) {
    auto now = settings(general);
    auto is_last = [&] { return known.last.tuple && known.last.settings == now; };
    if (!is_last()) {
      std::swap(known.last, known.before);
      if (!is_last()) known.last = {checked(PyObject_CallNoArgs(PyDict_GetItem(readers_.get(), family))), now};
    }
    return known.last.tuple.get();
  }

 private:
  // All that the readers of any family read on this device.
  Settings settings(bool general) const {
    auto& context = at::globalContext();
    Settings found{c10::GradMode::is_enabled(),
                   context.userEnabledMkldnn(),
                   context.deterministicAlgorithms(),
                   context.deterministicAlgorithmsWarnOnly(),
                   flushes_denormal(),
                   at::get_num_threads(),
                   static_cast<int>(c10::typeMetaToScalarType(c10::get_default_dtype()))};
    if (!general) on_cpu_ ? add_of_cpu(context, &found[7]) : add_of_cuda(context, &found[7]);
    return found;
  }
  // As `torch.set_flush_denormal` has set it for this thread.
  static bool flushes_denormal() {
#if defined(__x86_64__)
    return (_mm_getcsr() & (_MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON)) != 0;  // to multiply a denormal number takes 50 ns
#else
    volatile double denormal = 4e-320;
    return denormal * 0.5 == 0.0;
#endif
  }
  static void add_of_cpu(at::Context& context, int* next) {
    next = add_precisions(context, /*cuda=*/false, next);
    *next++ = context.allowFP16ReductionCPU();
    *next++ = context.deterministicMkldnn();
    *next++ = context.userEnabledNNPACK();
  }
  static void add_of_cuda(at::Context& context, int* next) {
    next = add_precisions(context, /*cuda=*/true, next);
    *next++ = static_cast<int>(context.allowFP16ReductionCuBLAS());
    *next++ = static_cast<int>(context.allowBF16ReductionCuBLAS());
    *next++ = context.userEnabledCuDNN() | context.deterministicCuDNN() << 1 | context.benchmarkCuDNN() << 2;
    *next++ = static_cast<int>(context.linalgPreferredBackend());
  }
  Ref readers_;
  bool on_cpu_;
};

}  // namespace dtrrun

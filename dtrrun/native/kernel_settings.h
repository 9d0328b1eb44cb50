// Settings that a kernel reads besides its arguments.
//
// A replay runs an operator later than its first run, perhaps in another thread. Meanwhile the program may have changed the default
// dtype, the number of threads or a backend's flags, and the same operator on the same inputs would give different bits, or a
// result of another dtype. So every recipe keeps the settings that its operator saw, and a replay restores those that differ.
//
// The general ones are read for every operator of the program, and those of backends only for operators whose kernels may use them
// (those that are not `Operator.general`). Seeds and states of random generators are in `runtime/rng.py`; autocast is in
// `replays.h`.
#pragma once

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include <array>
#include <memory>
#include <vector>

#if defined(__x86_64__)
#include <pmmintrin.h>
#endif

#include "pytorch.h"

namespace dtrrun {

struct KernelSetting {
  int (*read)(at::Context&);
  void (*write)(at::Context&, int);
  bool each_thread = false;  // each thread has its own
};

// Returns what `torch.set_flush_denormal` has set for this thread.
inline bool flushes_denormal() {
#if defined(__x86_64__)
  return (_mm_getcsr() & (_MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON)) != 0;  // multiplying a denormal number takes 50 ns
#else
  volatile double denormal = 4e-320;
  return denormal * 0.5 == 0.0;
#endif
}

#define DTRRUN_SETTING(get, set)         \
  {[](at::Context& context) -> int {     \
     (void)context;                      \
     return get;                         \
   },                                    \
   [](at::Context& context, int value) { \
     (void)context;                      \
     set;                                \
   }}

inline constexpr KernelSetting GENERAL_SETTINGS[] = {
    {[](at::Context&) -> int { return c10::GradMode::is_enabled(); },
     [](at::Context&, int value) { c10::GradMode::set_enabled(value != 0); }, true},
    DTRRUN_SETTING(context.userEnabledMkldnn(), context.setUserEnabledMkldnn(value != 0)),
    // Without warn-only, some kernels raise.
    DTRRUN_SETTING(context.deterministicAlgorithms() | context.deterministicAlgorithmsWarnOnly() << 1,
                   context.setDeterministicAlgorithms((value & 1) != 0, (value & 2) != 0)),
    {[](at::Context&) -> int { return flushes_denormal(); },
     [](at::Context& context, int value) { context.setFlushDenormal(value != 0); }, true},
    DTRRUN_SETTING(at::get_num_threads(), at::set_num_threads(value)),
    DTRRUN_SETTING(static_cast<int>(c10::typeMetaToScalarType(c10::get_default_dtype())),
                   c10::set_default_dtype(c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(value)))),
};

inline constexpr KernelSetting CPU_SETTINGS[] = {
    DTRRUN_SETTING(read_precision(context, false, 0), write_precision(context, false, 0, value)),
    DTRRUN_SETTING(read_precision(context, false, 1), write_precision(context, false, 1, value)),
    DTRRUN_SETTING(read_precision(context, false, 2), write_precision(context, false, 2, value)),
    DTRRUN_SETTING(context.allowFP16ReductionCPU(), context.setAllowFP16ReductionCPU(value != 0)),
    DTRRUN_SETTING(context.deterministicMkldnn(), context.setDeterministicMkldnn(value != 0)),
    DTRRUN_SETTING(context.userEnabledNNPACK(), context.setUserEnabledNNPACK(value != 0)),
};

inline constexpr KernelSetting CUDA_SETTINGS[] = {
    DTRRUN_SETTING(read_precision(context, true, 0), write_precision(context, true, 0, value)),
    DTRRUN_SETTING(read_precision(context, true, 1), write_precision(context, true, 1, value)),
    DTRRUN_SETTING(read_precision(context, true, 2), write_precision(context, true, 2, value)),
    DTRRUN_SETTING(static_cast<int>(context.allowFP16ReductionCuBLAS()),
                   set_sums(context, &at::Context::setAllowFP16ReductionCuBLAS, value)),
    DTRRUN_SETTING(static_cast<int>(context.allowBF16ReductionCuBLAS()),
                   set_sums(context, &at::Context::setAllowBF16ReductionCuBLAS, value)),
    DTRRUN_SETTING(context.userEnabledCuDNN(), context.setUserEnabledCuDNN(value != 0)),
    DTRRUN_SETTING(context.deterministicCuDNN(), context.setDeterministicCuDNN(value != 0)),
    DTRRUN_SETTING(context.benchmarkCuDNN(), context.setBenchmarkCuDNN(value != 0)),
    DTRRUN_SETTING(static_cast<int>(context.linalgPreferredBackend()),
                   context.setLinalgPreferredBackend(static_cast<at::LinalgBackend>(value))),
};
#undef DTRRUN_SETTING

// The values of settings at one moment. Equal ones have the same address.
class KernelState {
 public:
  // The last two states of similar calls. They hardly ever change except back and forth, as grad mode does between a model and
  // its optimizer.
  struct Recent {
    const KernelState *last = nullptr, *before = nullptr;
  };
  // Returns the current settings: the general ones, or also those of the backends on this device.
  static const KernelState* now(bool general, bool on_cpu) { return interned(read(general, on_cpu)); }
  static const KernelState* now(bool general, bool on_cpu, Recent& recent) {
    KernelState found = read(general, on_cpu);
    auto is_last = [&] { return recent.last != nullptr && *recent.last == found; };
    if (!is_last()) {
      std::swap(recent.last, recent.before);
      if (!is_last()) recent.last = interned(found);
    }
    return recent.last;
  }

  // Returns whether making these settings current would change any for other threads.
  bool changes_others() const {
    KernelState present = read(general_, on_cpu_);
    for (size_t place = 0; place < GENERAL; place++)
      if (GENERAL_SETTINGS[place].each_thread) present.values_[place] = values_[place];
    return !(present == *this);
  }

  // Makes these settings current. Returns the previous ones.
  const KernelState* restore() const {
    const KernelState* before = now(general_, on_cpu_);
    if (before != this) write(*before);
    return before;
  }

 private:
  static constexpr size_t GENERAL = std::size(GENERAL_SETTINGS);

  bool operator==(const KernelState& other) const = default;

  static KernelState read(bool general, bool on_cpu) {
    auto& context = at::globalContext();
    KernelState found;
    found.general_ = general;
    found.on_cpu_ = on_cpu;
    read<GENERAL_SETTINGS>(context, found.values_.data(), std::make_index_sequence<GENERAL>());
    if (general) return found;
    if (on_cpu)
      read<CPU_SETTINGS>(context, &found.values_[GENERAL], std::make_index_sequence<std::size(CPU_SETTINGS)>());
    else
      read<CUDA_SETTINGS>(context, &found.values_[GENERAL], std::make_index_sequence<std::size(CUDA_SETTINGS)>());
    return found;
  }
  // Makes no indirect calls, since it is done for every operator.
  template <const auto& settings, size_t... places>
  static void read(at::Context& context, int* values, std::index_sequence<places...>) {
    ((values[places] = settings[places].read(context)), ...);
  }
  // Writes the settings that differ from `present`, the current ones.
  void write(const KernelState& present) const {
    for (size_t place = 0; place < GENERAL; place++) write(GENERAL_SETTINGS[place], present, place);
    if (general_) return;
    size_t count = on_cpu_ ? std::size(CPU_SETTINGS) : std::size(CUDA_SETTINGS);
    for (size_t i = 0; i < count; i++) write(on_cpu_ ? CPU_SETTINGS[i] : CUDA_SETTINGS[i], present, GENERAL + i);
  }
  void write(const KernelSetting& setting, const KernelState& present, size_t place) const {
    if (values_[place] != present.values_[place]) setting.write(at::globalContext(), values_[place]);
  }

  // The caller has the GIL. Never freed: recipes refer to them, and there are few.
  static const KernelState* interned(const KernelState& state) {
    static auto& all = *new std::vector<std::unique_ptr<KernelState>>;
    for (const auto& one : all)
      if (*one == state) return one.get();
    all.push_back(std::make_unique<KernelState>(state));
    return all.back().get();
  }

  bool general_, on_cpu_;
  std::array<int, GENERAL + std::size(CUDA_SETTINGS)> values_{};
};

// Restores the settings that an operator saw while in scope.
class Restored {
 public:
  explicit Restored(const KernelState& state) : before_(state.restore()), changed_(before_ != &state) {}
  ~Restored() {
    if (changed_) before_->restore();
  }
  Restored(const Restored&) = delete;

 private:
  const KernelState* before_;
  bool changed_;
};

}  // namespace dtrrun

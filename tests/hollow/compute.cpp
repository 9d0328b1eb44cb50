// Values for the hollow GPU: its memory is the host's (cuda.c), so what a CUDA operator would compute, the CPU's kernel
// does, over the same memory.
//
// Every operator of ATen's with a CUDA kernel gets one in its place that first runs the real one. Its code on the host
// allocates, may run out of memory, chooses an algorithm, and advances the generator; its launches do nothing. Then the
// CPU computes what it would have launched, at once, or in a capture each time that the graph is launched.
#include <ATen/record_function.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <set>

#include "compute.h"

extern "C" {
extern __thread int hollow_inside;
int hollow_captures(void* stream);
void hollow_capture(void* stream, void (*run)(void*, void*), void (*drop)(void*), void* data);
int hollow_checks_races(void);
uint32_t hollow_begin(void* stream, int* place);
void hollow_touch(int place, uint32_t when, const void* at, uint64_t nbytes, int writes, const char* name);
int hollow_engines(void);
}

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

at::Generator generator_of(int64_t seed, int64_t offset) {
  uint64_t x = static_cast<uint64_t>(seed) * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(offset);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return at::make_generator<at::CPUGeneratorImpl>(x ^ (x >> 31));
}

namespace {

// -- tensors ----------------------------------------------------------------------------------------------------

bool on_gpu(const Tensor& t) { return t.defined() && t.is_cuda(); }

// A tensor of the CPU's over the same memory, which it does not keep.
Tensor hosted(const Tensor& t) {
  if (!on_gpu(t)) return t;
  const auto& storage = t.storage();
  c10::DataPtr at(const_cast<void*>(storage.data()), nullptr, [](void*) {}, c10::Device(c10::kCPU));
  c10::Storage host(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(at), nullptr, false);
  c10::DispatchKeySet keys(DispatchKey::CPU);
  if (t.is_conj()) keys = keys.add(DispatchKey::Conjugate);
  if (t.is_neg()) keys = keys.add(DispatchKey::Negative);
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(host), keys, t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return made;
}

using Change = std::function<Tensor(const Tensor&)>;

IValue changed(const IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const IValue& one : value.toListRef()) made.push_back(change(one.toTensor()));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const IValue& one : value.toListRef())
      made.push_back(one.isTensor() ? std::optional<Tensor>(change(one.toTensor())) : std::nullopt);
    return made;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(c10::kCPU);
  return value;
}

void each(const IValue& value, const std::function<void(const Tensor&)>& see) {
  changed(value, [&](const Tensor& t) {
    if (t.defined()) see(t);
    return t;
  });
}

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

bool takes_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

// Keys of modes, of autograd and of dtrrun, which the operator has passed already.
c10::DispatchKeySet passed() {
  using K = DispatchKey;
  c10::DispatchKeySet keys = c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  for (K key : {K::Python, K::PythonTLSSnapshot, K::Fake, K::Functionalize, K::AutocastCPU, K::AutocastCUDA,
                K::FuncTorchDynamicLayerBackMode, K::FuncTorchDynamicLayerFrontMode, K::CustomRNGKeyId})
    keys = keys.add(key);
  return keys;
}

// -- work -------------------------------------------------------------------------------------------------------

struct Span {
  const void* at;
  uint64_t nbytes;
  bool written;
};

// What the CPU is to compute, over addresses alone, so that a graph can do it again.
struct Work {
  explicit Work(OperatorHandle op) : op(std::move(op)) {}

  OperatorHandle op;
  std::string name;
  Computation special;
  Stack arguments;             // for the CPU
  std::vector<IValue> results; // of the GPU's, for the CPU, to be filled
  std::vector<Span> spans;
  bool random = false, own_generator = false, other_bits = false;
  Drawn drawn;

  // Gives the CPU's results.
  Stack compute() const {
    c10::impl::ExcludeDispatchKeyGuard guard(passed());
    Stack stack = arguments;
    at::Generator seeded = random ? generator_of(drawn.current_seed(), drawn.current_offset()) : at::Generator();
    for (size_t i = 0; own_generator && i < stack.size(); i++)
      if (takes_generator(op.schema().arguments()[i])) stack[i] = seeded;
    if (special) {
      special(stack, drawn);
      return stack;
    }
    if (!random || own_generator) {
      op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &stack);
      return stack;
    }
    // Its kernel draws from the common generator.
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    at::Generator common = at::detail::getDefaultCPUGenerator();
    Tensor state = common.get_state();
    common.set_state(seeded.get_state());
    try {
      op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &stack);
    } catch (...) {
      common.set_state(state);
      throw;
    }
    common.set_state(state);
    return stack;
  }

  void fill(const IValue& result, const IValue& found) const {
    if (result.isTensorList() && found.isTensorList()) {
      auto one = result.toListRef(), other = found.toListRef();
      for (size_t i = 0; i < std::min(one.size(), other.size()); i++) fill(one[i], other[i]);
    } else if (result.isTensor() && found.isTensor()) {
      Tensor to = result.toTensor(), from = found.toTensor();
      if (!to.defined() || !from.defined() || !to.numel() || to.storage().data() == from.storage().data()) return;
      if (to.sizes() != from.sizes()) {
        if (to.numel() == from.numel()) {
          from = from.reshape(to.sizes());
        } else {  // the GPU's is padded
          TORCH_CHECK(to.dim() == from.dim(), "hollow: ", name, ": ", to.sizes(), " for ", from.sizes());
          for (int64_t d = 0; d < from.dim(); d++) to = to.narrow(d, 0, from.size(d));
        }
      }
      to.copy_(from);
      if (other_bits && to.is_floating_point()) to.mul_(1.0 + 1e-6);
    }
  }

  void fill(const Stack& found) const {
    c10::impl::ExcludeDispatchKeyGuard guard(passed());
    for (size_t i = 0; i < std::min(results.size(), found.size()); i++) fill(results[i], found[i]);
  }

  void tell(int place, uint32_t when) const {
    for (const Span& one : spans) hollow_touch(place, when, one.at, one.nbytes, one.written, name.c_str());
  }
};

void run_again(void* data, void* stream) {
  const auto& work = *static_cast<Work*>(data);
  int place = 0;
  uint32_t when = hollow_checks_races() ? hollow_begin(stream, &place) : 0;
  hollow_inside++;
  work.fill(work.compute());
  hollow_inside--;
  if (hollow_checks_races()) work.tell(place, when);
}

void drop(void* data) { delete static_cast<Work*>(data); }

struct Inside {
  Inside() { hollow_inside++; }
  ~Inside() { hollow_inside--; }
};

// -- kernels ----------------------------------------------------------------------------------------------------

struct Kernel final : c10::OperatorKernel {
  // `real`: the real kernel runs first. `within`: computes inside of other operators as well, whose code on the host
  // depends on its values.
  Kernel(const OperatorHandle& op, bool real, bool within, Computation special)
      : real(real), within(within), special(std::move(special)), original(op.getComputedKernelForDispatchKey(DispatchKey::CUDA)) {
    for (const auto& argument : op.schema().arguments()) own_generator |= takes_generator(argument);
    random = own_generator;
    for (auto tag : op.getTags()) random |= tag == at::Tag::nondeterministic_seeded;
  }

  void operator()(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    // What dtrrun computes in the middle of an operator, unrecorded (`runtime/guards.py`, `aside`), is no part of it.
    if (hollow_inside && !within && at::isRecordFunctionEnabled()) return original.callBoxed(op, keys, stack);
    const auto& schema = op.schema();
    const size_t count = schema.arguments().size();
    Stack given(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
    c10::Device device = c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice();
    for (const IValue& value : given)
      each(value, [&](const Tensor& t) {
        if (on_gpu(t)) device = t.device();
      });
    c10::DeviceGuard there(device);
    void* stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
    const bool captured = hollow_captures(stream);
    int place = 0;
    uint32_t when = hollow_checks_races() ? hollow_begin(stream, &place) : 0;

    auto work = std::make_unique<Work>(op);
    work->name = c10::toString(op.operator_name());
    work->special = special;
    work->random = random;
    work->own_generator = own_generator;
    if (random) work->drawn = begin_drawing(given, device);

    if (real) {
      Inside inside;
      hollow_engines();
      original.callBoxed(op, keys, stack);
      work->other_bits = hollow_engines() & 2;  // that engine's algorithm is another
    } else {
      torch::jit::drop(*stack, count);
    }

    Inside inside;
    std::vector<std::pair<Tensor, Tensor>> aliases;  // of the GPU, for the CPU
    std::vector<std::pair<Tensor, Tensor>> outs;     // of unknown sizes
    for (size_t i = 0; i < count; i++) {
      bool out = !real && schema.arguments()[i].kwarg_only() && writes(schema.arguments()[i]);
      work->arguments.push_back(changed(given[i], [&](const Tensor& t) {
        if (!on_gpu(t)) return t.defined() && captured ? t.clone() : t;  // a graph keeps the value
        if (out) {
          outs.emplace_back(t, at::empty({0}, t.options().device(c10::kCPU)));
          return outs.back().second;
        }
        aliases.emplace_back(t, hosted(t));
        return aliases.back().second;
      }));
    }

    std::optional<Stack> found;
    if (!real) {
      found = work->compute();
      for (IValue& value : *found) {
        IValue result = changed(value, [&](const Tensor& t) {
          if (!t.defined() || t.is_cuda()) return t;
          for (auto& [ours, made] : outs)
            if (made.is_same(t)) {
              ours.resize_(made.sizes());
              return ours;
            }
          for (auto& [ours, made] : aliases)
            if (made.is_same(t)) return ours;
          return at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
        });
        stack->push_back(result);
      }
    }
    for (auto it = stack->end() - static_cast<std::ptrdiff_t>(schema.returns().size()); it != stack->end(); ++it)
      work->results.push_back(changed(*it, [&](const Tensor& t) { return on_gpu(t) ? hosted(t) : Tensor(); }));
    note_spans(*work, schema, given);

    if (captured) {
      hollow_capture(stream, run_again, drop, work.release());
      return;
    }
    work->fill(found ? *found : work->compute());
    if (hollow_checks_races()) work->tell(place, when);
  }

  Drawn begin_drawing(const Stack& given, c10::Device device) const {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    for (const IValue& value : given)
      if (value.isGenerator() && value.toGenerator().device().is_cuda()) generator = value.toGenerator();
    auto* philox = at::check_generator<at::CUDAGeneratorImpl>(generator);
    std::lock_guard<std::mutex> lock(generator.mutex());
    at::PhiloxCudaState state = philox->philox_cuda_state(real ? 0 : 4);  // the real one advances it
    Drawn drawn;
    if (state.captured_) {
      drawn.seed_at = state.seed_.ptr;
      drawn.offset_at = state.offset_.ptr;
      drawn.offset = state.offset_intragraph_;
    } else {
      drawn.seed = static_cast<int64_t>(state.seed_.val);
      drawn.offset = static_cast<int64_t>(state.offset_.val);
    }
    return drawn;
  }

  static void note_spans(Work& work, const c10::FunctionSchema& schema, const Stack& given) {
    auto note = [&](const Tensor& t, bool written) {
      if (!t.defined() || !t.numel()) return;
      int64_t last = 0;
      for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
      work.spans.push_back({t.data_ptr(), static_cast<uint64_t>((last + 1) * t.element_size()), written});
    };
    for (size_t i = 0; i < given.size(); i++) {
      bool written = writes(schema.arguments()[i]);
      each(given[i], [&](const Tensor& t) {
        if (on_gpu(t)) note(t, written);
      });
    }
    size_t inputs = work.spans.size();  // cuDNN's recurrent layers return their weights, to which they do not write
    auto is_input = [&](const Tensor& t) {
      return std::any_of(work.spans.begin(), work.spans.begin() + inputs,
                         [&](const Span& one) { return one.at == t.data_ptr(); });
    };
    for (const IValue& value : work.results)
      each(value, [&](const Tensor& t) {
        if (t.defined() && !is_input(t)) note(t, true);
      });
  }

  bool real, within, own_generator = false, random = false;
  Computation special;
  c10::SafeKernelFunction original;
};

// -- which operators --------------------------------------------------------------------------------------------

bool begins(const std::string& text, const char* with) { return text.rfind(with, 0) == 0; }
bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// These only allocate, look at geometry, or copy by calls of CUDA's own.
const std::set<std::string> AS_THEY_ARE = {"set_",
                                           "resize_",
                                           "resize",
                                           "record_stream",
                                           "_local_scalar_dense",
                                           "_fused_sdp_choice",
                                           "is_set_to",
                                           "is_pinned",
                                           "_pin_memory",
                                           "_efficientzerotensor",
                                           "_cudnn_init_dropout_state",
                                           "_use_cudnn_ctc_loss",
                                           "_use_miopen_ctc_loss",
                                           "_cudnn_rnn_flatten_weight",
                                           "_unsafe_view",
                                           "_nested_view_from_buffer",
                                           "_has_compatible_shallow_copy_type"};

// The real one's code on the host depends on computed values, or calls libraries that are not modelled.
const std::vector<const char*> CPU_ALONE = {"equal",
                                            "nonzero",
                                            "masked_select",
                                            "unique",
                                            "_unique",
                                            "embedding_dense_backward",
                                            "repeat_interleave",
                                            "bincount",
                                            "histc",
                                            "_histogramdd",
                                            "linalg_",
                                            "_linalg_",
                                            "cholesky",
                                            "lu_",
                                            "geqrf",
                                            "ormqr",
                                            "orgqr",
                                            "triangular_solve",
                                            "_fft_",
                                            "multinomial",
                                            "_ctc_loss",
                                            "ctc_loss",
                                            "segment_reduce",
                                            "_embedding_bag",
                                            "isin",
                                            "_cdist",
                                            "_pdist",
                                            "_scaled_dot_product_cudnn_attention"};

// Other operators run these for their values.
const std::set<std::string> WITHIN = {"nonzero", "nonzero_static"};

void replace_all() {
  struct Mute : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } mute;  // it warns of each
  c10::WarningUtils::WarningHandlerGuard muted(&mute);
  static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  auto special = computations();
  for (const auto& full : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!begins(full.name, "aten::")) continue;
    const std::string base = full.name.substr(6);
    const std::string name = full.overload_name.empty() ? base : base + "." + full.overload_name;
    auto op = c10::Dispatcher::singleton().findSchema(full);
    const bool composite = name == "convolution_backward" || name == "copy_";
    if (!op || !(op->hasKernelForDispatchKey(DispatchKey::CUDA) || composite)) continue;
    if (AS_THEY_ARE.count(base) || begins(base, "empty") || has(base, "sparse") || has(base, "csr") || has(base, "nested") ||
        has(base, "quantize"))
      continue;
    bool view = false, computes = false;
    for (const auto& argument : op->schema().arguments()) {
      view |= argument.alias_info() && !argument.alias_info()->isWrite();
      computes |= writes(argument);
    }
    for (const auto& result : op->schema().returns())
      computes |= result.type()->isSubtypeOf(*c10::TensorType::get()) || result.type()->kind() == c10::TypeKind::ListType;
    bool alone = std::any_of(CPU_ALONE.begin(), CPU_ALONE.end(), [&](const char* one) { return begins(base, one); });
    if (view || !(computes || alone)) continue;
    auto found = special.find(name);
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(
                                   *op, !alone, WITHIN.count(base) > 0, found == special.end() ? Computation() : found->second)));
  }
}

// -- requests that are refused ----------------------------------------------------------------------------------

// PyTorch's caching allocator, with another `allocate`: the first entry of its virtual table after two destructors.
using Allocate = c10::DataPtr (*)(c10::Allocator*, size_t);
constexpr size_t ALLOCATE = 2, ENTRIES = 192;
std::atomic<long> requests{0}, refused_at{-1};
Allocate allocate_really;

c10::DataPtr allocate(c10::Allocator* self, size_t nbytes) {
  if (!nbytes || ++requests != refused_at) return allocate_really(self, nbytes);
  try {
    return allocate_really(self, size_t(1) << 50);  // the allocator's own refusal, counted by itself
  } catch (const c10::OutOfMemoryError& error) {
    std::array<char, 64> size;
    std::snprintf(size.data(), size.size(), "Tried to allocate %.2f MiB.", static_cast<double>(nbytes) / (1 << 20));
    std::string text = error.what_without_backtrace();
    size_t from = text.find("Tried to allocate"), to = text.find("iB.", from);
    if (from != std::string::npos && to != std::string::npos) text.replace(from, to + 3 - from, size.data());
    throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, text);
  } catch (...) {  // dtrrun stops the allocator before it flushes, and then asks for the same again
    refused_at = requests + 1;
    throw;
  }
}

void replace_allocate() {
  static void* entries[ENTRIES];
  if (allocate_really) return;
  c10::Allocator* allocator = c10::cuda::CUDACachingAllocator::get();
  void*** table = reinterpret_cast<void***>(allocator);
  std::memcpy(entries, *table - 2, sizeof entries);
  allocate_really = reinterpret_cast<Allocate>(entries[2 + ALLOCATE]);
  entries[2 + ALLOCATE] = reinterpret_cast<void*>(&allocate);
  *table = entries + 2;
}

struct Loaded {
  Loaded() { replace_all(); }
} loaded;

}  // namespace

// For tests, by ctypes. Refuses the n-th request from now on, once; -1: none. Gives how many there were since the last call.
extern "C" long hollow_refuse(long n) {
  replace_allocate();
  refused_at = -1;
  long seen = requests.exchange(0);
  refused_at = n;
  return seen;
}

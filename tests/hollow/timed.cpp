// How long the hollow GPU takes for an operator (--clock). Loaded in place of compute.cpp.
//
// Every operator of ATen's with a CUDA kernel gets one in its place that runs the real one, whose launches do nothing, and
// then says how long a GPU would have been busy (clock.c). That is looked up by the operator and the sizes of its tensors in
// a file measured on a GPU (HOLLOW_CLOCK). What is not there takes as long as the most similar call that is there, in
// proportion, or else what memory and arithmetic allow (`roofline`).
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cmath>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>

extern "C" {
extern __thread int hollow_inside, hollow_launched;
extern __thread int64_t hollow_workspace;
void hollow_launch(void* stream, int64_t ns);
}

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

namespace {

// An H200: kernels read and write 4 TB/s together, multiply 48 TFLOP/s of float32 and 400 of half as many bits, convolve
// 125 (TF32, with the change of layout that cuDNN needs), and take at least 1.5 µs.
constexpr double BYTES_PER_NS = 4000, FLOAT = 48e3, HALF = 400e3, CONVOLUTION = 125e3, LEAST_NS = 1500;
constexpr double SIMILAR = 2;  // calls differ by e to this power at most
// InceptionV4's convolutions have not been measured. With this factor, its plain step takes what it took.
constexpr double OTHER_CONVOLUTIONS = 1.5;

struct Row {
  double ns, roofline;
};
struct Operator {
  std::unordered_map<std::string, Row> by_sizes;
  std::unordered_map<std::string, int64_t> workspaces;
};

// Lines: operator, sizes (6x3x8x8,16x3x3x3), ns, roofline in ns; or "workspace", operator, sizes, bytes.
const std::map<std::string, Operator>& measured() {
  static const auto* made = [] {
    auto* found = new std::map<std::string, Operator>;
    const char* path = std::getenv("HOLLOW_CLOCK");
    std::ifstream file(path ? path : "");
    std::string line, name, sizes;
    while (std::getline(file, line)) {
      std::istringstream words(line);
      words >> name;
      if (name == "workspace") {
        int64_t nbytes = 0;
        words >> name >> sizes >> nbytes;
        (*found)[name].workspaces[sizes] = nbytes;
      } else {
        Row row{};
        words >> sizes >> row.ns >> row.roofline;
        (*found)[name].by_sizes[sizes] = row;
      }
    }
    return found;
  }();
  return *made;
}

// -- one call ----------------------------------------------------------------------------------------------------------

struct Given {
  uint64_t hash = 1469598103934665603ull;
  double nbytes = 0;
  void add(uint64_t value) { hash = (hash ^ value) * 1099511628211ull; }
  void add(const Tensor& t) {
    if (!t.defined()) return add(1);
    for (int64_t size : t.sizes()) add(static_cast<uint64_t>(size));
    add(static_cast<uint64_t>(t.scalar_type()) + 1000);
    if (t.is_cuda()) nbytes += static_cast<double>(t.numel()) * static_cast<double>(t.element_size());
  }
  void add(const IValue& value) {
    if (value.isTensor())
      add(value.toTensor());
    else if (value.isTensorList())
      for (const IValue& one : value.toListRef()) add(one.toTensor());
    else if (value.isInt())
      add(static_cast<uint64_t>(value.toInt()));
    else if (value.isIntList())
      for (int64_t one : value.toIntList()) add(static_cast<uint64_t>(one));
    else
      add(2);
  }
};

double product(c10::IntArrayRef sizes) {
  double made = 1;
  for (int64_t size : sizes) made *= static_cast<double>(size);
  return made;
}

std::string sizes_of(const std::vector<IValue>& given) {
  std::string text;
  for (const IValue& value : given) {
    if (!value.isTensor() || !value.toTensor().defined() || !value.toTensor().dim()) continue;
    if (!text.empty()) text += ',';
    bool first = true;
    for (int64_t size : value.toTensor().sizes()) {
      text += (first ? "" : "x") + std::to_string(size);
      first = false;
    }
  }
  return text.empty() ? "-" : text;
}

bool is_convolution(const std::string& name) {
  return name == "cudnn_convolution" || name == "convolution_backward" || name == "cudnn_convolution_transpose";
}

double flops(const std::string& name, const std::vector<IValue>& given, const Tensor& result) {
  auto tensor = [&](size_t i) { return given[i].toTensor(); };
  auto inner = [&](const Tensor& a) { return 2 * product(result.sizes()) * static_cast<double>(a.size(-1)); };
  if (name == "mm" || name == "bmm") return inner(tensor(0));
  if (name == "addmm" || name == "baddbmm") return inner(tensor(1));
  if (name == "cudnn_convolution") return 2 * product(result.sizes()) * product(tensor(1).sizes().slice(1));
  if (name == "convolution_backward") return 4 * product(tensor(0).sizes()) * product(tensor(2).sizes().slice(1));
  if (name.find("scaled_dot_product") != std::string::npos) {
    bool backward = name.find("backward") != std::string::npos;
    Tensor q = tensor(backward ? 1 : 0), k = tensor(backward ? 2 : 1);
    return (backward ? 10 : 4) * product(q.sizes()) * static_cast<double>(k.size(-2));
  }
  return 0;
}

struct Frame {
  bool charged = false;
};
thread_local Frame* innermost = nullptr;

struct Inside {
  Inside() { hollow_inside++; }
  ~Inside() {
    hollow_inside--;
    hollow_workspace = -1;
  }
};

struct Timed final : c10::OperatorKernel {
  explicit Timed(const c10::OperatorHandle& op)
      : name(op.schema().name().substr(6)), original(op.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA)) {
    static const std::set<std::string> LIBRARIES = {"mm", "addmm", "bmm", "baddbmm", "_cudnn_rnn", "_cudnn_rnn_backward"};
    launches = LIBRARIES.count(name) || is_convolution(name) || name.rfind("cudnn_batch_norm", 0) == 0;
    auto at = measured().find(name);
    rows = at == measured().end() ? &none : &at->second;
    auto convolution = measured().find(name == "cudnn_convolution" ? "convolution" : name);
    workspaces = convolution == measured().end() ? &none : &convolution->second;
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const size_t count = op.schema().arguments().size();
    const auto begin = stack->end() - static_cast<std::ptrdiff_t>(count);
    Given given;
    for (auto it = begin; it != stack->end(); ++it) given.add(*it);
    Known known = find(given.hash);
    Stack arguments;
    if (!known.is) arguments.assign(begin, stack->end());
    Frame frame, *outer = innermost;
    const int before = hollow_launched;
    bool launched = false;
    {
      Inside inside;
      innermost = &frame;
      if (is_convolution(name)) hollow_workspace = known.is ? known.workspace : workspace_of(arguments);
      try {
        original.callBoxed(op, keys, stack);
      } catch (...) {
        innermost = outer;
        throw;
      }
      innermost = outer;
      launched = launches || hollow_launched != before;
    }
    if (launched) {
      hollow_launched = before;
      if (!known.is) known = learn(given, op, arguments, *stack);
      if (known.exact || !frame.charged) hollow_launch(c10::cuda::getCurrentCUDAStream().stream(), known.ns);
      frame.charged = true;
    }
    if (outer) outer->charged |= frame.charged;
  }

  struct Known {
    bool is = false, exact = false;
    int64_t ns = 0, workspace = -1;
  };

  Known find(uint64_t hash) {
    std::lock_guard<std::mutex> lock(mutex);
    auto at = known.find(hash);
    return at == known.end() ? Known{} : at->second;
  }

  Known learn(Given given, const c10::OperatorHandle& op, const std::vector<IValue>& arguments, const Stack& stack) {
    const uint64_t hash = given.hash;
    Tensor result;
    double inputs = given.nbytes;
    for (auto it = stack.end() - static_cast<std::ptrdiff_t>(op.schema().returns().size()); it != stack.end(); ++it) {
      if (it->isTensor() && !result.defined()) result = it->toTensor();
      given.add(*it);
    }
    if (op.schema().returns().empty()) given.add(arguments[0]);  // a list that is updated in place
    const bool half = result.defined() && result.element_size() == 2;
    double count = flops(name, arguments, result);
    double peak = is_convolution(name) ? CONVOLUTION : half ? HALF : FLOAT;
    Known made{true};
    if (is_convolution(name)) made.workspace = workspace_of(arguments);
    auto row = rows->by_sizes.find(sizes_of(arguments));
    if (row != rows->by_sizes.end()) {
      made.exact = true;
      made.ns = static_cast<int64_t>(row->second.ns);
    } else {
      // Rows know no results: they compare by what is read.
      double similar = inputs / BYTES_PER_NS + count / peak, distance = SIMILAR;
      double ns = std::max({given.nbytes / BYTES_PER_NS, count / peak, LEAST_NS});
      for (const auto& [_, one] : rows->by_sizes) {
        double off = std::abs(std::log((similar + LEAST_NS) / (one.roofline + LEAST_NS)));
        if (off >= distance) continue;
        distance = off;
        ns = std::max(one.ns * (similar + LEAST_NS) / (one.roofline + LEAST_NS), LEAST_NS);
      }
      made.ns = static_cast<int64_t>(is_convolution(name) ? OTHER_CONVOLUTIONS * ns : ns);
    }
    if (std::getenv("HOLLOW_TOLD"))
      fprintf(stderr, "TOLD %s %s: %s, %ld ns\n", name.c_str(), sizes_of(arguments).c_str(), made.exact ? "measured" : "modelled",
              made.ns);
    std::lock_guard<std::mutex> lock(mutex);
    return known[hash] = made;
  }

  // cuDNN on an H200: for TF32, about as much as the input and the output take, in its layout.
  int64_t workspace_of(const std::vector<IValue>& arguments) const {
    auto row = workspaces->workspaces.find(sizes_of(arguments));
    if (row != workspaces->workspaces.end()) return row->second;
    Tensor one = arguments[0].toTensor(), other = arguments[1].toTensor();
    if (one.element_size() != 4 || rows->by_sizes.count(sizes_of(arguments))) return 0;
    double nbytes = 4 * product(one.sizes());
    nbytes += name == "convolution_backward" ? 4 * product(other.sizes())
                                             : nbytes * static_cast<double>(other.size(0)) / static_cast<double>(one.size(1));
    return static_cast<int64_t>(nbytes);
  }

  static inline const Operator none;
  const std::string name;
  c10::SafeKernelFunction original;
  bool launches = false;
  const Operator *rows = nullptr, *workspaces = nullptr;
  std::mutex mutex;
  std::unordered_map<uint64_t, Known> known;
};

// These only allocate or look.
const std::set<std::string> AS_THEY_ARE = {"set_",         "resize_",
                                           "resize",       "record_stream",
                                           "is_set_to",    "is_pinned",
                                           "_pin_memory",  "_fused_sdp_choice",
                                           "_unsafe_view", "_has_compatible_shallow_copy_type"};

struct Loaded {
  Loaded() {
    struct Mute : c10::WarningHandler {
      void process(const c10::Warning&) override {}
    } mute;  // it warns of each
    c10::WarningUtils::WarningHandlerGuard muted(&mute);
    static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    for (const auto& full : c10::Dispatcher::singleton().getAllOpNames()) {
      if (full.name.rfind("aten::", 0) != 0) continue;
      const std::string base = full.name.substr(6);
      const std::string name = full.overload_name.empty() ? base : base + "." + full.overload_name;
      auto op = c10::Dispatcher::singleton().findSchema(full);
      const bool composite = name == "convolution_backward" || name == "copy_";
      if (!op || !(op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || composite)) continue;
      bool view = AS_THEY_ARE.count(base) || base.rfind("empty", 0) == 0;
      for (const char* part : {"sparse", "csr", "nested", "quantize"}) view |= base.find(part) != std::string::npos;
      for (const auto& argument : op->schema().arguments()) view |= argument.alias_info() && !argument.alias_info()->isWrite();
      if (!view) library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Timed>(*op)));
    }
  }
} loaded;

}  // namespace

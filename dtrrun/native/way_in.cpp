// Registers our kernels with PyTorch's dispatcher. Compiled separately: the kernels for operators of many types take as long as
// everything else together.
//
// Everything here is what the dispatcher offers to any extension. Our key counts as a backend's, so a fallback is not enough:
//
// - A kernel for all backends (CompositeExplicitAutograd) and a composite (CompositeImplicitAutograd) take precedence over a
//   fallback. PyTorch would then run these at our key, even for an operator that has a kernel of its own for the tensor's
//   backend, with other bits. So each operator has one of our kernels at the key. The fallback is for operators that were
//   registered a moment ago.
// - Kernels at `BackendSelect`, and those for sparse, nested and oneDNN tensors, are above the key. So each of them is replaced
//   by one that calls it, but lets the operator arrive first (`Gate`, and `FactoryGates` for some). Where such tensors have no
//   kernel of their own but one for all backends, the operators that this calls arrive.
// - A composite with a kernel at a backend's key would be ambiguous for tensors without an autograd key of their own, such as
//   oneDNN's. So what runs for these is registered as a kernel at `AutogradOther`.
//
// Composites arrive only where autograd has not decomposed them, as in inference mode.
//
// Operators that are registered later are covered when the main thread is back in Python, or when the next operator arrives.
//
// What is registered for an operator is removed only after the operator itself: as soon as the main thread is back in Python,
// since PyTorch keeps what it has remembered of an operator for the next one of this name as long as anyone has a kernel for it.
// Nothing else is ever unregistered: the dispatcher's tables are read without a lock, so a thread might call what has just been
// removed. Adding a kernel is as unsafe as ever in PyTorch. Without a session the key is off, so only gates cost anything: the
// boxing of an operator's arguments, if it has a kernel above the key and no factory gate.
#include "python.h"

#include "way_in.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "factory_gates.h"
#include "registrations.h"
#include "typed_kernels.h"

namespace dtrrun {

namespace {

void interpose_boxed(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  BoxedArrival arrival(op, keys, stack);
  WayIn::interpose(arrival);
}

class Covers {
 public:
  static void install() {
    auto& dispatcher = c10::Dispatcher::singleton();
    [[maybe_unused]] static auto& fallback = *new c10::RegistrationHandleRAII(dispatcher.registerFallback(KEY, kernel(), OURS));
    Registrations::note_changes(&follow_in_python);
    std::lock_guard<std::mutex> guard(mutex_);
    Unwarned unwarned;
    for (const c10::OperatorName& name : dispatcher.getAllOpNames())
      if (auto op = dispatcher.findSchema(name)) cover(*op);
  }

  static bool are_behind() { return Registrations::has_changes() || again_.load(std::memory_order_relaxed); }
  static void follow() {
    std::unique_lock<std::mutex> guard(mutex_, std::try_to_lock);
    if (guard.owns_lock()) follow(false);
  }

 private:
  static constexpr DispatchKey KEY = WayIn::KEY;
  static constexpr const char *OURS = "by dtrrun", *OURS_TYPED = "by dtrrun, unboxed";
  // The keys above ours whose kernels are replaced.
  static constexpr DispatchKey GATES[] = {
      DispatchKey::BackendSelect,   DispatchKey::MkldnnCPU,        DispatchKey::SparseCPU,        DispatchKey::SparseCUDA,
      DispatchKey::SparseMeta,      DispatchKey::SparseCsrCPU,     DispatchKey::SparseCsrCUDA,    DispatchKey::SparseCsrMeta,
      DispatchKey::NestedTensorCPU, DispatchKey::NestedTensorCUDA, DispatchKey::NestedTensorMeta,
  };

  static c10::KernelFunction kernel() { return c10::KernelFunction::makeFromBoxedFunction<&interpose_boxed>(); }

  // Stands in for a kernel, and calls it.
  class Stand : public c10::OperatorKernel {
   public:
    explicit Stand(c10::SafeKernelFunction kernel) : kernel_(std::move(kernel)) {}
    void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
      try {
        kernel_.callBoxed(op, keys, stack);
        return;
      } catch (const c10::Error& error) {
        if (error.msg().rfind(REMOVED, 0) != 0) throw;
      }
      cover_again(op);  // which destroys this object
      op.redispatchBoxed(keys, stack);
    }

   private:
    static constexpr const char* REMOVED = "SafeKernelFunction has been invalidated";  // PyTorch's message
    c10::SafeKernelFunction kernel_;
  };
  // The same for a kernel above the key: lets operators arrive first.
  class Gate final : public Stand {
   public:
    using Stand::Stand;
    void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
      if (WayIn::is_for_us(keys)) return interpose_boxed(op, keys, stack);
      Stand::operator()(op, keys, stack);
    }
  };

  // What has been registered for one operator.
  class Cover {
   public:
    // name: what PyTorch's lists of kernels show.
    void add(const OperatorHandle& op, DispatchKey key, c10::KernelFunction kernel, const char* name = OURS) {
      handles_.emplace_back(key, c10::Dispatcher::singleton().registerImpl(op.operator_name(), key, std::move(kernel),
                                                                           std::nullopt, nullptr, name));
    }
    bool has(DispatchKey key) const {
      return std::any_of(handles_.begin(), handles_.end(), [&](const auto& one) { return one.first == key; });
    }

   private:
    std::vector<std::pair<DispatchKey, c10::RegistrationHandleRAII>> handles_;
  };

  // The caller holds the lock.
  static void cover(const OperatorHandle& op) {
    Cover& own = covers_[op.operator_name()];
    if (op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) && !own.has(DispatchKey::AutogradOther)) {
      own = Cover();  // it may have had no kernels before; what runs for tensors of other backends is looked up without ours
      own.add(op, DispatchKey::AutogradOther,
              standing_for<Stand>(op.getComputedKernelForDispatchKey(DispatchKey::AutogradOther)));
    }
    for (DispatchKey key : GATES)
      if (!own.has(key) && op.hasKernelForDispatchKey(key) && !op.isKernelFallthroughKernel(key))
        if (auto gate = gate_for(op, key)) own.add(op, key, std::move(*gate));
    if (own.has(KEY)) return;
    if (auto typed = TypedKernels::made_for(op))
      own.add(op, KEY, std::move(*typed), OURS_TYPED);
    else
      own.add(op, KEY, kernel());
  }

  static std::optional<c10::KernelFunction> gate_for(const OperatorHandle& op, DispatchKey key) {
    c10::SafeKernelFunction before = op.getComputedKernelForDispatchKey(key);
    if (key == DispatchKey::BackendSelect && FactoryGates::is_generated(before.debug())) {
      const auto& arguments = op.schema().arguments();
      // If there is a tensor argument, the kernel redispatches with the keys that are switched on, so the operator arrives then.
      if (std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& one) { return has_tensors(*one.type()); }))
        return std::nullopt;
      if (auto gate = FactoryGates::made_for(op)) return gate;
    }
    return standing_for<Gate>(std::move(before));
  }
  static bool has_tensors(const c10::Type& type) {
    if (type.kind() == c10::TypeKind::TensorType) return true;
    auto inner = type.containedTypes();
    return std::any_of(inner.begin(), inner.end(), [](const auto& one) { return has_tensors(*one); });
  }

  static void cover_again(const OperatorHandle& op) {
    std::lock_guard<std::mutex> guard(mutex_);
    Unwarned unwarned;
    covers_.erase(op.operator_name());
    cover(op);
  }

  template <class Replacement>
  static c10::KernelFunction standing_for(c10::SafeKernelFunction kernel) {
    return c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Replacement>(std::move(kernel)));
  }

  static void follow_in_python() {
    WithoutGil released;  // the thread that holds the dispatcher's mutex may be waiting for the GIL
    std::lock_guard<std::mutex> guard(mutex_);
    follow(true);
  }
  // early: possibly between an operator's definition and that of its kernels.
  static void follow(bool early) {
    Unwarned unwarned;
    auto names = std::exchange(recent_, {});
    for (const auto& [name, is_removal] : Registrations::take()) {
      if (is_removal)
        covers_.erase(name);
      else
        names.push_back(name);
    }
    for (const c10::OperatorName& name : names)
      if (auto op = c10::Dispatcher::singleton().findSchema(name)) cover(*op);
    if (early) recent_ = std::move(names);
    again_ = !recent_.empty();
  }

  // Suppresses PyTorch's warning that kernels are replaced, in this thread, without using up the one that the program may get.
  class Unwarned : c10::WarningHandler {
   public:
    Unwarned() { c10::WarningUtils::set_warnAlways(true); }
    ~Unwarned() { c10::WarningUtils::set_warnAlways(always_); }
    void process(const c10::Warning&) override {}

   private:
    bool always_ = c10::WarningUtils::get_warnAlways();
    c10::WarningUtils::WarningHandlerGuard guard_{this};
  };

  static inline std::mutex& mutex_ = *new std::mutex;
  static inline std::unordered_map<c10::OperatorName, Cover>& covers_ = *new std::unordered_map<c10::OperatorName, Cover>;
  static inline std::vector<c10::OperatorName>& recent_ = *new std::vector<c10::OperatorName>;  // to be checked once more
  static inline std::atomic<bool> again_{false};
};

}  // namespace

void WayIn::open() { Covers::install(); }

void WayIn::interpose(Arrival& arrival) {
  if (Covers::are_behind()) Covers::follow();
  if (!is_unseen()) return arrive(arrival);
  // While the dispatcher looks kernels up in Python (`enable_python_dispatcher`, as compilers do), it computes the keys of each
  // kernel anew: those at `BackendSelect` would lead here again.
  c10::impl::ExcludeDispatchKeyGuard off(OWN);
  arrival.run();
}

}  // namespace dtrrun

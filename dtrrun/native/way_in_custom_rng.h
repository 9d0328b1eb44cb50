// The other way in: kernels at the dispatch key `CustomRNGKeyId`, which PyTorch defines but does not use. It is open whatever
// happens to `Fake`, and needs only what PyTorch's dispatcher offers to any extension.
//
// A fallback at this key is not enough, since it counts as a backend's:
//
// - A kernel for all backends (CompositeExplicitAutograd) takes precedence over a fallback. So each operator that has one gets
//   one of our kernels at the key.
// - Kernels at `BackendSelect`, and those for sparse, nested and oneDNN tensors, are above the key. So each of them is replaced
//   by one that calls it, but lets the operator arrive first (`Gate`, and `FactoryGates` for some).
// - Composites (CompositeImplicitAutograd) are left alone, so where autograd has not decomposed them, as in inference mode,
//   their parts arrive. Those that dtrrun must handle as a whole get a kernel, too (`take_whole`).
//
// Operators that are registered later are covered when the main thread is back in Python, or when the next operator arrives.
//
// Nothing is ever unregistered: the dispatcher's tables are read without a lock, so a thread might call what has just been
// removed. Adding a kernel is as unsafe as ever in PyTorch. Without a session the key is off, so only gates cost anything: the
// boxing of an operator's arguments, if it has a kernel above the key and no factory gate.
#pragma once

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
#include "python.h"
#include "registrations.h"
#include "typed_kernels.h"

namespace dtrrun {

class CustomRngWay {
 public:
  static void install() {
    auto& dispatcher = c10::Dispatcher::singleton();
    auto from_select = DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::BackendSelect).add(DispatchKey::BackendSelect);
    static auto& fallback = *new c10::RegistrationHandleRAII(dispatcher.registerFallback(KEY, kernel(), OURS));
    way_in = WayIn("custom-rng", KEY, from_select.remove(KEY));
    way_in.take_whole = &take_whole;
    Registrations::note_changes(&follow_in_python);
    std::lock_guard<std::mutex> guard(mutex_);
    Unwarned unwarned;
    for (const c10::OperatorName& name : dispatcher.getAllOpNames())
      if (auto op = dispatcher.findSchema(name)) cover(*op, has_kernel_for_all_backends(*op));
  }

  static void interpose_boxed(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    BoxedArrival arrival(op, keys, stack);
    interpose(arrival);
  }
  static void interpose(Arrival& arrival) {
    if (Registrations::has_changes() || again_.load(std::memory_order_relaxed)) follow();
    is_unseen() ? arrival.run() : arrive(arrival);
  }

  // Returns true if an operator at a gate must arrive. keys: include ours, unless it is off or the operator has arrived already.
  static bool is_for_us(DispatchKeySet keys) { return keys.has(KEY) && !is_unseen(); }

 private:
  static constexpr DispatchKey KEY = DispatchKey::CustomRNGKeyId;
  using Factories = FactoryGates<CustomRngWay>;
  static constexpr const char* OURS = "by dtrrun";
  // The keys above ours whose kernels are replaced.
  static constexpr DispatchKey GATES[] = {
      DispatchKey::BackendSelect,    DispatchKey::MkldnnCPU,       DispatchKey::SparseCPU,    DispatchKey::SparseCUDA,
      DispatchKey::SparseMeta,       DispatchKey::SparseCsrCPU,    DispatchKey::SparseCsrCUDA, DispatchKey::SparseCsrMeta,
      DispatchKey::NestedTensorCPU,  DispatchKey::NestedTensorCUDA, DispatchKey::NestedTensorMeta,
  };

  static c10::KernelFunction kernel() { return c10::KernelFunction::makeFromBoxedFunction<&interpose_boxed>(); }

  // `torch.tensor` makes a tensor by operators, and fills it by address. It hides these operators from modes of all kinds, but
  // cannot know our key.
  static bool is_unseen() {
    constexpr DispatchKeySet hidden({DispatchKey::Fake, DispatchKey::DeferredInit, DispatchKey::Python});
    return c10::impl::tls_local_dispatch_key_set().excluded_.has_all(hidden);
  }

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
      if (is_for_us(keys)) return interpose_boxed(op, keys, stack);
      Stand::operator()(op, keys, stack);
    }
  };

  // What has been registered for one operator.
  class Cover {
   public:
    bool is_whole = false;  // it is a composite that dtrrun must handle as a whole

    void add(const OperatorHandle& op, DispatchKey key, c10::KernelFunction kernel) {
      handles_.emplace_back(key, c10::Dispatcher::singleton().registerImpl(op.operator_name(), key, std::move(kernel),
                                                                           std::nullopt, nullptr, OURS));
    }
    bool has(DispatchKey key) const {
      return std::any_of(handles_.begin(), handles_.end(), [&](const auto& one) { return one.first == key; });
    }

   private:
    std::vector<std::pair<DispatchKey, c10::RegistrationHandleRAII>> handles_;
  };

  static bool has_kernel_for_all_backends(const OperatorHandle& op) {
    return op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
           op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
  }

  // for_all_backends: the operator has a kernel for all backends, or may get one. The caller holds the lock.
  static void cover(const OperatorHandle& op, bool for_all_backends) {
    auto known = covers_.find(op.operator_name());
    if (op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)) {
      if (known != covers_.end() && !known->second.is_whole) covers_.erase(known);  // it had no kernels before
      return;
    }
    Cover& own = covers_[op.operator_name()];
    for (DispatchKey key : GATES)
      if (!own.has(key) && op.hasKernelForDispatchKey(key) && !op.isKernelFallthroughKernel(key))
        if (auto gate = gate_for(op, key)) own.add(op, key, std::move(*gate));
    if (own.has(KEY)) return;
    if (auto typed = TypedKernels::made_for(op, &interpose))
      own.add(op, KEY, std::move(*typed));
    else if (for_all_backends)
      own.add(op, KEY, kernel());
  }

  static void take_whole(const OperatorHandle& op) {
    std::lock_guard<std::mutex> guard(mutex_);
    cover_whole(op);
  }
  static void cover_whole(const OperatorHandle& op) {
    Cover& own = covers_[op.operator_name()];
    if (own.is_whole) return;
    own = Cover();
    own.is_whole = true;
    // Because of the kernel at our key, PyTorch no longer uses the composite as the kernel at this key.
    own.add(op, DispatchKey::AutogradOther, standing_for<Stand>(op.getComputedKernelForDispatchKey(DispatchKey::AutogradOther)));
    own.add(op, KEY, kernel());
  }

  static std::optional<c10::KernelFunction> gate_for(const OperatorHandle& op, DispatchKey key) {
    c10::SafeKernelFunction before = op.getComputedKernelForDispatchKey(key);
    if (key == DispatchKey::BackendSelect && Factories::is_generated(before.debug())) {
      const auto& arguments = op.schema().arguments();
      // If there is a tensor argument, the kernel redispatches with the keys that are switched on, so the operator arrives then.
      if (std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& one) { return has_tensors(*one.type()); }))
        return std::nullopt;
      if (auto gate = Factories::made_for(op)) return gate;
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
    auto known = covers_.find(op.operator_name());
    bool is_whole = known != covers_.end() && known->second.is_whole;
    if (known != covers_.end()) covers_.erase(known);
    is_whole ? cover_whole(op) : cover(op, true);
  }

  template <class Replacement>
  static c10::KernelFunction standing_for(c10::SafeKernelFunction kernel) {
    return c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Replacement>(std::move(kernel)));
  }

  static void follow() {
    std::unique_lock<std::mutex> guard(mutex_, std::try_to_lock);
    if (guard.owns_lock()) follow(false);
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
      if (auto op = c10::Dispatcher::singleton().findSchema(name)) cover(*op, true);
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

}  // namespace dtrrun

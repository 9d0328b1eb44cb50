// Our kernels for the operators that programs call most, which receive the caller's arguments unboxed.
//
// When an operator arrives through a boxed kernel, PyTorch first boxes its arguments onto a stack, and unboxes them again for its
// own kernel: a quarter of a microsecond, and more for lists of numbers. So the operators that programs call most get a kernel of
// their own type. Each type is given by one operator, and serves all of PyTorch's operators of that type.
#pragma once

#include <ATen/Operators.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>

#include "arrival.h"

namespace dtrrun {

// Holds what an operator's kernel has returned, or its replacement.
template <class Result>
class Returning : public Arrival {
 public:
  Tensors tensors() const final {
    Tensors found;
    each(*result_, [&](const auto& one) { add_tensors(one, found); });
    return found;
  }
  Stack results() const final {
    Stack all;
    each(*result_, [&](const auto& one) { all.emplace_back(one); });
    return all;
  }
  bool count_results(OwnStorages& own) final {
    bool all = true;
    each(*result_, [&](const auto& one) { all = count_new(one, own) && all; });
    return all;
  }
  void set_results(Stack&& results) final { result_.emplace(unboxed(std::move(results), static_cast<Result*>(nullptr))); }
  Result take() { return std::move(*result_); }

 protected:
  using Arrival::Arrival;
  std::optional<Result> result_;

 private:
  template <class One, class Function>
  static void each(const One& one, const Function& function) {
    function(one);
  }
  template <class... Ones, class Function>
  static void each(const std::tuple<Ones...>& all, const Function& function) {
    std::apply([&](const auto&... ones) { (function(ones), ...); }, all);
  }
  template <class One>
  static One unboxed(Stack&& results, One*) {
    return std::move(results.at(0)).template to<One>();
  }
  template <class... Ones>
  static std::tuple<Ones...> unboxed(Stack&& results, std::tuple<Ones...>*) {
    size_t place = 0;
    auto next = [&]() -> c10::IValue&& { return std::move(results.at(place++)); };
    return {next().template to<Ones>()...};  // evaluated in order because of the braces
  }
};
// For operators that work in place: returns the first argument, whatever the kernel returns.
template <>
class Returning<at::Tensor&> : public Arrival {
 public:
  Tensors tensors() const final { return {*self_}; }
  Stack results() const final { return {*self_}; }
  bool count_results(OwnStorages&) final { return true; }
  void set_results(Stack&&) final {}
  at::Tensor& take() { return *self_; }

 protected:
  using Arrival::Arrival;
  at::Tensor* self_ = nullptr;
};

// Lists of whole numbers as values, made once for each content and thread. Nothing changes them.
class NumberLists {
 public:
  static IValue of(c10::IntArrayRef numbers) {
    if (numbers.size() > LONGEST) return IValue(numbers);
    SizesHash found;
    found.add(numbers);
    thread_local std::array<NumberLists, size_t{1} << BITS> lists;
    NumberLists& one = lists[found.hash >> (64 - BITS)];
    if (one.count_ != numbers.size() || !std::equal(numbers.begin(), numbers.end(), one.numbers_)) {
      one.value_ = IValue(numbers);
      one.count_ = numbers.size();
      std::copy(numbers.begin(), numbers.end(), one.numbers_);
    }
    return one.value_;
  }

 private:
  static constexpr size_t LONGEST = 5, BITS = 6;

  IValue value_;
  size_t count_ = LONGEST + 1;
  int64_t numbers_[LONGEST];
};

// The caller holds the tensors for as long as they are needed, so these values only borrow them.
inline IValue boxed(const at::Tensor& tensor) { return c10::MaybeOwnedTraits<at::Tensor>::createBorrow(tensor); }
inline IValue boxed(const std::optional<at::Tensor>& tensor) { return tensor.has_value() ? boxed(*tensor) : IValue(); }
inline IValue boxed(c10::IntArrayRef numbers) { return NumberLists::of(numbers); }
inline IValue boxed(c10::SymIntArrayRef numbers) {
  auto known = c10::asIntArrayRefSlowOpt(numbers);
  return known ? NumberLists::of(*known) : IValue(numbers);
}
inline IValue boxed(at::OptionalIntArrayRef numbers) { return numbers ? boxed(*numbers) : IValue(); }
inline IValue boxed(at::OptionalSymIntArrayRef numbers) { return numbers ? boxed(*numbers) : IValue(); }
template <class Type>
IValue boxed(const Type& value) {
  return IValue(value);
}

template <class Result, class... Args>
class TypedArrival final : public Returning<Result> {
 public:
  using Handle = c10::TypedOperatorHandle<Result(Args...)>;

  TypedArrival(const Handle& op, DispatchKeySet keys, Args&... args)
      : Returning<Result>(op, keys, COUNT), handle_(op), args_(args...) {
    if constexpr (std::is_reference_v<Result>) this->self_ = &std::get<0>(args_);
  }
  ~TypedArrival() { destroy(std::index_sequence_for<Args...>()); }

  const IValue* values() override {
    if (built_ == 0) build(std::index_sequence_for<Args...>());
    return place(0);
  }
  IValue kept(const IValue& value) const override { return value; }
  const at::Tensor* first() override {
    if constexpr (is<at::Tensor, std::tuple_element_t<0, std::tuple<Args...>>>) return &std::get<0>(args_);
    return nullptr;
  }
  using Arrival::run;
  void run(DispatchKeySet below) override {
    auto call = [&](Args&... args) -> Result { return handle_.redispatch(below, args...); };
    if constexpr (std::is_reference_v<Result>)
      std::apply(call, args_);
    else
      this->result_.emplace(std::apply(call, args_));
  }
  void keep() override {}  // a kernel does not consume its arguments
  void restore() override {}
  void drop() override {}
  bool is_known(const Ours& ours) override {
    return std::apply([&](const auto&... all) { return (dtrrun::is_known(all, ours) && ...); }, args_);
  }
  uint64_t hash_of_sizes() override {
    SizesHash found;
    std::apply([&](const auto&... all) { (found.add(all), ...); }, args_);
    return found.hash;
  }

 private:
  static constexpr size_t COUNT = sizeof...(Args);
  template <class Type, class Argument>
  static constexpr bool is = std::is_same_v<std::decay_t<Argument>, Type>;
  template <class Argument>
  static constexpr bool is_borrowed = is<at::Tensor, Argument> || is<std::optional<at::Tensor>, Argument>;

  IValue* place(size_t place) { return reinterpret_cast<IValue*>(memory_) + place; }
  template <size_t... places>
  void build(std::index_sequence<places...>) {
    ((new (place(places)) IValue(boxed(std::get<places>(args_))), built_++), ...);
  }
  template <size_t... places>
  void destroy(std::index_sequence<places...>) {
    ((places < built_ && !is_borrowed<Args> ? std::destroy_at(place(places)) : void()), ...);
  }

  const Handle& handle_;
  std::tuple<Args&...> args_;
  alignas(IValue) std::byte memory_[COUNT * sizeof(IValue)];
  size_t built_ = 0;
};

// Makes kernels.
class TypedKernels {
 public:
  // Returns a kernel for one of PyTorch's operators; nullopt if its type is not listed here.
  static std::optional<c10::KernelFunction> made_for(const OperatorHandle& op) {
    if (op.operator_name().getNamespace() != "aten") return std::nullopt;
    static const auto& makers = *new Makers(known());
    auto [first, last] = makers.equal_range(type_of(op.schema()));
    for (auto found = first; found != last; ++found) {
      try {
        return found->second(op);
      } catch (const c10::Error&) {  // PyTorch found that the types differ, as those of `cat` and `stack` do in C++ alone
      }
    }
    return std::nullopt;
  }

  template <class Type>
  class Kernel;
  template <class Result, class... Args>
  class Kernel<Result(Args...)> final : public c10::OperatorKernel {
   public:
    explicit Kernel(const OperatorHandle& op) : op_(op.typed<Result(Args...)>()) {}
    Result operator()(DispatchKeySet keys, Args... args) {
      TypedArrival<Result, Args...> arrival(op_, keys, args...);
      WayIn::interpose(arrival);
      return arrival.take();
    }

   private:
    const c10::TypedOperatorHandle<Result(Args...)> op_;
  };

 private:
  using Maker = c10::KernelFunction (*)(const OperatorHandle&);
  using Makers = std::unordered_multimap<std::string, Maker>;

  template <class Type>
  static c10::KernelFunction made(const OperatorHandle& op) {
    return c10::KernelFunction::makeFromUnboxedFunctor<false, Kernel<Type>>(std::make_unique<Kernel<Type>>(op));
  }

  static std::string type_of(const c10::FunctionSchema& schema) {
    std::string all;
    auto add = [&](const c10::Argument& one) {
      all += one.real_type()->str();
      if (one.alias_info() != nullptr && one.alias_info()->isWrite()) all += '!';
      if (one.N() && all.ends_with("bool[]")) all += std::to_string(*one.N());  // an array
      all += ';';
    };
    for (const c10::Argument& one : schema.arguments()) add(one);
    all += ">";
    for (const c10::Argument& one : schema.returns()) add(one);
    return all;
  }

  template <class... Examples>
  static Makers types_of() {
    Makers all;
    auto add = [&](const char* name, const char* overload, Maker maker) {
      if (auto op = c10::Dispatcher::singleton().findSchema({name, overload})) all.emplace(type_of(op->schema()), maker);
    };
    (add(Examples::name, Examples::overload_name, &made<typename Examples::schema>), ...);
    return all;
  }
  static Makers known() {
    namespace ops = at::_ops;
    return types_of<
        // elementwise
        ops::relu, ops::relu_, ops::mul_Tensor, ops::mul__Tensor, ops::div_Scalar, ops::div__Scalar, ops::pow_Scalar,
        ops::add_Tensor, ops::add__Tensor, ops::add_Scalar, ops::add__Scalar, ops::where_self, ops::lerp__Tensor, ops::addcmul,
        ops::addcmul_, ops::clamp, ops::gelu, ops::gelu_backward, ops::native_dropout, ops::native_dropout_backward,
        ops::bernoulli__float, ops::mse_loss,
        // views, and their backward operators
        ops::view, ops::expand, ops::permute, ops::transpose_int, ops::unsqueeze, ops::select_int, ops::slice_Tensor,
        ops::as_strided, ops::_reshape_alias, ops::unbind_int, ops::split_Tensor, ops::split_with_sizes, ops::select_backward,
        ops::slice_backward,
        // creation and copies
        ops::empty_memory_format, ops::empty_strided, ops::new_empty, ops::zeros, ops::full, ops::zeros_like, ops::arange,
        ops::clone, ops::_to_copy, ops::copy_,
        // sums, products and the like
        ops::sum, ops::sum_dim_IntList, ops::amax, ops::max_dim, ops::_softmax, ops::_softmax_backward_data,
        ops::linalg_vector_norm, ops::cumsum, ops::addmm, ops::addmm_, ops::native_layer_norm, ops::native_layer_norm_backward,
        ops::gather, ops::index_select, ops::constant_pad_nd,
        // convolutional networks
        ops::convolution, ops::convolution_backward, ops::cudnn_batch_norm, ops::cudnn_batch_norm_backward,
        ops::native_batch_norm, ops::native_batch_norm_backward, ops::softplus_backward,
        // lists of tensors
        ops::cat, ops::stack>();
  }
};

}  // namespace dtrrun

// Makes the signature of a call that is the first of its kind, and asks Python what no formula says of it.
#pragma once

#include "formulas.h"
#include "tensor_versions.h"
#include "pytorch.h"

namespace dtrrun {

class FirstCalls {
 public:
  // signatures: the session's Python object.
  FirstCalls(PyObject* python, PyObject* signatures, const TensorVersions& versions)
      : python_(Ref::copy(python)), signatures_(Ref::copy(signatures)),
        signature_class_(attribute(attribute(versions.ledger_object(), "graph").get(), "signature")),
        size_class_(attribute(python, "size_class")), is_modelled_(truth(signatures, "modelled")),
        prices_(truth(python, "prices")), knows_costs_(truth(signatures, "has_costs")), versions_(versions) {
    Ref rates = attribute(python, "rates");
    if (!PyArg_ParseTuple(rates.get(), "LLL", &launch_ns_, &bytes_per_ns_, &flops_per_ns_)) raise();
  }

  // read: the bytes of its inputs. lesson: set if the call's results will tell what a formula needs.
  template <class C>
  Ref signature_of(const C& call, int64_t read, std::optional<Formulas::Lesson>& lesson) const {
    const OperatorInfo& info = call.info;
    Ref made = blank(info, geometries_of(call, false));
    SignatureObject* one = as_signature(made.get());
    bool is_elsewhere = call.unusual && !call.unusual->elsewhere.empty();
    bool is_usual = !is_elsewhere && !call.opaque && !(call.unusual && !call.unusual->by_value.empty());
    auto nbytes = is_usual ? predicted(info, call.values, call.count) : std::nullopt;
    if (!nbytes && is_usual) lesson = formulas_.lesson_of(info, call.values, call.count);
    if (nbytes && !knows_costs_ && !is_elsewhere) {
      one->figures.output_bytes = *nbytes;
      one->figures.guessed = info.makes_tensors;
    } else {
      Untraced untraced;
      WithoutFunctionModes plain;
      auto [args, kwargs] = templates_of(call.arrival.schema(), call.values, *info.enumerations, call.holes.data());
      Ref formula = nbytes ? Ref(PyLong_FromLongLong(*nbytes)) : Ref::copy(Py_None), more = more_of(call);
      checked(PyObject_CallMethod(python_.get(), "first_call", "OOOOLOOO", made.get(), info.func.get(), args.get(),
                                  kwargs ? kwargs.get() : Py_None, static_cast<long long>(read), formula.get(), more.get(),
                                  is_elsewhere ? Py_True : Py_False));
    }
    if (call.excludes) one->replayed_as = blank(info, geometries_of(call, true)).release();
    if (call.unusual && !call.unusual->same.empty()) {
      const auto& same = call.unusual->same;
      Ref all = unwatched(&PyTuple_Type, same.size(), [&](size_t i) { return PyLong_FromLongLong(same[i]); });
      if (PyObject_SetAttrString(made.get(), "same", all.get()) < 0) raise();
    }
    return made;
  }
  // Returns what else calls of its kind have in common: where their results are, and which of their tensors are the same.
  template <class C>
  static Ref more_of(const C& call) {
    if (!call.unusual || (call.unusual->elsewhere.empty() && call.unusual->same.empty())) return Ref::copy(nothing);
    Ref same = checked(PyTuple_New(static_cast<Py_ssize_t>(call.unusual->same.size())));
    for (size_t i = 0; i < call.unusual->same.size(); i++)
      PyTuple_SET_ITEM(same.get(), i, PyLong_FromLongLong(call.unusual->same[i]));
    return checked(Py_BuildValue("(sO)", call.unusual->elsewhere.c_str(), same.get()));
  }

  // What the cost model needs of a call before it runs (which consumes its arguments).
  struct Unpriced {
    int64_t read = 0, flops = 0;  // bytes that it reads, FLOPs if they are known
    Ref args, kwargs;             // if Python counts the FLOPs
  };
  std::optional<Unpriced> unpriced(const OperatorInfo& info, const c10::OperatorHandle& op, const IValue* values,
                                   int64_t read) const {
    if (!prices_) return std::nullopt;  // it is measured
    Unpriced call{read, 0, {}, {}};
    auto flops =
        info.formula == Formula::PRODUCT ? Formulas::flops_of_product(values, op.schema().arguments().size()) : std::nullopt;
    if (flops) {
      call.flops = *flops;
    } else if (info.counts_flops) {
      std::tie(call.args, call.kwargs) = to_arguments(
          op.schema(), values, PyTuple_New, [&](size_t place) { return to_python(values[place], (*info.enumerations)[place]); });
    }
    return call;
  }
  // Sets the modelled cost of a call that has run (`modelled_ns` in runtime/cost_model.py).
  void price(Signature& figures, const OperatorInfo& info, const Unpriced& call, const Arrival& arrival) const {
    int64_t flops = call.flops;
    if (call.args) {
      Untraced untraced;
      Ref results = shown_results(arrival.results());
      Ref found = checked(PyObject_CallMethod(python_.get(), "flops", "OOOO", info.func.get(), call.args.get(),
                                              call.kwargs ? call.kwargs.get() : Py_None, results.get()));
      flops = as_number(found.get());
    }
    int64_t nbytes = call.read + (truth(signatures_.get(), "needs_sizes") ? figures.output_bytes : 0);
    figures.cost = launch_ns_ + nbytes / bytes_per_ns_ + flops / flops_per_ns_;
    if (is_modelled_) figures.calls = Signature::SETTLED;
  }

  // Called once that call has run and its results are known.
  void made(PyObject* signature) {
    if (PyObject* replay = replayed_as(signature)) {
      const Signature& figures = as_signature(signature)->figures;
      as_signature(replay)->figures.calls = figures.calls;
      as_signature(replay)->figures.resemble(figures);
    }
    checked(PyObject_CallMethod(signatures_.get(), "add", "O", signature));
  }

  // Returns the bytes that a call will allocate, if known.
  std::optional<int64_t> predicted(const OperatorInfo& info, const IValue* values, size_t count) const {
    if (info.handler == HandlerKind::VIEW) return 0;
    if (info.formula == Formula::UNKNOWN) return std::nullopt;
    auto storages = formulas_.predict(info, values, count);
    if (!storages) return std::nullopt;
    int64_t nbytes = 0;
    for (int64_t storage : *storages) nbytes += versions_.rounded(storage);
    return nbytes;
  }

  // Returns what a call that is about to run can teach, if anything.
  std::optional<Formulas::Lesson> lesson_of(const OperatorInfo& info, const IValue* values, size_t count) const {
    return formulas_.lesson_of(info, values, count);
  }
  // Learns from that call, which has run with these results.
  void learn(OperatorInfo& info, const Formulas::Lesson& lesson, const Stack& results) { formulas_.learn(info, lesson, results); }

  // without_statistics: leaves out running statistics.
  template <class C>
  Ref geometries_of(const C& call, bool without_statistics) const {
    c10::SmallVector<Ref, 4> all;
    call.each_tensor([&](size_t place, const at::Tensor& tensor) {
      if (!(without_statistics && call.is_statistics(place))) all.push_back(geometry_of(tensor));
    });
    return unwatched(&PyTuple_Type, all.size(), [&](size_t i) { return all[i].release(); });
  }
  // Returns a tensor's place in its storage (`core.graph.Geometry`).
  Ref geometry_of(const at::Tensor& tensor) const {
    auto numbers = [](PyTypeObject* type, c10::IntArrayRef all) {
      return unwatched(type, all.size(), [&](size_t i) { return PyLong_FromLongLong(all[i]); });
    };
    return unwatched(&PyTuple_Type, lazy_bits(tensor) == 0 ? 4 : 6, [&](size_t i) {
      if (i == 0) return numbers(reinterpret_cast<PyTypeObject*>(size_class_.get()), tensor.sizes()).release();
      if (i == 1) return numbers(&PyTuple_Type, tensor.strides()).release();
      if (i == 2) return PyLong_FromLongLong(tensor.storage_offset());
      if (i > 3) return PyBool_FromLong(i == 4 ? tensor.is_conj() : tensor.is_neg());
      return Py_NewRef(reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type())));
    });
  }

 private:
  Ref blank(const OperatorInfo& info, Ref geometries) const {
    auto* type = reinterpret_cast<PyTypeObject*>(signature_class_.get());
    Ref made = checked(type->tp_alloc(type, 0));
    PyObject_GC_UnTrack(made.get());
    as_signature(made.get())->operator_ = Ref::copy(info.operator_.get()).release();
    as_signature(made.get())->geometries = geometries.release();
    return made;
  }

  // Makes a tuple, or a `torch.Size`, that cannot be part of a cycle and is not tracked: the garbage collector would visit it
  // for nothing, and a program whose calls all differ makes five of them per call. item: makes the item at a place.
  template <class Item>
  static Ref unwatched(PyTypeObject* type, size_t size, const Item& item) {
    auto count = static_cast<Py_ssize_t>(size);
    Ref tuple = checked(type == &PyTuple_Type ? PyTuple_New(count) : type->tp_alloc(type, count));
    for (size_t i = 0; i < size; i++) PyTuple_SET_ITEM(tuple.get(), i, item(i));
    PyObject_GC_UnTrack(tuple.get());
    return tuple;
  }

  Ref python_, signatures_, signature_class_, size_class_;
  const bool is_modelled_, prices_, knows_costs_;
  long long launch_ns_ = 0, bytes_per_ns_ = 0, flops_per_ns_ = 0;  // of the cost model
  const TensorVersions& versions_;
  Formulas formulas_;
};

}  // namespace dtrrun

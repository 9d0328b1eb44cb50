// Makes the signature of a call that is the first of its kind: `Signatures._new` in dispatch/signatures.py.
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
        size_class_(attribute(python, "size_class")), is_modelled_(truth(signatures, "modelled")), versions_(versions) {}

  // Returns null if the call falls back to Python. tensors: their number. excludes: whether a replay omits running statistics.
  Ref signature_of(const OperatorInfo& info, const c10::OperatorHandle& op, const IValue* values, size_t tensors,
                   bool excludes) const {
    if (!info.first_calls) return Ref();
    size_t count = op.schema().arguments().size();
    auto nbytes = predicted(info, values, count);
    if (!nbytes) return Ref();
    Ref geometries = geometries_of(values, count, nullptr);
    if (PyTuple_GET_SIZE(geometries.get()) != static_cast<Py_ssize_t>(tensors)) return Ref();
    Ref made = blank(info, std::move(geometries));
    SignatureObject* one = as_signature(made.get());
    one->figures.output_bytes = *nbytes;
    one->figures.guessed = info.makes_tensors;
    if (excludes) one->replayed_as = blank(info, geometries_of(values, count, info.statistics)).release();
    return made;
  }

  // The arguments of a call whose cost will come from the cost model.
  struct Unpriced {
    Ref args, kwargs;
    int64_t read = 0;  // bytes
  };
  template <class Versions>
  std::optional<Unpriced> unpriced(const OperatorInfo& info, const c10::OperatorHandle& op, const IValue* values,
                                   const Versions& versions) const {
    if (!is_modelled_) return std::nullopt;
    auto [args, kwargs] = to_arguments(op.schema(), values, PyTuple_New, [&](size_t place) {
      return to_python(values[place], (*info.enumerations)[place]);
    });
    Unpriced call{std::move(args), std::move(kwargs)};
    for (const Version* one : versions) call.read += one->nbytes;
    return call;
  }
  // Sets the modeled cost of a call that has run.
  void price(PyObject* made, const OperatorInfo& info, const Unpriced& call, const Arrival& arrival) const {
    Untraced untraced;
    Ref results = shown_results(arrival.results());
    checked(PyObject_CallMethod(python_.get(), "price", "OOOOOL", made, info.func.get(), call.args.get(),
                                call.kwargs ? call.kwargs.get() : Py_None, results.get(), static_cast<long long>(call.read)));
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
    if (info.formula == Formula::UNKNOWN) return std::nullopt;
    auto storages = formulas_.predict(info, values, count);
    if (!storages) return std::nullopt;
    int64_t nbytes = 0;
    for (int64_t storage : *storages) nbytes += versions_.rounded(storage);
    return nbytes;
  }

  // Learns from a first call that has run in Python with these results.
  void learn(OperatorInfo& info, const IValue* values, size_t count, const Stack& results) {
    formulas_.learn(info, values, count, results);
  }

  // statistics: two places to leave out, or null.
  Ref geometries_of(const IValue* values, size_t count, const int* statistics) const {
    c10::SmallVector<Ref, 4> all;
    auto add = [&](const at::Tensor& tensor) {
      if (tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number()) all.push_back(geometry_of(tensor));
    };
    for (size_t place = 0; place < count; place++) {
      const IValue& value = values[place];
      if (statistics != nullptr && std::find(statistics, statistics + 2, static_cast<int>(place)) != statistics + 2) continue;
      if (value.isTensor()) add(value.toTensor());
      if (value.isTensorList())
        for (const at::Tensor& tensor : value.toTensorVector()) add(tensor);
      if (value.isOptionalTensorList())
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) add(tensor.value_or(at::Tensor()));
    }
    return unwatched(&PyTuple_Type, all.size(), [&](size_t i) { return all[i].release(); });
  }
  // `geometry_of` in dispatch/arguments.py, for a tensor without lazy bits.
  Ref geometry_of(const at::Tensor& tensor) const {
    auto numbers = [](PyTypeObject* type, c10::IntArrayRef all) {
      return unwatched(type, all.size(), [&](size_t i) { return PyLong_FromLongLong(all[i]); });
    };
    return unwatched(&PyTuple_Type, 4, [&](size_t i) {
      if (i == 0) return numbers(reinterpret_cast<PyTypeObject*>(size_class_.get()), tensor.sizes()).release();
      if (i == 1) return numbers(&PyTuple_Type, tensor.strides()).release();
      if (i == 2) return PyLong_FromLongLong(tensor.storage_offset());
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
  bool is_modelled_;
  const TensorVersions& versions_;
  Formulas formulas_;
};

}  // namespace dtrrun

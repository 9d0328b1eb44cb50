// What a replay needs of an operator's call: `Operation.recorded`, kept as PyTorch's own values.
//
// Python sees the sequence that the slow path records, (func, template, kwargs, rng, state, autocast), but it
// is made only when something asks for it: most operations are never run again.
#pragma once

#include <c10/util/SmallVector.h>

#include "arguments.h"

namespace dtrrun {

using Constants = c10::SmallVector<IValue, 6>;
using Holes = c10::SmallVector<int, 6>;  // by argument: -1 for a value, -2 for a tensor, otherwise tensors in a list

struct Recipe {
  const c10::OperatorHandle handle;
  std::shared_ptr<std::vector<Enumeration>> enumerations;
  Constants values;  // of the arguments; where tensors were, None or which items of a list there are
  Holes holes;
  Ref func, state, rng;
};

struct RecipeObject {
  PyObject_HEAD
  Recipe recipe;
};

inline PyObject* hole = nullptr;  // core.graph.HOLE
inline PyTypeObject* recipe_type = nullptr;

inline Ref template_of(const Recipe& recipe, size_t place) {
  int count = recipe.holes[place];
  if (count == -1) return to_python(recipe.values[place], (*recipe.enumerations)[place]);
  if (count == -2) return Ref::copy(hole);
  Ref list = checked(PyList_New(count));
  const IValue& given = recipe.values[place];  // a list of flags if some items may be None
  for (int i = 0; i < count; i++) {
    bool is_tensor = !given.isBoolList() || given.toBoolList().get(i);
    PyList_SET_ITEM(list.get(), i, Ref::copy(is_tensor ? hole : Py_None).release());
  }
  return list;
}

inline Ref as_sequence(const Recipe& recipe) {
  // A tensor is never a default, but the None in its place may look like one.
  const auto& schema = recipe.handle.schema();
  Constants shown = recipe.values;
  for (size_t place = 0; place < shown.size(); place++)
    if (recipe.holes[place] != -1) shown[place] = IValue(at::Tensor());
  auto [args, kwargs] =
      to_arguments(schema, shown.data(), PyList_New, [&](size_t place) { return template_of(recipe, place); });
  Ref nothing(PyTuple_New(0));
  return Ref(PyTuple_Pack(6, recipe.func.get(), args.get(), kwargs ? kwargs.get() : Py_None,
                          recipe.rng ? recipe.rng.get() : Py_None, recipe.state.get(), nothing.get()));
}

inline PyObject* iterate_recipe(PyObject* self) {
  try {
    Ref sequence = as_sequence(reinterpret_cast<RecipeObject*>(self)->recipe);
    return sequence ? PyObject_GetIter(sequence.get()) : nullptr;
  } catch (python_error& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

inline void delete_recipe(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<RecipeObject*>(self)->recipe.~Recipe();
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyTypeObject* make_recipe_type() {
  static PyType_Slot slots[] = {
      {Py_tp_iter, reinterpret_cast<void*>(iterate_recipe)},
      {Py_tp_dealloc, reinterpret_cast<void*>(delete_recipe)},
      {Py_tp_doc, const_cast<char*>("Iterates over (func, template, kwargs, rng, state, autocast).")},
      {0, nullptr},
  };
  static PyType_Spec spec = {"dtrrun._native.Recipe", sizeof(RecipeObject), 0, Py_TPFLAGS_DEFAULT, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

inline Ref new_recipe(Recipe&& recipe) {
  Ref object = checked(recipe_type->tp_alloc(recipe_type, 0));
  new (&reinterpret_cast<RecipeObject*>(object.get())->recipe) Recipe(std::move(recipe));
  return object;
}

}  // namespace dtrrun

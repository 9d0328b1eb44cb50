// What a heuristic makes of a storage: c / (m * s ** S), each of which may be left out, and two factors on it.
//
// The numbers are Python's to the last bit (`core.heuristics`, `core.chain`), so that ties are ties here as well.
#pragma once

#include <cmath>

#include "attributes.h"

namespace dtrrun {

// cost / (size * staleness), rounded once, as Python divides whole numbers.
inline double divided(int64_t cost, int64_t size, int64_t staleness) {
  constexpr int64_t EXACT = int64_t{1} << 53;
  using Wide = unsigned __int128;
  Wide divisor = static_cast<Wide>(size) * static_cast<Wide>(staleness);
  if (cost <= EXACT && divisor <= static_cast<Wide>(EXACT))
    return static_cast<double>(cost) / static_cast<double>(static_cast<int64_t>(divisor));
  auto bits = [](Wide number) {
    auto high = static_cast<uint64_t>(number >> 64), low = static_cast<uint64_t>(number);
    return high != 0 ? 128 - __builtin_clzll(high) : low != 0 ? 64 - __builtin_clzll(low) : 0;
  };
  if (bits(divisor) > 72)  // a terabyte, unused for an hour
    return static_cast<double>(static_cast<long double>(cost) / static_cast<long double>(divisor));
  int shift = std::max(56 + bits(divisor) - bits(static_cast<Wide>(cost)), 0);
  if (cost == 0) return 0;
  Wide dividend = static_cast<Wide>(cost) << shift;
  auto quotient = static_cast<uint64_t>(dividend / divisor);  // at least 56 bits, of which a double keeps 53
  if (dividend % divisor != 0) quotient |= 1;                 // so that half-way cases are rounded rightly
  return std::ldexp(static_cast<double>(quotient), -shift);
}

// A `core.heuristics.Heuristic` that has `powers`.
class Score {
 public:
  explicit Score(PyObject* heuristic)
      : exponent(number(heuristic, "exponent")), ages(truth(heuristic, "ages")),
        released(number(heuristic, "released")), foresight(number(heuristic, "foresight")),
        adjusts(foresight > 0 || released != 1) {
    Ref powers = attribute(heuristic, "powers");
    PyObject *cost, *size, *staleness;
    if (powers.get() == Py_None) {
      PyErr_SetString(PyExc_ValueError, "this heuristic is for Python");
      raise();
    }
    if (!PyArg_ParseTuple(powers.get(), "OOO", &cost, &size, &staleness)) raise();
    cost_ = PyObject_IsTrue(cost);
    size_ = PyObject_IsTrue(size);
    staleness_ = PyObject_IsTrue(staleness);
    root_ = PyFloat_Check(staleness);
  }

  const double exponent;  // of staleness
  const bool ages;        // whether the score falls with time
  const double released, foresight;
  const bool adjusts;     // whether there are factors

  double operator()(int64_t cost, int64_t size, int64_t staleness) const {
    if (root_)  // with floats from here on, in this order
      return static_cast<double>(cost) / (static_cast<double>(size) * std::pow(static_cast<double>(staleness), exponent));
    return divided(cost_ ? cost : 1, size_ ? size : 1, staleness_ ? staleness : 1);
  }
  // The score at staleness 1, of a lower bound of the cost.
  double share(double cost, int64_t size) const { return (cost_ ? cost : 1) / (size_ ? static_cast<double>(size) : 1); }
  // By what the score has fallen.
  double aged(int64_t staleness) const {
    auto time = static_cast<double>(staleness);
    return exponent == 1 ? time : std::pow(time, exponent);
  }
  // The staleness at which it has fallen by this.
  double staleness_of(double aged) const { return exponent == 1 ? aged : std::pow(aged, 1 / exponent); }
  // The factor for what is used at this distance of the recorded step.
  double nearness(int64_t distance) const { return std::pow(static_cast<double>(std::max<int64_t>(distance, 1)), foresight); }

 private:
  static double number(PyObject* heuristic, const char* name) {
    double found = PyFloat_AsDouble(attribute(heuristic, name).get());
    if (found == -1 && PyErr_Occurred()) raise();
    return found;
  }
  bool cost_, size_, staleness_, root_;
};

}  // namespace dtrrun

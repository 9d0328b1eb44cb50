// Counts of evictions and rematerializations, by the name of the operator.
#pragma once

#include <string>
#include <unordered_map>

#include "python.h"

namespace dtrrun {

struct Tally {
  int64_t evictions = 0;                 // of what the operator had made
  int64_t runs = 0, ns = 0, nbytes = 0;  // how often it ran again, and the time and the bytes of that
};

class Tallies {
 public:
  // Returns the tally of an operator, which has a `name`.
  Tally& of(PyObject* object) {
    static PyObject* its_name = PyUnicode_InternFromString("name");  // `attribute` would make a new string each time
    Ref name = checked(PyObject_GetAttr(object, its_name));
    Named& found = all_[name.get()];
    if (!found.name) found.name = std::move(name);
    return found.tally;
  }
  // Returns the number of evictions by operator, for those that have any: dict[str, int].
  Ref evictions() const {
    return sums([](const Tally& one) { return one.evictions; },
                [](const Tally& sum) { return checked(PyLong_FromLongLong(sum.evictions)); });
  }
  // Returns (number, ns, bytes) by operator, for those that ran again: dict[str, tuple[int, int, int]].
  Ref runs() const {
    return sums([](const Tally& one) { return one.runs; },
                [](const Tally& sum) {
                  auto number = [](int64_t value) { return static_cast<long long>(value); };
                  return checked(Py_BuildValue("(LLL)", number(sum.runs), number(sum.ns), number(sum.nbytes)));
                });
  }

 private:
  struct Named {
    Ref name;
    Tally tally;
  };

  // Two operators may have names that are equal but not the same object.
  template <class Count, class Make>
  Ref sums(const Count& count, const Make& make) const {
    std::unordered_map<std::string, Tally> by_name;
    for (const auto& [address, one] : all_) {
      const char* text = PyUnicode_AsUTF8(one.name.get());
      if (text == nullptr) raise();
      Tally& sum = by_name[text];
      sum.evictions += one.tally.evictions;
      sum.runs += one.tally.runs;
      sum.ns += one.tally.ns;
      sum.nbytes += one.tally.nbytes;
    }
    Ref found = checked(PyDict_New());
    for (const auto& [name, sum] : by_name)
      if (count(sum) != 0 && PyDict_SetItemString(found.get(), name.c_str(), make(sum).get()) < 0) raise();
    return found;
  }

  std::unordered_map<PyObject*, Named> all_;
};

}  // namespace dtrrun

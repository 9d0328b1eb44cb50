// Counts of evictions and rematerializations, by the name of the operator.
#pragma once

#include <map>
#include <string>
#include <tuple>
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
  // Returns the number of evictions by operator, for those that have any.
  std::map<std::string, int64_t> evictions() const {
    std::map<std::string, int64_t> found;
    for (const auto& [name, sum] : sums())
      if (sum.evictions != 0) found[name] = sum.evictions;
    return found;
  }
  // Returns (number, ns, bytes) by operator, for those that ran again.
  std::map<std::string, std::tuple<int64_t, int64_t, int64_t>> runs() const {
    std::map<std::string, std::tuple<int64_t, int64_t, int64_t>> found;
    for (const auto& [name, sum] : sums())
      if (sum.runs != 0) found[name] = {sum.runs, sum.ns, sum.nbytes};
    return found;
  }

 private:
  struct Named {
    Ref name;
    Tally tally;
  };

  // Two operators may have names that are equal but not the same object.
  std::unordered_map<std::string, Tally> sums() const {
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
    return by_name;
  }

  std::unordered_map<PyObject*, Named> all_;
};

}  // namespace dtrrun

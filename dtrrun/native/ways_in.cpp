// The ways in, compiled separately: their kernels for operators of many types take as long as everything else together.
#include "python.h"

#include "way_in_custom_rng.h"
#include "way_in_fake.h"

namespace dtrrun {

void take_way(std::string_view name) {
  if (name == "fake") FakeWay::install();
  if (name == "custom-rng") CustomRngWay::install();
}

}  // namespace dtrrun

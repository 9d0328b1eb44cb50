// How a heuristic scores a storage (`core.heuristics.Heuristic`).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>

namespace dtrrun {

// Returns cost / (size * staleness), rounded once, as Python divides integers.
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
  if (dividend % divisor != 0) quotient |= 1;                 // a sticky bit, so that halfway cases are rounded correctly
  return std::ldexp(static_cast<double>(quotient), -shift);
}

enum class Neighbours { NONE, ANCESTORS, E_STAR, EQCLASS };

// c / (m * s ** S), each of which may be left out, times two factors; or a function.
struct Heuristic {
  Neighbours neighbours;  // the storages whose cost a projected cost includes
  bool cost, size;
  bool staleness;         // the score falls with time
  bool root;              // staleness has an exponent, which makes all numbers floats
  double exponent = 1;    // of staleness: above 0, at most 1
  double released = 1;    // factor on the score of what the program has released
  double foresight = 0;   // exponent of the time until the next use, which divides the score; or 0
  // score(size, staleness, cost, projected_cost): if set, replaces all of these except `neighbours`.
  std::function<double(int64_t, int64_t, int64_t, int64_t)> function;

  bool adjusts() const { return foresight > 0 || released != 1; }

  // Returns the score for a projected cost, without the factors.
  double score(int64_t projected_cost, int64_t nbytes, int64_t since) const {
    if (root)  // in floats, in this order of operations
      return static_cast<double>(projected_cost) / (static_cast<double>(nbytes) * std::pow(static_cast<double>(since), exponent));
    return divided(cost ? projected_cost : 1, size ? nbytes : 1, staleness ? since : 1);
  }
  // Returns the score at staleness 1 for a lower bound of the projected cost.
  double share(double projected_cost, int64_t nbytes) const {
    return (cost ? projected_cost : 1) / (size ? static_cast<double>(nbytes) : 1);
  }
  // Returns the divisor by which the score has fallen at this staleness.
  double aged(int64_t since) const {
    auto time = static_cast<double>(since);
    return exponent == 1 ? time : std::pow(time, exponent);
  }
  // Returns the staleness at which the score has fallen by this divisor.
  double staleness_of(double fallen) const { return exponent == 1 ? fallen : std::pow(fallen, 1 / exponent); }
  // Returns the divisor for what is used at this distance in the recorded step.
  double nearness(int64_t distance) const { return std::pow(static_cast<double>(std::max<int64_t>(distance, 1)), foresight); }
};

}  // namespace dtrrun

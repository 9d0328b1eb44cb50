// A table of pointers by number, which takes a few instructions to look up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace dtrrun {

// Open addressing with linear probing. Does not own the values.
template <class Value>
class Table {
 public:
  // Returns the value of a key, or null.
  Value* find(int64_t key) const {
    if (cells_.empty()) return nullptr;
    for (size_t place = home(key);; place = next(place)) {
      const Cell& cell = cells_[place];
      if (cell.value == nullptr || cell.key == key) return cell.value;
    }
  }
  // Adds a value, or replaces the one that has this key. value: not null.
  void put(int64_t key, Value* value) {
    if (4 * (count_ + 1) > 3 * cells_.size()) grow();
    size_t place = home(key);
    while (cells_[place].value != nullptr && cells_[place].key != key) place = next(place);
    if (cells_[place].value == nullptr) count_++;
    cells_[place] = {key, value};
  }
  // Returns the value that the key had, or null.
  Value* remove(int64_t key) {
    if (cells_.empty()) return nullptr;
    size_t hole = home(key);
    while (cells_[hole].value != nullptr && cells_[hole].key != key) hole = next(hole);
    Value* found = cells_[hole].value;
    if (found == nullptr) return nullptr;
    for (size_t place = next(hole); cells_[place].value != nullptr; place = next(place)) {
      if (((place - home(cells_[place].key)) & (cells_.size() - 1)) < ((place - hole) & (cells_.size() - 1))) continue;
      cells_[hole] = cells_[place];
      hole = place;
    }
    cells_[hole] = {};
    count_--;
    return found;
  }
  size_t size() const { return count_; }
  // Calls function(key, value) for each, in no particular order. `function` must not change the table.
  template <class Function>
  void each(const Function& function) const {
    for (const Cell& cell : cells_)
      if (cell.value != nullptr) function(cell.key, *cell.value);
  }

 private:
  struct Cell {
    int64_t key = 0;
    Value* value = nullptr;
  };

  size_t home(int64_t key) const { return static_cast<size_t>(static_cast<uint64_t>(key) * 0x9E3779B97F4A7C15ull >> shift_); }
  size_t next(size_t place) const { return (place + 1) & (cells_.size() - 1); }
  void grow() {
    std::vector<Cell> before(cells_.empty() ? 64 : 2 * cells_.size());
    std::swap(before, cells_);
    shift_ = 64 - __builtin_ctzll(cells_.size());
    count_ = 0;
    for (const Cell& cell : before)
      if (cell.value != nullptr) put(cell.key, cell.value);
  }

  std::vector<Cell> cells_;  // a power of two of them
  size_t count_ = 0;
  int shift_ = 64;
};

}  // namespace dtrrun

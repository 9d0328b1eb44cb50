// Finds the `Signature` of a call that has been seen before, by what calls of equal cost and size share: the
// operator, its arguments without floating-point numbers, and the geometries of its tensors.
#pragma once

#include <cstring>
#include <vector>

#include "arguments.h"

namespace dtrrun {

// Returns the bits of a tensor that its kernels resolve: 1: conjugate, 2: negative.
inline int lazy_bits(const at::Tensor& tensor) { return tensor.is_conj() | tensor.is_neg() << 1; }

class Key {
 public:
  void clear() { size_ = 0; }
  void add(uint64_t word) { *room_for(1) = word; }
  void add(const at::Tensor& tensor, bool with_offset = true) {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    auto sizes = impl->sizes();
    auto strides = impl->strides();
    uint64_t* next = room_for(2 + 2 * sizes.size());
    *next++ = TENSOR | static_cast<uint64_t>(c10::typeMetaToScalarType(impl->dtype())) << 8 |
              static_cast<uint64_t>(lazy_bits(tensor)) << 16 | sizes.size() << 24;
    for (int64_t size : sizes) *next++ = static_cast<uint64_t>(size);
    for (int64_t stride : strides) *next++ = static_cast<uint64_t>(stride);
    *next = with_offset ? static_cast<uint64_t>(impl->storage_offset()) : 0;
  }
  // Returns false if it has not added anything that tells calls with this argument apart.
  bool add(const IValue& value) {
    if (value.isNone()) {
      add(NONE);
    } else if (value.isInt()) {
      add(INT);
      add(static_cast<uint64_t>(value.toInt()));
    } else if (value.isBool()) {
      add(BOOL | static_cast<uint64_t>(value.toBool()) << 8);
    } else if (value.isDouble()) {
      add(DOUBLE);  // such numbers vary between steps (learning rates), and affect neither cost nor size
    } else if (value.isComplexDouble()) {
      add(COMPLEX);
    } else if (value.isIntList()) {
      auto list = value.toListRef();
      add(INTS | list.size() << 8);
      for (const IValue& number : list) add(static_cast<uint64_t>(number.toInt()));
    } else if (value.isBoolList()) {
      auto list = value.toBoolList();
      add(BOOLS | list.size() << 8);
      for (bool one : list) add(static_cast<uint64_t>(one));
    } else if (value.isDoubleList()) {
      add(DOUBLES | value.toDoubleVector().size() << 8);
    } else if (value.isDevice()) {
      auto device = value.toDevice();
      add(DEVICE | static_cast<uint64_t>(device.type()) << 8 | static_cast<uint64_t>(device.index()) << 16);
    } else if (value.isString()) {
      const std::string& text = value.toStringRef();
      add(STRING | text.size() << 8);
      for (char letter : text) add(static_cast<uint64_t>(letter));
    } else if (value.isGenerator()) {
      add(GENERATOR);
    } else if (value.isList()) {  // of numbers: those of an optimizer's step
      auto items = value.toListRef();
      for (const IValue& item : items)
        if (!item.isDouble()) return false;
      add(DOUBLES | items.size() << 8);
    } else {
      return false;
    }
    return true;
  }
  // Adds a value that is not part of a signature.
  void add_other() { add(OTHER); }
  // Adds a number that affects the size of a result.
  void add_size(double number) {
    uint64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    add(DOUBLE);
    add(bits);
  }
  void add_list(size_t count) { add(TENSORS | count << 8); }

  uint64_t hash() const {
    uint64_t hash = size_;
    for (size_t i = 0; i < size_; i++) {
      hash = (hash ^ words_[i]) * 0x9E3779B97F4A7C15ull;
      hash ^= hash >> 32;
    }
    return hash;
  }
  const uint64_t* begin() const { return words_.data(); }
  const uint64_t* end() const { return words_.data() + size_; }
  size_t size() const { return size_; }

 private:
  enum : uint64_t {
    NONE = 1,
    INT,
    BOOL,
    DOUBLE,
    COMPLEX,
    INTS,
    BOOLS,
    DOUBLES,
    DEVICE,
    STRING,
    GENERATOR,
    TENSOR,
    TENSORS,
    OTHER
  };
  uint64_t* room_for(size_t more) {
    if (size_ + more > words_.size()) words_.resize(2 * (size_ + more));
    return words_.data() + std::exchange(size_, size_ + more);
  }

  std::vector<uint64_t> words_;
  size_t size_ = 0;
};

class Signatures {
 public:
  static constexpr size_t LIMIT_BYTES = size_t{16} << 20;  // about as in dispatch/signatures.py

  // Returns a borrowed reference, or null.
  PyObject* find(const Key& key) const {
    uint64_t hash = key.hash();
    for (size_t place = hash & mask(); cells_[place].signature; place = (place + 1) & mask()) {
      const Cell& cell = cells_[place];
      if (cell.hash == hash && cell.size == key.size() && std::equal(key.begin(), key.end(), words_.begin() + cell.begin))
        return cell.signature.get();
    }
    return nullptr;
  }
  void add(const Key& key, PyObject* signature) {
    if (words_.size() * sizeof(uint64_t) + cells_.size() * sizeof(Cell) >= LIMIT_BYTES) clear();
    if (2 * ++count_ > cells_.size()) grow();
    put({key.hash(), words_.size(), key.size(), Ref::copy(signature)});
    words_.insert(words_.end(), key.begin(), key.end());
  }
  void clear() {
    cells_ = std::vector<Cell>(FIRST);
    words_.clear();
    count_ = 0;
  }

 private:
  static constexpr size_t FIRST = 256;     // a power of 2
  struct Cell {
    uint64_t hash = 0;
    size_t begin = 0, size = 0;  // of its key among the words
    Ref signature;
  };
  size_t mask() const { return cells_.size() - 1; }
  void put(Cell&& cell) {
    size_t place = cell.hash & mask();
    while (cells_[place].signature) place = (place + 1) & mask();
    cells_[place] = std::move(cell);
  }
  void grow() {
    std::vector<Cell> before(2 * cells_.size());
    std::swap(before, cells_);
    for (Cell& cell : before)
      if (cell.signature) put(std::move(cell));
  }

  std::vector<Cell> cells_ = std::vector<Cell>(FIRST);
  std::vector<uint64_t> words_;
  size_t count_ = 0;
};

}  // namespace dtrrun

// What compute.cpp and operators.cpp share.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/stack.h>

#include <functional>
#include <map>
#include <string>

// Where a random operator begins: the seed and the offset of its philox generator, or their addresses in a graph.
struct Drawn {
  const int64_t* seed_at = nullptr;
  const int64_t* offset_at = nullptr;
  int64_t seed = 0, offset = 0;

  int64_t current_seed() const { return seed_at ? *seed_at : seed; }
  int64_t current_offset() const { return offset + (offset_at ? *offset_at : 0); }
};

// A generator of the CPU's that draws the same numbers for the same two.
at::Generator generator_of(int64_t seed, int64_t offset);

// Computes an operator on the CPU: takes its arguments from the stack, and leaves as many results.
using Computation = std::function<void(torch::jit::Stack&, const Drawn&)>;

// By names of operators: those that the CPU lacks, or computes otherwise.
std::map<std::string, Computation> computations();

// What is known about an operator.
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "arguments.h"
#include "kernel_settings.h"

namespace dtrrun {

// The formula for the number of elements of an operator's results. `runtime/formulas.py` says which operators have which.
enum class Formula {
  UNKNOWN,
  NOTHING,
  ELEMENTWISE,
  PRODUCT,
  ALL,
  GIVEN,
  SHAPED,
  COUNTED,
  ONE,
  FIRST,
  FIRST_TWICE,
  SECOND,
  REDUCED,
  EMBEDDING,
  EMBEDDING_BACKWARD,
  BATCH_NORM,
  BATCH_NORM_BACKWARD,
  LAYER_NORM,
  LAYER_NORM_BACKWARD,
  GROUP_NORM,
  GROUP_NORM_BACKWARD,
  CONVOLUTION,
  CONVOLUTION_BACKWARD,
  MAX_POOL,
  AVG_POOL,
  NLL_LOSS,
};

inline Formula formula_named(std::string_view name) {
  constexpr std::pair<std::string_view, Formula> NAMES[] = {
      {"nothing", Formula::NOTHING},
      {"elementwise", Formula::ELEMENTWISE},
      {"product", Formula::PRODUCT},
      {"all", Formula::ALL},
      {"given", Formula::GIVEN},
      {"shaped", Formula::SHAPED},
      {"counted", Formula::COUNTED},
      {"one", Formula::ONE},
      {"first", Formula::FIRST},
      {"first_twice", Formula::FIRST_TWICE},
      {"second", Formula::SECOND},
      {"reduced", Formula::REDUCED},
      {"embedding", Formula::EMBEDDING},
      {"embedding_backward", Formula::EMBEDDING_BACKWARD},
      {"batch_norm", Formula::BATCH_NORM},
      {"batch_norm_backward", Formula::BATCH_NORM_BACKWARD},
      {"layer_norm", Formula::LAYER_NORM},
      {"layer_norm_backward", Formula::LAYER_NORM_BACKWARD},
      {"group_norm", Formula::GROUP_NORM},
      {"group_norm_backward", Formula::GROUP_NORM_BACKWARD},
      {"convolution", Formula::CONVOLUTION},
      {"convolution_backward", Formula::CONVOLUTION_BACKWARD},
      {"max_pool", Formula::MAX_POOL},
      {"avg_pool", Formula::AVG_POOL},
      {"nll_loss", Formula::NLL_LOSS},
  };
  for (auto [known, formula] : NAMES)
    if (name == known) return formula;
  return Formula::UNKNOWN;
}

// What handles an operator. OTHER: nothing is done for it alone; more has to be found out about its calls.
enum class HandlerKind { OTHER, VIEW, PLAIN, WRITES, LISTS, NO_TENSORS };

// What is known about an operator; see `runtime/operators.py`.
struct OperatorInfo {
  bool is_old = false;  // what is known may have changed
  uint64_t number = 0;  // another one for each operator, and for one that takes the place of another in memory
  HandlerKind handler = HandlerKind::OTHER;
  bool composite = false, foreign = false, untouching = false, random = false, overwrites = false, uninitialised = false;
  bool views = false, only_views = false;  // as in `runtime/operators.py`
  // Of operators that `OTHER` handles:
  bool collective = false, reshapes = false, takes_storage = false, shares_memory = false, calls_others = false;
  bool compares_tensors = false, reads_opaque = false;
  bool is_classified = false;  // its results may be others than plain tensors over new memory of ours
  int workspace = -1;          // the place of a result that is one, of any operator
  bool shrinks = false;        // it may have allocated more than predicted
  bool makes_tensors = true, sized_by_numbers = false;
  bool opaque = false;  // one result is a workspace, which exists only if gradients may be computed
  bool blank = false;   // it overwrites memory that nothing has written to, perhaps only a part of it
  bool allocates_first = false, writes_beside = false;  // as in `runtime/operators.py`
  std::vector<size_t> mutates;  // the places of the tensors, or lists of them, that it writes to
  bool replayable = false, grows = false;  // it may have a recipe; what it writes to may become larger
  bool dynamic = false;         // the size of its results depends on data
  bool convolves = false;       // its library can do without a workspace, by another algorithm
  bool chooses_kernels = false;  // its library chooses one by the sizes of its arguments
  bool counts_flops = false;     // the cost model knows its FLOPs
  bool splits = false;           // calls with parts of its lists compute the same
  bool varies = false;          // what it allocates varies between calls of one signature
  int statistics[2] = {-1, -1}, trains = -1;  // places of running statistics, and of the training flag (-1: it trains)
  bool updates = false;                       // it writes to the statistics
  Formula formula = Formula::UNKNOWN;  // of what it allocates
  Ref replay;  // what is run again, without the statistics
  KernelState::Recent states;  // of its last calls
  bool writes_to(size_t place) const { return std::find(mutates.begin(), mutates.end(), place) != mutates.end(); }
  bool general = true;  // its kernels read only the general settings
  int64_t python_calls = 0, native_calls = 0, list_calls = 0;  // list_calls: of the native ones, those of lists.h
  Ref func, operator_;
  std::vector<Enumeration>* enumerations = new std::vector<Enumeration>();  // never freed: recipes refer to it
};

}  // namespace dtrrun

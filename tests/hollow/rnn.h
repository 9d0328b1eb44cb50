/* Where the weights of recurrent layers lie in one buffer: all matrices, layer by layer, then all biases. In elements. */
#ifndef HOLLOW_RNN_H
#define HOLLOW_RNN_H

#include <stdint.h>

#define HOLLOW_RESERVED 64 /* bytes at the beginning of the reserve space: the seed of its dropout */

struct rnn_sizes {
  int gates, input, hidden, projected, layers, directions;
};

static inline int rnn_output(const struct rnn_sizes* s) { return s->projected ? s->projected : s->hidden; }

/* Columns of a layer's matrix for what comes from below (half 0), and for what recurs (1). A layer is one direction's. */
static inline int rnn_columns(const struct rnn_sizes* s, int layer, int half) {
  if (half) return rnn_output(s);
  return layer < s->directions ? s->input : rnn_output(s) * s->directions;
}

static inline int64_t rnn_matrix(const struct rnn_sizes* s, int layer, int half) { /* half 2: the projection */
  int64_t at = 0;
  for (int one = 0; one <= layer; one++)
    for (int part = 0; part < 3; part++) {
      if (one == layer && part == half) return at;
      at += part < 2 ? (int64_t)s->gates * s->hidden * rnn_columns(s, one, part) : (int64_t)s->projected * s->hidden;
    }
  return at;
}

static inline int64_t rnn_bias(const struct rnn_sizes* s, int layer, int half) {
  return rnn_matrix(s, s->layers * s->directions - 1, 3) + (int64_t)(2 * layer + half) * s->gates * s->hidden;
}

static inline int64_t rnn_end(const struct rnn_sizes* s) { return rnn_bias(s, s->layers * s->directions, 0); }

#endif

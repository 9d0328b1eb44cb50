// Operators of CUDA's that the CPU lacks, or computes otherwise, by operators that it has.
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstring>
#include <exception>
#include <thread>

#include "compute.h"
#include "rnn.h"

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

namespace {

std::optional<Tensor> maybe(const IValue& value) {
  return value.isTensor() && value.toTensor().defined() ? std::optional<Tensor>(value.toTensor()) : std::nullopt;
}
std::vector<int64_t> ints(const IValue& value) { return value.toIntVector(); }
template <class... Results>
void give(Stack& s, Results... results) {
  s.clear();
  (s.push_back(IValue(std::move(results))), ...);
}

// -- convolutions and batch normalization -----------------------------------------------------------------------

void convolution(Stack& s, const Drawn&) {
  auto padding = ints(s[2]);
  give(s, at::convolution(s[0].toTensor(), s[1].toTensor(), {}, ints(s[3]), padding, ints(s[4]), false,
                          std::vector<int64_t>(padding.size(), 0), s[5].toInt()));
}
void transposed_convolution(Stack& s, const Drawn&) {
  give(s,
       at::convolution(s[0].toTensor(), s[1].toTensor(), {}, ints(s[4]), ints(s[2]), ints(s[5]), true, ints(s[3]), s[6].toInt()));
}
void depthwise_convolution(Stack& s, const Drawn&) {
  Tensor x = s[0].toTensor();
  give(s, at::convolution(x, s[1].toTensor(), maybe(s[3]), ints(s[4]), ints(s[5]), ints(s[6]), false, {0, 0}, x.size(1)));
}

// The reserve space is not read here, but the backward pass fails where it was lost.
constexpr uint8_t RESERVED = 0x5a;
void batch_norm(Stack& s, const Drawn&) {
  auto [y, mean, deviation] = at::native_batch_norm(s[0].toTensor(), maybe(s[1]), maybe(s[2]), maybe(s[3]), maybe(s[4]),
                                                    s[5].toBool(), s[6].toDouble(), s[7].toDouble());
  give(s, y, mean, deviation, at::full({1}, RESERVED, at::kByte));
}
void batch_norm_backward(Stack& s, const Drawn&) {
  Tensor reserve = s[8].toTensor();
  TORCH_CHECK(!reserve.numel() || *reserve.const_data_ptr<uint8_t>() == RESERVED, "hollow: batch norm's reserve space was lost");
  auto [x, weight, bias] = at::native_batch_norm_backward(s[1].toTensor(), s[0].toTensor(), maybe(s[2]), maybe(s[3]), maybe(s[4]),
                                                          maybe(s[5]), maybe(s[6]), true, s[7].toDouble(), {true, true, true});
  give(s, x, weight, bias);
}

// -- softmax, which may go from half precision to single ---------------------------------------------------------

Computation softmax(bool log) {
  return [log](Stack& s, const Drawn&) {
    Tensor x = s[0].toTensor();
    if (s[2].toBool()) x = x.to(at::kFloat);
    give(s, log ? at::_log_softmax(x, s[1].toInt(), false) : at::_softmax(x, s[1].toInt(), false));
  };
}
Computation softmax_backward(bool log) {
  return [log](Stack& s, const Drawn&) {
    Tensor g = s[0].toTensor(), y = s[1].toTensor();
    Tensor found = log ? at::_log_softmax_backward_data(g, y, s[2].toInt(), g.scalar_type())
                       : at::_softmax_backward_data(g, y, s[2].toInt(), g.scalar_type());
    give(s, found.to(s[3].toScalarType()));
  };
}

// -- dropout ----------------------------------------------------------------------------------------------------

Tensor drop_mask(at::IntArrayRef sizes, double p, at::Generator generator) {
  return at::empty(sizes, at::kBool).bernoulli_(1 - p, std::move(generator));
}

void native_dropout(Stack& s, const Drawn& drawn) {
  Tensor x = s[0].toTensor();
  double p = s[1].toDouble();
  if (!s[2].isNone() && !s[2].toBool()) return give(s, x.clone(), at::ones(x.sizes(), at::kBool));
  Tensor mask = drop_mask(x.sizes(), p, generator_of(drawn.current_seed(), drawn.current_offset()));
  give(s, p == 1 ? at::zeros_like(x) : x * mask * (1 / (1 - p)), mask);
}

// -- attention --------------------------------------------------------------------------------------------------

struct Attention {
  Tensor q, k, v;
  std::optional<Tensor> bias;
  double p;
  bool causal;
  double scale;
  int64_t seed, offset;

  Attention(Tensor query, Tensor key, Tensor value, std::optional<Tensor> bias, double p, bool causal, const IValue& scale)
      : q(query.to(at::kFloat)), k(key.to(at::kFloat)), v(value.to(at::kFloat)), bias(std::move(bias)), p(p), causal(causal),
        scale(scale.isNone() ? 1 / std::sqrt(static_cast<double>(query.size(-1))) : scale.toDouble()), seed(0), offset(0) {
    groups = q.size(1) / k.size(1);
    if (groups > 1) {
      k = k.repeat_interleave(groups, 1);
      v = v.repeat_interleave(groups, 1);
    }
  }

  Tensor scores() const {
    Tensor found = at::matmul(q, k.transpose(-2, -1)) * scale;
    if (bias) found = found + bias->to(at::kFloat);
    if (causal) found = found.masked_fill(at::ones({q.size(-2), k.size(-2)}, at::kBool).tril().logical_not(), -INFINITY);
    return found;
  }
  Tensor kept() const {  // what dropout multiplies weights by
    return drop_mask({q.size(0), q.size(1), q.size(2), k.size(2)}, p, generator_of(seed, offset)).to(at::kFloat) / (1 - p);
  }
  std::pair<Tensor, Tensor> forward() const {
    Tensor found = scores(), lse = found.logsumexp(-1);
    Tensor weights = (found - lse.unsqueeze(-1)).exp().nan_to_num(0.0);
    return {at::matmul(p > 0 ? weights * kept() : weights, v), lse};
  }
  // For queries, keys, values, and the bias.
  std::array<Tensor, 4> backward(const Tensor& grad, Tensor lse) const {
    lse = lse.narrow(2, 0, q.size(2)).to(at::kFloat);
    Tensor weights = (scores() - lse.unsqueeze(-1)).exp().nan_to_num(0.0), g = grad.to(at::kFloat);
    Tensor for_weights = at::matmul(g, v.transpose(-2, -1)), dropped = weights;
    if (p > 0) {
      Tensor mask = kept();
      for_weights = for_weights * mask;
      dropped = weights * mask;
    }
    Tensor for_scores = weights * (for_weights - (for_weights * weights).sum(-1, true));
    Tensor for_k = at::matmul(for_scores.transpose(-2, -1), q) * scale, for_v = at::matmul(dropped.transpose(-2, -1), g);
    if (groups > 1) {
      for_k = for_k.unflatten(1, {-1, groups}).sum(2);
      for_v = for_v.unflatten(1, {-1, groups}).sum(2);
    }
    return {at::matmul(for_scores, k) * scale, for_k, for_v, bias ? for_scores.sum_to_size(bias->sizes()) : Tensor()};
  }

 private:
  int64_t groups;
};

// A value that an operator was given as a tensor, of one element or of several.
int64_t number(const IValue& value, int64_t place = 0) {
  auto tensor = maybe(value);
  return tensor && tensor->numel() > place ? tensor->flatten()[place].to(at::kLong).item<int64_t>() : 0;
}

void efficient_attention(Stack& s, const Drawn& drawn) {
  Attention one(s[0].toTensor(), s[1].toTensor(), s[2].toTensor(), maybe(s[3]), s[5].toDouble(), s[6].toBool(), s[7]);
  one.seed = drawn.current_seed(), one.offset = drawn.current_offset();
  auto [out, lse] = one.forward();
  give(s, out, lse, at::scalar_tensor(one.seed, at::kLong), at::scalar_tensor(one.offset, at::kLong));
}
void efficient_attention_backward(Stack& s, const Drawn&) {
  if (!maybe(s[0])) return give(s, Tensor(), Tensor(), Tensor(), Tensor());
  Attention one(s[1].toTensor(), s[2].toTensor(), s[3].toTensor(), maybe(s[4]), s[9].toDouble(), s[11].toBool(), s[12]);
  one.seed = number(s[7]), one.offset = number(s[8]);
  auto [q, k, v, bias] = one.backward(s[0].toTensor(), s[6].toTensor());
  give(s, q, k, v, bias);
}
void flash_attention(Stack& s, const Drawn& drawn) {
  Attention one(s[0].toTensor(), s[1].toTensor(), s[2].toTensor(), {}, s[3].toDouble(), s[4].toBool(), s[6]);
  one.seed = drawn.current_seed(), one.offset = drawn.current_offset();
  auto [out, lse] = one.forward();
  Tensor state = at::tensor({one.seed, one.offset}, at::kLong);
  give(s, out, lse, Tensor(), Tensor(), one.q.size(2), one.k.size(2), state, Tensor(), Tensor());
}
void flash_attention_backward(Stack& s, const Drawn&) {
  Attention one(s[1].toTensor(), s[2].toTensor(), s[3].toTensor(), {}, s[10].toDouble(), s[11].toBool(), s[14]);
  one.seed = number(s[12], 0), one.offset = number(s[12], 1);
  auto [q, k, v, bias] = one.backward(s[0].toTensor(), s[5].toTensor());
  give(s, q, k, v);
}
// Alone, so its results have the dtype and the strides that the real one would give them.
Tensor as_heads(const Tensor& found, const Tensor& like) {
  return found.to(like.scalar_type()).transpose(1, 2).contiguous().transpose(1, 2);
}
void cudnn_attention(Stack& s, const Drawn& drawn) {
  Tensor query = s[0].toTensor();
  Attention one(query, s[1].toTensor(), s[2].toTensor(), maybe(s[3]), s[5].toDouble(), s[6].toBool(), s[8]);
  one.seed = drawn.current_seed(), one.offset = drawn.current_offset();
  auto [out, lse] = one.forward();
  give(s, as_heads(out, query), lse.unsqueeze(-1), Tensor(), Tensor(), one.q.size(2), one.k.size(2),
       at::scalar_tensor(one.seed, at::kLong), at::scalar_tensor(one.offset, at::kLong), Tensor());
}
void cudnn_attention_backward(Stack& s, const Drawn&) {
  Tensor query = s[1].toTensor();
  Attention one(query, s[2].toTensor(), s[3].toTensor(), maybe(s[8]), s[13].toDouble(), s[14].toBool(), s[15]);
  one.seed = number(s[6]), one.offset = number(s[7]);
  auto [q, k, v, bias] = one.backward(s[0].toTensor(), s[5].toTensor().squeeze(-1));
  give(s, as_heads(q, query), as_heads(k, query), as_heads(v, query));
}

// -- recurrent layers -------------------------------------------------------------------------------------------

// Runs on a thread of its own: with autograd, and with none of the program's modes.
void apart(const std::function<void()>& run) {
  std::exception_ptr error;
  std::thread([&] {
    try {
      run();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

enum { RELU, TANH, LSTM, GRU };

// From an operator's arguments, from `at` on: mode, hidden size, projected size, layers, batch first, dropout, train,
// both directions, batch sizes.
rnn_sizes sizes_of(const Stack& s, size_t at, const Tensor& input) {
  const int64_t mode = s[at].toInt();
  auto number = [&](size_t place) { return static_cast<int>(s[at + place].toInt()); };
  return {mode == LSTM  ? 4
          : mode == GRU ? 3
                        : 1,
          static_cast<int>(input.size(-1)),
          number(1),
          number(2),
          number(3),
          s[at + 7].toBool() ? 2 : 1};
}

// Views of the buffer, of each layer and direction.
std::vector<std::vector<Tensor>> weights_of(const rnn_sizes& sizes, const Tensor& buffer, bool biases) {
  std::vector<std::vector<Tensor>> all;
  const int64_t rows = sizes.gates * sizes.hidden;
  auto part = [&](int64_t from, int64_t height, int64_t width) {
    return buffer.narrow(0, from, height * width).view({height, width});
  };
  for (int layer = 0; layer < sizes.layers * sizes.directions; layer++) {
    std::vector<Tensor> own;
    for (int half : {0, 1}) own.push_back(part(rnn_matrix(&sizes, layer, half), rows, rnn_columns(&sizes, layer, half)));
    for (int half : {0, 1})
      if (biases) own.push_back(buffer.narrow(0, rnn_bias(&sizes, layer, half), rows));
    if (sizes.projected) own.push_back(part(rnn_matrix(&sizes, layer, 2), sizes.projected, sizes.hidden));
    all.push_back(own);
  }
  return all;
}

struct Layers {
  rnn_sizes sizes;
  int64_t mode;
  bool batch_first, biases;
  double p;
  std::vector<int64_t> batch_sizes;
  std::vector<std::vector<Tensor>> weights;
  Tensor x, h, c;
  int64_t seed = 0;

  Layers(const Stack& s, size_t at, const Tensor& input, const Tensor& buffer, Tensor hx, std::optional<Tensor> cx)
      : sizes(sizes_of(s, at, input)), mode(s[at].toInt()), batch_first(s[at + 4].toBool()), biases(s[2].toInt() >= 4),
        p(s[at + 6].toBool() ? s[at + 5].toDouble() : 0), batch_sizes(ints(s[at + 8])),
        weights(weights_of(sizes, buffer, biases)), x(input), h(std::move(hx)), c(cx.value_or(Tensor())) {
    if (swaps()) x = x.transpose(0, 1);
  }

  bool swaps() const { return batch_first && batch_sizes.empty(); }

  // Output, and the last states.
  std::array<Tensor, 3> forward() const {
    std::vector<Tensor> last_h, last_c;
    Tensor y = x;
    at::Generator generator = generator_of(seed, 0);
    for (int layer = 0; layer < sizes.layers; layer++) {
      const int from = layer * sizes.directions;
      std::vector<Tensor> own;
      for (int one = 0; one < sizes.directions; one++)
        own.insert(own.end(), weights[from + one].begin(), weights[from + one].end());
      Tensor first = h.narrow(0, from, sizes.directions), last;
      const bool both = sizes.directions == 2;
      auto batches = batch_sizes.empty() ? Tensor() : at::tensor(batch_sizes, at::kLong);
      if (mode == LSTM) {
        std::vector<Tensor> state = {first, c.narrow(0, from, sizes.directions)};
        auto [out, hy, cy] = batches.defined() ? at::lstm(y, batches, state, own, biases, 1, 0.0, true, both)
                                               : at::lstm(y, state, own, biases, 1, 0.0, true, both, false);
        y = out, last = hy;
        last_c.push_back(cy);
      } else {
        std::tuple<Tensor, Tensor> found;
        if (batches.defined())
          found = mode == GRU    ? at::gru(y, batches, first, own, biases, 1, 0.0, true, both)
                  : mode == TANH ? at::rnn_tanh(y, batches, first, own, biases, 1, 0.0, true, both)
                                 : at::rnn_relu(y, batches, first, own, biases, 1, 0.0, true, both);
        else
          found = mode == GRU    ? at::gru(y, first, own, biases, 1, 0.0, true, both, false)
                  : mode == TANH ? at::rnn_tanh(y, first, own, biases, 1, 0.0, true, both, false)
                                 : at::rnn_relu(y, first, own, biases, 1, 0.0, true, both, false);
        std::tie(y, last) = found;
      }
      last_h.push_back(last);
      if (p > 0 && layer + 1 < sizes.layers) y = y * drop_mask(y.sizes(), p, generator) / (1 - p);
    }
    return {swaps() ? y.transpose(0, 1) : y, at::cat(last_h), last_c.empty() ? Tensor() : at::cat(last_c)};
  }
};

void rnn(Stack& s, const Drawn&) {
  auto state = maybe(s[15]);
  Tensor input = s[0].toTensor(), buffer = maybe(s[3]).value_or(Tensor()), reserved = at::zeros({HOLLOW_RESERVED}, at::kByte);
  std::array<Tensor, 3> found;
  apart([&] {
    c10::NoGradGuard without;
    if (!buffer.defined()) {  // the real one copies the weights into a buffer
      auto list = s[1].toTensorVector();
      rnn_sizes sizes = sizes_of(s, 6, input);
      buffer = at::zeros({rnn_end(&sizes)}, list[0].options());
      size_t next = 0;
      for (auto& layer : weights_of(sizes, buffer, s[2].toInt() >= 4))
        for (Tensor& one : layer) one.copy_(list[next++]);
    }
    Layers layers(s, 6, input, buffer, s[4].toTensor(), maybe(s[5]));
    if (layers.p > 0 && state) {
      auto* at = reinterpret_cast<int64_t*>(state->data_ptr());
      layers.seed = at[0] * 1000003 + ++at[1];
      std::memcpy(reserved.data_ptr(), &layers.seed, sizeof layers.seed);
    }
    found = layers.forward();
  });
  give(s, found[0], found[1], found[2], reserved, buffer);
}

void rnn_backward(Stack& s, const Drawn&) {
  Tensor x, h, c;
  std::vector<Tensor> list;
  apart([&] {
    Tensor buffer = s[3].toTensor().clone().requires_grad_();
    auto leaf = [](const Tensor& t) { return t.detach().clone().requires_grad_(); };
    auto cell = maybe(s[5]);
    Tensor input = leaf(s[0].toTensor()), first = leaf(s[4].toTensor());
    std::optional<Tensor> first_c = cell ? std::optional<Tensor>(leaf(*cell)) : std::nullopt;
    Layers layers(s, 10, input, buffer, first, first_c);
    Tensor reserve = s[20].toTensor();
    if (layers.p > 0) std::memcpy(&layers.seed, reserve.const_data_ptr(), sizeof layers.seed);
    auto found = layers.forward();
    torch::autograd::variable_list outputs, gradients, inputs = {input, first, buffer};
    if (first_c) inputs.push_back(*first_c);
    for (size_t i = 0; i < 3; i++)
      if (auto grad = maybe(s[7 + i]); grad && found[i].defined()) {
        outputs.push_back(found[i]);
        gradients.push_back(*grad);
      }
    auto grads = torch::autograd::grad(outputs, inputs, gradients, {}, false, true);
    c10::NoGradGuard without;
    x = grads[0], h = grads[1], c = first_c ? grads[3] : Tensor();
    for (auto& layer : weights_of(layers.sizes, grads[2], layers.biases)) list.insert(list.end(), layer.begin(), layer.end());
    // The real one writes to its reserve space: what reads it once more reads something else.
    auto* end = static_cast<uint8_t*>(reserve.data_ptr()) + reserve.numel() - 1;
    if (reserve.numel() > HOLLOW_RESERVED) *end ^= 0xff;
  });
  give(s, x, h, c, list);
}

// -- others -----------------------------------------------------------------------------------------------------

void lstm_cell(Stack& s, const Drawn&) {
  Tensor gates = s[0].toTensor() + s[1].toTensor(), cx = s[2].toTensor();
  for (size_t bias : {3, 4})
    if (auto one = maybe(s[bias])) gates = gates + *one;
  auto parts = gates.chunk(4, 1);
  Tensor i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(), o = parts[3].sigmoid();
  Tensor cy = f * cx + i * g;
  give(s, o * cy.tanh(), cy, at::cat({i, f, g, o}, 1));
}
void lstm_cell_backward(Stack& s, const Drawn&) {
  Tensor cx = s[2].toTensor(), cy = s[3].toTensor();
  auto parts = s[4].toTensor().chunk(4, 1);
  Tensor i = parts[0], f = parts[1], g = parts[2], o = parts[3], t = cy.tanh();
  Tensor for_h = maybe(s[0]).value_or(at::zeros_like(cy)), for_c = maybe(s[1]).value_or(at::zeros_like(cy));
  Tensor d = for_c + for_h * o * (1 - t * t);
  Tensor gates = at::cat({d * g * i * (1 - i), d * cx * f * (1 - f), d * i * (1 - g * g), for_h * t * o * (1 - o)}, 1);
  give(s, gates, d * f, s[5].toBool() ? gates.sum(0) : Tensor());
}
// The workspace has what the backward pass needs: both gates, the new state, the old one, and its part of the new one.
void gru_cell(Stack& s, const Drawn&) {
  Tensor input = s[0].toTensor(), hidden = s[1].toTensor(), hx = s[2].toTensor();
  if (auto one = maybe(s[3])) input = input + *one;
  if (auto one = maybe(s[4])) hidden = hidden + *one;
  auto i = input.chunk(3, 1), h = hidden.chunk(3, 1);
  Tensor r = (i[0] + h[0]).sigmoid(), z = (i[1] + h[1]).sigmoid(), n = (i[2] + r * h[2]).tanh();
  give(s, n + z * (hx - n), at::cat({r, z, n, hx, h[2]}, 1));
}
void gru_cell_backward(Stack& s, const Drawn&) {
  Tensor g = s[0].toTensor();
  auto parts = s[1].toTensor().chunk(5, 1);
  Tensor r = parts[0], z = parts[1], n = parts[2], hx = parts[3], h = parts[4];
  Tensor for_n = g * (1 - z) * (1 - n * n), for_z = g * (hx - n) * z * (1 - z), for_r = for_n * h * r * (1 - r);
  Tensor input = at::cat({for_r, for_z, for_n}, 1), hidden = at::cat({for_r, for_z, for_n * r}, 1);
  const bool bias = s[2].toBool();
  give(s, input, hidden, g * z, bias ? input.sum(0) : Tensor(), bias ? hidden.sum(0) : Tensor());
}
void rms_norm_backward(Stack& s, const Drawn&) {
  Tensor dy = s[0].toTensor(), x = s[1].toTensor(), deviation = s[3].toTensor();
  auto weight = maybe(s[4]);
  std::vector<int64_t> normalized, others;
  const int64_t first = x.dim() - static_cast<int64_t>(ints(s[2]).size());
  for (int64_t d = 0; d < x.dim(); d++) (d < first ? others : normalized).push_back(d);
  Tensor normal = x * deviation, g = weight ? dy * *weight : dy, for_weight = dy * normal;
  if (!others.empty()) for_weight = for_weight.sum(others);
  give(s, deviation * (g - normal * (g * normal).mean(normalized, true)), weight ? for_weight : Tensor());
}

}  // namespace

std::map<std::string, Computation> computations() {
  return {
      {"cudnn_convolution", convolution},
      {"cudnn_convolution_transpose", transposed_convolution},
      {"_conv_depthwise2d", depthwise_convolution},
      {"cudnn_batch_norm", batch_norm},
      {"cudnn_batch_norm_backward", batch_norm_backward},
      {"_softmax", softmax(false)},
      {"_log_softmax", softmax(true)},
      {"_softmax_backward_data", softmax_backward(false)},
      {"_log_softmax_backward_data", softmax_backward(true)},
      {"native_dropout", native_dropout},
      {"_scaled_dot_product_efficient_attention", efficient_attention},
      {"_scaled_dot_product_efficient_attention_backward", efficient_attention_backward},
      {"_scaled_dot_product_flash_attention", flash_attention},
      {"_scaled_dot_product_flash_attention_backward", flash_attention_backward},
      {"_scaled_dot_product_cudnn_attention", cudnn_attention},
      {"_scaled_dot_product_cudnn_attention_backward", cudnn_attention_backward},
      {"_cudnn_rnn", rnn},
      {"_cudnn_rnn_backward", rnn_backward},
      {"_thnn_fused_lstm_cell", lstm_cell},
      {"_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward},
      {"_thnn_fused_gru_cell", gru_cell},
      {"_thnn_fused_gru_cell_backward", gru_cell_backward},
      {"_fused_rms_norm_backward", rms_norm_backward},
  };
}

// Attention and GELU for a CPU, forward and backward. The formulas are derived in attention_python.py and gelu_python.py; here
// is how to get them fast: large products by PyTorch, everything between two products in one pass over a row that is still in
// the core's cache.
//
// N rows times heads, S queries, T keys, D width of queries and keys, W width of values.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>

namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
template <typename scalar_t>
using Vec = at::vec::Vectorized<scalar_t>;  // as many numbers as the processor computes with at once

// Half precision as fp32: computed there and rounded at the end of each pass.
Tensor in_wide(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? x.contiguous() : x.to(at::kFloat).contiguous();
}

// ---------------------------------------------------------------------------------------------------------------------- GELU

constexpr double kRootHalf = 0.70710678118654752440;        // √(1/2)
constexpr double kOneOverRoot2Pi = 0.39894228040143267794;  // 1/√(2π)
constexpr double kRoot2OverPi = 0.79788456080286535588;     // √(2/π)
constexpr double kCubic = 0.044715;
constexpr int64_t kNumbersPerTask = 1 << 14;  // fewer are not worth waking another core for

// Φ(x)
template <typename scalar_t>
Vec<scalar_t> below(Vec<scalar_t> x) {
  return Vec<scalar_t>(0.5) + Vec<scalar_t>(0.5) * (x * Vec<scalar_t>(kRootHalf)).erf();
}

// tanh u(x)
template <typename scalar_t>
Vec<scalar_t> tanh_inner(Vec<scalar_t> x) {
  using V = Vec<scalar_t>;
  return (V(kRoot2OverPi) * x * (V(1) + V(kCubic) * x * x)).tanh();
}

template <typename scalar_t>
Vec<scalar_t> gelu_of(Vec<scalar_t> x, bool tanh) {
  using V = Vec<scalar_t>;
  return tanh ? V(0.5) * x * (V(1) + tanh_inner(x)) : x * below(x);
}

template <typename scalar_t>
Vec<scalar_t> gelu_slope(Vec<scalar_t> x, bool tanh) {
  using V = Vec<scalar_t>;
  if (!tanh) {
    return below(x) + x * V(kOneOverRoot2Pi) * (V(-0.5) * x * x).exp();
  }
  V t = tanh_inner(x);
  V inner_slope = V(kRoot2OverPi) * (V(1) + V(3 * kCubic) * x * x);
  return V(0.5) * (V(1) + t) + V(0.5) * x * (V(1) - t * t) * inner_slope;
}

// One pass: every number is read once and written once, whatever is computed in between.
Tensor gelu(const Tensor& x, bool tanh) {
  Tensor in = in_wide(x), out = at::empty_like(in);
  AT_DISPATCH_FLOATING_TYPES(in.scalar_type(), "gelu", [&] {
    const scalar_t* from = in.const_data_ptr<scalar_t>();
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, in.numel(), kNumbersPerTask, [&](int64_t begin, int64_t end) {
      at::vec::map<scalar_t>([&](Vec<scalar_t> x) { return gelu_of(x, tanh); }, to + begin, from + begin, end - begin);
    });
  });
  return out.to(x.scalar_type());
}

Tensor gelu_backward(const Tensor& grad, const Tensor& x, bool tanh) {
  TORCH_CHECK(grad.sizes() == x.sizes() && grad.scalar_type() == x.scalar_type(),
              "gelu: the gradient needs the shape and the type of x");
  Tensor in = in_wide(x), grad_out = in_wide(grad), grad_in = at::empty_like(in);
  AT_DISPATCH_FLOATING_TYPES(in.scalar_type(), "gelu_backward", [&] {
    const scalar_t* from = in.const_data_ptr<scalar_t>();
    const scalar_t* above = grad_out.const_data_ptr<scalar_t>();
    scalar_t* to = grad_in.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, in.numel(), kNumbersPerTask, [&](int64_t begin, int64_t end) {
      at::vec::map2<scalar_t>([&](Vec<scalar_t> g, Vec<scalar_t> x) { return g * gelu_slope(x, tanh); },
                              to + begin, above + begin, from + begin, end - begin);
    });
  });
  return grad_in.to(x.scalar_type());
}

// ----------------------------------------------------------------------------------------------------------------- Attention

constexpr int64_t kScoresAtOnce = 1 << 17;  // half a MiB of scores in fp32: a block and its gradient fit a core's cache,
constexpr int64_t kFewestQueries = 256;     // unless there are many keys: a product with fewer rows is slow

// "lowbias32" of Chris Wellons's hash prospector
inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352dU;
  x = (x ^ (x >> 15)) * 0x846ca68bU;
  return x ^ (x >> 16);
}

// What the softmax of each row needs beside the products.
template <typename scalar_t>
struct Rows {
  int64_t heads, queries, keys;  // H, S, T
  bool causal;
  scalar_t scale;
  const scalar_t* bias = nullptr;  // B, H, S by the strides, T numbers side by side; null: there is none
  int64_t bias_strides[3] = {0, 0, 0};
  double dropout;
  uint32_t seed[2] = {0, 0};

  // Keys that a query may see by its position: the first ones.
  int64_t seen(int64_t query) const { return causal ? std::min(keys, query + 1) : keys; }

  // Of row and head n = b·H + h
  const scalar_t* bias_of(int64_t n, int64_t query) const {
    const int64_t* strides = bias_strides;
    return bias ? bias + n / heads * strides[0] + n % heads * strides[1] + query * strides[2] : nullptr;
  }

  // Z: see `dropout_factors` in attention_python.py, which draws the same.
  void dropout_factors(scalar_t* z, int64_t n, int64_t query, int64_t count) const {
    const uint32_t row_key = mix(mix(uint32_t(n * queries + query) + seed[0]) ^ seed[1]);
    const int32_t threshold = int32_t(std::llround(dropout * 4294967296.0) - 2147483648LL);
    const scalar_t kept = 1 / (1 - dropout);
    for (int64_t j = 0; j < count; ++j) {
      z[j] = int32_t(mix(row_key ^ uint32_t(j))) >= threshold ? kept : scalar_t(0);
    }
  }
};

// exp_u20 below is the quicker one of PyTorch's two exponentials in fp32, at most 20 units of the last place off.

// Calls step(j, n) for the n numbers from j on, a whole vector or the rest of a row.
template <typename scalar_t, typename Step>
void by_vectors(int64_t count, const Step& step) {
  for (int64_t j = 0; j < count; j += Vec<scalar_t>::size()) {
    step(j, std::min<int64_t>(Vec<scalar_t>::size(), count - j));
  }
}

// s x + m for n numbers of a row of Q Kᵀ; bias is null where there is none.
template <typename scalar_t>
Vec<scalar_t> score(const scalar_t* row, const scalar_t* bias, scalar_t scale, int64_t j, int64_t n) {
  using V = Vec<scalar_t>;
  const V x = V::loadu(row + j, n) * V(scale);
  return bias ? x + V::loadu(bias + j, n) : x;
}

// A row of Q Kᵀ → exp(a − largest a) of its scores a; returns the largest and the sum, in two passes.
template <typename scalar_t>
std::tuple<scalar_t, scalar_t> softmax(scalar_t* row, const scalar_t* bias, scalar_t scale, int64_t count) {
  using V = Vec<scalar_t>;
  const scalar_t lowest = std::numeric_limits<scalar_t>::lowest();  // of a row that sees nothing: -inf − -inf is nan
  V largest(lowest), sum(0);
  by_vectors<scalar_t>(count, [&](int64_t j, int64_t n) {
    const V a = score(row, bias, scale, j, n);
    a.store(row + j, n);
    largest = at::vec::maximum(largest, V::set(largest, a, n));
  });
  const scalar_t peak = at::vec::vec_reduce_all<scalar_t>([](V a, V b) { return at::vec::maximum(a, b); }, largest);
  by_vectors<scalar_t>(count, [&](int64_t j, int64_t n) {
    const V weight = (V::loadu(row + j, n) - V(peak)).exp_u20();
    weight.store(row + j, n);
    sum = sum + V::set(V(0), weight, n);
  });
  const scalar_t total = at::vec::vec_reduce_all<scalar_t>([](V a, V b) { return a + b; }, sum);
  return {peak, std::max(total, scalar_t(1))};  // a row that sees anything has a term exp(0) = 1
}

// A row of Q Kᵀ → P ∘ Z, and a row of ∂O Vᵀ → s ∂A, in one pass. z is null without dropout.
template <typename scalar_t>
void softmax_backward(scalar_t* row, scalar_t* grad, const scalar_t* bias, const scalar_t* z,
                      const scalar_t* log_sum, scalar_t delta, scalar_t scale, int64_t count) {
  using V = Vec<scalar_t>;
  const V peak(log_sum[0]), log_total(log_sum[1]);
  by_vectors<scalar_t>(count, [&](int64_t j, int64_t n) {
    const V p = (score(row, bias, scale, j, n) - peak - log_total).exp_u20();
    const V kept = z ? V::loadu(z + j, n) : V(1);
    const V grad_p = V::loadu(grad + j, n) * kept;
    (p * kept).store(row + j, n);
    (p * (grad_p - V(delta)) * V(scale)).store(grad + j, n);
  });
}

// Calls block(room, first head, heads, first query, queries, keys) for blocks that cover everything, each head by one thread
// alone: the gradients of its keys and values are then nobody else's. The room has two numbers for each score of a block.
template <typename Block>
void for_blocks(const Tensor& q, int64_t keys, bool causal, const Block& block) {
  const int64_t all_heads = q.size(0), queries = q.size(1);
  const int64_t share = std::max<int64_t>(1, all_heads / at::get_num_threads());
  const int64_t heads_at_once = std::clamp<int64_t>(kScoresAtOnce / std::max<int64_t>(1, queries * keys), 1, share);
  const int64_t queries_at_once = std::min(queries, std::max(kFewestQueries, kScoresAtOnce / keys));
  const int64_t groups = (all_heads + heads_at_once - 1) / heads_at_once;
  std::atomic<int64_t> next{0};  // whoever is free takes the next group: a core that other programs disturb takes fewer
  at::parallel_for(0, std::min<int64_t>(groups, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    // These apply to a thread, so each sets them: no graph is recorded in here, the caller's inference mode, which the thread
    // knows nothing of, forbids no write, and autocast changes no product.
    at::AutoDispatchBelowADInplaceOrView no_graph;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Tensor room = at::empty({2, heads_at_once * queries_at_once * keys}, q.options());
    for (int64_t group = next++; group < groups; group = next++) {
      const int64_t head = group * heads_at_once, heads = std::min(heads_at_once, all_heads - head);
      for (int64_t query = 0; query < queries; query += queries_at_once) {
        const int64_t last = std::min(queries, query + queries_at_once);
        block(room, head, heads, query, last - query, causal ? std::min(keys, last) : keys);
      }
    }
  });
}

template <typename scalar_t>
Rows<scalar_t> rows_of(const Tensor& q, const Tensor& k, const MaybeTensor& bias, bool causal, double scale,
                       double dropout, const MaybeTensor& seed) {
  Rows<scalar_t> rows{q.size(1), q.size(2), k.size(2), causal, scalar_t(scale)};
  rows.dropout = dropout;
  if (bias) {
    TORCH_CHECK(bias->scalar_type() == c10::CppTypeToScalarType<scalar_t>::value && (k.size(2) == 1 || bias->stride(3) == 1),
                "attention: the bias needs the type that is computed in, its keys side by side");
    rows.bias = bias->const_data_ptr<scalar_t>();
    for (int axis = 0; axis < 3; ++axis) {
      rows.bias_strides[axis] = bias->size(axis) == 1 ? 0 : bias->stride(axis);
    }
  }
  if (dropout > 0) {
    const int32_t* numbers = seed->const_data_ptr<int32_t>();
    rows.seed[0] = uint32_t(numbers[0]), rows.seed[1] = uint32_t(numbers[1]);
  }
  return rows;
}

// A bias that is the same for all keys, spread: the loops above read it key by key.
MaybeTensor spread(const MaybeTensor& bias, int64_t keys) {
  return bias && bias->size(3) != keys ? bias->expand({-1, -1, -1, keys}).contiguous() : bias;
}

// (B, H, S, D) → (N, S, D)
Tensor by_heads(const Tensor& x) { return in_wide(x).flatten(0, 1); }

// Some heads, and of these some queries or keys
Tensor part(const Tensor& x, int64_t head, int64_t heads, int64_t first, int64_t count) {
  return x.narrow(0, head, heads).narrow(1, first, count);
}

// A block of scores (n, s, t) in the room for one
Tensor scores_in(const Tensor& room, int64_t n, int64_t s, int64_t t) { return room.narrow(0, 0, n * s * t).view({n, s, t}); }

// Whoever calls through torch.ops.attention_op meets no Python that checks: a wrong shape would read foreign memory.
void check_arguments(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& bias, double dropout,
                     const MaybeTensor& seed) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "attention: q, k and v have four axes");
  TORCH_CHECK(q.is_floating_point() && q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(),
              "attention: q, k and v need one floating-point type");
  const int64_t sizes[4] = {q.size(0), q.size(1), q.size(2), k.size(2)};  // B, H, S, T
  for (int axis = 0; axis < 2; ++axis) {
    TORCH_CHECK(k.size(axis) == sizes[axis] && v.size(axis) == sizes[axis], "attention: batch and heads differ");
  }
  TORCH_CHECK(q.size(3) == k.size(3), "attention: queries and keys differ in width");
  TORCH_CHECK(k.size(2) == v.size(2), "attention: as many values as keys");
  TORCH_CHECK(k.size(2) > 0, "attention: no keys");
  if (bias) {
    TORCH_CHECK(bias->dim() == 4, "attention: the bias has four axes");
    for (int axis = 0; axis < 4; ++axis) {
      TORCH_CHECK(bias->size(axis) == 1 || bias->size(axis) == sizes[axis], "attention: the bias does not fit the scores");
    }
  }
  TORCH_CHECK(dropout >= 0 && dropout < 1, "attention: dropout is in [0, 1)");
  TORCH_CHECK(dropout == 0 || (seed && seed->scalar_type() == at::kInt && seed->numel() == 2 && seed->is_contiguous()),
              "attention: dropout needs a seed of two int32");
}

// (B, H, S, D), (B, H, T, D), (B, H, T, W) → the output (B, H, S, W) and the two parts of ℓ (B, H, S, 2)
std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& some_bias,
                                     bool causal, double scale, double dropout, const MaybeTensor& seed) {
  check_arguments(q, k, v, some_bias, dropout, seed);
  const Tensor queries = by_heads(q), keys = by_heads(k), values = by_heads(v);
  const MaybeTensor bias = spread(some_bias, k.size(2));
  Tensor out = at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, queries.options());
  Tensor log_sum = at::empty({q.size(0), q.size(1), q.size(2), 2}, queries.options());
  Tensor out_by_heads = out.flatten(0, 1);
  AT_DISPATCH_FLOATING_TYPES(queries.scalar_type(), "attention", [&] {
    using V = Vec<scalar_t>;
    const Rows<scalar_t> rows = rows_of<scalar_t>(q, k, bias, causal, scale, dropout, seed);
    scalar_t* log_sums = log_sum.mutable_data_ptr<scalar_t>();
    for_blocks(queries, k.size(2), causal, [&](const Tensor& room, int64_t head, int64_t n, int64_t first, int64_t s, int64_t t) {
      Tensor weights = scores_in(room[0], n, s, t);
      at::bmm_out(weights, part(queries, head, n, first, s), part(keys, head, n, 0, t).transpose(1, 2));
      Tensor z = at::empty({dropout > 0 ? t : 0}, weights.options()), totals = at::empty({n, s, 1}, weights.options());
      scalar_t *row = weights.mutable_data_ptr<scalar_t>(), *factors = z.mutable_data_ptr<scalar_t>();
      scalar_t* total = totals.mutable_data_ptr<scalar_t>();
      for (int64_t in_head = head; in_head < head + n; ++in_head) {
        for (int64_t query = first; query < first + s; ++query, row += t, ++total) {
          const int64_t seen = rows.seen(query);
          scalar_t* parts = log_sums + 2 * (in_head * rows.queries + query);
          std::tie(parts[0], *total) = softmax(row, rows.bias_of(in_head, query), rows.scale, seen);
          parts[1] = std::log(*total);
          if (dropout > 0) {
            rows.dropout_factors(factors, in_head, query, seen);
            at::vec::map2<scalar_t>([](V p, V f) { return p * f; }, row, row, factors, seen);
          }
          std::fill(row + seen, row + t, scalar_t(0));
        }
      }
      Tensor block = part(out_by_heads, head, n, first, s);
      at::bmm_out(block, weights, part(values, head, n, 0, t));
      block.div_(totals);  // S·W divisions instead of S·T
    });
  });
  return {out.to(q.scalar_type()), log_sum};
}

// sum (n, t, d) becomes Xᵀ Y, or has it added: x (n, s, t), y (n, s, d). A sum that lies transposed in memory gets Yᵀ X.
void add_product(const Tensor& sum, const Tensor& x, const Tensor& y, bool add) {
  if (sum.stride(1) == 1) {
    sum.transpose(1, 2).baddbmm_(y.transpose(1, 2), x, add);
  } else {
    sum.baddbmm_(x.transpose(1, 2), y, add);
  }
}

// ∂O → ∂Q, ∂K, ∂V
std::tuple<Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& some_bias, const Tensor& out,
    const Tensor& some_log_sum, bool causal, double scale, double dropout, const MaybeTensor& seed) {
  check_arguments(q, k, v, some_bias, dropout, seed);
  const int64_t shape[4] = {q.size(0), q.size(1), q.size(2), v.size(3)};  // B, H, S, W
  const int64_t parts_of_log_sum[4] = {q.size(0), q.size(1), q.size(2), 2};
  TORCH_CHECK(grad.sizes() == shape && out.sizes() == shape && some_log_sum.sizes() == parts_of_log_sum,
              "attention: the gradient and what the forward pass gave do not fit q and v");
  const Tensor log_sum = in_wide(some_log_sum);
  const Tensor grads = by_heads(grad), queries = by_heads(q), keys = by_heads(k), values = by_heads(v), outs = by_heads(out);
  TORCH_CHECK(grads.scalar_type() == queries.scalar_type() && outs.scalar_type() == queries.scalar_type() &&
                  log_sum.scalar_type() == queries.scalar_type(),
              "attention: the gradient and what the forward pass gave need the type of q");
  const MaybeTensor bias = spread(some_bias, k.size(2));
  Tensor grad_q = at::empty_like(queries), grad_k = at::empty_like(keys), grad_v = at::empty_like(values);
  const int64_t threads = at::get_num_threads();
  const Tensor sums_k = at::empty({threads, 1, k.size(3), k.size(2)}, keys.options());  // ∂K of the head a thread is at
  const Tensor sums_v = at::empty({threads, 1, v.size(3), v.size(2)}, values.options());
  if (q.size(2) == 0) {  // then there is no block
    grad_k.zero_(), grad_v.zero_();
  }
  AT_DISPATCH_FLOATING_TYPES(queries.scalar_type(), "attention_backward", [&] {
    using V = Vec<scalar_t>;
    const Rows<scalar_t> rows = rows_of<scalar_t>(q, k, bias, causal, scale, dropout, seed);
    const scalar_t* log_sums = log_sum.const_data_ptr<scalar_t>();
    const scalar_t *all_grads = grads.const_data_ptr<scalar_t>(), *all_outs = outs.const_data_ptr<scalar_t>();
    const int64_t width = v.size(3);
    for_blocks(queries, k.size(2), causal, [&](const Tensor& room, int64_t head, int64_t n, int64_t first, int64_t s, int64_t t) {
      const Tensor block_q = part(queries, head, n, first, s), block_k = part(keys, head, n, 0, t);
      const Tensor block_grad = part(grads, head, n, first, s);
      Tensor weights = scores_in(room[0], n, s, t), grad_a = scores_in(room[1], n, s, t);
      at::bmm_out(weights, block_q, block_k.transpose(1, 2));
      at::bmm_out(grad_a, block_grad, part(values, head, n, 0, t).transpose(1, 2));
      Tensor z = at::empty({dropout > 0 ? t : 0}, weights.options());
      scalar_t *row = weights.mutable_data_ptr<scalar_t>(), *grad_row = grad_a.mutable_data_ptr<scalar_t>();
      scalar_t* factors = dropout > 0 ? z.mutable_data_ptr<scalar_t>() : nullptr;
      for (int64_t in_head = head; in_head < head + n; ++in_head) {
        for (int64_t query = first; query < first + s; ++query, row += t, grad_row += t) {
          const int64_t number = in_head * rows.queries + query, seen = rows.seen(query);
          const scalar_t delta = at::vec::map2_reduce_all<scalar_t>(
              [](V a, V b) { return a * b; }, [](V a, V b) { return a + b; }, all_grads + number * width,
              all_outs + number * width, width);
          if (factors) {
            rows.dropout_factors(factors, in_head, query, seen);
          }
          const scalar_t* biases = rows.bias_of(in_head, query);
          softmax_backward(row, grad_row, biases, factors, log_sums + 2 * number, delta, rows.scale, seen);
          std::fill(row + seen, row + t, scalar_t(0));
          std::fill(grad_row + seen, grad_row + t, scalar_t(0));
        }
      }
      Tensor into_q = part(grad_q, head, n, first, s);
      at::bmm_out(into_q, grad_a, block_k);
      // A head in one block, or several such heads: no other block adds to these gradients. Else sums over the blocks, which
      // are kept transposed: the product is faster so by a third.
      const bool alone = s == rows.queries;
      Tensor into_k = alone ? grad_k.narrow(0, head, n) : sums_k[at::get_thread_num()].transpose(1, 2);
      Tensor into_v = alone ? grad_v.narrow(0, head, n) : sums_v[at::get_thread_num()].transpose(1, 2);
      if (first == 0 && t < k.size(2)) {  // keys that the first queries do not see
        into_k.zero_(), into_v.zero_();
      }
      add_product(into_k.narrow(1, 0, t), grad_a, block_q, first > 0);
      add_product(into_v.narrow(1, 0, t), weights, block_grad, first > 0);
      if (!alone && first + s == rows.queries) {
        grad_k[head].copy_(into_k[0]), grad_v[head].copy_(into_v[0]);  // one head: two axes are copied faster than three
      }
    });
  });
  return {grad_q.view(q.sizes()).to(q.scalar_type()), grad_k.view(k.sizes()).to(k.scalar_type()),
          grad_v.view(v.sizes()).to(v.scalar_type())};
}

}  // namespace

TORCH_LIBRARY(attention_op, m) {
  m.def("gelu(Tensor x, bool tanh) -> Tensor");
  m.def("gelu_backward(Tensor grad, Tensor x, bool tanh) -> Tensor");
  m.def("attention(Tensor q, Tensor k, Tensor v, Tensor? bias, bool causal, float scale, float dropout, Tensor? seed) "
        "-> (Tensor, Tensor)");
  m.def("attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor out, Tensor log_sum, "
        "bool causal, float scale, float dropout, Tensor? seed) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(attention_op, CPU, m) {
  m.impl("gelu", &gelu);
  m.impl("gelu_backward", &gelu_backward);
  m.impl("attention", &attention);
  m.impl("attention_backward", &attention_backward);
}

// What a training step of a Transformer does between two matrix products with weights, each in one pass over memory: biases,
// dropout, residuals, norms, the inner part of attention, and the softmax over the vocabulary. kernels.py says what each
// function computes; here is how. `Narrow`, the format of the matrix products, is float or bf16
// (compiled with -DNARROW=…); sums are always made in float.
//
// N rows (tokens), D width, B sentences, H heads, W = D / H, T queries, S keys, V vocabulary. W, and with it D, and the width of
// the feed-forward layers are multiples of 16, so of every vector's size.

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include <omp.h>

#include "vectors.h"

using Narrow = NARROW;

namespace {

// --------------------------------------------------------------------------------------------------------------------- Dropout

// "lowbias32" of Chris Wellons's hash prospector: every bit of the result depends on every bit of x.
template <typename Word>
inline Word mix(Word x) {
  x = (x ^ (x >> 16)) * 0x7feb352dU;
  x = (x ^ (x >> 15)) * 0x846ca68bU;
  return x ^ (x >> 16);
}

// Which numbers are kept is a function of the seed, the row and the place in the row: nothing is stored for the backward pass.
struct Dropout {
  uint32_t threshold;  // p · 2^32
  float kept;          // 1 / (1 − p)
  uint64_t seed;

  Dropout(double p, int64_t seed) : threshold(uint32_t(std::min(p * 4294967296.0, 4294967295.0))),
                                    kept(float(1 / (1 - p))), seed(uint64_t(seed)) {}

  uint32_t row_key(int64_t row) const { return mix(mix(uint32_t(row) + uint32_t(seed)) ^ uint32_t(seed >> 32)); }

  // 0 or 1 / (1 − p) for the places j, j + 1, … of a row
  Floats factors(uint32_t row_key, int64_t j) const { return of_words(((Words)lane_numbers() + uint32_t(j)) ^ row_key); }

  Floats of_words(Words words) const {
    if (threshold == 0) return broadcast(1);
    return mix(words) >= threshold ? broadcast(kept) : Floats{};
  }
};

}  // namespace

extern "C" {

// ----------------------------------------------------------------------------------------------------------------- Copy and pad

// to ← wide + narrow, one of which may be null, and a narrow copy; the rows from `tokens` to `rows` become 0.
void copy_rows(const float* wide, const Narrow* narrow, float* to, Narrow* narrow_to, int64_t tokens, int64_t rows, int64_t width,
               int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t j = n * width; j < (n + 1) * width; j += kLanes) {
      Floats x{};
      if (wide && n < tokens) x += load(wide + j);
      if (narrow && n < tokens) x += load(narrow + j);
      store(to + j, x);
      if (narrow_to) store(narrow_to + j, x);
    }
  }
}

// ----------------------------------------------------------------------------------------------------- Residual, dropout and norm

// sum ← residual + drop(branch + bias); y ← norm(sum) · gain + shift, and a narrow copy. Without a branch the norm alone.
void add_norm(const float* residual, const Narrow* branch, const float* bias, const float* gain, const float* shift, float* sum,
              float* moments, float* y, Narrow* narrow, int64_t tokens, int64_t width, double epsilon, double p, int64_t seed,
              int64_t threads) {
  const Dropout dropout(p, seed);
#pragma omp parallel for num_threads(threads)
  for (int64_t n = 0; n < tokens; ++n) {
    const uint32_t key = dropout.row_key(n);
    float* row = sum + n * width;
    Floats total{}, squares{};
    for (int64_t j = 0; j < width; j += kLanes) {
      Floats x = load(residual + n * width + j);
      if (branch) {
        x += (load(branch + n * width + j) + load(bias + j)) * dropout.factors(key, j);
      }
      store(row + j, x);
      total += x;
    }
    const float mean = sum_of(total) / width;
    for (int64_t j = 0; j < width; j += kLanes) {
      const Floats away = load(row + j) - mean;
      squares += away * away;
    }
    const float scale = 1 / std::sqrt(sum_of(squares) / width + float(epsilon));
    moments[2 * n] = mean;
    moments[2 * n + 1] = scale;
    for (int64_t j = 0; j < width; j += kLanes) {
      const Floats out = (load(row + j) - mean) * scale * load(gain + j) + load(shift + j);
      store(y + n * width + j, out);
      if (narrow) store(narrow + n * width + j, out);
    }
  }
}

// The gradients of bias, gain and shift are sums over tokens: each thread makes its own, (threads, 3, D), set to 0 before.
void add_norm_backward(const float* sum_grad, const float* grad, const Narrow* narrow_grad, const float* sum, const float* moments,
                       const float* gain, float* residual_grad, Narrow* branch_grad, float* sums, int64_t tokens, int64_t width,
                       double p, int64_t seed, int64_t threads) {
  const Dropout dropout(p, seed);
#pragma omp parallel num_threads(threads)
  {
    float* bias_grad = sums + omp_get_thread_num() * 3 * width;
    float *gain_grad = bias_grad + width, *shift_grad = gain_grad + width;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < tokens; ++n) {
      const uint32_t key = dropout.row_key(n);
      const float mean = moments[2 * n], scale = moments[2 * n + 1];
      float* below = residual_grad + n * width;
      Floats total{}, along{};
      for (int64_t j = 0; j < width; j += kLanes) {
        Floats g{};
        if (grad) g += load(grad + n * width + j);
        if (narrow_grad) g += load(narrow_grad + n * width + j);
        const Floats normal = (load(sum + n * width + j) - mean) * scale;
        store(gain_grad + j, load(gain_grad + j) + g * normal);
        store(shift_grad + j, load(shift_grad + j) + g);
        const Floats weighted = g * load(gain + j);
        store(below + j, weighted);
        total += weighted;
        along += weighted * normal;
      }
      const float mean_grad = sum_of(total) / width, mean_along = sum_of(along) / width;
      for (int64_t j = 0; j < width; j += kLanes) {
        const Floats normal = (load(sum + n * width + j) - mean) * scale;
        Floats g = (load(below + j) - mean_grad - normal * mean_along) * scale;
        if (sum_grad) g += load(sum_grad + n * width + j);
        store(below + j, g);
        if (branch_grad) {
          const Floats kept = g * dropout.factors(key, j);
          store(branch_grad + n * width + j, kept);
          store(bias_grad + j, load(bias_grad + j) + kept);
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------------------ ReLU and dropout

// x ← drop(max(x + bias, 0)), in place
void relu_dropout(Narrow* x, const float* bias, int64_t tokens, int64_t width, double p, int64_t seed, int64_t threads) {
  const Dropout dropout(p, seed);
#pragma omp parallel for num_threads(threads)
  for (int64_t n = 0; n < tokens; ++n) {
    const uint32_t key = dropout.row_key(n);
    for (int64_t j = 0; j < width; j += kLanes) {
      const Floats sum = load(x + n * width + j) + load(bias + j);
      store(x + n * width + j, (sum < 0 ? Floats{} : sum) * dropout.factors(key, j));  // NaN stays
    }
  }
}

// What came out as 0 was negative or dropped, and passes nothing on: the mask need not be drawn again.
void relu_dropout_backward(const Narrow* grad, const Narrow* y, Narrow* x_grad, float* sums, int64_t tokens, int64_t width, double p,
                           int64_t threads) {
  const float kept = float(1 / (1 - p));
#pragma omp parallel num_threads(threads)
  {
    float* bias_grad = sums + omp_get_thread_num() * width;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < tokens; ++n) {
      for (int64_t j = 0; j < width; j += kLanes) {
        const Floats g = load(grad + n * width + j) * kept;
        const Floats passed = load(y + n * width + j) > 0 ? g : Floats{};
        store(x_grad + n * width + j, passed);
        store(bias_grad + j, load(bias_grad + j) + passed);
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------------------------- Attention

}  // extern "C"

namespace {

constexpr int64_t kBlock = 32;  // queries at once: with 32 keys their scores are 4 KiB, and stay in the nearest cache
constexpr int64_t kRows = 4;    // rows of a product at once, in registers

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

#define UNROLLED _Pragma("GCC unroll 8")  // so that an array of vectors can be registers

// c (kRows, C vectors) ← or += a (kRows, inner) · b (inner, C vectors). Any strides for a, so it may be read transposed.
template <int C, bool kAdd>
inline void tile(float* c, int64_t c_stride, const float* a, int64_t a_row, int64_t a_column, const float* b,
                 int64_t b_stride, int64_t inner) {
  Floats total[kRows][C];
  UNROLLED for (int r = 0; r < kRows; ++r)
    UNROLLED for (int v = 0; v < C; ++v) total[r][v] = kAdd ? load(c + r * c_stride + v * kLanes) : Floats{};
  for (int64_t k = 0; k < inner; ++k) {
    Floats right[C];
    for (int v = 0; v < C; ++v) right[v] = load(b + k * b_stride + v * kLanes);
#ifdef __AVX512F__  // keeps GCC from reading each vector again for every row
    for (int v = 0; v < C; ++v) asm("" : "+v"(right[v]));
#endif
    UNROLLED for (int r = 0; r < kRows; ++r)
      UNROLLED for (int v = 0; v < C; ++v) total[r][v] += a[r * a_row + k * a_column] * right[v];
  }
  UNROLLED for (int r = 0; r < kRows; ++r)
    UNROLLED for (int v = 0; v < C; ++v) store(c + r * c_stride + v * kLanes, total[r][v]);
}

// c (rows, columns) ← or += a · b; rows a multiple of kRows, columns of kLanes.
template <bool kAdd>
void multiply(float* c, int64_t c_stride, const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_stride,
              int64_t rows, int64_t inner, int64_t columns) {
  for (int64_t r = 0; r < rows; r += kRows) {
    int64_t j = 0;
    for (; j + 2 * kLanes <= columns; j += 2 * kLanes)
      tile<2, kAdd>(c + r * c_stride + j, c_stride, a + r * a_row, a_row, a_column, b + j, b_stride, inner);
    if (j < columns)
      tile<1, kAdd>(c + r * c_stride + j, c_stride, a + r * a_row, a_row, a_column, b + j, b_stride, inner);
  }
}

// Memory for the numbers of one sentence and head; each thread of a call makes one. Where memory runs out, the process ends.
class Scratch {
 public:
  explicit Scratch(int64_t numbers) : memory_(new Floats[numbers / kLanes + 1]), next_((float*)memory_.get()) {}
  float* allocate(int64_t numbers) { return std::exchange(next_, next_ + numbers); }

 private:
  std::unique_ptr<Floats[]> memory_;
  float* next_;
};

// Query, key or value of one sentence and head: rows of W numbers in the middle of longer rows.
template <typename T>
struct Rows {
  T* first;
  int64_t stride;  // numbers from one row to the next

  // → (padded, W) in float plus bias, zeros after the last row
  void read(int64_t rows, int64_t padded, int64_t width, const float* bias, float* to) const {
    for (int64_t r = 0; r < rows; ++r) {
      const T* row = first + r * stride;
      for (int64_t j = 0; j < width; j += kLanes) {
        __builtin_prefetch(row + width + j);  // the next head's, read next: too far apart for the processor to guess
        store(to + r * width + j, load(row + j) + (bias ? load(bias + j) : Floats{}));
      }
    }
    std::fill(to + rows * width, to + padded * width, 0.0f);
  }

  // (rows, W) in float → these rows, and added to `total` (W,) if there is one
  void write(int64_t rows, int64_t width, const float* from, float* total) const {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t j = 0; j < width; j += kLanes) {
        const Floats x = load(from + r * width + j);
        store(first + r * stride + j, x);
        if (total) store(total + j, load(total + j) + x);
      }
    }
  }
};

// (kBlock, W) → (W, kBlock)
inline void transpose(const float* from, int64_t width, float* to) {
  for (int64_t r = 0; r < kBlock; ++r)
    for (int64_t j = 0; j < width; ++j) to[j * kBlock + r] = from[r * width + j];
}

struct Attention {
  const Narrow *q, *k, *v;
  int64_t q_stride, kv_stride;
  const float *q_bias, *k_bias, *v_bias;  // (D,) each
  const float* mask;                      // (B, S) added to the scores, or null
  int64_t batch, heads, queries, keys, width, causal;
  double p;  // of dropout
  int64_t seed;

  int64_t padded_keys() const { return round_up(keys, kRows); }
  float scale() const { return 1 / std::sqrt(float(width)); }
  int64_t of_queries(int64_t b, int64_t h) const { return b * queries * q_stride + h * width; }
  int64_t of_keys(int64_t b, int64_t h) const { return b * keys * kv_stride + h * width; }
  // Keys that any of a block of queries may see
  int64_t visible_keys(int64_t first) const { return causal ? std::min(keys, first + kBlock) : keys; }
};

// As many queries of a block as a vector has lanes, one in each. Scores stand transposed, a row for every key: so the maximum and the sum of a
// softmax run over rows, and never over the lanes of a vector.
struct Lanes {
  const float* mask;  // of this sentence, or null
  float scale;        // 1 / √W
  bool causal;
  Ints place;  // of each query in its sentence
  Dropout dropout;
  Words row_keys;  // of dropout, one for each query

  Lanes(const Attention& a, const Dropout& dropout, int64_t task, int64_t query)
      : mask(a.mask ? a.mask + task / a.heads * a.keys : nullptr), scale(a.scale()), causal(a.causal), dropout(dropout) {
    place = lane_numbers() + int32_t(query);
    for (int64_t i = 0; i < kLanes; ++i) row_keys[i] = dropout.row_key(task * a.queries + query + i);
  }

  // Products of the queries with key s → scores
  Floats score(Floats products, int64_t s) const {
    const Floats x = products * scale + (mask ? mask[s] : 0.0f);
    return causal ? (place >= int32_t(s) ? x : broadcast(kMinusInfinity)) : x;
  }

  Floats factors(int64_t s) const { return dropout.of_words(row_keys ^ uint32_t(s)); }
};

}  // namespace

extern "C" {

// stats (B, H, 2, T): the largest score of each query, and 1 / Σ exp(score − largest)
void attention(const Attention& a, Narrow* out, float* stats, int64_t threads) {
  const int64_t width = a.width, d = a.heads * width;
  const Dropout dropout(a.p, a.seed);
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch(a.padded_keys() * (2 * width + kBlock) + 3 * kBlock * width);
    float *k = scratch.allocate(a.padded_keys() * width), *v = scratch.allocate(a.padded_keys() * width);
    float *q = scratch.allocate(kBlock * width), *q_t = scratch.allocate(kBlock * width), *attended = scratch.allocate(kBlock * width);
    float* p = scratch.allocate(a.padded_keys() * kBlock);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < a.batch * a.heads; ++task) {
      const int64_t b = task / a.heads, h = task % a.heads;
      const Rows<const Narrow> keys{a.k + a.of_keys(b, h), a.kv_stride}, values{a.v + a.of_keys(b, h), a.kv_stride};
      keys.read(a.keys, a.padded_keys(), width, a.k_bias + h * width, k);
      values.read(a.keys, a.padded_keys(), width, a.v_bias + h * width, v);
      float *peaks = stats + task * 2 * a.queries, *inverses = peaks + a.queries;
      for (int64_t first = 0; first < a.queries; first += kBlock) {
        const int64_t count = std::min(kBlock, a.queries - first), visible_keys = a.visible_keys(first);
        const Rows<const Narrow> queries{a.q + a.of_queries(b, h) + first * a.q_stride, a.q_stride};
        queries.read(count, kBlock, width, a.q_bias + h * width, q);
        transpose(q, width, q_t);
        multiply<false>(p, kBlock, k, width, 1, q_t, kBlock, round_up(visible_keys, kRows), width, kBlock);
        for (int64_t i = 0; i < count; i += kLanes) {
          const Lanes lanes(a, dropout, task, first + i);
          Floats peak = broadcast(kLowest), total{};
          for (int64_t s = 0; s < visible_keys; ++s) {
            const Floats x = lanes.score(load(p + s * kBlock + i), s);
            store(p + s * kBlock + i, x);
            peak = max(peak, x);
          }
          for (int64_t s = 0; s < visible_keys; ++s) {
            const Floats weight = exp(load(p + s * kBlock + i) - peak);
            total += weight;
            store(p + s * kBlock + i, weight * lanes.factors(s));
          }
          const int64_t rest = std::min(kLanes, count - i);
          store(peaks + first + i, peak, rest);
          store(inverses + first + i, 1 / total, rest);
        }
        multiply<false>(attended, width, p, 1, kBlock, v, width, round_up(count, kRows), visible_keys, width);
        for (int64_t r = 0; r < count; ++r)
          for (int64_t j = 0; j < width; j += kLanes)
            store(attended + r * width + j, load(attended + r * width + j) * inverses[first + r]);
        Rows<Narrow>{out + (b * a.queries + first) * d + h * width, d}.write(count, width, attended, nullptr);
      }
    }
  }
}

// With P the weights, Z the factors of dropout, O = (P ∘ Z) V: ∂V = (P ∘ Z)ᵀ ∂O, ∂P = Z ∘ (∂O Vᵀ), and of the scores
// ∂A = P ∘ (∂P − rowsum(P ∘ ∂P)); ∂Q = ∂A K / √W, ∂K = ∂Aᵀ Q / √W. The weights are computed again from `stats`.
void attention_backward(const Attention& a, const Narrow* grad, const float* stats, Narrow* q_grad, Narrow* k_grad,
                        Narrow* v_grad, float* sums, int64_t threads) {
  const int64_t width = a.width, d = a.heads * width, padded = a.padded_keys();
  const Dropout dropout(a.p, a.seed);
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch(padded * (4 * width + 2 * kBlock) + 5 * kBlock * width);
    float *k = scratch.allocate(padded * width), *v = scratch.allocate(padded * width);
    float *dk = scratch.allocate(padded * width), *dv = scratch.allocate(padded * width);
    float *q = scratch.allocate(kBlock * width), *q_t = scratch.allocate(kBlock * width), *dq = scratch.allocate(kBlock * width);
    float *dout = scratch.allocate(kBlock * width), *dout_t = scratch.allocate(kBlock * width);
    float *p = scratch.allocate(padded * kBlock), *dp = scratch.allocate(padded * kBlock);
    float *q_sum = sums + omp_get_thread_num() * 3 * d, *k_sum = q_sum + d, *v_sum = k_sum + d;  // gradients of the biases
#pragma omp for schedule(static)
    for (int64_t task = 0; task < a.batch * a.heads; ++task) {
      const int64_t b = task / a.heads, h = task % a.heads;
      const Rows<const Narrow> keys{a.k + a.of_keys(b, h), a.kv_stride}, values{a.v + a.of_keys(b, h), a.kv_stride};
      keys.read(a.keys, padded, width, a.k_bias + h * width, k);
      values.read(a.keys, padded, width, a.v_bias + h * width, v);
      std::fill(dk, dk + padded * width, 0.0f);
      std::fill(dv, dv + padded * width, 0.0f);
      const float *peaks = stats + task * 2 * a.queries, *inverses = peaks + a.queries;
      for (int64_t first = 0; first < a.queries; first += kBlock) {
        const int64_t count = std::min(kBlock, a.queries - first), visible_keys = a.visible_keys(first);
        const int64_t rows = round_up(visible_keys, kRows), offset = a.of_queries(b, h) + first * a.q_stride;
        Rows<const Narrow>{a.q + offset, a.q_stride}.read(count, kBlock, width, a.q_bias + h * width, q);
        Rows<const Narrow>{grad + (b * a.queries + first) * d + h * width, d}.read(count, kBlock, width, nullptr, dout);
        transpose(q, width, q_t);
        transpose(dout, width, dout_t);
        multiply<false>(p, kBlock, k, width, 1, q_t, kBlock, rows, width, kBlock);
        multiply<false>(dp, kBlock, v, width, 1, dout_t, kBlock, rows, width, kBlock);
        for (int64_t i = 0; i < count; i += kLanes) {
          const Lanes lanes(a, dropout, task, first + i);
          const int64_t rest = std::min(kLanes, count - i);
          const Floats peak = load(peaks + first + i, rest), inverse = load(inverses + first + i, rest);
          Floats delta{};
          for (int64_t s = 0; s < visible_keys; ++s) {
            const Floats weight = exp(lanes.score(load(p + s * kBlock + i), s) - peak) * inverse;
            const Floats weight_grad = load(dp + s * kBlock + i) * lanes.factors(s);
            delta += weight * weight_grad;
            store(dp + s * kBlock + i, weight_grad);
            store(p + s * kBlock + i, weight);
          }
          for (int64_t s = 0; s < visible_keys; ++s) {
            const Floats weight = load(p + s * kBlock + i);
            store(dp + s * kBlock + i, weight * (load(dp + s * kBlock + i) - delta) * a.scale());
            store(p + s * kBlock + i, weight * lanes.factors(s));
          }
        }
        multiply<true>(dv, width, p, kBlock, 1, dout, width, rows, count, width);
        multiply<true>(dk, width, dp, kBlock, 1, q, width, rows, count, width);
        multiply<false>(dq, width, dp, 1, kBlock, k, width, round_up(count, kRows), visible_keys, width);
        Rows<Narrow>{q_grad + offset, a.q_stride}.write(count, width, dq, q_sum + h * width);
      }
      Rows<Narrow>{k_grad + a.of_keys(b, h), a.kv_stride}.write(a.keys, width, dk, k_sum + h * width);
      Rows<Narrow>{v_grad + a.of_keys(b, h), a.kv_stride}.write(a.keys, width, dv, v_sum + h * width);
    }
  }
}

}  // extern "C"

// --------------------------------------------------------------------------------------------------------------- Cross-entropy

namespace {

// A vocabulary, unlike the other widths, may have any size.
struct Whole {};
template <typename T>
inline Floats load(const T* from, Whole) {
  return ::load(from);
}
template <typename T>
inline void store(T* to, Floats x, Whole) {
  ::store(to, x);
}

// Runs f(j, Whole) for every whole vector of a row of n numbers, then f(j, rest) for what is left of it.
template <typename Step>
inline void by_vectors(int64_t n, const Step& f) {
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) f(j, Whole{});
  if (j < n) f(j, n - j);
}

}  // namespace

extern "C" {

// Logits (N, V) without their bias → their softmax, in place; losses[n] ← log Σ exp − (1 − smoothing) · logit of the truth.
// The sum of the probabilities over tokens is the gradient of the bias: (threads, V), set to 0 before.
void softmax_loss(Narrow* logits, const float* bias, const int64_t* target, float* losses, float* sums, int64_t tokens,
                  int64_t vocabulary, double smoothing, int64_t threads) {
#pragma omp parallel num_threads(threads)
  {
    // One row in float, and behind it numbers whose e^x is 0, up to a whole vector.
    const int64_t padded = round_up(vocabulary, kLanes);
    Scratch scratch(padded);
    float *wide = scratch.allocate(padded), *probability_sum = sums + omp_get_thread_num() * vocabulary;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < tokens; ++n) {
      Narrow* row = logits + n * vocabulary;
      Floats largest = broadcast(kLowest), total{};
      std::fill(wide + vocabulary, wide + padded, kLowest);
      by_vectors(vocabulary, [&](int64_t j, auto part) {
        store(wide + j, load(row + j, part) + load(bias + j, part), part);
        largest = max(largest, load(wide + j));
      });
      const float peak = max_of(largest);
      losses[n] = peak - float(1 - smoothing) * wide[target[n]];
      for (int64_t j = 0; j < padded; j += kLanes) {
        const Floats x = exp(load(wide + j) - peak);
        store(wide + j, x);
        total += x;
      }
      const float whole = sum_of(total);
      losses[n] += std::log(whole);
      by_vectors(vocabulary, [&](int64_t j, auto part) {
        const Floats p = load(wide + j, part) * (1 / whole);
        store(row + j, p, part);
        store(probability_sum + j, load(probability_sum + j, part) + p, part);
      });
    }
  }
}

}  // extern "C"

// PyTorch's layers for decoding on a CPU: all layers of the encoder for a few sentences, or of the decoder for one token of all
// rows of a batch, in one call; and the output layer with its largest results. Why it is fast:
//  - with AVX-512, a matrix product takes 6 rows by 64 outputs at a time, which fill the registers, from weights that were
//    laid out for it once (Goto and van de Geijn 2008); the largest logits are found while the logits are in registers, and no
//    logit is ever stored;
//  - attention reads the keys of 16 tokens side by side; sentences of other lengths add nothing to a sentence's work;
//  - beams that continue the same hypothesis share its keys and values: only the last, unfinished block of 16 tokens is copied
//    (Kwon et al. 2023, PagedAttention);
//  - compiled with -DINT8, an input row is rounded to 8 bits with a scale of its own, and one instruction does 64
//    multiplications (Wu et al. 2020, arXiv:2004.09602); keys and values are kept in bf16.
//
// D model width, F width of the feed-forward layer, H heads, W = D / H, V vocabulary, N rows. D, F and W are multiples of 16.

#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>
#ifdef INT8
#ifndef __AVX512VNNI__
#error int8 needs AVX-512 VNNI
#endif
#include <immintrin.h>
#endif

namespace {

#ifdef INT8
using Number = uint8_t;  // of a product's input
using Cached = bf16;
#else
using Number = float;
using Cached = float;
#endif

// A product's sums, and what it multiplies, are in registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kVectors = 4;  // 6 · 4 sums, 4 vectors of weights and an input are 29 of 32
#else
constexpr int kVectors = 2;  // 6 · 2 sums, 2 vectors of weights and an input are 15 of 16
#endif
constexpr int kTileRows = 6;
constexpr int64_t kPanel = kVectors * kLanes;  // outputs
constexpr int64_t kCacheLine = 16;             // floats
constexpr int64_t kTokens = 16;                // of a cache's block; a multiple of kLanes
constexpr int64_t kSourceTokens = 256;         // about this many are encoded together, so that activations stay in the cache

// ----------------------------------------------------------------- what Python hands over: the same structures in decoding.py

// y = x Wᵀ + b. In int8, W ≈ scale · w, and an input is x ≈ row's scale · (number − zero).
struct Linear {
  const void* weight;    // (panels, in, kPanel), or in int8 (panels, in / 4, kPanel, 4)
  const float* bias;     // (panels · kPanel,), -inf for outputs that only pad
  const float* scale;    // int8: (panels · kPanel,)
  const int32_t* start;  // int8: (panels · kPanel,), −zero · the sum of a row of w
  int64_t in, out, zero;
};

struct Norm {
  const float *weight, *bias;
  double epsilon;
};

struct Layer {  // an encoder's has no source
  Linear own, own_out, source_query, source, source_out, linear1, linear2;
  Norm norms[3];
};

struct Stack {  // an encoder or a decoder
  const Layer* layers;
  int64_t count, heads, width, norm_first;
  Norm norm;  // after the last layer
};

// Keys and values in blocks of 16 tokens: for every layer and head keys (W, 16), then values (16, W).
struct CacheAddresses {
  void* const* own;              // block number → (slots, layers, H, 2, 16 · W)
  const int64_t* own_slots;      // (blocks, N) the slot of each row; rows may share one, but not in the block being written
  void* source;                  // (all sentences' blocks, layers, H, 2, 16 · W)
  const int64_t* source_first;   // (N,) the first block of each row's sentence
  const int64_t* source_length;  // (N,) tokens
};

// Where the keys and values of one head begin, in an array that begins at `first`.
Cached* find(const Stack& model, void* first, int64_t block_or_slot, int64_t layer, int64_t head) {
  const int64_t place = (block_or_slot * model.count + layer) * model.heads + head;
  return static_cast<Cached*>(first) + place * 2 * kTokens * (model.width / model.heads);
}

// ------------------------------------------------------------------------------------------------------------------ products

// The rows of a product's input: as they are, or in int8 rounded, each with a scale of its own.
struct Rows {
  const Number* numbers;  // (N, in)
  const float* scale;     // int8: (N,)
};

// kRows rows of x, from number `row` on, times one panel of weights; `use(r, v, outputs)` gets every vector of the results.
// Meanwhile the next panel is fetched from memory; after the last one, prefetching past the end is harmless.
#ifndef INT8
template <int kRows, typename Use>
void multiply(const Linear& linear, int64_t panel, const Rows& x, int64_t row, Use use) {
  const float* inputs = x.numbers + row * linear.in;
  const float* weight = static_cast<const float*>(linear.weight) + panel * kPanel * linear.in;
  Floats sums[kRows][kVectors] = {};
  for (int64_t i = 0; i < linear.in; ++i, weight += kPanel) {
    Floats weights[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) weights[v] = load(weight + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][v] += inputs[r * linear.in + i] * weights[v];
      if (r * kCacheLine < kPanel) __builtin_prefetch(weight + kPanel * linear.in + r * kCacheLine, 0, 2);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) use(r, v, sums[r][v] + load(linear.bias + panel * kPanel + v * kLanes));
  }
}

#else
// The same in integers: four neighbouring inputs times their weights are added to each of 16 sums at once.
template <int kRows, typename Use>
void multiply(const Linear& linear, int64_t panel, const Rows& x, int64_t row, Use use) {
  const uint8_t* inputs = x.numbers + row * linear.in;
  const float* scale = x.scale + row;
  Ints sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) std::memcpy(&sums[r][v], linear.start + panel * kPanel + v * kLanes, sizeof(Ints));
  }
  const int8_t* weight = static_cast<const int8_t*>(linear.weight) + panel * kPanel * linear.in;
  for (int64_t i = 0; i < linear.in; i += 4, weight += 4 * kPanel) {
    __m512i weights[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      weights[v] = _mm512_loadu_si512(weight + v * 64);
      __builtin_prefetch(weight + kPanel * linear.in + v * 64, 0, 2);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      int32_t four;
      std::memcpy(&four, inputs + r * linear.in + i, 4);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = (Ints)_mm512_dpbusd_epi32((__m512i)sums[r][v], _mm512_set1_epi32(four), weights[v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const int64_t first = panel * kPanel + v * kLanes;
      const Floats sum = __builtin_convertvector(sums[r][v], Floats);
      use(r, v, sum * (scale[r] * load(linear.scale + first)) + load(linear.bias + first));
    }
  }
}
#endif

// (rows, in) → `use(row, first output, outputs)`, a vector at a time, for all of (rows, out). A panel's weights stay in the
// core's cache while all rows pass; the last rows, fewer than kRows, pass by a smaller tile.
template <int kRows, typename Use>
void pass(const Linear& linear, int64_t panel, const Rows& x, int64_t row, int64_t rows, Use use) {
  for (; row + kRows <= rows; row += kRows) {
    multiply<kRows>(linear, panel, x, row, [&](int r, int v, Floats y) {
      const int64_t first = panel * kPanel + v * kLanes;
      if (first < linear.out) use(row + r, first, y);
    });
  }
  if constexpr (kRows > 1) pass<kRows - 1>(linear, panel, x, row, rows, use);
}

template <typename Use>
void product(const Linear& linear, const Rows& x, int64_t rows, Use use) {
  for (int64_t panel = 0; panel * kPanel < linear.out; ++panel) pass<kTileRows>(linear, panel, x, 0, rows, use);
}

// Where int8 keeps the rounded inputs of a product.
struct Rounded {
  std::vector<uint8_t> numbers;
  std::vector<float> scale;
};

#ifndef INT8
Rows inputs_of(const Linear&, const float* x, int64_t, Rounded&) { return {x, nullptr}; }
#else
typedef uint8_t Bytes __attribute__((vector_size(16)));

Rows inputs_of(const Linear& linear, const float* x, int64_t rows, Rounded& into) {
  into.numbers.resize(std::max(into.numbers.size(), size_t(rows * linear.in)));
  into.scale.resize(std::max(into.scale.size(), size_t(rows)));
  const float steps = float(255 - linear.zero);  // 127 to either side of 128; 255 where nothing is negative
  uint8_t* numbers = into.numbers.data();
  for (int64_t row = 0; row < rows; ++row, x += linear.in, numbers += linear.in) {
    Floats largest = {};
    for (int64_t i = 0; i < linear.in; i += kLanes) largest = max(largest, max(load(x + i), -load(x + i)));
    const float bound = std::max(max_of(largest), 1e-30f);  // a row of zeros needs a scale as well
    into.scale[row] = bound / steps;
    for (int64_t i = 0; i < linear.in; i += kLanes) {
      const Floats shifted = load(x + i) * (steps / bound) + kRound;
      const Bytes whole = __builtin_convertvector((Words)shifted + uint32_t(linear.zero), Bytes);
      std::memcpy(numbers + i, &whole, sizeof whole);
    }
  }
  return {into.numbers.data(), into.scale.data()};
}
#endif

// y = x Wᵀ + b, (rows, in) → (rows, out), with `out` a multiple of kLanes
void apply(const Linear& linear, const float* x, int64_t rows, Rounded& rounded, float* y, bool relu = false) {
  product(linear, inputs_of(linear, x, rows, rounded), rows, [&](int64_t row, int64_t first, Floats sums) {
    store(y + row * linear.out + first, relu ? max(sums, Floats{}) : sums);
  });
}

// (rows, D) → (rows,) the output with the largest logit, of equal ones the first.
void argmax(const Linear& linear, const float* x, int64_t rows, Rounded& rounded, int64_t* chosen) {
  struct Best {  // lane i: of the outputs i, i + kLanes, i + 2 · kLanes, …
    Floats logit;
    Ints output;
  };
  std::vector<Best> best(rows, Best{broadcast(kMinusInfinity), Ints{}});
  product(linear, inputs_of(linear, x, rows, rounded), rows, [&](int64_t row, int64_t first, Floats logit) {
    const Ints better = logit > best[row].logit;
    best[row].logit = max(logit, best[row].logit);
    best[row].output = better ? lane_numbers() + int32_t(first) : best[row].output;
  });
  for (int64_t row = 0; row < rows; ++row) {
    const float largest = max_of(best[row].logit);
    chosen[row] = std::numeric_limits<int32_t>::max();
    for (int64_t i = 0; i < kLanes; ++i) {
      if (best[row].logit[i] == largest) chosen[row] = std::min(chosen[row], int64_t(best[row].output[i]));
    }
  }
}

// The largest logits of one row so far, and the sum of e^logit over all of them, for the softmax. The sum is relative to the
// largest logit yet, and scaled when that changes (Milakov and Gimelshein 2018, arXiv:1805.02867).
class Candidates {
 public:
  explicit Candidates(int64_t count) : kept_(count) {
    // Ascending, so that it is a heap.
    for (int64_t i = 0; i < count; ++i) kept_[i] = {kMinusInfinity, i + 1 - count};
  }

  void add(Floats logits, int64_t first) {
    if (max_of(logits) > kept_.front().first) keep(logits, first);
    sum_ += exp(logits - largest_);
  }

  // Best first, of equal ones the first: (count,) log-probabilities and outputs.
  void write(float* log_probabilities, int64_t* outputs) {
    std::sort_heap(kept_.begin(), kept_.end(), std::greater<>());
    const float log_of_sum = largest_ + std::log(sum_of(sum_));
    for (const auto& [logit, negated_output] : kept_) {
      *log_probabilities++ = logit - log_of_sum;
      *outputs++ = -negated_output;
    }
  }

 private:
  // Seldom called: after the first few hundred outputs of a vocabulary, hardly one is among the largest.
  void keep(Floats logits, int64_t first) {
    for (int64_t i = 0; i < kLanes; ++i) {
      if (!(logits[i] > kept_.front().first)) continue;
      std::pop_heap(kept_.begin(), kept_.end(), std::greater<>());
      kept_.back() = {float(logits[i]), -(first + i)};
      std::push_heap(kept_.begin(), kept_.end(), std::greater<>());
    }
    const float largest = std::max(largest_, max_of(logits));
    sum_ *= exp(broadcast(largest_ - largest));
    largest_ = largest;
  }

  std::vector<std::pair<float, int64_t>> kept_;  // a heap of (logit, −output), the smallest in front
  float largest_ = kMinusInfinity;
  Floats sum_ = {};  // of e^(logit − largest_); lane i: of the outputs i, i + kLanes, …
};

// (rows, D) → (rows, count) the largest log-probabilities and their outputs.
void top_k(const Linear& linear, const float* x, int64_t rows, Rounded& rounded, int64_t count, float* log_probabilities,
           int64_t* outputs) {
  std::vector<Candidates> candidates(rows, Candidates(count));
  product(linear, inputs_of(linear, x, rows, rounded), rows,
          [&](int64_t row, int64_t first, Floats logits) { candidates[row].add(logits, first); });
  for (int64_t row = 0; row < rows; ++row) {
    candidates[row].write(log_probabilities + row * count, outputs + row * count);
  }
}

// ------------------------------------------------------------------------------------------------------------------------ norms

void add(float* x, const float* y, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store(x + i, load(x + i) + load(y + i));
}

// (rows, D) → (rows, D), also in place
void normalise(const Norm& norm, const float* x, float* y, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row, x += width, y += width) {
    Floats total = {}, squares = {};
    for (int64_t i = 0; i < width; i += kLanes) total += load(x + i);
    const float mean = sum_of(total) / width;
    for (int64_t i = 0; i < width; i += kLanes) squares += (load(x + i) - mean) * (load(x + i) - mean);
    const float inverse = 1 / std::sqrt(sum_of(squares) / width + float(norm.epsilon));
    for (int64_t i = 0; i < width; i += kLanes) {
      store(y + i, (load(x + i) - mean) * inverse * load(norm.weight + i) + load(norm.bias + i));
    }
  }
}

// ------------------------------------------------------------------------------------------------------------------ attention

// Write the key and value of one head (W,) as token number `lane` of a block. A fresh block is all zeros: what lies after the
// last token is multiplied by 0, and must not be NaN.
void append(Cached* block, int64_t lane, const float* key, const float* value, int64_t width) {
  if (lane == 0) std::memset(block, 0, 2 * kTokens * width * sizeof(Cached));
  Cached part[kLanes];
  for (int64_t i = 0; i < width; i += kLanes) {
    store(part, load(key + i));
    for (int64_t j = 0; j < kLanes; ++j) block[(i + j) * kTokens + lane] = part[j];
    store(block + (kTokens + lane) * width + i, load(value + i));
  }
}

// softmax(query · keys + mask) · values: one head's query (W,), already times 1/√W, over `length` tokens → (W,). Block b is at
// `block(b)`. `mask` is added to the scores, if there is one; it has a number for every place of the last block too.
template <typename Block>
void attend(const float* query, const float* mask, int64_t length, int64_t width, Block block, std::vector<float>& scores,
            float* attended) {
  const int64_t blocks = (length + kTokens - 1) / kTokens, padded = blocks * kTokens;
  scores.resize(std::max(scores.size(), size_t(padded)));
  Floats largest = broadcast(kMinusInfinity), total = {};
  for (int64_t t = 0; t < padded; t += kLanes) {
    const Cached* keys = block(t / kTokens) + t % kTokens;
    Floats part[4] = {};  // four sums at a time, because each addition waits for the one before
    for (int64_t i = 0; i < width; i += 4) {
      for (int64_t j = 0; j < 4; ++j) part[j] += query[i + j] * load(keys + (i + j) * kTokens);
    }
    Floats score = (part[0] + part[1]) + (part[2] + part[3]);
    if (mask) score += load(mask + t);
    // The last block may have fewer tokens than places.
    const Floats real = lane_numbers() < int32_t(length - t) ? score : broadcast(kMinusInfinity);
    largest = max(largest, real);
    store(scores.data() + t, real);
  }
  const float bound = std::max(max_of(largest), kLowest);  // finite, even if every score is -inf
  for (int64_t t = 0; t < padded; t += kLanes) {
    const Floats weight = exp(load(scores.data() + t) - bound);
    total += weight;
    store(scores.data() + t, weight);
  }
  const float sum = sum_of(total);
  const float inverse = sum > 0 ? 1 / sum : 0;  // as in PyTorch, attention to nothing is 0
  for (int64_t i = 0; i < width; i += kLanes) {
    Floats part[4] = {};
    for (int64_t b = 0; b < blocks; ++b) {
      const Cached* values = block(b) + kTokens * width + i;
      for (int64_t t = 0; t < kTokens; t += 4) {
        for (int64_t j = 0; j < 4; ++j) part[j] += scores[b * kTokens + t + j] * load(values + (t + j) * width);
      }
    }
    store(attended + i, ((part[0] + part[1]) + (part[2] + part[3])) * inverse);
  }
}

// All heads (H, W) of one token's queries over `length` tokens → (H, W). `block(b, h)` is where head h's block b is.
template <typename Block>
void attend_heads(const Stack& model, const float* queries, const float* mask, int64_t length, Block block, float* attended) {
  thread_local std::vector<float> scores;
  const int64_t W = model.width / model.heads;
  for (int64_t h = 0; h < model.heads; ++h) {
    attend(queries + h * W, mask, length, W, [&](int64_t b) { return block(b, h); }, scores, attended + h * W);
  }
}

// ------------------------------------------------------------------------------------------------------- encoder and decoder

// What N rows need between their products; a thread keeps it from call to call.
struct Workspace {
  std::vector<float> normed, projected, attended, inner, y, mask;
  Rounded rounded;

  void fit(int64_t N, const Stack& model) {
    const auto grow = [](auto& numbers, int64_t size) { numbers.resize(std::max(numbers.size(), size_t(size))); };
    for (auto* numbers : {&normed, &attended, &y}) grow(*numbers, N * model.width);
    grow(projected, 3 * N * model.width);
    for (int64_t l = 0; l < model.count; ++l) grow(inner, N * model.layers[l].linear1.out);
  }
};

// x ← x + sublayer(norm(x)), or x ← norm(x + sublayer(x))
template <typename Sublayer>
void add_and_norm(const Stack& model, const Norm& norm, float* x, Workspace& s, int64_t N, Sublayer sublayer) {
  float* y = s.y.data();
  if (model.norm_first) {
    normalise(norm, x, s.normed.data(), N, model.width);
    sublayer(s.normed.data(), y);
    add(x, y, N * model.width);
  } else {
    sublayer(x, y);
    add(x, y, N * model.width);
    normalise(norm, x, x, N, model.width);
  }
}

void feed_forward(const Layer& layer, const float* x, float* y, int64_t N, Workspace& s) {
  apply(layer.linear1, x, N, s.rounded, s.inner.data(), true);
  apply(layer.linear2, s.inner.data(), N, s.rounded, y);
}

// `rows` sentences of these lengths, together N tokens one after the other, x (N, D) → the encoder's output, in place
void encode(const Stack& model, float* x, const int64_t* lengths, int64_t rows, int64_t N) {
  thread_local Workspace s;
  thread_local std::vector<Cached> blocks;  // one sentence's keys and values: (blocks, H, 2, 16 · W)
  const int64_t D = model.width, H = model.heads, W = D / H, size = 2 * kTokens * W;
  s.fit(N, model);
  for (const Layer* layer = model.layers; layer < model.layers + model.count; ++layer) {
    add_and_norm(model, layer->norms[0], x, s, N, [&](const float* x, float* y) {
      apply(layer->own, x, N, s.rounded, s.projected.data());  // (N, 3, H, W)
      for (int64_t row = 0, n = 0; row < rows; n += lengths[row++]) {
        blocks.resize(std::max(blocks.size(), size_t((lengths[row] + kTokens - 1) / kTokens * H * size)));
        const auto block = [&](int64_t b, int64_t h) { return blocks.data() + (b * H + h) * size; };
        const float* query = &s.projected[3 * n * D];
        for (int64_t t = 0; t < lengths[row]; ++t) {
          for (int64_t h = 0; h < H; ++h) {
            const float* key = query + (3 * t + 1) * D + h * W;
            append(block(t / kTokens, h), t % kTokens, key, key + D, W);
          }
        }
        for (int64_t t = 0; t < lengths[row]; ++t) {
          attend_heads(model, query + 3 * t * D, nullptr, lengths[row], block, &s.attended[(n + t) * D]);
        }
      }
      apply(layer->own_out, s.attended.data(), N, s.rounded, y);
    });
    add_and_norm(model, layer->norms[1], x, s, N, [&](const float* x, float* y) { feed_forward(*layer, x, y, N, s); });
  }
  normalise(model.norm, x, x, N, D);
}

// x (N, D) at `position` → the decoder's output, in place; keys and values of x go to the cache. `hidden` (position + 1,) is true
// where self-attention must not look.
void decode(const Stack& model, const CacheAddresses& cache, const bool* hidden, float* x, int64_t N, int64_t position, Workspace& s) {
  const int64_t D = model.width, H = model.heads, W = D / H;
  s.fit(N, model);
  const float* mask = nullptr;  // with a causal mask, the newest token sees all others
  if (hidden && std::any_of(hidden, hidden + position + 1, [](bool is_hidden) { return is_hidden; })) {
    s.mask.assign((position / kTokens + 1) * kTokens, 0);
    for (int64_t t = 0; t <= position; ++t) s.mask[t] = hidden[t] ? kMinusInfinity : 0;
    mask = s.mask.data();
  }
  for (int64_t l = 0; l < model.count; ++l) {
    const Layer& layer = model.layers[l];
    add_and_norm(model, layer.norms[0], x, s, N, [&](const float* x, float* y) {
      apply(layer.own, x, N, s.rounded, s.projected.data());  // (N, 3, H, W)
      for (int64_t n = 0; n < N; ++n) {
        const float* query = &s.projected[3 * n * D];
        const auto block = [&](int64_t b, int64_t h) { return find(model, cache.own[b], cache.own_slots[b * N + n], l, h); };
        for (int64_t h = 0; h < H; ++h) {
          const float* key = query + D + h * W;
          append(block(position / kTokens, h), position % kTokens, key, key + D, W);
        }
        attend_heads(model, query, mask, position + 1, block, &s.attended[n * D]);
      }
      apply(layer.own_out, s.attended.data(), N, s.rounded, y);
    });
    add_and_norm(model, layer.norms[1], x, s, N, [&](const float* x, float* y) {
      apply(layer.source_query, x, N, s.rounded, s.projected.data());  // (N, H, W)
      for (int64_t n = 0; n < N; ++n) {
        const auto block = [&](int64_t b, int64_t h) { return find(model, cache.source, cache.source_first[n] + b, l, h); };
        attend_heads(model, &s.projected[n * D], nullptr, cache.source_length[n], block, &s.attended[n * D]);
      }
      apply(layer.source_out, s.attended.data(), N, s.rounded, y);
    });
    add_and_norm(model, layer.norms[2], x, s, N, [&](const float* x, float* y) { feed_forward(layer, x, y, N, s); });
  }
  normalise(model.norm, x, x, N, D);
}

// `use(first, some, N)` for groups of sentences, numbers `first` to `first + some`, of N tokens together.
template <typename Use>
void in_groups(const int64_t* lengths, int64_t rows, Use use) {
  for (int64_t first = 0, some = 0; first < rows; first += some) {
    int64_t N = lengths[first];
    for (some = 1; first + some < rows && N + lengths[first + some] <= kSourceTokens; ++some) N += lengths[first + some];
    use(first, some, N);
  }
}

}  // namespace

extern "C" {

int64_t outputs_in_a_panel() { return kPanel; }

// One product, (rows, in) → (rows, out): for the tests.
void multiply_rows(const Linear* linear, const float* x, int64_t rows, float* y) {
  Rounded rounded;
  apply(*linear, x, rows, rounded, y);
}

// All sentences of a batch, their tokens one sentence after the other: x (all tokens, D) → the encoder's output, in place.
void encode_sources(const Stack* encoder, float* x, const int64_t* lengths, int64_t rows) {
  in_groups(lengths, rows, [&](int64_t first, int64_t some, int64_t N) {
    encode(*encoder, x, lengths + first, some, N);
    x += N * encoder->width;
  });
}

// The same tokens' memory (all tokens, D) → its keys and values in every layer of the decoder, in the cache.
void keep_sources(const Stack* decoder, const CacheAddresses* cache, const float* memory, int64_t rows) {
  thread_local Workspace s;
  const int64_t D = decoder->width, H = decoder->heads, W = D / H;
  in_groups(cache->source_length, rows, [&](int64_t first, int64_t some, int64_t N) {
    s.fit(N, *decoder);
    for (int64_t l = 0; l < decoder->count; ++l) {
      apply(decoder->layers[l].source, memory, N, s.rounded, s.projected.data());  // (N, 2, H, W)
      for (int64_t row = first, n = 0; row < first + some; ++row) {
        for (int64_t t = 0; t < cache->source_length[row]; ++t, ++n) {
          const int64_t b = cache->source_first[row] + t / kTokens;
          for (int64_t h = 0; h < H; ++h) {
            const float* key = &s.projected[2 * n * D + h * W];
            append(find(*decoder, cache->source, b, l, h), t % kTokens, key, key + D, W);
          }
        }
      }
    }
    memory += N * D;
  });
}

// x (N, D) at `position` → the decoder's output, in place; see `decode`.
void decode_token(const Stack* decoder, const CacheAddresses* cache, const bool* hidden, float* x, int64_t N, int64_t position) {
  thread_local Workspace s;
  decode(*decoder, *cache, hidden, x, N, position, s);
}

// x (N, D) → the outputs with the largest logits (N,)
void largest(const Linear* output, const float* x, int64_t N, int64_t* chosen) {
  thread_local Rounded rounded;
  argmax(*output, x, N, rounded, chosen);
}

// x (N, D) → the `count` largest log-probabilities of each row, (N, count), and their outputs, best first
void most_probable(const Linear* output, const float* x, int64_t N, int64_t count, float* log_probabilities, int64_t* chosen) {
  thread_local Rounded rounded;
  top_k(*output, x, N, rounded, count, log_probabilities, chosen);
}

// Give each of N rows a slot of its own in a block: of those that share one, the first keeps it, the others get a copy in a
// slot that nobody uses. There are at least N slots, of `bytes` bytes each.
void copy_shared_slots(void* block, int64_t bytes, int64_t slots, int64_t* slot_of_row, int64_t N) {
  std::vector<bool> used(slots), taken(slots);
  for (int64_t n = 0; n < N; ++n) used[slot_of_row[n]] = true;
  char* first = static_cast<char*>(block);
  for (int64_t n = 0, free = 0; n < N; ++n) {
    const int64_t slot = slot_of_row[n];
    if (taken[slot]) {
      while (used[free]) ++free;
      std::memcpy(first + free * bytes, first + slot * bytes, bytes);
      slot_of_row[n] = free++;
    }
    taken[slot] = true;
  }
}
}

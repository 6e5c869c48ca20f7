// Decoding on a CPU: the encoder for a few sentences, or one step of the decoder for all rows of a batch, in one call.
// What it computes is `step` of the decoding.py in the root. Why it is fast:
//  - with AVX-512, a matrix product takes 6 rows by 64 outputs at a time, which fill the registers, from weights that were
//    laid out for it once; the largest logits are found while the logits are in registers, and no logit is ever stored;
//  - attention reads keys 16 tokens at a time, one vector, and values as they are: no mask and no padding anywhere;
//  - beams that continue the same hypothesis share its keys and values: only the last, unfinished block of 16 tokens is copied;
//  - compiled with -DINT8, an input row is rounded to 8 bits with a scale of its own, and one instruction does 64
//    multiplications; keys and values are kept in bf16.
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

// A product's sums are of type Register: GCC would keep sums of larger vectors in memory, ten times slower.
#if defined(__AVX512F__)
constexpr int kVectors = 4;  // 6 · 4 sums, 4 vectors of weights and an input are 29 of 32 registers
#else
constexpr int kVectors = 1;  // AVX2: 6 · 2 sums, 2 and 1 are 15 of 16; NEON: 6 · 4 sums, 4 and 1 are 29 of 32
#endif
constexpr int kTileRows = 6;
constexpr int64_t kPanel = kVectors * kLanes;  // outputs
constexpr int64_t kTokens = kLanes;            // of a cache's block
constexpr int64_t kSourceTokens = 256;         // encoded at once, about: what lies between two products stays near the core
constexpr float kNever = -std::numeric_limits<float>::infinity();

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

struct Weights {
  const float *source_embedding, *target_embedding;  // times √D
  const float* positions;
  const Layer *encoder, *decoder;
  int64_t encoder_layers, decoder_layers, heads, width, norm_first;
  Norm encoder_norm, decoder_norm;
  Linear output;
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
Cached* find(const Weights& model, void* first, int64_t block_or_slot, int64_t layer, int64_t head) {
  const int64_t place = (block_or_slot * model.decoder_layers + layer) * model.heads + head;
  return static_cast<Cached*>(first) + place * 2 * kTokens * (model.width / model.heads);
}

// ------------------------------------------------------------------------------------------------------------------ products

// kRows rows x (kRows, in) times one panel of weights; `use(r, v, 16 outputs)` gets every vector of the results. Meanwhile the
// next panel is fetched from memory; after the last one there is none, and a prefetch of nothing does nothing.
#ifndef INT8
inline Register load_register(const float* from) {
  Register x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline void store_register(float* to, Register x) { std::memcpy(to, &x, sizeof x); }

template <int kRows, typename Use>
void multiply(const Linear& linear, int64_t panel, const float* x, const float*, Use use) {
  constexpr int kWidth = sizeof(Register) / sizeof(float), kRegisters = kPanel / kWidth;
  Register sums[kRows][kRegisters] = {};
  const float* weight = static_cast<const float*>(linear.weight) + panel * kPanel * linear.in;
  for (int64_t i = 0; i < linear.in; ++i, weight += kPanel) {
    Register weights[kRegisters];
#pragma GCC unroll 8
    for (int v = 0; v < kRegisters; ++v) weights[v] = load_register(weight + v * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kRegisters; ++v) sums[r][v] += x[r * linear.in + i] * weights[v];
      if (r < kVectors) __builtin_prefetch(weight + kPanel * linear.in + r * kLanes, 0, 2);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    float products[kPanel];
#pragma GCC unroll 8
    for (int v = 0; v < kRegisters; ++v) store_register(products + v * kWidth, sums[r][v]);
    for (int v = 0; v < kVectors; ++v) {
      use(r, v, load(products + v * kLanes) + load(linear.bias + panel * kPanel + v * kLanes));
    }
  }
}

#else
// The same in integers: four neighbouring inputs times their weights are added to each of 16 sums at once.
template <int kRows, typename Use>
void multiply(const Linear& linear, int64_t panel, const uint8_t* x, const float* scale, Use use) {
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
      std::memcpy(&four, x + r * linear.in + i, 4);
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

// (rows, in) → `use(row, first output, 16 outputs)` for all of (rows, out). A panel's weights stay in the core's cache while
// all rows pass; the last rows, fewer than kRows, pass by a smaller tile.
template <int kRows, typename Use>
void pass(const Linear& linear, int64_t panel, const Number* x, const float* scale, int64_t row, int64_t rows, Use use) {
  for (; row + kRows <= rows; row += kRows) {
    multiply<kRows>(linear, panel, x + row * linear.in, scale + row, [&](int r, int v, Floats y) {
      const int64_t first = panel * kPanel + v * kLanes;
      if (first < linear.out) use(row + r, first, y);
    });
  }
  if constexpr (kRows > 1) pass<kRows - 1>(linear, panel, x, scale, row, rows, use);
}

template <typename Use>
void product(const Linear& linear, const Number* x, const float* scale, int64_t rows, Use use) {
  for (int64_t panel = 0; panel * kPanel < linear.out; ++panel) pass<kTileRows>(linear, panel, x, scale, 0, rows, use);
}

// Inputs of a product: the floats as they are, or rounded.
struct Inputs {
  std::vector<Number> numbers;  // (N, in)
  std::vector<float> scale;     // (N,)
};

#ifndef INT8
const float* round_rows(const Linear&, const float* x, int64_t, Inputs&) { return x; }
#else
typedef uint8_t Bytes __attribute__((vector_size(16)));

const uint8_t* round_rows(const Linear& linear, const float* x, int64_t rows, Inputs& into) {
  into.numbers.resize(std::max(into.numbers.size(), size_t(rows * linear.in)));
  into.scale.resize(std::max(into.scale.size(), size_t(rows)));
  const float steps = float(255 - linear.zero);  // 127 to either side of 128; 255 where nothing is negative
  uint8_t* numbers = into.numbers.data();
  for (int64_t row = 0; row < rows; ++row, x += linear.in, numbers += linear.in) {
    Floats most = {};
    for (int64_t i = 0; i < linear.in; i += kLanes) most = larger(most, larger(load(x + i), -load(x + i)));
    const float bound = std::max(largest_of(most), 1e-30f);  // a row of zeros needs a scale as well
    into.scale[row] = bound / steps;
    for (int64_t i = 0; i < linear.in; i += kLanes) {
      // Adding 1.5 · 2^23 rounds to the nearest whole number and leaves it in the lowest bits.
      const Floats shifted = load(x + i) * (steps / bound) + 12582912.0f;
      const Bytes whole = __builtin_convertvector((Words)shifted + uint32_t(linear.zero), Bytes);
      std::memcpy(numbers + i, &whole, sizeof whole);
    }
  }
  return into.numbers.data();
}
#endif

// y = x Wᵀ + b, (rows, in) → (rows, out)
void apply(const Linear& linear, const float* x, int64_t rows, Inputs& inputs, float* y, bool relu = false) {
  const Number* numbers = round_rows(linear, x, rows, inputs);
  product(linear, numbers, inputs.scale.data(), rows, [&](int64_t row, int64_t first, Floats sums) {
    store(y + row * linear.out + first, relu ? larger(sums, Floats{}) : sums);
  });
}

const Ints kLaneNumbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// (rows, D) → (rows,) the output with the largest logit, of equal ones the first.
void likeliest(const Linear& linear, const float* x, int64_t rows, Inputs& inputs, int64_t* chosen) {
  const Number* numbers = round_rows(linear, x, rows, inputs);
  struct Best {
    Floats logit;
    Ints output;
  };
  std::vector<Best> best(rows, Best{all(kNever), Ints{}});  // of outputs 0, 16, 32, …; of outputs 1, 17, 33, …
  product(linear, numbers, inputs.scale.data(), rows, [&](int64_t row, int64_t first, Floats logit) {
    const Ints better = is_greater(logit, best[row].logit);
    best[row].logit = larger(logit, best[row].logit);
    best[row].output = (better & (kLaneNumbers + int32_t(first))) | (~better & best[row].output);
  });
  for (int64_t row = 0; row < rows; ++row) {
    const float most = largest_of(best[row].logit);
    chosen[row] = std::numeric_limits<int32_t>::max();
    for (int64_t i = 0; i < kLanes; ++i) {
      if (best[row].logit[i] == most) chosen[row] = std::min(chosen[row], int64_t(best[row].output[i]));
    }
    if (chosen[row] >= linear.out) chosen[row] = 0;  // nothing but NaN
  }
}

inline bool any(Ints mask) {
  uint64_t parts[8], together = 0;
  std::memcpy(parts, &mask, sizeof parts);
  for (uint64_t part : parts) together |= part;
  return together != 0;
}

// The largest logits of one row so far, and the sum of e^logit over all of them, for the softmax.
class Candidates {
 public:
  explicit Candidates(int64_t count) : kept_(count) {
    // Ascending, so that it is a heap.
    for (int64_t i = 0; i < count; ++i) kept_[i] = {kNever, i + 1 - count};
  }

  void add(Floats logits, int64_t first) {
    if (any(is_greater(logits, all(kept_.front().first)))) keep(logits, first);
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
      kept_.back() = {logits[i], -(first + i)};
      std::push_heap(kept_.begin(), kept_.end(), std::greater<>());
    }
    const float largest = std::max(largest_, largest_of(logits));
    sum_ *= exp(all(largest_ - largest));
    largest_ = largest;
  }

  std::vector<std::pair<float, int64_t>> kept_;  // a heap of (logit, −output), the smallest in front
  float largest_ = kNever;
  Floats sum_ = {};  // of e^(logit − largest_): outputs 0, 16, 32, …; outputs 1, 17, 33, …
};

// (rows, D) → (rows, count) the largest log-probabilities and their outputs.
void find_candidates(const Linear& linear, const float* x, int64_t rows, Inputs& inputs, int64_t count,
                     float* log_probabilities, int64_t* outputs) {
  const Number* numbers = round_rows(linear, x, rows, inputs);
  std::vector<Candidates> candidates(rows, Candidates(count));
  product(linear, numbers, inputs.scale.data(), rows,
          [&](int64_t row, int64_t first, Floats logits) { candidates[row].add(logits, first); });
  for (int64_t row = 0; row < rows; ++row) {
    candidates[row].write(log_probabilities + row * count, outputs + row * count);
  }
}

// ------------------------------------------------------------------------------------------------------- embedding and norms

void embed(const Weights& model, const float* embedding, int64_t token, int64_t position, float* x) {
  embedding += token * model.width;
  for (int64_t i = 0; i < model.width; i += kLanes) {
    store(x + i, load(embedding + i) + load(model.positions + position * model.width + i));
  }
}

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

// softmax(query · keys) · values: one head's query (W,), already times 1/√W, over `length` tokens → (W,). Block b is at
// `block(b)`.
template <typename Block>
void attend(const float* query, int64_t length, int64_t width, Block block, std::vector<float>& scores, float* seen) {
  const Floats lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int64_t blocks = (length + kTokens - 1) / kTokens;
  scores.resize(std::max(scores.size(), size_t(blocks * kTokens)));
  Floats most = all(kNever), total = {};
  for (int64_t b = 0; b < blocks; ++b) {
    const Cached* keys = block(b);
    Floats part[4] = {};  // four sums at a time, because each addition waits for the one before
    for (int64_t i = 0; i < width; i += 4) {
      for (int64_t j = 0; j < 4; ++j) part[j] += query[i + j] * load(keys + (i + j) * kTokens);
    }
    const Floats score = (part[0] + part[1]) + (part[2] + part[3]);
    const float left = float(length - b * kTokens);
    const auto choose = [&](Register x, Register lane) { return lane < left ? x : Register{} + kNever; };
    const Floats real = by_registers(choose, score, lanes);
    most = larger(most, real);
    store(scores.data() + b * kTokens, real);
  }
  const float bound = largest_of(most);
  for (int64_t b = 0; b < blocks; ++b) {
    const Floats weight = exp(load(scores.data() + b * kTokens) - bound);
    total += weight;
    store(scores.data() + b * kTokens, weight);
  }
  const float inverse = 1 / sum_of(total);
  for (int64_t i = 0; i < width; i += kLanes) {
    Floats part[4] = {};
    for (int64_t b = 0; b < blocks; ++b) {
      const Cached* values = block(b) + kTokens * width + i;
      for (int64_t t = 0; t < kTokens; t += 4) {
        for (int64_t j = 0; j < 4; ++j) part[j] += scores[b * kTokens + t + j] * load(values + (t + j) * width);
      }
    }
    store(seen + i, ((part[0] + part[1]) + (part[2] + part[3])) * inverse);
  }
}

// All heads (H, W) of one token's queries over `length` tokens → (H, W). `block(b, h)` is where head h's block b is.
template <typename Block>
void attend_heads(const Weights& model, const float* queries, int64_t length, Block block, float* seen) {
  thread_local std::vector<float> scores;
  const int64_t W = model.width / model.heads;
  for (int64_t h = 0; h < model.heads; ++h) {
    attend(queries + h * W, length, W, [&](int64_t b) { return block(b, h); }, scores, seen + h * W);
  }
}

// ------------------------------------------------------------------------------------------------------- encoder and decoder

// What N rows need between their products; a thread keeps it from call to call.
struct Workspace {
  std::vector<float> x, normed, projected, seen, inner, y;
  Inputs inputs;

  void fit(int64_t N, const Weights& model, const Layer& layer) {
    const auto grow = [](auto& numbers, int64_t size) { numbers.resize(std::max(numbers.size(), size_t(size))); };
    for (auto* numbers : {&x, &normed, &seen, &y}) grow(*numbers, N * model.width);
    grow(projected, 3 * N * model.width);
    grow(inner, N * layer.linear1.out);
  }
};

// x ← x + sublayer(norm(x)), or x ← norm(x + sublayer(x))
template <typename Sublayer>
void add_and_norm(const Weights& model, const Norm& norm, Workspace& s, int64_t N, Sublayer sublayer) {
  float *x = s.x.data(), *y = s.y.data();
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
  apply(layer.linear1, x, N, s.inputs, s.inner.data(), true);
  apply(layer.linear2, s.inner.data(), N, s.inputs, y);
}

// `rows` sentences from number `first` on, together N tokens one after the other → their keys and values in the cache.
void encode(const Weights& model, const CacheAddresses& cache, const int64_t* tokens, int64_t first, int64_t rows, int64_t N) {
  thread_local Workspace s;
  thread_local std::vector<Cached> blocks;  // one sentence's keys and values: (blocks, H, 2, 16 · W)
  const int64_t D = model.width, H = model.heads, W = D / H, size = 2 * kTokens * W, layers = model.decoder_layers;
  const int64_t* lengths = cache.source_length + first;
  s.fit(N, model, model.encoder[0]);
  for (int64_t row = 0, n = 0; row < rows; ++row) {
    for (int64_t t = 0; t < lengths[row]; ++t, ++n) embed(model, model.source_embedding, tokens[n], t, &s.x[n * D]);
  }
  for (const Layer* layer = model.encoder; layer < model.encoder + model.encoder_layers; ++layer) {
    add_and_norm(model, layer->norms[0], s, N, [&](const float* x, float* y) {
      apply(layer->own, x, N, s.inputs, s.projected.data());  // (N, 3, H, W)
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
          attend_heads(model, query + 3 * t * D, lengths[row], block, &s.seen[(n + t) * D]);
        }
      }
      apply(layer->own_out, s.seen.data(), N, s.inputs, y);
    });
    add_and_norm(model, layer->norms[1], s, N, [&](const float* x, float* y) { feed_forward(*layer, x, y, N, s); });
  }
  normalise(model.encoder_norm, s.x.data(), s.x.data(), N, D);
  for (int64_t l = 0; l < layers; ++l) {
    apply(model.decoder[l].source, s.x.data(), N, s.inputs, s.projected.data());  // (N, 2, H, W)
    for (int64_t row = 0, n = 0; row < rows; ++row) {
      for (int64_t t = 0; t < lengths[row]; ++t, ++n) {
        const int64_t b = cache.source_first[first + row] + t / kTokens;
        for (int64_t h = 0; h < H; ++h) {
          const float* key = &s.projected[2 * n * D + h * W];
          append(find(model, cache.source, b, l, h), t % kTokens, key, key + D, W);
        }
      }
    }
  }
}

// tokens (N,) at `position` → what the output layer sees of them, s.x (N, D); their keys and values in the cache.
void decoder_step(const Weights& model, const CacheAddresses& cache, const int64_t* tokens, int64_t N, int64_t position, Workspace& s) {
  const int64_t D = model.width, H = model.heads, W = D / H;
  s.fit(N, model, model.decoder[0]);
  for (int64_t n = 0; n < N; ++n) embed(model, model.target_embedding, tokens[n], position, &s.x[n * D]);
  for (int64_t l = 0; l < model.decoder_layers; ++l) {
    const Layer& layer = model.decoder[l];
    add_and_norm(model, layer.norms[0], s, N, [&](const float* x, float* y) {
      apply(layer.own, x, N, s.inputs, s.projected.data());  // (N, 3, H, W)
      for (int64_t n = 0; n < N; ++n) {
        const float* query = &s.projected[3 * n * D];
        const auto block = [&](int64_t b, int64_t h) { return find(model, cache.own[b], cache.own_slots[b * N + n], l, h); };
        for (int64_t h = 0; h < H; ++h) {
          const float* key = query + D + h * W;
          append(block(position / kTokens, h), position % kTokens, key, key + D, W);
        }
        attend_heads(model, query, position + 1, block, &s.seen[n * D]);
      }
      apply(layer.own_out, s.seen.data(), N, s.inputs, y);
    });
    add_and_norm(model, layer.norms[1], s, N, [&](const float* x, float* y) {
      apply(layer.source_query, x, N, s.inputs, s.projected.data());  // (N, H, W)
      for (int64_t n = 0; n < N; ++n) {
        const auto block = [&](int64_t b, int64_t h) { return find(model, cache.source, cache.source_first[n] + b, l, h); };
        attend_heads(model, &s.projected[n * D], cache.source_length[n], block, &s.seen[n * D]);
      }
      apply(layer.source_out, s.seen.data(), N, s.inputs, y);
    });
    add_and_norm(model, layer.norms[2], s, N, [&](const float* x, float* y) { feed_forward(layer, x, y, N, s); });
  }
  normalise(model.decoder_norm, s.x.data(), s.x.data(), N, D);
}

}  // namespace

extern "C" {

int64_t outputs_in_a_panel() { return kPanel; }

// One product, (rows, in) → (rows, out): for the tests.
void multiply_rows(const Linear* linear, const float* x, int64_t rows, float* y) {
  Inputs inputs;
  apply(*linear, x, rows, inputs, y);
}

// All sentences of a batch, their tokens one sentence after the other, → keys and values in the cache.
void encode_sources(const Weights* model, const CacheAddresses* cache, const int64_t* tokens, int64_t rows) {
  for (int64_t first = 0, some = 0; first < rows; first += some) {
    int64_t N = cache->source_length[first];
    for (some = 1; first + some < rows && N + cache->source_length[first + some] <= kSourceTokens; ++some) {
      N += cache->source_length[first + some];
    }
    encode(*model, *cache, tokens, first, some, N);
    tokens += N;
  }
}

// tokens (N,) at `position` → the likeliest next ones (N,)
void next_tokens(const Weights* model, const CacheAddresses* cache, const int64_t* tokens, int64_t N, int64_t position,
                 int64_t* next) {
  thread_local Workspace s;
  decoder_step(*model, *cache, tokens, N, position, s);
  likeliest(model->output, s.x.data(), N, s.inputs, next);
}

// tokens (N,) at `position` → (N, count) the likeliest next ones and their log-probabilities, best first
void top_tokens(const Weights* model, const CacheAddresses* cache, const int64_t* tokens, int64_t N, int64_t position,
                int64_t count, float* log_probabilities, int64_t* next) {
  thread_local Workspace s;
  decoder_step(*model, *cache, tokens, N, position, s);
  find_candidates(model->output, s.x.data(), N, s.inputs, count, log_probabilities, next);
}

// Give each of N rows a slot of its own in a block: of those that share one, the first keeps it, the others get a copy in a
// slot that nobody uses. There are at least N slots, of `bytes` bytes each.
void separate(void* block, int64_t bytes, int64_t slots, int64_t* slot_of_row, int64_t N) {
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

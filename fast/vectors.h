// Vectors of as many floats as a register holds, and the few functions that the kernels need of them. GCC and Clang translate
// arithmetic on them into the instructions of the processor they compile for. Larger vectors would not do: GCC keeps them in
// memory, which is up to a hundred times slower.

#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#ifdef __AVX512F__
#include <immintrin.h>  // for the four functions where GCC does not find the one instruction itself
#endif

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;  // NEON, or x86-64 without AVX
#endif
constexpr int64_t kLanes = kRegisterBytes / 4;  // 16, 8 or 4; sizes of models are multiples of 16

typedef float Floats __attribute__((vector_size(kRegisterBytes)));
typedef int32_t Ints __attribute__((vector_size(kRegisterBytes)));
typedef uint32_t Words __attribute__((vector_size(kRegisterBytes)));
typedef uint16_t Shorts __attribute__((vector_size(kRegisterBytes / 2)));

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();
// Added to a float below 2^22, it rounds to the nearest whole number and leaves that in the lowest bits: 1.5 · 2^23.
constexpr float kRound = 12582912.0f;

// The upper half of a float: its range with 8 bits of precision.
struct bf16 {
  uint16_t bits;
};

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline Floats load(const bf16* from) {
  Shorts x;
  std::memcpy(&x, from, sizeof x);
#ifdef __AVX512F__  // one instruction, of which GCC makes five
  return (Floats)((Words)_mm512_cvtepu16_epi32((__m256i)x) << 16);
#else
  return (Floats)(__builtin_convertvector(x, Words) << 16);
#endif
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }
inline void store(bf16* to, Floats x) {
  // To the nearest, of two equally near ones to the even one. NaN stays NaN: its bits might round to infinity.
#ifdef __AVX512BF16__
  const __m256bh upper = _mm512_cvtneps_pbh((__m512)x);
#else
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Shorts upper = __builtin_convertvector(x == x ? rounded : Words{} + 0x7fc0, Shorts);
#endif
  std::memcpy(to, &upper, sizeof upper);
}

// The first n numbers, and zeros; or the first n numbers of x.
template <typename T>
inline Floats load(const T* from, int64_t n) {
  T part[kLanes] = {};
  std::memcpy(part, from, n * sizeof(T));
  return load(part);
}
template <typename T>
inline void store(T* to, Floats x, int64_t n) {
  T part[kLanes];
  store(part, x);
  std::memcpy(to, part, n * sizeof(T));
}

inline Floats broadcast(float x) { return x - Floats{}; }

inline Ints lane_numbers() {
  Ints numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = i;
  return numbers;
}

// Lane by lane; if one of them is NaN, b.
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

inline float sum_of(Floats x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)x);
#else
  float total = 0;
  for (int64_t i = 0; i < kLanes; ++i) total += x[i];
  return total;
#endif
}
inline float max_of(Floats x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)x);
#else
  float largest = x[0];
  for (int64_t i = 1; i < kLanes; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
#endif
}

// e^x for x ≤ 0, to 2 units of the last place; 0 for x < −87, where e^x is just above the smallest normal float. NaN stays.
inline Floats exp(Floats x) {
  const Floats least = broadcast(-87.0f);
  const Floats bounded = max(x, least);
  const Floats shifted = bounded * 1.44269504f + kRound;  // x / ln 2
  const Floats whole = shifted - kRound;
  const Floats rest = (bounded - whole * 0.693359375f) + whole * 2.12194440e-4f;  // x − whole · ln 2, in two steps
  Floats y = rest * 1.9875691500e-4f + 1.3981999507e-3f;  // the polynomial of Cephes
  y = y * rest + 8.3334519073e-3f;
  y = y * rest + 4.1665795894e-2f;
  y = y * rest + 1.6666665459e-1f;
  y = y * rest + 5.0000001201e-1f;
  y = y * rest * rest + rest + 1.0f;
  const Floats power = (Floats)((Ints)y + ((Ints)shifted << 23));  // y · 2^whole
  return x >= least ? power : (x < least ? Floats{} : x);
}

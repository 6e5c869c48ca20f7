// Sixteen floats at a time, and the few functions the kernels need of them. GCC and Clang make of a vector whatever the
// processor has: one register with AVX-512, two with AVX2, four with NEON.

#pragma once
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>  // for the three functions where GCC does not find the one instruction itself
#endif

constexpr int64_t kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

// What one register holds. GCC splits larger vectors into registers, but it compares them number by number. So comparisons are
// made register by register.
#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;  // NEON
#endif
typedef float Register __attribute__((vector_size(kRegisterBytes)));
typedef int32_t RegisterInts __attribute__((vector_size(kRegisterBytes)));

// Applies f to the vectors' registers: first to the lowest one of each, and so on.
template <typename Result = Floats, typename Function, typename... Vectors>
inline Result by_registers(Function f, Vectors... vectors) {
  Result result;
  for (size_t first = 0; first < sizeof result; first += kRegisterBytes) {
    const auto part = [&](const Floats& x) {
      Register some;
      std::memcpy(&some, reinterpret_cast<const char*>(&x) + first, kRegisterBytes);
      return some;
    };
    const auto some = f(part(vectors)...);
    std::memcpy(reinterpret_cast<char*>(&result) + first, &some, kRegisterBytes);
  }
  return result;
}

// The upper half of a float: its range with 8 bits of precision.
struct bf16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline Floats load(const bf16* from) {
  Halves x;
  std::memcpy(&x, from, sizeof x);
#ifdef __AVX512F__  // one instruction, of which GCC makes five
  return (Floats)((Words)_mm512_cvtepu16_epi32((__m256i)x) << 16);
#else
  return (Floats)(__builtin_convertvector(x, Words) << 16);
#endif
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }
inline void store(bf16* to, Floats x) {
  // To the nearest, of two equally near ones to the even one.
#ifdef __AVX512BF16__
  const __m256bh half = _mm512_cvtneps_pbh((__m512)x);
#else
  const Words bits = (Words)x;
  const Halves half = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Halves);
#endif
  std::memcpy(to, &half, sizeof half);
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

struct Whole {};
template <typename T>
inline Floats load(const T* from, Whole) {
  return load(from);
}
template <typename T>
inline void store(T* to, Floats x, Whole) {
  store(to, x);
}

// x, or its first n numbers and something else beyond
inline Floats only(Floats x, Whole, float = 0) { return x; }
inline Floats only(Floats x, int64_t n, float beyond = 0) {
  float numbers[kLanes];
  store(numbers, x);
  for (int64_t i = n; i < kLanes; ++i) numbers[i] = beyond;
  return load(numbers);
}

// Runs f(j, Whole) for every full vector of a row of n numbers, then f(j, rest) for what is left of it.
template <typename Step>
inline void by_vectors(int64_t n, const Step& f) {
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) f(j, Whole{});
  if (j < n) f(j, n - j);
}

inline Floats all(float x) { return x - Floats{}; }
inline Floats larger(Floats a, Floats b) {
  return by_registers([](Register x, Register y) { return x > y ? x : y; }, a, b);
}
// Lane by lane −1 (all bits) where a > b, else 0.
inline Ints is_greater(Floats a, Floats b) {
  return by_registers<Ints>([](Register x, Register y) { return RegisterInts(x > y); }, a, b);
}

inline float sum_of(Floats x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)x);
#else
  float total = 0;
  for (int64_t i = 0; i < kLanes; ++i) total += x[i];
  return total;
#endif
}
inline float largest_of(Floats x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)x);
#else
  float most = x[0];
  for (int64_t i = 1; i < kLanes; ++i) most = x[i] > most ? x[i] : most;
  return most;
#endif
}

// e^x for x ≤ 88, to 2 units of the last place; 0 below e^-87, just above the smallest normal float.
inline Register exp_of_register(Register x) {
  constexpr float kRound = 12582912.0f;  // 1.5 · 2^23: adding it leaves the nearest whole number in the last bits
  const Register least = Register{} - 87.0f;
  const Register bounded = x > least ? x : least;
  const Register shifted = bounded * 1.44269504f + kRound;  // x / ln 2
  const Register whole = shifted - kRound;
  const Register rest = (bounded - whole * 0.693359375f) + whole * 2.12194440e-4f;  // x − whole · ln 2, in two steps
  Register y = rest * 1.9875691500e-4f + 1.3981999507e-3f;  // the polynomial of Cephes
  y = y * rest + 8.3334519073e-3f;
  y = y * rest + 4.1665795894e-2f;
  y = y * rest + 1.6666665459e-1f;
  y = y * rest + 5.0000001201e-1f;
  y = y * rest * rest + rest + 1.0f;
  const Register power = (Register)((RegisterInts)y + ((RegisterInts)shifted << 23));
  return x >= least ? power : (x < least ? Register{} : x);  // NaN stays
}
inline Floats exp(Floats x) { return by_registers(exp_of_register, x); }

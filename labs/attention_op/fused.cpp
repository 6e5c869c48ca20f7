// GELU and the softmax of attention as loops of our own, forward and backward. operators.cpp calls a
// function of ATen for every operation, and each reads and writes all numbers once. A loop does all
// operations while the numbers are in registers or in the nearest cache, so it reads and writes
// memory once in total.
//
// `Vec` is ATen's vector of 4 to 16 numbers; `map` applies a function of vectors to an array,
// `reduce_all` combines its numbers to one.

// How wide the vectors may be. Without these they would be loops over single numbers.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define CPU_CAPABILITY_AVX512
#elif defined(__AVX2__) && defined(__FMA__)
#define CPU_CAPABILITY_AVX2
#endif

#define AT_PER_OPERATOR_HEADERS
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

namespace {

using at::Tensor;
using at::vec::Vectorized;

constexpr int64_t kGrain = 32768;  // numbers that are worth a thread

// ------------------------------------------------------------------------------------------- GELU

// Φ(x)
template <typename T>
Vectorized<T> normal_cdf(Vectorized<T> x) {
  using Vec = Vectorized<T>;
  return Vec(0.5) * (Vec(1) + (x * Vec(std::sqrt(0.5))).erf());
}

Tensor gelu(const Tensor& x) {
  const Tensor numbers = x.contiguous();
  Tensor result = at::empty_like(numbers);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "gelu", [&] {
    using Vec = Vectorized<scalar_t>;
    const scalar_t* in = numbers.const_data_ptr<scalar_t>();
    scalar_t* out = result.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, numbers.numel(), kGrain, [&](int64_t begin, int64_t end) {
      auto formula = [](Vec x) { return x * normal_cdf<scalar_t>(x); };
      at::vec::map(formula, out + begin, in + begin, end - begin);
    });
  });
  return result;
}

Tensor gelu_backward(const Tensor& grad, const Tensor& x) {
  const Tensor grads = grad.contiguous();
  const Tensor numbers = x.contiguous();
  Tensor result = at::empty_like(numbers);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "gelu_backward", [&] {
    using Vec = Vectorized<scalar_t>;
    const scalar_t factor = 1 / std::sqrt(2 * std::acos(-1.0));
    const scalar_t* grad_in = grads.const_data_ptr<scalar_t>();
    const scalar_t* in = numbers.const_data_ptr<scalar_t>();
    scalar_t* out = result.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, numbers.numel(), kGrain, [&](int64_t begin, int64_t end) {
      auto formula = [=](Vec grad, Vec x) {
        const Vec density = (Vec(-0.5) * x * x).exp() * Vec(factor);  // φ(x)
        return grad * (normal_cdf<scalar_t>(x) + x * density);
      };
      at::vec::map2(formula, out + begin, grad_in + begin, in + begin, end - begin);
    });
  });
  return result;
}

// ---------------------------------------------------------------------------------------- Softmax

// a (T) ← softmax(a + m), or zeros if all are -inf. A row of some hundred numbers stays in the
// nearest cache, so only the first and the last line wait for memory.
template <typename T>
void softmax_row(T* a, const T* m, int64_t keys) {
  using Vec = Vectorized<T>;
  if (m) {
    at::vec::map2([](Vec a, Vec m) { return a + m; }, a, a, m, keys);
  }
  auto maximum = [](Vec& x, Vec& y) { return at::vec::maximum(x, y); };
  const T largest = at::vec::reduce_all<T>(maximum, a, keys);
  if (largest == -std::numeric_limits<T>::infinity()) {
    std::fill(a, a + keys, T(0));  // this query may see nothing
    return;
  }
  // exp cannot overflow: no exponent is above 0.
  at::vec::map([=](Vec a) { return (a - Vec(largest)).exp(); }, a, a, keys);
  auto plus = [](Vec& x, Vec& y) { return x + y; };
  const T sum = at::vec::reduce_all<T>(plus, a, keys);
  at::vec::map([=](Vec e) { return e / Vec(sum); }, a, a, keys);
}

// A (B, H, S, T) ← softmax(A + M) in place, row by row; M broadcasts to (B, H, S, T).
void softmax_(Tensor& scores, const std::optional<Tensor>& bias) {
  TORCH_CHECK(scores.dim() == 4 && scores.is_contiguous(), "softmax_: (B, H, S, T), contiguous");
  const int64_t heads = scores.size(1);
  const int64_t queries = scores.size(2);
  const int64_t keys = scores.size(3);
  Tensor mask;
  if (bias) {
    mask = bias->expand(scores.sizes());  // copies nothing: a broadcast axis has stride 0
    if (mask.stride(3) != 1) {
      mask = mask.contiguous();
    }
  }
  AT_DISPATCH_FLOATING_TYPES(scores.scalar_type(), "softmax_", [&] {
    scalar_t* a = scores.mutable_data_ptr<scalar_t>();
    const scalar_t* m = bias ? mask.const_data_ptr<scalar_t>() : nullptr;
    const int64_t rows = scores.numel() / keys;
    at::parallel_for(0, rows, kGrain / keys + 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const scalar_t* m_row = nullptr;
        if (m) {
          const int64_t b = row / (heads * queries);
          const int64_t h = row / queries % heads;
          const int64_t s = row % queries;
          m_row = m + b * mask.stride(0) + h * mask.stride(1) + s * mask.stride(2);
        }
        softmax_row(a + row * keys, m_row, keys);
      }
    });
  });
}

// ∂P ← ∂A = P ∘ (∂P − δ) in place, row by row, with δ = Σ_j P_j ∂P_j.
void softmax_backward_(Tensor& grad, const Tensor& weights) {
  TORCH_CHECK(grad.sizes() == weights.sizes(), "softmax_backward_: two different shapes");
  TORCH_CHECK(grad.is_contiguous() && weights.is_contiguous(), "softmax_backward_: contiguous");
  const int64_t keys = grad.size(-1);
  AT_DISPATCH_FLOATING_TYPES(grad.scalar_type(), "softmax_backward_", [&] {
    using Vec = Vectorized<scalar_t>;
    scalar_t* grads = grad.mutable_data_ptr<scalar_t>();
    const scalar_t* p = weights.const_data_ptr<scalar_t>();
    const int64_t rows = grad.numel() / keys;
    at::parallel_for(0, rows, kGrain / keys + 1, [&](int64_t begin, int64_t end) {
      auto times = [](Vec x, Vec y) { return x * y; };
      auto plus = [](Vec x, Vec y) { return x + y; };
      for (int64_t row = begin; row < end; ++row) {
        scalar_t* g_row = grads + row * keys;
        const scalar_t* p_row = p + row * keys;
        const scalar_t delta =
            at::vec::map2_reduce_all<scalar_t>(times, plus, g_row, p_row, keys);
        auto formula = [=](Vec g, Vec p) { return p * (g - Vec(delta)); };
        at::vec::map2(formula, g_row, g_row, p_row, keys);
      }
    });
  });
}

}  // namespace

// (a!) marks an argument that is changed in place.
TORCH_LIBRARY(attention_op_fused, library) {
  library.def("gelu(Tensor x) -> Tensor");
  library.def("gelu_backward(Tensor grad, Tensor x) -> Tensor");
  library.def("softmax_(Tensor(a!) scores, Tensor? bias) -> ()");
  library.def("softmax_backward_(Tensor(a!) grad, Tensor weights) -> ()");
}

TORCH_LIBRARY_IMPL(attention_op_fused, CPU, library) {
  library.impl("gelu", &gelu);
  library.impl("gelu_backward", &gelu_backward);
  library.impl("softmax_", &softmax_);
  library.impl("softmax_backward_", &softmax_backward_);
}

// torch.compile asks for the shapes of the results only. It cannot look into a loop, as it can into
// functions of ATen.
Tensor like(const Tensor& x) {
  return at::empty_like(x, at::MemoryFormat::Contiguous);
}

TORCH_LIBRARY_IMPL(attention_op_fused, Meta, library) {
  library.impl("gelu", &like);
  library.impl("gelu_backward", [](const Tensor& grad, const Tensor& x) { return like(x); });
  library.impl("softmax_", [](Tensor& scores, const std::optional<Tensor>& bias) {});
  library.impl("softmax_backward_", [](Tensor& grad, const Tensor& weights) {});
}

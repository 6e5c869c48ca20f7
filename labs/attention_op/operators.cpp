// GELU and attention in C++, forward and backward, made of ATen's tensor functions.
// gelu_python.py and attention_python.py derive the formulas.
//
// B sequences, H heads, S queries, T keys, D width of queries and keys, W width of values.

// TensorOperators.h then includes only what it needs, which halves the time to compile.
#define AT_PER_OPERATOR_HEADERS
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Φ(x)
Tensor normal_cdf(const Tensor& x) {
  return 0.5 * (1 + (x * std::sqrt(0.5)).erf());
}

Tensor gelu(const Tensor& x) {
  return x * normal_cdf(x);
}

Tensor gelu_backward(const Tensor& grad, const Tensor& x) {
  const double pi = std::acos(-1.0);
  Tensor density = (-0.5 * x * x).exp() / std::sqrt(2 * pi);  // φ(x)
  return grad * (normal_cdf(x) + x * density);
}

// P ∘ Z
Tensor dropped(const Tensor& weights, const MaybeTensor& factors) {
  return factors ? weights * *factors : weights;
}

// Q (B, H, S, D), K (B, H, T, D), V (B, H, T, W) → output O (B, H, S, W), weights P (B, H, S, T)
std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const MaybeTensor& bias, const MaybeTensor& factors) {
  const double scale = 1 / std::sqrt(q.size(-1));
  Tensor scores = (q * scale).matmul(k.mT());
  if (bias) {
    scores += *bias;
  }
  Tensor weights = scores.softmax(-1);
  // The softmax of a row of -inf is nan.
  const double infinity = std::numeric_limits<double>::infinity();
  weights = weights.masked_fill(scores.amax(-1, /*keepdim=*/true) == -infinity, 0);
  return {dropped(weights, factors).matmul(v), weights};
}

// ∂O → ∂Q, ∂K, ∂V
std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& q,
                                                      const Tensor& k, const Tensor& v,
                                                      const MaybeTensor& factors,
                                                      const Tensor& weights, const Tensor& out) {
  const double scale = 1 / std::sqrt(q.size(-1));
  Tensor grad_v = dropped(weights, factors).mT().matmul(grad);
  Tensor grad_weights = dropped(grad.matmul(v.mT()), factors);
  Tensor delta = (grad * out).sum(-1, /*keepdim=*/true);
  Tensor grad_scores = (grad_weights - delta) * weights;
  Tensor grad_q = grad_scores.matmul(k) * scale;
  Tensor grad_k = grad_scores.mT().matmul(q) * scale;
  return {grad_q, grad_k, grad_v};
}

}  // namespace

// Python calls them as torch.ops.attention_op.gelu and so on. A schema names the arguments and their
// types; `?` marks those that may be None.
TORCH_LIBRARY(attention_op, library) {
  library.def("gelu(Tensor x) -> Tensor", &gelu);
  library.def("gelu_backward(Tensor grad, Tensor x) -> Tensor", &gelu_backward);
  library.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? factors) -> (Tensor, Tensor)",
      &attention);
  library.def(
      "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? factors, "
      "Tensor weights, Tensor out) -> (Tensor, Tensor, Tensor)",
      &attention_backward);
}

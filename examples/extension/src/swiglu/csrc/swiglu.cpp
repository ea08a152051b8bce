// The operators' schemas, and their kernels for CPUs. No Python in it: a C++ program can compile it as well.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>
#include <cmath>
#include <tuple>

// Raises where two tensors are no inputs of one operator.
void check_swiglu(const at::Tensor& gate, const at::Tensor& x) {
  TORCH_CHECK(gate.sizes() == x.sizes(), "swiglu: gate is ", gate.sizes(), ", x is ", x.sizes(), ": give one shape");
  TORCH_CHECK(gate.dtype() == x.dtype(), "swiglu: gate is ", gate.dtype(), ", x is ", x.dtype(), ": give one type");
  TORCH_CHECK(gate.device() == x.device(), "swiglu: gate is on ", gate.device(), ", x on ", x.device());
}

namespace {

constexpr int64_t kGrain = 1 << 14;  // elements for which another thread is worth its start

at::Tensor forward(const at::Tensor& gate, const at::Tensor& x) {
  check_swiglu(gate, x);
  const auto a = gate.contiguous(), b = x.contiguous();
  auto out = at::empty_like(b);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, b.scalar_type(), "swiglu", [&] {
    using math = at::opmath_type<scalar_t>;  // float, for half and bfloat16
    const auto *g = a.const_data_ptr<scalar_t>(), *v = b.const_data_ptr<scalar_t>();
    auto* to = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, b.numel(), kGrain, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const math z = g[i];
        to[i] = z / (1 + std::exp(-z)) * static_cast<math>(v[i]);
      }
    });
  });
  return out;
}

std::tuple<at::Tensor, at::Tensor> backward(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& x) {
  check_swiglu(gate, x);
  check_swiglu(grad, x);
  const auto c = grad.contiguous(), a = gate.contiguous(), b = x.contiguous();
  auto d_gate = at::empty_like(a), d_x = at::empty_like(b);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, b.scalar_type(), "swiglu_backward", [&] {
    using math = at::opmath_type<scalar_t>;
    const auto *d = c.const_data_ptr<scalar_t>(), *g = a.const_data_ptr<scalar_t>(), *v = b.const_data_ptr<scalar_t>();
    auto *to_gate = d_gate.mutable_data_ptr<scalar_t>(), *to_x = d_x.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, b.numel(), kGrain, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const math z = g[i], s = 1 / (1 + std::exp(-z)), from = d[i];
        to_gate[i] = from * static_cast<math>(v[i]) * s * (1 + z * (1 - s));
        to_x[i] = from * z * s;
      }
    });
  });
  return {d_gate, d_x};
}

}  // namespace

TORCH_LIBRARY(swiglu, library) {
  library.def("forward(Tensor gate, Tensor x) -> Tensor");
  library.def("backward(Tensor grad, Tensor gate, Tensor x) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(swiglu, CPU, library) {
  library.impl("forward", &forward);
  library.impl("backward", &backward);
}

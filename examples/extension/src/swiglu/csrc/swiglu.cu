// The operators' kernels for GPUs of NVIDIA's; setup.py compiles them where there are nvcc and a torch for CUDA.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>
#include <tuple>

void check_swiglu(const at::Tensor& gate, const at::Tensor& x);  // in swiglu.cpp

namespace {

constexpr int kThreads = 256;

unsigned blocks(int64_t count) { return static_cast<unsigned>((count + kThreads - 1) / kThreads); }

template <class T>
__global__ void forward_kernel(const T* gate, const T* x, T* out, int64_t count) {
  using math = at::opmath_type<T>;
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i >= count) return;
  const math z = gate[i];
  out[i] = z / (1 + ::exp(-z)) * static_cast<math>(x[i]);
}

template <class T>
__global__ void backward_kernel(const T* grad, const T* gate, const T* x, T* d_gate, T* d_x, int64_t count) {
  using math = at::opmath_type<T>;
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i >= count) return;
  const math z = gate[i], s = 1 / (1 + ::exp(-z)), from = grad[i];
  d_gate[i] = from * static_cast<math>(x[i]) * s * (1 + z * (1 - s));
  d_x[i] = from * z * s;
}

at::Tensor forward(const at::Tensor& gate, const at::Tensor& x) {
  check_swiglu(gate, x);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto a = gate.contiguous(), b = x.contiguous();
  auto out = at::empty_like(b);
  if (!b.numel()) return out;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, b.scalar_type(), "swiglu", [&] {
    forward_kernel<scalar_t><<<blocks(b.numel()), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        a.const_data_ptr<scalar_t>(), b.const_data_ptr<scalar_t>(), out.mutable_data_ptr<scalar_t>(), b.numel());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return out;
}

std::tuple<at::Tensor, at::Tensor> backward(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& x) {
  check_swiglu(gate, x);
  check_swiglu(grad, x);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto c = grad.contiguous(), a = gate.contiguous(), b = x.contiguous();
  auto d_gate = at::empty_like(a), d_x = at::empty_like(b);
  if (!b.numel()) return {d_gate, d_x};
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, b.scalar_type(), "swiglu_backward", [&] {
    backward_kernel<scalar_t><<<blocks(b.numel()), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        c.const_data_ptr<scalar_t>(), a.const_data_ptr<scalar_t>(), b.const_data_ptr<scalar_t>(),
        d_gate.mutable_data_ptr<scalar_t>(), d_x.mutable_data_ptr<scalar_t>(), b.numel());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return {d_gate, d_x};
}

}  // namespace

TORCH_LIBRARY_IMPL(swiglu, CUDA, library) {
  library.impl("forward", &forward);
  library.impl("backward", &backward);
}

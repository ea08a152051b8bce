// Prints rows of tensors as lines of JSON.
#pragma once
#include <ATen/ATen.h>
#include <cmath>
#include <cstdio>
#include <vector>
#include "model.h"

inline void print_number(int64_t value) { std::printf("%lld", static_cast<long long>(value)); }

inline void print_number(double value) {  // JSON has no word for what is not finite
  std::isfinite(value) ? std::printf("%.9g", value) : std::printf("null");
}

template <class T>
const T* print_nested(const T* next, at::IntArrayRef shape) {
  if (shape.empty()) {
    print_number(*next);
    return next + 1;
  }
  std::putchar('[');
  for (int64_t i = 0; i < shape[0]; ++i) {
    if (i) std::fputs(", ", stdout);
    next = print_nested(next, shape.slice(1));
  }
  std::putchar(']');
  return next;
}

// Prints `count` lines: row i of each of `outputs`, by name.
inline void print_lines(const std::vector<at::Tensor>& outputs, int64_t count) {
  std::vector<at::Tensor> plain;
  for (const auto& one : outputs)
    plain.push_back(one.to(one.is_floating_point() ? at::kDouble : at::kLong).contiguous());
  for (int64_t row = 0; row < count; ++row) {
    for (size_t i = 0; i < plain.size(); ++i) {
      const auto shape = plain[i].sizes().slice(1);
      const int64_t start = row * c10::multiply_integers(shape);
      std::printf("%s\"%s\": ", i ? ", " : "{", kOutputs[i]);
      if (plain[i].is_floating_point())
        print_nested(plain[i].const_data_ptr<double>() + start, shape);
      else
        print_nested(plain[i].const_data_ptr<int64_t>() + start, shape);
    }
    std::fputs("}\n", stdout);
  }
}

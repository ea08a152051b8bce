// Puts other weights into a loaded package: `grappe export RUN --to NEW --weights-for THIS` writes them, as safetensors.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include "checksum.h"
#include "model.h"
#include "npy.h"

// Name of a type of numbers in safetensors.
inline std::string type_name(at::ScalarType type) {
  if (type == at::kBool) return "BOOL";
  if (type == at::kBFloat16) return "BF16";
  const std::string kind = at::isFloatingType(type) ? "F" : type == at::kByte ? "U" : "I";
  return kind + std::to_string(8 * c10::elementSize(type));
}

inline void load_weights(torch::inductor::AOTIModelPackageLoader& model, const std::string& file) {
  const auto refuse = [&](const std::string& why) { throw std::runtime_error(file + ": " + why); };
  std::ifstream stream(file, std::ios::binary | std::ios::ate);
  if (!stream) refuse("it cannot be read");
  const int64_t size = stream.tellg();
  unsigned char start[8] = {};
  stream.seekg(0);
  stream.read(reinterpret_cast<char*>(start), sizeof start);
  int64_t length = 0;  // of the header, in JSON; the numbers follow
  for (int i = 7; i >= 0; --i) length = length << 8 | start[i];
  if (size < 8 || length < 0 || length > size - 8) refuse("it is cut, or is no file of weights");
  std::string header(length, ' ');
  stream.read(header.data(), length);
  if (header_value(header, "\"graph\":\"", '"') != kGraph)
    refuse("it has not the weights of this model: grappe export RUN --to NEW --weights-for FOLDER writes them");
  int64_t bytes = 0;
  const uint32_t crc = crc32(stream, bytes);
  if (header_value(header, "\"crc32\":\"", '"') != std::to_string(crc)) refuse("it is damaged");

  stream.clear();
  std::unordered_map<std::string, at::Tensor> weights = model.get_runner()->extract_constants_map(false);
  for (auto& [name, value] : weights) {
    if (name.rfind("model.", 0)) continue;  // a constant of forward(): it stays
    std::string shape;
    for (const int64_t one : value.sizes()) shape += (shape.empty() ? "" : ",") + std::to_string(one);
    const std::string key = "\"" + name + "\":{\"dtype\":\"" + type_name(value.scalar_type()) + "\",\"shape\":[" + shape +
                            "],\"data_offsets\":[";
    const auto found = header.find(key);
    if (found == std::string::npos) refuse("it has no " + name + " of the type and shape that the model has");
    auto read = at::empty(value.sizes(), value.options());
    char* comma = nullptr;
    const int64_t from = std::strtoll(header.c_str() + found + key.size(), &comma, 10);
    const int64_t end = *comma == ',' ? std::strtoll(comma + 1, nullptr, 10) : -1;
    if (from < 0 || end > bytes || end - from != static_cast<int64_t>(read.nbytes())) refuse("it is damaged");
    stream.seekg(8 + length + from);
    stream.read(static_cast<char*>(read.mutable_data_ptr()), read.nbytes());
    value = at::empty_strided(value.sizes(), value.strides(), value.options()).copy_(read);
  }
  model.load_constants(weights, false, true);
}

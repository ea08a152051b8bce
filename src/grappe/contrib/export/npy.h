// Reads arrays of numbers from .npy files, NumPy's plain format (versions 1 to 3).
#pragma once
#include <ATen/ATen.h>
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>
#include "model.h"

// Returns the text that follows `key` in the header, up to `end`.
inline std::string header_value(const std::string& header, const std::string& key, char end) {
  const auto found = header.find(key);
  if (found == std::string::npos) return "";
  const auto start = found + key.size();
  return header.substr(start, header.find(end, start) - start);
}

// Reads samples [N, ...] of the type and shape that the model takes; throws std::runtime_error where the file has others.
inline at::Tensor read_npy(const std::string& file, const Input& wanted) {
  const auto refuse = [&](const std::string& why) { throw std::runtime_error(file + ": " + why); };
  std::ifstream stream(file, std::ios::binary | std::ios::ate);
  if (!stream) refuse("it cannot be read");
  const int64_t size = stream.tellg();
  unsigned char start[12] = {};
  stream.seekg(0);
  stream.read(reinterpret_cast<char*>(start), sizeof start);
  if (stream.gcount() < 12 || std::string(start, start + 6) != "\x93NUMPY") refuse("it is no .npy file");
  int64_t from = start[6] == 1 ? 10 : 12;  // version 1 has two bytes of length, the others four
  int64_t length = start[8] | start[9] << 8;
  if (from == 12) length |= static_cast<int64_t>(start[10]) << 16 | static_cast<int64_t>(start[11]) << 24;
  if (length > size - from || length > 1 << 20) refuse("it is cut, or its header is damaged");
  std::string header(length, ' ');
  stream.seekg(from);
  stream.read(header.data(), length);
  from += length;

  const std::string type = header_value(header, "'descr': '", '\'');
  if (type.size() < 2 || type[0] == '>' || type.substr(1) != wanted.type)
    refuse("its numbers are " + type + ", and the model takes " + wanted.type + " (NumPy's names)");
  if (header_value(header, "'fortran_order': ", ',') != "False") refuse("it is in Fortran's order: save a C array");
  const std::string shape = header_value(header, "'shape': (", ')');
  std::vector<int64_t> sizes;
  char* end = nullptr;
  for (const char* at = shape.c_str(); *at; at = end) {
    const int64_t length = std::strtoll(at, &end, 10);
    if (end == at) break;
    sizes.push_back(length);
    while (*end == ',' || *end == ' ') ++end;
  }
  if (sizes.empty() || !std::equal(sizes.begin() + 1, sizes.end(), wanted.shape.begin(), wanted.shape.end()))
    refuse("its shape is (" + shape + "), and the model takes [N" + wanted.shape_text + "]");
  if (sizes[0] < 1) refuse("there is no sample in it");
  if ((size - from) % wanted.bytes || (size - from) / wanted.bytes != sizes[0]) refuse("it is cut, or longer than it says");
  auto values = at::empty(sizes, wanted.dtype);
  stream.read(static_cast<char*>(values.mutable_data_ptr()), size - from);
  if (stream.gcount() != size - from) refuse("it cannot be read to its end");
  return values;
}

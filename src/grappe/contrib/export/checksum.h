// Refuses files that are damaged, or of another export: torch's loader would run such a package.
#pragma once
#include <array>
#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>
#include "model.h"

// CRC-32 of zlib and PNG (ISO 3309) of the rest of a stream, and its bytes: every damage within 32 bits is seen. It
// proves nothing about who made the file.
inline uint32_t crc32(std::istream& stream, int64_t& size) {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    table[i] = i;
    for (int bit = 0; bit < 8; ++bit) table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xEDB88320u : 0u);
  }
  uint32_t crc = ~0u;
  size = 0;
  std::vector<char> part(1 << 20);
  while (stream.read(part.data(), part.size()), stream.gcount() > 0) {
    size += stream.gcount();
    for (int64_t i = 0; i < stream.gcount(); ++i)
      crc = table[(crc ^ static_cast<unsigned char>(part[i])) & 0xFF] ^ crc >> 8;
  }
  return ~crc;
}

inline void check_package(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw std::runtime_error(file + ": it cannot be read");
  int64_t size = 0;
  const uint32_t crc = crc32(stream, size);
  if (size != kPackageBytes || crc != kPackageCrc32)
    throw std::runtime_error(file + ": it is damaged, or is not the package that this program was exported with");
}

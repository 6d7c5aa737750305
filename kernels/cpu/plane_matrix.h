// A matrix of bit planes as it lies in memory; kernels/planes.py and kernels/scales.py say how.
#pragma once
#include <cstdint>

constexpr int ALL_PLANES = 4, PLANE_BITS[ALL_PLANES] = {2, 1, 1, 4};  // of symmetric codes
constexpr int BLOCK_ROWS = 16, CHUNK = 32, STEPS = 4, STEP_BYTES = 64;
constexpr int SUPERBLOCK = 256, SUPER_CHUNKS = SUPERBLOCK / CHUNK;

// Kinds of scales, in the order of kernels/scales.py.
enum Scales : int32_t { SYMMETRIC, CENTRED, OFFSET, SUPER, SUPER_OFFSET, SUPER_NIBBLES };

extern "C" struct PlaneFormat {
  int32_t group_size, bits, scales;

  bool symmetric() const { return scales == SYMMETRIC; }
  bool superblocks() const { return scales >= SUPER; }
  bool centred() const { return scales == CENTRED || scales == SUPER; }
  long row_group() const { return symmetric() ? group_size : CHUNK; }  // of activations
  int first_bits() const { return bits < 4 ? 2 : 4; }                  // of a file's codes
  int most_planes() const { return symmetric() ? ALL_PLANES : first_bits() == bits ? 1 : 2; }
  int plane_bits(int p) const {
    if (symmetric()) return PLANE_BITS[p];
    return p == 0 ? first_bits() : p == 1 ? bits - first_bits() : 0;
  }
  // Bytes of the scales of 16 rows for each superblock, and of those in it that are not its groups'.
  long super_head() const { return !superblocks() ? 0 : scales == SUPER ? 32 : 64; }
  long group_bytes() const {
    constexpr long each[] = {32, 32, 64, 16, 32, 16};
    return each[scales];
  }
  long super_bytes() const { return super_head() + SUPERBLOCK / group_size * group_bytes(); }
};

extern "C" struct PlaneMatrix {
  const uint8_t* plane[ALL_PLANES];  // null for planes that are absent
  const uint16_t* scales;            // float16, or what kernels/scales.py says
  int64_t rows, columns;             // N outputs, K inputs
  PlaneFormat format;
  int32_t planes;  // how many it has

  long blocks() const { return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }
  long groups() const {
    if (format.group_size < CHUNK) return chunks() * CHUNK / format.group_size;
    return (columns + format.group_size - 1) / format.group_size;
  }
  long chunks() const {
    if (format.symmetric()) return groups() * format.group_size / CHUNK;
    return (columns + CHUNK - 1) / CHUNK;
  }
  long supers() const { return (columns + SUPERBLOCK - 1) / SUPERBLOCK; }
  long plane_stride(int p) const { return chunks() * STEP_BYTES * format.plane_bits(p); }  // a block's
  long plane_bytes(int p) const { return blocks() * plane_stride(p); }
  long scale_stride() const {  // of a block, in 16-bit words
    return (format.superblocks() ? supers() * format.super_bytes()
                                 : groups() * format.group_bytes()) / 2;
  }
  long scale_words() const { return blocks() * scale_stride(); }

  long bytes() const {
    long bytes = scale_words() * long(sizeof *scales);
    for (int p = 0; p < planes; ++p) bytes += plane_bytes(p);
    return bytes;
  }

  PlaneMatrix from(long block) const {  // the rows from a block on
    PlaneMatrix w = *this;
    for (int p = 0; p < planes; ++p) w.plane[p] += block * plane_stride(p);
    w.scales += block * scale_stride();
    w.rows -= block * BLOCK_ROWS;
    return w;
  }
};

// Activation rows of int8 codes with a float scale for each group of columns, for the plane kernels;
// `quantize_rows` of kernels/reference.py is the definition.
#pragma once
#include "plane_tiles.h"

typedef int8_t vb __attribute__((vector_size(LANES)));

constexpr int MAX_GROUP = 64;
constexpr float MAX_CODE = 127, TINY = 0x1p-100f;

// Bytes between rows: one cache line more than they need, because rows a power of two apart would
// share the same few sets of the cache.
constexpr long row_stride(long columns, long group_size) {
  const long groups = (columns + group_size - 1) / group_size;
  return aligned(groups * (group_size + long(sizeof(QuantizedRows::Scale)))) + 64;
}

constexpr size_t rows_bytes(long rows, long columns, long group_size) {
  return rows * row_stride(columns, group_size);
}

// Rows in `memory` of rows_bytes(), for `digits` times as many.
static inline QuantizedRows place_rows(char* memory, long columns, long group_size,
                                       long digits = 1) {
  return {reinterpret_cast<int8_t*>(memory), row_stride(columns, group_size),
          (columns + group_size - 1) / group_size, group_size, digits};
}

// One group of a row, `size` floats padded with zeros. Where one is not finite, nor is the scale, and
// the codes are 0: their products are NaN.
static inline void quantize_group(const float* from, long size, const QuantizedRows& row,
                                  long group) {
  vi bound = {};  // magnitudes compare as the integers that their bits are, NaN above all
  for (long c = 0; c < size; c += LANES) {
    const vi magnitude = bits<vi>(load<vf>(from + c)) & 0x7fffffff;
    bound = magnitude > bound ? magnitude : bound;
  }
  const int32_t most = fold_lanes(bound, larger);
  float largest = bits<float>(most);
  largest = largest < TINY ? 0 : largest;
  const float inverse = largest > 0 ? MAX_CODE / largest : 0;
  const float to_int = 12582912.0f;  // 1.5 * 2^23: rounds to nearest, ties to even
  const vi finite = vi{} - (most < 0x7f800000);
  vi total = {}, first = {};
  for (long c = 0; c < size; c += LANES) {
    if (c == size / 2) first = total;
    vf product = load<vf>(from + c) * inverse;
    IN_REGISTER(product);  // rounded by itself, never fused with the addition
    const vi code = (bits<vi>(product + to_int) - bits<int32_t>(to_int)) & finite;
    store(row.codes(group) + c, __builtin_convertvector(code, vb));
    total += code;
  }
  const auto sum = [](vi lanes) {
    return int16_t(fold_lanes(lanes, [](auto a, auto b) { return a + b; }));
  };
  store(row.scale_at(group), QuantizedRows::Scale{largest / MAX_CODE, sum(total), sum(first)});
}

// One group of a row in as many digits as it has. Each codes what those before it leave of the values,
// 1/254 of them at most, so three keep 24 bits of the largest: as many as a float.
static inline void quantize_digits(float* values, long size, const QuantizedRows& row, long group) {
  quantize_group(values, size, row, group);
  for (long d = 1; d < row.digits; ++d) {
    const QuantizedRows last = row.digit(d - 1);
    const vf scale = splat(-last.scale(group, 0).scale);
    for (long c = 0; c < size; c += LANES) {
      const vf code = __builtin_convertvector(load<vb>(last.codes(group) + c), vf);
      store(values + c, fused(code, scale, load<vf>(values + c)));
    }
    quantize_group(values, size, row.digit(d), group);
  }
}

// A whole row of floats or bf16.
template <class From>
static void quantize_row(const From* from, long columns, long group_size,
                         const QuantizedRows& row) {
  for (long group = 0; group < row.groups; ++group) {
    alignas(64) float part[MAX_GROUP];
    for (long c = 0; c < group_size; c += LANES) {
      const long left = columns - group * group_size - c;
      store(part + c, left > 0 ? load_as_fp32(from + group * group_size + c, left) : vf{});
    }
    quantize_digits(part, group_size, row, group);
  }
}

static inline void copy_row(const QuantizedRows& from, const QuantizedRows& to) {
  memcpy(to.memory, from.memory, from.digits * from.stride);
}

// Keys and values as a sequence keeps them: in blocks of tokens that a table lists, each row whole
// (float32, bf16) or as codes of 8 or 4 bits. A row is coded by itself when it is written, so its bits
// depend on no other row. Codes come in groups that share a scale, and may be those of the row turned
// by a Hadamard matrix, which spreads outliers; whoever reads them turns queries and sums likewise.
// Letters: N heads, D numbers of a row.
#pragma once
#include <algorithm>
#include <cmath>

#include "gemm.h"

namespace kv {

constexpr long TOKENS = 64, SHIFT = 6;  // of a block
constexpr long GROUP = 32;              // codes that share a scale
constexpr long WHOLE = 62;              // a shift that makes one block of any number of tokens

struct Format {
  int32_t bits, turned;  // 32, 16, 8 or 4 bits a number; turned by a Hadamard matrix

  bool coded() const { return bits < 16; }
  long groups(long size) const { return (size + GROUP - 1) / GROUP; }
  long row_bytes(long size) const {
    return coded() ? groups(size) * (GROUP * bits / 8 + 2) : size * bits / 8;
  }
};

// Turns a row in place by an orthonormal symmetric matrix: to turn it again turns it back. Of a size
// that is no power of two, parts of the largest power that divides it are turned by themselves.
void turn(float* row, long size);

// Codes a row of `size` floats; one function for all callers, so that equal rows get equal codes.
void put(Format format, const float* row, long size, char* to);

template <class V>
static inline vf to_float(V codes) {
  return __builtin_convertvector(codes, vf);
}

typedef int8_t v8 __attribute__((vector_size(LANES)));
typedef uint8_t vu8 __attribute__((vector_size(LANES)));

// Lanes of signed bytes, and of the low halves of bytes, as integers.
static inline vi integers(const char* from) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepi8_epi32(load<__m128i>(from));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  return __builtin_convertvector(load<v8>(from), vi);
#endif
}

static inline float scale_of(const char* at) {
  uint16_t half;
  memcpy(&half, at, 2);
  return bits<float>(uint32_t(half) << 16);
}

// to = the row as floats; it has room for whole groups.
static inline void take(Format format, const char* from, long size, float* to) {
  if (format.bits == 32) {
    memcpy(to, from, size * sizeof(float));
  } else if (format.bits == 16) {
    const auto* row = reinterpret_cast<const uint16_t*>(from);
    for (long c = 0; c < size; c += LANES) store(to + c, load_as_fp32(row + c, size - c));
  } else {
    const long groups = format.groups(size);
    const char* codes = from + 2 * groups;
    for (long g = 0; g < groups; ++g, to += GROUP) {
      const vf scale = splat(scale_of(from + 2 * g));
      if (format.bits == 8) {
        UNROLL for (int c = 0; c < GROUP; c += LANES)
          store(to + c, __builtin_convertvector(integers(codes + c), vf) * scale);
        codes += GROUP;
      } else {  // number c is in the low half of byte c, number c + 16 in the high half
        UNROLL for (int c = 0; c < GROUP / 2; c += LANES) {
          const vi both = integers(codes + c);
          store(to + c, __builtin_convertvector((both & 15) - 8, vf) * scale);
          store(to + c + GROUP / 2, __builtin_convertvector(((both >> 4) & 15) - 8, vf) * scale);
        }
        codes += GROUP / 2;
      }
    }
  }
}

static inline long whole_groups(long size) { return (size + GROUP - 1) / GROUP * GROUP; }

// The rows of one head in a cache.
struct Rows {
  const char* const* table;  // addresses of the blocks
  Format format;
  long size;          // D
  long shift;         // log2 of a block's tokens
  long offset;        // of the head's rows in a block, in bytes
  long bytes;         // of a row

  // `room`: tokens of a block.
  Rows(const void* table, Format format, long size, long room, long head)
      : table(static_cast<const char* const*>(table)), format(format), size(size),
        shift(room == TOKENS ? SHIFT : WHOLE), bytes(format.row_bytes(size)) {
    offset = head * room * bytes;
  }
  char* at(long t) const {
    const long block = t >> shift;
    return const_cast<char*>(table[block]) + offset + (t - (block << shift)) * bytes;
  }

  // Where `count` rows from t on lie as floats, one after the other `stride` apart: in the block
  // itself, or in `memory`, which has room for `count` rows of whole groups.
  const float* floats(long t, long count, float* memory, long& stride) const {
    if (format.bits == 32 && t >> shift == (t + count - 1) >> shift)
      return stride = size, reinterpret_cast<const float*>(at(t));
    stride = whole_groups(size);
    for (long i = 0; i < count; ++i) take(format, at(t + i), size, memory + i * stride);
    return memory;
  }
  // The same of chosen rows.
  const float* floats(const int64_t* index, long count, float* memory, long& stride) const {
    stride = whole_groups(size);
    for (long i = 0; i < count; ++i) take(format, at(index[i]), size, memory + i * stride);
    return memory;
  }
};

// Of each whole block and head, the largest and then the smallest value of each number of its keys, as
// they are stored: (2, D) floats. They lie behind the block's values, where a cache keeps them.
struct Bounds {
  Rows keys;
  long offset;  // of the head's bounds in a block of keys, in bytes

  // `begin`: behind the block's values.
  Bounds(const Rows& keys, long begin, long head)
      : keys(keys), offset(begin + head * 2 * keys.size * long(sizeof(float))) {}
  float* at(long block) const {
    return reinterpret_cast<float*>(const_cast<char*>(keys.table[block]) + offset);
  }
  void set(long block) const;  // when the last row of a block is written
};

// Behind a block's values.
static inline long bounds_begin(Format keys, long key_size, Format values, long value_size,
                                long heads) {
  return TOKENS * heads * (keys.row_bytes(key_size) + values.row_bytes(value_size));
}

}  // namespace kv

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

// Codes of 4 bits from number `own` of a group on: number c is in the low half of byte c, number c + 16
// in the high half.
static inline vf half_bytes(const char* codes, unsigned long own) {
  const vi both = integers(codes + own % (GROUP / 2));
  const vi code = own < GROUP / 2 ? both : both >> 4;
#if defined(__AVX512F__)  // the low half of each lane chooses
  const vf table = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  return (vf)_mm512_permutexvar_ps((__m512i)code, (__m512)table);
#else
  return to_float((code & 15) - 8);
#endif
}

// A scale, which is a bf16, in all lanes.
static inline vf scales(const char* at) {
  uint16_t half;
  memcpy(&half, at, 2);
#if defined(__AVX512BW__)
  return bits<vf>((vu)_mm512_set1_epi16(half) << 16);
#else
  return splat(bits<float>(uint32_t(half) << 16));
#endif
}

// How the numbers of a row lie, for loops over vectors of them: `whole` gives LANES from c on,
// `part` the last `left` of a row from c on, and zeros (or, of codes, what pads their group).
struct Floats {
  static constexpr long BYTES = 4;
  vf whole(const char* row, long c) const { return load<vf>(row + 4 * c); }
  vf part(const char* row, long c, long left) const {
    return load_as_fp32(reinterpret_cast<const float*>(row) + c, left);
  }
};

struct Fp16s {
  static constexpr long BYTES = 2;
  vf whole(const char* row, long c) const { return from_fp16(load<vh>(row + 2 * c)); }
  vf part(const char* row, long c, long left) const {
    return from_fp16(load_part<vh>(reinterpret_cast<const uint16_t*>(row) + c, left));
  }
};

struct Bf16s {
  vf whole(const char* row, long c) const { return from_bf16(load<vh>(row + 2 * c)); }
  vf part(const char* row, long c, long left) const {
    return load_as_fp32(reinterpret_cast<const uint16_t*>(row) + c, left);
  }
};

template <int BITS>
struct Codes {
  long head;  // bytes of a row's scales

  __attribute__((always_inline)) vf whole(const char* row, long c) const {
    const unsigned long group = c / unsigned(GROUP), own = c % unsigned(GROUP);
    const char* codes = row + head + group * (GROUP * BITS / 8);
    const vf code = BITS == 8 ? to_float(integers(codes + own)) : half_bytes(codes, own);
    return code * scales(row + 2 * group);
  }
  vf part(const char* row, long c, long) const { return whole(row, c); }
};

// Runs `body(numbers)` with how the numbers of a row of `size` lie.
template <class Body>
static inline void with_numbers(Format format, long size, const Body& body) {
  if (format.bits == 32) return body(Floats{});
  if (format.bits == 16) return body(Bf16s{});
  const long head = 2 * format.groups(size);
  format.bits == 8 ? body(Codes<8>{head}) : body(Codes<4>{head});
}

// to = the row as floats; it has room for whole groups.
static inline void take(Format format, const char* from, long size, float* to) {
  if (format.bits == 32) {
    memcpy(to, from, size * sizeof(float));
    return;
  }
  with_numbers(format, size, [&](auto numbers) {
    long c = 0;
    for (; c + LANES <= size; c += LANES) store(to + c, numbers.whole(from, c));
    if (c < size) store(to + c, numbers.part(from, c, size - c));
  });
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

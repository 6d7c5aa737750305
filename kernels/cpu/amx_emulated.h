// AMX's instructions in plain C++, as Intel's manual (volume 2) defines them: tests build with
// -DEMULATED_AMX on machines without AMX. A use that the processor would refuse ends the process.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace amx {

constexpr bool ready = true;

struct EmulatedTile {
  long rows, bytes;  // of a row
  uint8_t row[16][64];
};

struct EmulatedTiles {
  bool configured = false;
  EmulatedTile at[8] = {};
};
inline thread_local EmulatedTiles tiles;

static inline void require(bool holds, const char* rule) {
  if (holds) return;
  fprintf(stderr, "AMX would refuse this: %s\n", rule);
  abort();
}

static inline EmulatedTile& checked(int index) {
  require(tiles.configured, "a tile is used without a configuration");
  EmulatedTile& tile = tiles.at[index];
  require(tile.rows && tile.bytes, "a tile without a shape is used");
  return tile;
}

// Config: 64 bytes, with the palette first, from byte 16 on the bytes of a row, from 48 on the rows.
template <class Config>
static inline void configure(const Config& config) {
  static_assert(sizeof(Config) == 64, "the size that ldtilecfg reads");
  uint8_t raw[64];
  memcpy(raw, &config, sizeof raw);
  require(raw[0] == 1, "the palette is 1");
  for (int i = 1; i < 16; ++i) require(!raw[i], "start row and reserved bytes are 0");
  for (int i = 0; i < 16; ++i) {
    const long bytes = raw[16 + 2 * i] | raw[17 + 2 * i] << 8, rows = raw[48 + i];
    require(i < 8 ? bytes <= 64 && rows <= 16 : !bytes && !rows, "8 tiles of 16 rows of 64 bytes");
    require(!bytes == !rows, "rows and bytes are both 0 or both set");
    if (i < 8) tiles.at[i] = EmulatedTile{rows, bytes, {}};
  }
  tiles.configured = true;
}

static inline void release() { tiles = EmulatedTiles{}; }

template <int R>
static inline void zero() {
  memset(checked(R).row, 0, sizeof checked(R).row);
}

template <int R>
static inline void load_tile(const void* from, long stride) {
  zero<R>();
  EmulatedTile& tile = checked(R);
  for (long i = 0; i < tile.rows; ++i)
    memcpy(tile.row[i], static_cast<const char*>(from) + i * stride, tile.bytes);
}

template <int R>
static inline void store_tile(void* to, long stride) {
  const EmulatedTile& tile = checked(R);
  for (long i = 0; i < tile.rows; ++i)
    memcpy(static_cast<char*>(to) + i * stride, tile.row[i], tile.bytes);
}

// Calls add(row of A, row of B, row of SUM, numbers in a row of SUM) for the rows that belong together.
template <int SUM, int A, int B, class Add>
static inline void multiply(const Add& add) {
  static_assert(SUM != A && SUM != B && A != B, "three different tiles");
  EmulatedTile &sum = checked(SUM), &a = checked(A), &b = checked(B);
  require(sum.bytes % 4 == 0 && a.bytes % 4 == 0, "rows are whole 32-bit numbers");
  require(a.rows == sum.rows && b.bytes == sum.bytes && a.bytes / 4 == b.rows, "shapes agree");
  for (long m = 0; m < sum.rows; ++m)
    for (long k = 0; k < b.rows; ++k) add(m, k, sum, a, b);
}

template <int SUM, int A, int B>
static inline void multiply_codes() {
  multiply<SUM, A, B>([](long m, long k, auto& sum, auto& a, auto& b) {
    int32_t total[16];
    memcpy(total, sum.row[m], sizeof total);
    for (int n = 0; n < 16; ++n)
      for (int i = 0; i < 4; ++i)
        total[n] += int32_t(int8_t(a.row[m][4 * k + i])) * int32_t(b.row[k][4 * n + i]);
    memcpy(sum.row[m], total, sum.bytes);
  });
}

static inline float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.f, x) : x; }

static inline float wide(const uint8_t* bf16) {
  uint16_t half;
  memcpy(&half, bf16, sizeof half);
  const uint32_t bits = uint32_t(half) << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return flushed(x);
}

// The first and the second numbers of the pairs are summed apart, each by one rounding a product, and
// both sums are added to what the register holds. Denormal numbers count as 0.
template <int SUM, int A, int B>
static inline void multiply_bf16() {
  float apart[16][2] = {};
  multiply<SUM, A, B>([&](long m, long k, auto& sum, auto& a, auto& b) {
    if (!k) memset(apart, 0, sizeof apart);
    for (int n = 0; n < 16; ++n)
      for (int i = 0; i < 2; ++i)
        apart[n][i] = flushed(
            std::fma(wide(a.row[m] + 4 * k + 2 * i), wide(b.row[k] + 4 * n + 2 * i), apart[n][i]));
    if (k + 1 < b.rows) return;
    float total[16];
    memcpy(total, sum.row[m], sizeof total);
    for (int n = 0; n < 16; ++n)
      total[n] = flushed(flushed(total[n]) + flushed(apart[n][0] + apart[n][1]));
    memcpy(sum.row[m], total, sum.bytes);
  });
}

}  // namespace amx

// A matrix of bit planes, and a panel of it: blocks that one thread multiplies by all rows. For many
// rows it unpacks the codes to memory once.
#pragma once
#include "amx_planes.h"
#include "file_tiles.h"

// Whether unpacking to memory first pays for so many rows: with vectors of 8 lanes from two tiles on.
static inline bool unpacks(long rows) {
  return rows > (amx::ready || LANES == 8 ? TILE_ROWS : 3 * TILE_ROWS);
}

// Whether the products of unpacked codes prefetch the thread's next panel, which takes four tiles. With
// AMX they leave no time for that, and unpacking prefetches it; as it does with a file's own codes.
static inline bool fetches_late(const PlaneMatrix& w, long rows) {
  return rows > 3 * TILE_ROWS && !amx::ready && w.format.symmetric();
}

// A tile: some of the rows that a panel is multiplied by.
struct Tile {
  long begin, rows, index;
};

// The first blocks of a matrix, ready to be multiplied by tiles of `rows` rows.
class Panel {
 public:
  static constexpr int MOST_TILE_ROWS = amx::ROWS > TILE_ROWS ? amx::ROWS : TILE_ROWS;

  // `next` is the thread's next panel, or `w` again if unknown. `memory` has unpacked_bytes(blocks)
  // where `unpacks(rows * digits)`; null: the panel is not unpacked.
  Panel(const PlaneMatrix& w, const PlaneMatrix& next, long blocks, long rows, uint8_t* memory,
        long digits)
      : w_(w), next_(next), blocks_(blocks), rows_(rows), digits_(digits),
        codes_(unpacks(rows * digits) ? memory : nullptr) {
    if (codes_ && !w.format.symmetric())
      file_codes::unpack(w, next, blocks, codes_);
    else if (codes_)
      with_source(fetches_late(w, rows * digits) ? w : next,
                  [&](auto source) { ::unpack(source, blocks, codes_); });
  }

  static long unpacked_bytes(const PlaneMatrix& w, long blocks) {
    return blocks * BLOCK_ROWS * w.chunks() * CHUNK;
  }

  // Calls run(tile) for all rows, in as few tiles as possible, of nearly equal sizes.
  template <class Run>
  void each_tile(const Run& run) const {
    Tile tile{0, 0, 0};
    for (long left = tiles(); left; --left, ++tile.index, tile.begin += tile.rows) {
      tile.rows = (rows_ - tile.begin + left - 1) / left;
      run(tile);
    }
  }

  // out[i * stride + n] = x[i] . row n of the panel, for the rows of a tile; `out` has room for
  // MOST_TILE_ROWS rows.
  void multiply(const QuantizedRows& x, const Tile& tile, float* out, long stride) const {
    multiply_digits(x.from(tile.begin), tile, out, stride);
    if (digits_ == 1) return;
    for (long i = 0; i < tile.rows; ++i)
      for (long n = 0; n < blocks_ * BLOCK_ROWS; n += LANES) {
        const float* from = out + i * digits_ * stride + n;
        vf sum = load<vf>(from + (digits_ - 1) * stride);  // the smallest first
        for (long d = digits_ - 2; d >= 0; --d) sum += load<vf>(from + d * stride);
        store(out + i * stride + n, sum);
      }
  }

 private:
  void multiply_digits(const QuantizedRows& own, const Tile& tile, float* out, long stride) const {
    const long rows = tile.rows * digits_;
    if (!w_.format.symmetric())
      return file_codes::multiply(w_, next_, codes_, blocks_, rows, own, out, stride);
    const auto run = [&](auto source) { multiply_blocks(rows, own, source, blocks_, out, stride); };
    if (!codes_) return with_source(next_, run);
    const Unpacked codes{codes_, w_.scales, w_.chunks(), w_.groups(), ahead(tile.index),
                         ZERO_CODE - BELOW};
    if (amx::ready) return amx::multiply_blocks(rows, own, codes, blocks_, out, stride);
    if (!PAIRS || w_.planes == ALL_PLANES) return run(codes);
    run(UnpackedCodes<true>{codes_, w_.scales, w_.chunks(), w_.groups(), ahead(tile.index),
                    ZERO_CODE - (0x40 >> w_.planes)});
  }

  long tiles() const {
    const bool by_amx = codes_ && amx::ready && w_.format.symmetric();
    const long most = (by_amx ? amx::ROWS : TILE_ROWS) / digits_;
    return (rows_ + most - 1) / most;
  }

  // The first four tiles of a panel prefetch all of the next one; see `fetches_late`.
  Ahead ahead(long tile) const {
    Ahead ahead{{codes_, codes_}, {0, 0}, next_.scales};  // nothing new
    if (!fetches_late(w_, rows_ * digits_)) return ahead;
    long index = -2 * tile;
    for (int p = 0; p < next_.planes; ++p)
      for (int v = 0; v < PLANE_BITS[p]; ++v, ++index)
        if (index == 0 || index == 1) {
          ahead.vector[index] = next_.plane[p] + v * STEP_BYTES;
          ahead.step[index] = PLANE_BITS[p] * STEP_BYTES;
        }
    return ahead;
  }

  template <class Run>
  void with_source(const PlaneMatrix& next, const Run& run) const {
    if (w_.planes == 1) return run(source<1>(next));
    if (w_.planes == 2) return run(source<2>(next));
    if (w_.planes == 3) return run(source<3>(next));
    run(source<4>(next));
  }

  template <int PLANES>
  Nested<PLANES> source(const PlaneMatrix& next) const {
    Nested<PLANES> source{{}, {}, w_.scales, next.scales, w_.chunks(), blocks_ * w_.chunks()};
    for (int p = 0; p < PLANES; ++p) {
      source.plane[p] = w_.plane[p];
      source.next[p] = p < next.planes ? next.plane[p] : w_.plane[p];
    }
    return source;
  }

  const PlaneMatrix w_, next_;
  const long blocks_, rows_, digits_;
  uint8_t* const codes_;
};

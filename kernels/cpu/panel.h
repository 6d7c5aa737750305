// A matrix of bit planes, and a panel of it: blocks that one thread multiplies by all rows. For many
// rows it unpacks the codes to memory once.
#pragma once
#include "amx_planes.h"

extern "C" struct PlaneMatrix {
  const uint8_t* plane[ALL_PLANES];  // null for planes that are absent
  const uint16_t* scales;            // float16
  int64_t rows, columns;             // N outputs, K inputs
  int32_t group_size;                // 32 or 64
  int32_t planes;                    // 1 to 4: 2, 3, 4 or 8 bits

  long blocks() const { return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }
  long groups() const { return (columns + group_size - 1) / group_size; }
  long chunks() const { return groups() * group_size / CHUNK; }
  long plane_bytes(int p) const { return blocks() * chunks() * STEP_BYTES * PLANE_BITS[p]; }
  long num_scales() const { return blocks() * BLOCK_ROWS * groups(); }

  PlaneMatrix from(long block) const {  // the rows from a block on
    PlaneMatrix w = *this;
    for (int p = 0; p < planes; ++p) w.plane[p] += block * chunks() * STEP_BYTES * PLANE_BITS[p];
    w.scales += block * BLOCK_ROWS * groups();
    w.rows -= block * BLOCK_ROWS;
    return w;
  }
};

// Whether unpacking to memory first pays for so many rows.
static inline bool unpacks(long rows) { return rows > (amx::ready ? TILE_ROWS : 3 * TILE_ROWS); }

// Whether the products of unpacked codes prefetch the thread's next panel. With AMX they leave no time
// for that, and unpacking prefetches it.
static inline bool fetches_late(long rows) { return unpacks(rows) && !amx::ready; }

// A tile: some of the rows that a panel is multiplied by.
struct Tile {
  long begin, rows, index;
};

// The first blocks of a matrix, ready to be multiplied by tiles of `rows` rows.
class Panel {
 public:
  static constexpr int MOST_TILE_ROWS = amx::ROWS > TILE_ROWS ? amx::ROWS : TILE_ROWS;

  // `next` is the thread's next panel, or `w` again if unknown. `memory` has unpacked_bytes(blocks)
  // where `unpacks(rows)`; null: the panel is not unpacked.
  Panel(const PlaneMatrix& w, const PlaneMatrix& next, long blocks, long rows, uint8_t* memory)
      : w_(w), next_(next), blocks_(blocks), rows_(rows), codes_(unpacks(rows) ? memory : nullptr) {
    if (codes_)
      with_source(fetches_late(rows) ? w : next,
                  [&](auto source) { unpack(source, blocks, codes_); });
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

  // out[i * stride + n] = x[i] . row n of the panel, for the rows of a tile.
  void multiply(const QuantizedRows& x, const Tile& tile, float* out, long stride) const {
    const QuantizedRows own = x.from(tile.begin);
    const auto run = [&](auto source) {
      multiply_blocks(tile.rows, own, source, blocks_, out, stride);
    };
    if (!codes_) return with_source(next_, run);
    const Unpacked codes{codes_, w_.scales, w_.chunks(), w_.groups(), ahead(tile.index)};
    amx::ready ? amx::multiply_blocks(tile.rows, own, codes, blocks_, out, stride) : run(codes);
  }

 private:
  long tiles() const {
    const long most = codes_ && amx::ready ? amx::ROWS : TILE_ROWS;
    return (rows_ + most - 1) / most;
  }

  // The first four tiles of a panel prefetch all of the next one; `unpacks` ensures that there are four.
  Ahead ahead(long tile) const {
    Ahead ahead{{codes_, codes_}, {0, 0}, next_.scales};  // nothing new
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
    Nested<PLANES> source{{}, {}, w_.scales, next.scales, w_.chunks()};
    for (int p = 0; p < PLANES; ++p) {
      source.plane[p] = w_.plane[p];
      source.next[p] = p < next.planes ? next.plane[p] : w_.plane[p];
    }
    return source;
  }

  const PlaneMatrix w_, next_;
  const long blocks_, rows_;
  uint8_t* const codes_;
};

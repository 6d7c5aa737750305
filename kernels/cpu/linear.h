// Matrices of bit planes times quantised rows, for C++ callers: the expert stages in quantized.h and
// the linear layers.
//
//   QuantizedRows x = place_rows(memory, rows, w.columns, w.group_size);   // rows.h
//   quantize_row(from, w.columns, w.group_size, x.from(i));                // for each row
//   #pragma omp parallel num_threads(threads)
//   plane_linear(w, bias, x, rows, out, w.rows, memory, threads, turns);
//
// A result depends on its own row alone, neither on other rows nor on the number of threads.
#pragma once
#include "amx_planes.h"
#include "grouped.h"
#include "rows.h"

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

// Whether so many rows pay for unpacking to memory first.
static inline bool unpacks(long rows) { return rows > (amx::ready ? TILE_ROWS : 3 * TILE_ROWS); }

// The first blocks of a matrix, ready to be multiplied by tiles of rows.
class Panel {
 public:
  static constexpr int MOST_TILE_ROWS = amx::ROWS > TILE_ROWS ? amx::ROWS : TILE_ROWS;

  // `next` is what the thread needs after this panel, or `w` again where that is not known.
  // `memory` holds unpacked_bytes(blocks) where `unpacks(rows)`, or is null: they are not, then.
  Panel(const PlaneMatrix& w, const PlaneMatrix& next, long blocks, long rows, uint8_t* memory)
      : w_(w), next_(next), blocks_(blocks), codes_(unpacks(rows) ? memory : nullptr) {
    if (codes_) with_source([&](auto source) { unpack(source, blocks, codes_); });
  }

  static long unpacked_bytes(const PlaneMatrix& w, long blocks) {
    return blocks * BLOCK_ROWS * w.chunks() * CHUNK;
  }

  // Rows of the tile that begins at `row`: all rows in as few tiles as can be, of nearly one size.
  long tile_rows(long row, long rows) const {
    const long most = codes_ && amx::ready ? amx::ROWS : TILE_ROWS, left = rows - row;
    const long tiles = (left + most - 1) / most;
    return (left + tiles - 1) / tiles;
  }

  // out[i * stride + n] = x[i] . row n of the panel, for `rows` of a tile.
  void multiply(const QuantizedRows& x, long rows, float* out, long stride) const {
    const auto run = [&](auto source) { multiply_blocks(rows, x, source, blocks_, out, stride); };
    if (!codes_) return with_source(run);
    const Unpacked codes{codes_, w_.scales, w_.chunks(), w_.groups()};
    amx::ready ? amx::multiply_blocks(rows, x, codes, blocks_, out, stride) : run(codes);
  }

 private:
  template <class Run>
  void with_source(const Run& run) const {
    if (w_.planes == 1) return run(source<1>());
    if (w_.planes == 2) return run(source<2>());
    if (w_.planes == 3) return run(source<3>());
    run(source<4>());
  }

  template <int PLANES>
  Nested<PLANES> source() const {
    Nested<PLANES> source{{}, {}, w_.scales, next_.scales, w_.chunks()};
    for (int p = 0; p < PLANES; ++p) {
      source.plane[p] = w_.plane[p];
      source.next[p] = p < next_.planes ? next_.plane[p] : w_.plane[p];
    }
    return source;
  }

  const PlaneMatrix w_, next_;
  const long blocks_;
  uint8_t* const codes_;
};

constexpr long MAX_PANEL_BLOCKS = 8;
constexpr long UNPACKED_PANEL = 256 << 10;  // bytes that stay in L2 while all rows pass

// Blocks a task: enough tasks to balance, and codes that fit the cache.
static inline long panel_blocks(const PlaneMatrix& w, long matrices, int threads) {
  const long share = w.blocks() * matrices / (threads * TASKS_A_THREAD);
  const long fit = UNPACKED_PANEL / (BLOCK_ROWS * CHUNK * w.chunks());
  const long most = fit < MAX_PANEL_BLOCKS ? fit : MAX_PANEL_BLOCKS;
  return share < 1 || most < 1 ? 1 : share < most ? share : most;
}

// Unpacking memory of one thread for plane_linear; 0 for so few rows that none is needed.
static inline long linear_unpack_bytes(const PlaneMatrix& w, long rows) {
  return unpacks(rows) ? Panel::unpacked_bytes(w, MAX_PANEL_BLOCKS) : 0;
}

// The `count` first sums as `To` (float or bf16), with the bias added. Streamed: see can_stream.
template <class To>
static inline void store_sums(const float* sums, const float* bias, long count, To* to,
                              bool streamed = false) {
  const auto sum = [&](long c, long n) {
    const vf v = load<vf>(sums + c);
    return bias ? v + load_as_fp32(bias + c, n) : v;
  };
  long c = 0;
  if constexpr (sizeof(To) == sizeof(float))
    for (; streamed && c < count; c += LANES) stream(to + c, sum(c, LANES));
  for (; c + LANES <= count; c += LANES) store_fp32_as(to + c, sum(c, LANES), LANES);
  if (c < count) store_fp32_as(to + c, sum(c, count - c), count - c);
}

constexpr long STREAMED_BYTES = 8 << 20;  // and more would not be in the cache when they are read

// Whether sums of so many rows in all may go past the caches: whole vectors, none of them cut.
static inline bool can_stream(const float* out, long rows, long stride) {
  return rows * stride * long(sizeof(float)) >= STREAMED_BYTES && stride % BLOCK_ROWS == 0 &&
         reinterpret_cast<uintptr_t>(out) % (LANES * sizeof(float)) == 0;
}

// out[i * stride + n] = x[i] . w[n] + bias[n] for the rows n of the first `blocks` blocks, or of as
// many as there are; bias may be null. `next` as in Panel. Streamed: see can_stream.
template <class To>
static void multiply_panel(const PlaneMatrix& w, const PlaneMatrix& next, const float* bias,
                           long blocks, const QuantizedRows& x, long rows, To* out, long stride,
                           uint8_t* memory, bool streamed = false) {
  blocks = w.blocks() < blocks ? w.blocks() : blocks;
  const long columns = w.rows < blocks * BLOCK_ROWS ? w.rows : blocks * BLOCK_ROWS;
  const Panel panel(w, next, blocks, rows, memory);
  alignas(64) float sums[Panel::MOST_TILE_ROWS][MAX_PANEL_BLOCKS * BLOCK_ROWS];
  for (long row = 0, tile; row < rows; row += tile) {
    tile = panel.tile_rows(row, rows);
    panel.multiply(x.from(row), tile, sums[0], MAX_PANEL_BLOCKS * BLOCK_ROWS);
    for (long i = 0; i < tile; ++i)
      store_sums(sums[i], bias, columns, out + (row + i) * stride, streamed);
  }
  if (streamed) end_stream();
}

// out[i * stride + n] = x[i] . w[n] + bias[n] for `rows` rows: a stage of a parallel region, run by
// all its threads. `memory` is the thread's own linear_unpack_bytes(). bias may be null.
template <class To>
static void plane_linear(const PlaneMatrix& w, const float* bias, const QuantizedRows& x, long rows,
                         To* out, long stride, uint8_t* memory, int threads, Turns& turns) {
  const long blocks = panel_blocks(w, 1, threads), count = (w.blocks() + blocks - 1) / blocks;
  turns.run_ahead(count, [&](long task, long next) {
    const long n = task * blocks * BLOCK_ROWS;
    multiply_panel(w.from(task * blocks), w.from((next < count ? next : task) * blocks),
                   bias ? bias + n : nullptr, blocks, x, rows, out + n, stride, memory);
  });
}

// Matrices of bit planes times quantised rows, for C++ callers: the expert stages in quantized.h and
// the linear layers.
//
//   QuantizedRows x = place_rows(memory, rows, w.columns, w.format.row_group());   // rows.h
//   quantize_row(from, w.columns, w.format.row_group(), x.from(i));                // for each row
//   #pragma omp parallel num_threads(threads)
//   plane_linear(w, bias, x, rows, out, w.rows, memory, threads, turns);
//
// A row's result depends neither on other rows nor on the number of threads.
#pragma once
#include "grouped.h"
#include "panel.h"
#include "rows.h"

constexpr long MAX_PANEL_BLOCKS = 8;
constexpr long UNPACKED_PANEL = 256 << 10;  // bytes that stay in L2 while all rows pass

// Blocks of a task: enough tasks to balance the threads, and codes that fit the cache.
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

// Stores the first `count` sums as `To` (float or bf16), with the bias. Streamed: see can_stream.
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

// Whether outputs may bypass the caches (streaming stores): all vectors must be whole.
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
  const Panel panel(w, next, blocks, rows, memory, x.digits);
  alignas(64) float sums[Panel::MOST_TILE_ROWS][MAX_PANEL_BLOCKS * BLOCK_ROWS];
  panel.each_tile([&](const Tile& tile) {
    panel.multiply(x, tile, sums[0], MAX_PANEL_BLOCKS * BLOCK_ROWS);
    for (long i = 0; i < tile.rows; ++i)
      store_sums(sums[i], bias, columns, out + (tile.begin + i) * stride, streamed);
  });
  if (streamed) end_stream();
}

// out[i * stride + n] = x[i] . w[n] + bias[n] for `rows` rows: a stage of a parallel region, run by
// all its threads. `memory` is the thread's own linear_unpack_bytes(). bias may be null.
template <class To>
static void plane_linear(const PlaneMatrix& w, const float* bias, const QuantizedRows& x, long rows,
                         To* out, long stride, uint8_t* memory, int threads, Turns& turns) {
  const long blocks = panel_blocks(w, 1, threads), count = (w.blocks() + blocks - 1) / blocks;
  turns.reads([&] { return w.bytes(); });
  turns.run_ahead(count, [&](long task, long next) {
    const long n = task * blocks * BLOCK_ROWS;
    multiply_panel(w.from(task * blocks), w.from((next < count ? next : task) * blocks),
                   bias ? bias + n : nullptr, blocks, x, rows, out + n, stride, memory);
  });
}

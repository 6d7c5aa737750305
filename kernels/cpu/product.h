// Products of a few rows with several matrices at once, dense or bit planes, divided over the threads
// of a parallel region.
#pragma once
#include "calls.h"
#include "linear.h"

namespace decode {

constexpr int32_t ABSENT = -1, BIT_PLANES = 8;  // beside Dtype, the element types of dense ones

struct Matrix {
  PlaneMatrix planes;  // dense matrices use its rows and columns
  const void* weight;  // dense: (rows, columns)
  const float* bias;
  int32_t format;

  explicit operator bool() const { return format != ABSENT; }
  bool quantized() const { return format == BIT_PLANES; }
  long rows() const { return *this ? planes.rows : 0; }
  long size() const { return rows() * planes.columns; }
  int64_t bytes() const { return quantized() ? planes.bytes() : size() * (format == FP32 ? 4 : 2); }

  Matrix from(long row) const {  // the rows from a block's first on
    Matrix own = *this;
    if (bias) own.bias += row;
    if (quantized()) {
      own.planes = planes.from(row / BLOCK_ROWS);
    } else {
      own.planes.rows -= row;
      own.weight = static_cast<const char*>(weight) + row * planes.columns * (format == FP32 ? 4 : 2);
    }
    return own;
  }
};

// Input rows of products, and the quantised copies that quantised matrices read: one for each size of
// groups that they want.
struct Rows {
  float* x;  // (rows, width)
  long width;
  QuantizedRows of_32, of_64;  // memory null where no quantised matrix reads them

  bool quantized() const { return of_32.memory || of_64.memory; }
  const QuantizedRows& codes(const PlaneMatrix& w) const {
    return w.format.row_group() == 64 ? of_64 : of_32;
  }
  void place(char* memory, long group) {
    (group == 64 ? of_64 : of_32) = place_rows(memory, width, group);
  }
  Rows from(long row) const {
    return {x + row * width, width, of_32.from(row), of_64.from(row)};
  }
  void prepare(long row) const {
    if (of_32.memory) quantize_row(x + row * width, width, 32, of_32.from(row));
    if (of_64.memory) quantize_row(x + row * width, width, 64, of_64.from(row));
  }
};

struct Product {
  const Matrix* matrix;
  const Rows* from;
  float* out;  // (rows, stride)
  long stride;
};

constexpr long WIDEST = MAX_PANEL_BLOCKS * BLOCK_ROWS;
static_assert(WIDEST <= MAX_PANEL, "a dense panel's sums");

inline thread_local Scratch unpacking;  // of a panel's codes

// Some input rows of a product.
struct Part {
  long begin, rows;
};

// `next`: see `multiply`; null: unknown.
template <class M>
static void dense_panel(const Product& p, Part part, long g, long count, const void* next) {
  typedef typename M::W W;
  const Matrix& m = *p.matrix;
  const long width = m.planes.columns;
  alignas(64) float sums[1][MAX_ROWS * MAX_PANEL];
  const W* w = static_cast<const W*>(m.weight) + g * width;
  const long end = part.begin + part.rows;
  for (long r = part.begin; r < end; r += MAX_ROWS) {
    const long n = end - r < MAX_ROWS ? end - r : MAX_ROWS;
    const float* from[MAX_ROWS];
    for (long i = 0; i < n; ++i) from[i] = p.from->x + (r + i) * width;
    const W* then = next && r + n == end ? static_cast<const W*>(next) : w;
    multiply_rows<M>(n, from, w, then, 1, m.rows(), count, width, sums);
    for (long i = 0; i < n; ++i)
      store_sums(sums[0] + i * MAX_PANEL, m.bias ? m.bias + g : nullptr, count,
                 p.out + (r + i) * p.stride + g);
  }
}

// The weight rows of a product from `begin` on; a null product has none.
struct Piece {
  const Product* product;
  long begin;

  bool quantized() const { return product && product->matrix->quantized(); }
  PlaneMatrix planes() const { return product->matrix->planes.from(begin / BLOCK_ROWS); }
  const void* weights() const {  // null: none, or bit planes
    if (!product || quantized()) return nullptr;
    const Matrix& m = *product->matrix;
    return static_cast<const char*>(m.weight) + begin * m.planes.columns * (m.format == FP32 ? 4 : 2);
  }
};

// Multiplies `count` weight rows of a piece, and prefetches those of the thread's next piece.
static void panel(const Piece& piece, const Piece& next, Part part, long count) {
  const Product& p = *piece.product;
  const Matrix& m = *p.matrix;
  const long g = piece.begin;
  switch (m.format) {
    case BIT_PLANES: {
      const long blocks = (count + BLOCK_ROWS - 1) / BLOCK_ROWS;
      const PlaneMatrix w = piece.planes();
      const bool unpacked = unpacks(part.rows);
      char* memory = unpacked ? unpacking.reserve(Panel::unpacked_bytes(w, blocks)) : nullptr;
      return multiply_panel(w, next.quantized() ? next.planes() : w, m.bias ? m.bias + g : nullptr,
                            blocks, p.from->codes(w).from(part.begin), part.rows,
                            p.out + part.begin * p.stride + g, p.stride,
                            reinterpret_cast<uint8_t*>(memory));
    }
    case FP32: return dense_panel<Fp32>(p, part, g, count, next.weights());
    case BF16: return dense_panel<Bf16>(p, part, g, count, next.weights());
    default: return dense_panel<Fp16>(p, part, g, count, next.weights());
  }
}

// Weight rows of a task, so that the tasks balance over the threads.
static long panel_rows(const Product* list, int count, int threads) {
  long rows = 0;
  for (int i = 0; i < count; ++i) rows += list[i].matrix->rows();
  const long share = rows / (threads * TASKS_A_THREAD) / BLOCK_ROWS * BLOCK_ROWS;
  return share < BLOCK_ROWS ? BLOCK_ROWS : share > WIDEST ? WIDEST : share;
}

// Computes every product whose matrix is not absent. A stage of a parallel region.
static void products(const Product* list, int count, long rows, int threads, Turns& turns) {
  const long step = panel_rows(list, count, threads);
  long tasks = 0, width = 1;
  for (int i = 0; i < count; ++i) {
    tasks += (list[i].matrix->rows() + step - 1) / step;
    if (*list[i].matrix && list[i].from->width > width) width = list[i].from->width;
  }
  const long most = (PART_BYTES / width + MAX_ROWS) / MAX_ROWS * MAX_ROWS;
  const long parts = (rows + most - 1) / most, some = (rows + parts - 1) / (parts ? parts : 1);
  turns.reads([&] {
    int64_t bytes = 0;
    for (int i = 0; i < count; ++i) bytes += list[i].matrix->bytes();
    return bytes;
  });
  const auto piece = [&](long task) -> Piece {
    for (int i = 0; i < count; ++i) {
      const long panels = (list[i].matrix->rows() + step - 1) / step;
      if (task < panels) return {list + i, task * step};
      task -= panels;
    }
    return {};
  };
  turns.run_ahead(parts * tasks, [&](long task, long next) {
    const Piece now = piece(task % tasks), then = next < parts * tasks ? piece(next % tasks) : Piece{};
    const long left = now.product->matrix->rows() - now.begin, begin = task / tasks * some;
    panel(now, then, {begin, rows - begin < some ? rows - begin : some}, left < step ? left : step);
  });
}

}  // namespace decode

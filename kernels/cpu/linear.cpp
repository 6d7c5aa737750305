// A linear layer of whole weights, called through ctypes (which releases the GIL). A row's bits
// depend neither on the other rows of the call nor on the number of threads, unlike torch's, which
// sums in another order for few rows than for many.
#include "calls.h"
#include "grouped.h"

namespace {

constexpr long TASK_ROWS = 16 * MAX_ROWS;  // at least: fewer do not pay for fetching the weights

constexpr long round_up(long count, long unit) { return (count + unit - 1) / unit * unit; }

// How a product is divided: a task is a panel of weight rows and a part of the input rows. A part's
// tasks follow each other.
struct Tasks {
  long panel, panels, part, parts;

  Tasks(long rows, long N, long row_bytes, long x_bytes, int threads) {
    const long wanted = threads * TASKS_A_THREAD;
    panel = PANEL_BYTES / row_bytes;
    if (rows <= TASK_ROWS && N / wanted < panel) panel = N / wanted;
    panel = panel < MIN_PANEL ? MIN_PANEL : panel > MAX_PANEL ? MAX_PANEL : panel / QUAD * QUAD;
    panels = (N + panel - 1) / panel;
    const long share = round_up((rows + wanted / panels) / (wanted / panels + 1), MAX_ROWS);
    const long most = PART_BYTES / x_bytes / MAX_ROWS * MAX_ROWS;
    part = share < TASK_ROWS ? TASK_ROWS : share;
    if (part > most) part = most < TASK_ROWS ? TASK_ROWS : most;
    parts = (rows + part - 1) / part;
  }
};

// out (rows, N) = x (rows, K) times w (N, K) transposed, plus bias.
template <class M, class X>
void multiply_whole(const X* x, const typename M::W* w, const float* bias, long rows, long N,
                    long K, X* out, int threads) {
  const Tasks tasks(rows, N, sizeof(typename M::W) * K, sizeof(X) * K, threads);
  Turns turns{stages::LINEAR};
#pragma omp parallel num_threads(threads)
  {
    alignas(64) float sums[1][MAX_ROWS * MAX_PANEL];
    turns.reads([&] { return N * K * int64_t(sizeof(typename M::W)); });
    turns.run(tasks.panels * tasks.parts, [&](long task) {
      const long g = task % tasks.panels * tasks.panel, begin = task / tasks.panels * tasks.part;
      const long columns = N - g < tasks.panel ? N - g : tasks.panel;
      const long end = begin + tasks.part < rows ? begin + tasks.part : rows;
      for (long r = begin; r < end; r += MAX_ROWS) {
        const long n = end - r < MAX_ROWS ? end - r : MAX_ROWS;
        const X* from[MAX_ROWS];
        for (long i = 0; i < n; ++i) from[i] = x + (r + i) * K;
        multiply_rows<M>(n, from, w + g * K, w + g * K, 1, N, columns, K, sums);
        for (long i = 0; i < n; ++i)
          for (long c = 0; c < columns; c += LANES) {
            vf v = load<vf>(sums[0] + i * MAX_PANEL + c);
            if (bias) v += load_as_fp32(bias + g + c, columns - c);
            store_fp32_as(out + (r + i) * N + g + c, v, columns - c);
          }
      }
    });
  }
}

}  // namespace

extern "C" {

// Rows in and out are contiguous, of `dtype` (FP32 or BF16); bias is float32 or null.
void moe_linear(const void* x, int32_t dtype, const void* weights, int32_t weight_dtype,
                const float* bias, int64_t rows, int64_t N, int64_t K, void* out, int32_t threads) {
  threads = team(rows * N * K, threads);
  with_mode(weight_dtype, dtype, [&](auto mode) {
    using M = decltype(mode);
    with_rows(x, dtype, [&](auto* from) {
      using X = std::remove_const_t<std::remove_pointer_t<decltype(from)>>;
      multiply_whole<M>(from, static_cast<const typename M::W*>(weights), bias, rows, N, K,
                        static_cast<X*>(out), threads);
    });
  });
}
}

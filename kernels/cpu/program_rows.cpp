// The instructions of a program for some rows: elementwise operations with broadcasting, reductions,
// choices and small products, on strided operands. Each computes in float32; elementwise operations
// on integers alone compute with integers of 64 bits, which wrap.
#include "program.h"

#include <algorithm>
#include <vector>

namespace program {

namespace {

constexpr long BLOCK = 128;  // elements of the last dimension at a time

// Elements of an operand from one row to the next.
long row_step(const Place& p) {
  constexpr long BYTES[] = {sizeof(float), sizeof(int64_t), sizeof(uint8_t)};
  const bool fixed = p.space == CONSTANT || p.space == BEFORE || p.space == AFTER;
  return fixed ? 0 : p.pitch / BYTES[p.element];
}

// Calls body(offsets) for each row and position of the first `dims` dimensions; offsets in elements.
template <int N, class Body>
void each_outer(const Rows& rows, const Instruction& i, int dims,
                const Operand* const (&operands)[N], const Body& body) {
  long step[N];
  for (int n = 0; n < N; ++n) step[n] = row_step(operands[n]->place);
  for (long r = 0; r < rows.count; ++r) {
    long at[N], index[DIMS] = {};
    for (int n = 0; n < N; ++n) at[n] = r * step[n];
    for (;;) {
      body(at);
      int d = dims - 1;
      for (; d >= 0; --d) {
        for (int n = 0; n < N; ++n) at[n] += operands[n]->strides[d];
        if (++index[d] < i.sizes[d]) break;
        for (int n = 0; n < N; ++n) at[n] -= operands[n]->strides[d] * i.sizes[d];
        index[d] = 0;
      }
      if (d < 0) break;
    }
  }
}

float scalar(const Operand& o, const void* base, long at) {
  switch (o.place.element) {
    case FLOAT: return static_cast<const float*>(base)[at];
    case INTEGER: return static_cast<const int64_t*>(base)[at];
    default: return static_cast<const uint8_t*>(base)[at];
  }
}

void put(const Operand& o, void* base, long at, float x) {
  switch (o.place.element) {
    case FLOAT: static_cast<float*>(base)[at] = x; break;
    case INTEGER: static_cast<int64_t*>(base)[at] = x; break;
    default: static_cast<uint8_t*>(base)[at] = x != 0;
  }
}

int64_t integer(const Operand& o, const void* base, long at) {
  return o.place.element == INTEGER ? static_cast<const int64_t*>(base)[at]
                                    : static_cast<int64_t>(scalar(o, base, at));
}

// Elements of a block: in place where they are floats side by side, else copied to `held`.
const float* read(const Operand& o, const void* base, long at, long stride, long n, float* held) {
  if (o.place.element == FLOAT) {
    const float* from = static_cast<const float*>(base) + at;
    if (stride == 1) return from;
    if (!stride) {
      const vf same = splat(*from);
      for (long c = 0; c < n; c += LANES) store(held + c, same);
      return held;
    }
    for (long c = 0; c < n; ++c) held[c] = from[c * stride];
    return held;
  }
  for (long c = 0; c < n; ++c) held[c] = scalar(o, base, at + c * stride);
  return held;
}

// Writes a block of `n` elements that lie `stride` apart.
void write(const Operand& o, void* base, long at, long stride, long n, const float* from) {
  if (o.place.element != FLOAT) {
    for (long c = 0; c < n; ++c) put(o, base, at + c * stride, from[c]);
    return;
  }
  float* to = static_cast<float*>(base) + at;
  for (long c = 0; c < n; ++c) to[c * stride] = from[c];
}

// The last two dimensions, where the last one is short: some rows of it are one block.
struct Narrow {
  const Instruction& i;
  const int last = i.dims - 1;
  const long n = i.sizes[last], most = BLOCK / n;

  static bool fits(const Instruction& i) {
    return i.dims > 1 && i.sizes[i.dims - 1] < LANES && i.sizes[i.dims - 2] > 1;
  }
  long rows() const { return i.sizes[last - 1]; }
  long row_stride(const Operand& o) const { return o.strides[last - 1]; }
  bool dense(const Operand& o) const {
    return o.place.element == FLOAT && o.strides[last] == 1 && row_stride(o) == n;
  }
  const float* read_block(const Operand& o, const void* base, long at, long rows,
                          float* held) const {
    if (dense(o)) return static_cast<const float*>(base) + at;
    for (long r = 0; r < rows; ++r, at += row_stride(o)) {
      const float* row = read(o, base, at, o.strides[last], n, held + r * n);
      if (row != held + r * n)
        for (long c = 0; c < n; ++c) held[r * n + c] = row[c];
    }
    return held;
  }
  void write_block(const Operand& o, void* base, long at, long rows, const float* from) const {
    for (long r = 0; r < rows; ++r)
      write(o, base, at + r * row_stride(o), o.strides[last], n, from + r * n);
  }
};

template <int N, class F>
void each_narrow(const Rows& row, const Instruction& i, const Operand* const (&operands)[N + 1],
                 void* const (&base)[N + 1], const F& f) {
  const Narrow narrow{i};
  const bool direct = narrow.dense(i.out);
  each_outer(row, i, i.dims - 2, operands, [&](const long* at) {
    alignas(64) float held[N + 1][BLOCK + LANES];
    for (long r = 0; r < narrow.rows(); r += narrow.most) {
      const long rows = std::min(narrow.rows() - r, narrow.most), n = rows * narrow.n;
      const auto start = [&](int k) { return at[k] + r * narrow.row_stride(*operands[k]); };
      const float* x[N];
      for (int k = 0; k < N; ++k)
        x[k] = narrow.read_block(*operands[k + 1], base[k + 1], start(k + 1), rows, held[k + 1]);
      float* to = direct ? static_cast<float*>(base[0]) + start(0) : held[0];
      for (long l = 0; l < n; l += LANES) {
        vf v[N];
        UNROLL for (int k = 0; k < N; ++k) v[k] = load_as_fp32(x[k] + l, n - l);
        store_fp32_as(to + l, f(v), n - l);
      }
      if (!direct) narrow.write_block(i.out, base[0], start(0), rows, to);
    }
  });
}

// Whether an operand's floats of one row lie right behind those of the row before.
bool follow(const Operand& o, const Instruction& i) {
  return o.place.element == FLOAT && o.strides[0] == 1 && row_step(o.place) == i.sizes[0];
}

// out = f(operands) over all elements; f takes and gives vectors.
template <int N, class F>
void each(const Rows& row, const Instruction& i, const Operand* const (&in)[N], const F& f) {
  if (row.count > 1 && i.dims == 1 && follow(i.out, i) &&
      std::all_of(in, in + N, [&](const Operand* o) { return follow(*o, i); })) {
    Instruction whole = i;  // all rows as one
    whole.sizes[0] *= row.count;
    return each<N>(Rows{row.arrays, row.states, row.row}, whole, in, f);
  }
  const Operand* operands[N + 1] = {&i.out};
  void* base[N + 1] = {row.at<void>(i.out.place)};
  for (int n = 0; n < N; ++n) operands[n + 1] = in[n], base[n + 1] = row.at<void>(in[n]->place);
  if (Narrow::fits(i)) return each_narrow<N>(row, i, operands, base, f);
  const int last = i.dims - 1;
  const long count = i.sizes[last], stride = i.out.strides[last];
  const bool direct = i.out.place.element == FLOAT && stride == 1;
  each_outer(row, i, last, operands, [&](const long* at) {
    alignas(64) float held[N + 1][BLOCK];
    for (long c = 0; c < count; c += BLOCK) {
      const long n = count - c < BLOCK ? count - c : BLOCK;
      const float* x[N];
      for (int k = 0; k < N; ++k) {
        const long step = in[k]->strides[last];
        x[k] = read(*in[k], base[k + 1], at[k + 1] + c * step, step, n, held[k + 1]);
      }
      float* to = direct ? static_cast<float*>(base[0]) + at[0] + c : held[0];
      for (long l = 0; l < n; l += LANES) {
        vf v[N];
        UNROLL for (int k = 0; k < N; ++k) v[k] = load_as_fp32(x[k] + l, n - l);
        store_fp32_as(to + l, f(v), direct ? n - l : LANES);
      }
      if (!direct) write(i.out, base[0], at[0] + c * stride, stride, n, to);
    }
  });
}

template <class F>
void unary(const Rows& row, const Instruction& i, const F& f) {
  each<1>(row, i, {&i.a}, [&](const vf* x) { return f(x[0]); });
}

template <class F>
void binary(const Rows& row, const Instruction& i, const F& f) {
  each<2>(row, i, {&i.a, &i.b}, [&](const vf* x) { return f(x[0], x[1]); });
}

vf yes_no(vi yes) { return yes ? splat(1.0f) : vf{}; }

template <float (*F)(float)>
vf lanes(vf x) {
  for (int l = 0; l < LANES; ++l) x[l] = F(x[l]);
  return x;
}

float cosine(float x) { return std::cos(x); }
float sine(float x) { return std::sin(x); }
float logarithm(float x) { return std::log(x); }
float log_of_1(float x) { return std::log1p(x); }
float tangent(float x) { return std::tanh(x); }
float error_function(float x) { return std::erf(x); }
float square_root(float x) { return std::sqrt(x); }
float rounded_down(float x) { return std::floor(x); }
// log(1 + e^x), and x itself where that is the same
float soft_plus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// The same of a short last dimension, for many outputs at a time.
template <class F>
void fold_narrow(const Rows& row, const Instruction& i, float start, const F& f) {
  const int last = i.dims - 1, outer = last - 1;
  const Operand* operands[2] = {&i.out, &i.a};
  void *out = row.at<void>(i.out.place), *a = row.at<void>(i.a.place);
  each_outer(row, i, outer, operands, [&](const long* at) {
    alignas(64) float sum[BLOCK], held[BLOCK];
    for (long r = 0; r < i.sizes[outer]; r += BLOCK) {
      const long n = std::min(i.sizes[outer] - r, BLOCK);
      for (long c = 0; c < i.sizes[last]; ++c) {
        const long first = at[1] + r * i.a.strides[outer] + c * i.a.strides[last];
        const float* x = read(i.a, a, first, i.a.strides[outer], n, held);
        for (long l = 0; l < n; l += LANES)
          store(sum + l, f(c ? load<vf>(sum + l) : splat(start), load_as_fp32(x + l, n - l)));
      }
      write(i.out, out, at[0] + r * i.out.strides[outer], i.out.strides[outer], n, sum);
    }
  });
}

// out = the fold of a's last dimension, in one fixed order.
template <class F>
void fold(const Rows& row, const Instruction& i, float start, const F& f) {
  if (Narrow::fits(i)) return fold_narrow(row, i, start, f);
  const int last = i.dims - 1;
  const long count = i.sizes[last], stride = i.a.strides[last];
  const Operand* operands[2] = {&i.out, &i.a};
  void *out = row.at<void>(i.out.place), *a = row.at<void>(i.a.place);
  each_outer(row, i, last, operands, [&](const long* at) {
    alignas(64) float held[BLOCK];
    vf sum = splat(start);
    float left = start;
    for (long c = 0; c < count; c += BLOCK) {
      const long n = count - c < BLOCK ? count - c : BLOCK;
      const float* x = read(i.a, a, at[1] + c * stride, stride, n, held);
      long l = 0;
      for (; l + LANES <= n; l += LANES) sum = f(sum, load<vf>(x + l));
      for (; l < n; ++l) left = f(left, x[l]);
    }
    const float whole = fold_lanes(sum, [&](auto p, auto q) { return f(p, q); });
    put(i.out, out, at[0], f(whole, left));
  });
}

void sinkhorn(const Rows& row, const Instruction& i) {
  const Operand* const operands[] = {&i.out, &i.a};
  float *out = row.at(i.out.place), *a = row.at(i.a.place);
  const int last = i.dims - 1;
  const long n = i.sizes[last - 1], m = i.sizes[last];
  each_outer(row, i, i.dims - 2, operands, [&](const long* at) {
    float x[SQUARE], sum[SQUARE];
    for (long r = 0; r < n; ++r)
      for (long c = 0; c < m; ++c)
        x[r * m + c] = a[at[1] + r * i.a.strides[last - 1] + c * i.a.strides[last]];
    for (long k = 0; k < i.count; ++k) {
      const bool rows = k % 2 == 0;
      std::fill(sum, sum + (rows ? n : m), 0.0f);
      for (long r = 0; r < n; ++r)
        for (long c = 0; c < m; ++c) sum[rows ? r : c] += x[r * m + c];
      for (long r = 0; r < n; ++r)
        for (long c = 0; c < m; ++c) x[r * m + c] /= sum[rows ? r : c] + i.number;
    }
    for (long r = 0; r < n; ++r)
      for (long c = 0; c < m; ++c)
        out[at[0] + r * i.out.strides[last - 1] + c * i.out.strides[last]] = x[r * m + c];
  });
}

void cumulate(const Rows& row, const Instruction& i) {
  const int last = i.dims - 1;
  const Operand* operands[2] = {&i.out, &i.a};
  void *out = row.at<void>(i.out.place), *a = row.at<void>(i.a.place);
  each_outer(row, i, last, operands, [&](const long* at) {
    float sum = 0;
    for (long c = 0; c < i.sizes[last]; ++c) {
      sum += scalar(i.a, a, at[1] + c * i.a.strides[last]);
      put(i.out, out, at[0] + c * i.out.strides[last], sum);
    }
  });
}

// The `count` largest (or smallest) of a's last dimension, best first; of equal ones the first.
void top(const Rows& row, const Instruction& i) {
  const int last = i.dims - 1;
  const long n = i.sizes[last];
  const Operand* operands[3] = {&i.out, &i.a, &i.c};
  void *out = row.at<void>(i.out.place), *a = row.at<void>(i.a.place);
  void* ids = row.at<void>(i.c.place);
  const float sign = i.number < 0 ? -1 : 1;
  std::vector<float> left(n), found(i.count);
  std::vector<int64_t> best(i.count);
  each_outer(row, i, last, operands, [&](const long* at) {
    const long stride = i.a.strides[last];
    if (i.a.place.element == FLOAT) {
      const float* from = static_cast<const float*>(a) + at[1];
      for (long c = 0; c < n; ++c) left[c] = sign * from[c * stride];
    } else {
      for (long c = 0; c < n; ++c) left[c] = sign * scalar(i.a, a, at[1] + c * stride);
    }
    decode::largest_of(left.data(), n, i.count, found.data(), best.data());
    for (long k = 0; k < i.count; ++k) {
      put(i.out, out, at[0] + k * i.out.strides[last], sign * found[k]);
      put(i.c, ids, at[2] + k * i.c.strides[last], best[k]);
    }
  });
}

void norm(const Rows& row, const Instruction& i) {
  const int last = i.dims - 1;
  const long n = i.sizes[last], whole = n / LANES * LANES;
  const Operand* operands[3] = {&i.out, &i.a, &i.b};
  float *out = row.at(i.out.place), *a = row.at(i.a.place), *b = row.at(i.b.place);
  each_outer(row, i, last, operands, [&](const long* at) {
    const float *from = a + at[1], *weight = b + at[2];
    vf squares[2] = {};
    for (long c = 0; c < whole; c += LANES) {
      const vf x = load<vf>(from + c);
      squares[c / LANES % 2] += x * x;
    }
    float sum = decode::total(squares[0] + squares[1]);
    for (long c = whole; c < n; ++c) sum += from[c] * from[c];
    const float scale = 1.0f / std::sqrt(sum / n + i.number);
    for (long c = 0; c < n; c += LANES) {
      const vf x = load_as_fp32(from + c, n - c) * scale;
      store_fp32_as(out + at[0] + c, i.count ? x * load_as_fp32(weight + c, n - c) : x, n - c);
    }
  });
}

void softmax(const Rows& row, const Instruction& i) {
  const int last = i.dims - 1;
  const long n = i.sizes[last], whole = n / LANES * LANES;
  const Operand* operands[2] = {&i.out, &i.a};
  float *out = row.at(i.out.place), *a = row.at(i.a.place);
  each_outer(row, i, last, operands, [&](const long* at) {
    const float* from = a + at[1];
    float* to = out + at[0];
    vf highs = splat(-INFINITY), sums = {};
    for (long c = 0; c < whole; c += LANES) {
      const vf x = load<vf>(from + c);
      highs = x > highs ? x : highs;
    }
    float high = largest_lane(highs);
    for (long c = whole; c < n; ++c) high = from[c] > high ? from[c] : high;
    for (long c = 0; c < n; c += LANES) {
      const vf x = load_as_fp32(from + c, n - c) - high;
      store_fp32_as(to + c, x < -87 ? vf{} : exp_lanes(x), n - c);
    }
    for (long c = 0; c < whole; c += LANES) sums += load<vf>(to + c);
    float sum = decode::total(sums);
    for (long c = whole; c < n; ++c) sum += to[c];
    for (long c = 0; c < n; c += LANES)
      store_fp32_as(to + c, load_as_fp32(to + c, n - c) / sum, n - c);
  });
}

void rotate(const Rows& row, const Instruction& i) {
  const int last = i.dims - 1;
  const long half = i.sizes[last] / 2;
  const Operand* operands[4] = {&i.out, &i.a, &i.b, &i.c};
  float *out = row.at(i.out.place), *a = row.at(i.a.place);
  float *cos = row.at(i.b.place), *sin = row.at(i.c.place);
  each_outer(row, i, last, operands, [&](const long* at) {
    for (long c = 0; c < half; c += LANES) {
      const long n = half - c;
      const auto both = [&](const float* x, long of) {
        return std::pair{load_as_fp32(x + of + c, n), load_as_fp32(x + of + half + c, n)};
      };
      const auto [x, y] = both(a, at[1]);
      const auto [cos_x, cos_y] = both(cos, at[2]);
      const auto [sin_x, sin_y] = both(sin, at[3]);
      store_fp32_as(out + at[0] + c, x * cos_x - y * sin_x, n);
      store_fp32_as(out + at[0] + half + c, y * cos_y + x * sin_y, n);
    }
  });
}

// GATHER: out = a[b], SCATTER: out[b] = or += a; `count` lies between two indexed elements.
void at_index(const Rows& row, const Instruction& i) {
  const int last = i.dims - 1;
  const bool gather = i.code == GATHER;
  const Operand& moved = gather ? i.a : i.out;
  const Operand& other = gather ? i.out : i.a;
  const Operand* operands[3] = {&moved, &other, &i.b};
  void *indexed = row.at<void>(moved.place), *plain = row.at<void>(other.place);
  void* index = row.at<void>(i.b.place);
  each_outer(row, i, last, operands, [&](const long* at) {
    for (long c = 0; c < i.sizes[last]; ++c) {
      const long chosen = integer(i.b, index, at[2] + c * i.b.strides[last]);
      const long there = at[0] + c * moved.strides[last] + chosen * i.count;
      const long here = at[1] + c * other.strides[last];
      if (gather && i.out.place.element == INTEGER && i.a.place.element == INTEGER) {
        static_cast<int64_t*>(plain)[here] = static_cast<const int64_t*>(indexed)[there];
      } else if (gather) {
        put(i.out, plain, here, scalar(i.a, indexed, there));
      } else {
        const float x = scalar(i.a, plain, here);
        put(i.out, indexed, there, i.code == SCATTER ? x : x + scalar(i.out, indexed, there));
      }
    }
  });
}

// out (m, n) = a (m, k) b (k, n) for each position of the dimensions before; floats only.
void matmul(const Rows& row, const Instruction& i) {
  const int n_dim = i.dims - 2, k_dim = i.dims - 1;
  const long N = i.sizes[n_dim], K = i.sizes[k_dim];
  const Operand* operands[3] = {&i.out, &i.a, &i.b};
  float *out = row.at(i.out.place), *a = row.at(i.a.place), *b = row.at(i.b.place);
  const long out_n = i.out.strides[n_dim], a_k = i.a.strides[k_dim], b_k = i.b.strides[k_dim];
  const long b_n = i.b.strides[n_dim];
  each_outer(row, i, n_dim, operands, [&](const long* at) {
    float* to = out + at[0];
    const float *x = a + at[1], *y = b + at[2];
    if (a_k == 1 && b_k == 1 && out_n == 1)
      return decode::scores_of(x, decode::Straight<float>{y, b_n}, N, K, to);
    if (out_n == 1 && b_n == 1) {
      for (long n = 0; n < N; n += LANES) {
        vf sum = {};
        for (long k = 0; k < K; ++k) sum += x[k * a_k] * load_as_fp32(y + k * b_k + n, N - n);
        store_fp32_as(to + n, sum, N - n);
      }
      return;
    }
    for (long n = 0; n < N; ++n) {
      float sum = 0;
      for (long k = 0; k < K; ++k) sum += x[k * a_k] * y[k * b_k + n * b_n];
      to[n * out_n] = sum;
    }
  });
}

// How many operands an elementwise instruction of integers alone has; 0: it is none.
int integer_inputs(const Instruction& i) {
  const Operand* const operands[] = {&i.a, &i.b, &i.c};
  int count = 2;
  switch (i.code) {
    case COPY: case NEGATE: case ABS: count = 1; break;
    case WHERE: count = 3; break;
    case ADD: case SUBTRACT: case MULTIPLY: case MAXIMUM: case MINIMUM: case EQUAL: case UNEQUAL:
    case LESS: case LESS_EQUAL: case XOR: case REMAINDER: break;
    default: return 0;
  }
  for (int n = 0; n < count; ++n)
    if (operands[n]->place.element == FLOAT) return 0;
  return count;
}

int64_t of_integers(int32_t code, const int64_t* x) {
  const uint64_t a = x[0], b = x[1];
  switch (code) {
    case COPY: return x[0];
    case NEGATE: return -a;
    case ABS: return x[0] < 0 ? -a : a;
    case WHERE: return x[0] ? x[1] : x[2];
    case ADD: return a + b;
    case SUBTRACT: return a - b;
    case MULTIPLY: return a * b;
    case MAXIMUM: return x[0] > x[1] ? x[0] : x[1];
    case MINIMUM: return x[0] < x[1] ? x[0] : x[1];
    case EQUAL: return a == b;
    case UNEQUAL: return a != b;
    case LESS: return x[0] < x[1];
    case LESS_EQUAL: return x[0] <= x[1];
    case XOR: return a ^ b;
    default: {  // REMAINDER
      const int64_t left = x[1] == 0 || x[1] == -1 ? 0 : x[0] % x[1];
      return left && (left < 0) != (x[1] < 0) ? left + x[1] : left;
    }
  }
}

void integers(const Rows& row, const Instruction& i, int count) {
  const Operand* operands[4] = {&i.out, &i.a, &i.b, &i.c};
  void* base[4];
  for (int n = 0; n <= count; ++n) base[n] = row.at<void>(operands[n]->place);
  each_outer(row, i, i.dims, operands, [&](const long* at) {
    int64_t x[3] = {};
    for (int n = 0; n < count; ++n) x[n] = integer(*operands[n + 1], base[n + 1], at[n + 1]);
    const int64_t made = of_integers(i.code, x);
    if (i.out.place.element == INTEGER) static_cast<int64_t*>(base[0])[at[0]] = made;
    else static_cast<uint8_t*>(base[0])[at[0]] = made != 0;
  });
}

}  // namespace

void Rows::run(const Instruction& i) const {
  const Rows& row = *this;
  if (i.out.place.element != FLOAT)
    if (const int count = integer_inputs(i)) return integers(row, i, count);
  switch (i.code) {
    case COPY: return unary(row, i, [](vf x) { return x; });
    case NEGATE: return unary(row, i, [](vf x) { return -x; });
    case EXP: return unary(row, i, [](vf x) { return x < -87 ? vf{} : exp_lanes(x); });
    case LOG: return unary(row, i, lanes<logarithm>);
    case LOG1P: return unary(row, i, lanes<log_of_1>);
    case SIGMOID: return unary(row, i, [](vf x) { return sigmoid(x); });
    case SILU: return unary(row, i, [](vf x) { return x / (1.0f + exp_lanes(-x)); });
    case TANH: return unary(row, i, lanes<tangent>);
    case RELU: return unary(row, i, [](vf x) { return x < 0 ? vf{} : x; });
    case RSQRT: return unary(row, i, [](vf x) { return 1.0f / lanes<square_root>(x); });
    case SQRT: return unary(row, i, lanes<square_root>);
    case RECIPROCAL: return unary(row, i, [](vf x) { return 1.0f / x; });
    case COS: return unary(row, i, lanes<cosine>);
    case SIN: return unary(row, i, lanes<sine>);
    case ABS: return unary(row, i, [](vf x) { return x < 0 ? -x : x; });
    case SOFTPLUS: return unary(row, i, lanes<soft_plus>);
    case GELU: return unary(row, i, gelu_erf);
    case GELU_TANH:
      return unary(row, i, [](vf x) {
        return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
      });
    case ERF: return unary(row, i, lanes<error_function>);
    case FLOOR: return unary(row, i, lanes<rounded_down>);
    case NOT: return unary(row, i, [](vf x) { return yes_no(x == 0); });
    case ADD: return binary(row, i, [](vf x, vf y) { return x + y; });
    case SUBTRACT: return binary(row, i, [](vf x, vf y) { return x - y; });
    case MULTIPLY: return binary(row, i, [](vf x, vf y) { return x * y; });
    case DIVIDE: return binary(row, i, [](vf x, vf y) { return x / y; });
    case POWER:
      return binary(row, i, [](vf x, vf y) {
        for (int l = 0; l < LANES; ++l) x[l] = std::pow(x[l], y[l]);
        return x;
      });
    case MAXIMUM: return binary(row, i, [](vf x, vf y) { return x > y ? x : y; });
    case MINIMUM: return binary(row, i, [](vf x, vf y) { return x < y ? x : y; });
    case EQUAL: return binary(row, i, [](vf x, vf y) { return yes_no(x == y); });
    case UNEQUAL: return binary(row, i, [](vf x, vf y) { return yes_no(x != y); });
    case LESS: return binary(row, i, [](vf x, vf y) { return yes_no(x < y); });
    case LESS_EQUAL: return binary(row, i, [](vf x, vf y) { return yes_no(x <= y); });
    case AND: return binary(row, i, [](vf x, vf y) { return yes_no((x != 0) & (y != 0)); });
    case OR: return binary(row, i, [](vf x, vf y) { return yes_no((x != 0) | (y != 0)); });
    case WHERE:
      return each<3>(row, i, {&i.a, &i.b, &i.c},
                     [](const vf* x) { return x[0] != 0 ? x[1] : x[2]; });
    case SUM: return fold(row, i, 0, [](auto p, auto q) { return p + q; });
    case LARGEST:
      return fold(row, i, -INFINITY, [](auto p, auto q) { return q > p ? q : p; });
    case SMALLEST:
      return fold(row, i, INFINITY, [](auto p, auto q) { return q < p ? q : p; });
    case CUMULATE: return cumulate(row, i);
    case TOP: return top(row, i);
    case GATHER:
    case SCATTER:
    case SCATTER_ADD: return at_index(row, i);
    case MATMUL: return matmul(row, i);
    case QUANTISE: {
      const long width = i.sizes[0], group = i.sizes[1];
      const float* from = at(i.a.place);
      char* to = at<char>(i.out.place);
      const QuantizedRows codes = place_rows(to, width, group);
      for (long n = 0; n < count * i.count; ++n)
        quantize_row(from + n * width, width, group, codes.from(n));
      return;
    }
    case SINKHORN: return sinkhorn(row, i);
    case SORT_CHOICE: {
      int64_t* ids = at<int64_t>(i.a.place);
      float* weights = at(i.b.place);
      for (long r = 0; r < count; ++r)
        decode::sort_choice(i.count, ids + r * row_step(i.a.place), weights + r * row_step(i.b.place));
      return;
    }
    case NORM: return norm(row, i);
    case SOFTMAX: return softmax(row, i);
    case ROTATE: return rotate(row, i);
  }
}

}  // namespace program

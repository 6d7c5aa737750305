// One MoE layer on bit planes, in stages that all threads of a parallel region run one after the
// other: quantise the tokens, first projection (with activation, and quantised again), second
// projection; grouped.h has the routing before them and the weighted sum after them.
// Letters as in grouped.h.
#pragma once
#include "curves.h"
#include "linear.h"

extern "C" struct QuantizedLayer {
  const void* const* blobs;  // (E, 5): planes 0 to 3, scales; null for planes that are absent
  const int32_t* planes;     // (E,): 1 to 4
  const float* first_bias;   // (E, parts * F) in the architecture's own order, or null
  const float* second_bias;  // (E, H), or null
  int64_t experts, hidden, width;
  PlaneFormat first, second;
  int32_t parts;        // 2: gate and up; 1: no gate
  int32_t interleaved;  // biases of gate and up in turn, not one after the other
  int32_t digits;       // of activations, 8 bits each; see quantize_digits
  PostNorm post;        // of `moe_quantized_forward`

  // Part 0 (gate) or 1 (up) of an expert's first projection, or `parts` for the second.
  PlaneMatrix matrix(long expert, int index) const {
    const PlaneMatrix part{{}, nullptr, width, hidden, first, planes[expert]};
    PlaneMatrix w{{}, nullptr, hidden, width, second, planes[expert]};
    if (index < parts) w = part;
    if (w.planes > w.format.most_planes()) w.planes = w.format.most_planes();
    const void* const* blob = blobs + (ALL_PLANES + 1) * expert;
    for (int p = 0; p < w.planes; ++p)
      w.plane[p] = static_cast<const uint8_t*>(blob[p]) + index * part.plane_bytes(p);
    w.scales = static_cast<const uint16_t*>(blob[ALL_PLANES]) + index * part.scale_words();
    return w;
  }

  // Bytes of `count` matrices, from one on, of every expert that has rows.
  int64_t bytes(const Routing& routing, int first, int count) const {
    int64_t bytes = 0;
    for (long a = 0; a < routing.num_active; ++a)
      for (int i = first; i < first + count; ++i) bytes += matrix(routing.active[a], i).bytes();
    return bytes;
  }

  // Biases of LANES units of a part from `unit` on; zeros beyond the last.
  vf bias(long expert, int part, long unit) const {
    const long left = width - unit, count = left < LANES ? left : LANES;
    if (!first_bias || count <= 0) return vf{};
    const float* own = first_bias + expert * parts * width;
    if (!interleaved) return load_part<vf>(own + part * width + unit, count);
    float values[LANES] = {};
    for (long i = 0; i < count; ++i) values[i] = own[2 * (unit + i) + part];
    return load<vf>(values);
  }

  long panels() const {  // of the first projection
    return (width + second.row_group() - 1) / second.row_group();
  }
};

// Bytes that each thread needs to unpack panels of an expert with `rows` rows.
static inline long layer_unpack_bytes(const QuantizedLayer& layer, long rows) {
  rows *= layer.digits;
  if (!unpacks(rows)) return 0;
  const long first = layer.parts * Panel::unpacked_bytes(layer.matrix(0, 0),
                                                         layer.second.row_group() / BLOCK_ROWS);
  const long second = linear_unpack_bytes(layer.matrix(0, layer.parts), rows);
  return first > second ? first : second;
}

// Bytes of `rows` activation rows of a matrix with so many columns.
static inline size_t layer_rows_bytes(const QuantizedLayer& layer, long rows, long columns,
                                      const PlaneFormat& format) {
  return rows_bytes(rows * layer.digits, columns, format.row_group());
}

// Sorted rows (A, H) of int8 from tokens x (T, H).
template <class From>
void quantize_tokens(const QuantizedLayer& layer, const Routing& routing, const From* x,
                     long tokens, long slots, const QuantizedRows& to, Turns& turns) {
  turns.run(tokens, [&](long t) {
    long first = -1;
    for (long s = t * slots; s < (t + 1) * slots; ++s) {
      const long row = routing.position[s];
      if (row < 0) continue;
      if (first < 0)
        quantize_row(x + t * layer.hidden, layer.hidden, layer.first.row_group(), to.from(row));
      else
        copy_row(to.from(first), to.from(row));
      if (first < 0) first = row;
    }
  });
}

// finish(e, r, panel, gate sums, up sums) for every sorted row r of expert e and every panel of
// second.row_group() columns of the inner activations; zeros stand for columns beyond the padded rows.
template <class Finish>
void first_projection(const QuantizedLayer& layer, const Routing& routing, const QuantizedRows& x,
                      uint8_t* memory, Turns& turns, const Finish& finish) {
  const long panels = layer.panels(), blocks = layer.second.row_group() / BLOCK_ROWS;
  alignas(64) float sums[2][Panel::MOST_TILE_ROWS][MAX_GROUP];
  const auto weights = [&](long task, int part) {
    return layer.matrix(routing.active[task / panels], part).from(task % panels * blocks);
  };
  const long tasks = panels * routing.num_active;
  turns.reads([&] { return layer.bytes(routing, 0, layer.parts); });
  turns.run_ahead(tasks, [&](long task, long next) {
    const long e = routing.active[task / panels], panel = task % panels, begin = routing.begin[e];
    const PlaneMatrix gate = weights(task, 0), up = weights(task, layer.parts - 1);
    const long rows = routing.begin[e + 1] - begin;
    const long count = gate.blocks() < blocks ? gate.blocks() : blocks;
    if (count < blocks) memset(sums, 0, sizeof sums);
    // Reads one part after the other, or both at the beginning of a task.
    const bool in_turn = layer.parts == 2 && !fetches_late(gate, rows * layer.digits);
    const auto after = [&](int part) { return weights(next < tasks ? next : task, part); };
    const Panel a(gate, in_turn ? up : after(0), count, rows, memory, layer.digits);
    const Panel b(up, after(in_turn ? 0 : layer.parts - 1), layer.parts == 2 ? count : 0, rows,
                  memory + Panel::unpacked_bytes(gate, count), layer.digits);
    a.each_tile([&](const Tile& tile) {
      a.multiply(x.from(begin), tile, sums[0][0], MAX_GROUP);
      b.multiply(x.from(begin), tile, sums[1][0], MAX_GROUP);
      for (long i = 0; i < tile.rows; ++i)
        finish(e, begin + tile.begin + i, panel, sums[0][i], sums[1][i]);
    });
  });
}

// Inner rows (A, F) of int8: the activation of the first projection, quantised at once.
static inline void project_first(const QuantizedLayer& layer, const Activation& activation,
                                 const Routing& routing, const QuantizedRows& x,
                                 const QuantizedRows& inner, uint8_t* memory, Turns& turns) {
  constexpr int TOGETHER = 32 / LANES < 4 ? 32 / LANES : 4;  // a group is 32 or 64 columns
  const long group = layer.second.row_group();
  first_projection(layer, routing, x, memory, turns,
                   [&](long e, long r, long panel, const float* gate, const float* up) {
    alignas(64) float values[MAX_GROUP];
    for (long begin = 0; begin < group; begin += TOGETHER * LANES) {
      vf g[TOGETHER], u[TOGETHER];
      UNROLL for (int i = 0; i < TOGETHER; ++i) {
        const long c = begin + i * LANES;
        g[i] = load<vf>(gate + c), u[i] = load<vf>(up + c);
        if (layer.first_bias) g[i] += layer.bias(e, 0, panel * group + c);
        if (layer.first_bias && layer.parts == 2) u[i] += layer.bias(e, 1, panel * group + c);
      }
      activate_each(activation, layer.parts == 2, g, u);
      UNROLL for (int i = 0; i < TOGETHER; ++i) store(values + begin + i * LANES, g[i]);
    }
    quantize_digits(values, group, inner.from(r), panel);
  });
}

// out (A, parts, F) = the first projection itself, for an activation in Python.
static inline void project_first_only(const QuantizedLayer& layer, const Routing& routing,
                                      const QuantizedRows& x, float* out, uint8_t* memory,
                                      Turns& turns) {
  const long group = layer.second.row_group(), width = layer.width;
  first_projection(layer, routing, x, memory, turns,
                   [&](long e, long r, long panel, const float* gate, const float* up) {
    const long at = panel * group, count = width - at < group ? width - at : group;
    for (int p = 0; p < layer.parts; ++p) {
      alignas(64) float bias[MAX_GROUP];
      for (long c = 0; c < group; c += LANES) store(bias + c, layer.bias(e, p, at + c));
      store_sums(p ? up : gate, bias, count, out + (r * layer.parts + p) * width + at);
    }
  });
}

// out (A, H) = second projection of the inner rows, plus bias.
static inline void project_second(const QuantizedLayer& layer, const Routing& routing,
                                  const QuantizedRows& inner, float* out, uint8_t* memory,
                                  int threads, Turns& turns) {
  const PlaneMatrix shape = layer.matrix(0, layer.parts);
  const long blocks = panel_blocks(shape, routing.num_active, threads);
  const long panels = (shape.blocks() + blocks - 1) / blocks;
  const auto weights = [&](long task) {
    return layer.matrix(routing.active[task / panels], layer.parts).from(task % panels * blocks);
  };
  const long tasks = panels * routing.num_active;
  const bool streamed = can_stream(out, routing.rows, layer.hidden);
  turns.reads([&] { return layer.bytes(routing, layer.parts, 1); });
  turns.run_ahead(tasks, [&](long task, long next) {
    const long e = routing.active[task / panels], n = task % panels * blocks * BLOCK_ROWS;
    const long begin = routing.begin[e], rows = routing.begin[e + 1] - begin;
    const float* bias = layer.second_bias ? layer.second_bias + e * layer.hidden + n : nullptr;
    multiply_panel(weights(task), weights(next < tasks ? next : task), bias, blocks,
                   inner.from(begin), rows, out + begin * layer.hidden + n, layer.hidden, memory,
                   streamed);
  });
}

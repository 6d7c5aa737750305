// The C interface of the kernels on bit planes, called through ctypes (which releases the GIL): raw
// pointers, contiguous arrays. `moe_quantized_forward` runs a whole layer whose activation C++ knows;
// for the others Python calls `first` and `second`, with its own between them. Letters as in grouped.h.
#include <omp.h>

#include "calls.h"
#include "layouts.h"
#include "quantized.h"

LAYOUT(PlaneFormat, group_size, bits, scales)
LAYOUT(PlaneMatrix, plane, scales, rows, columns, format, planes)
LAYOUT(QuantizedLayer, blobs, planes, first_bias, second_bias, experts, hidden, width, first, second,
       parts, interleaved, digits, post)
LAYOUT(Activation, curve, slope, limit, offset, late)

namespace {

int32_t layer_team(const QuantizedLayer& layer, long rows, int32_t threads) {
  return team(rows * layer.hidden * layer.width * (layer.parts + 1), threads);
}

// Hands out consecutive pieces of memory that is large enough.
struct Pieces {
  char* next;
  char* take(size_t bytes) {
    char* piece = next;
    next += aligned(bytes);
    return piece;
  }
};

}  // namespace

extern "C" {

// out (T, N) of `dtype` (FP32 or BF16) = x (T, K) W^T + bias, which may be null. False: no memory.
int32_t moe_plane_linear(const PlaneMatrix* w, const float* bias, const void* x, int32_t dtype,
                         int64_t tokens, void* out, int32_t threads) {
  threads = team(tokens * w->rows * w->columns, threads);
  const size_t row_bytes = aligned(rows_bytes(tokens, w->columns, w->format.row_group()));
  const size_t unpack_bytes = aligned(linear_unpack_bytes(*w, tokens));
  char* memory = scratch.reserve(row_bytes + threads * unpack_bytes);
  if (!memory) return 0;
  const QuantizedRows rows = place_rows(memory, w->columns, w->format.row_group());
  Turns quantising{stages::LINEAR}, product{stages::LINEAR};
  with_rows(x, dtype, [&](auto* from) {
    auto* to = static_cast<std::remove_const_t<std::remove_pointer_t<decltype(from)>>*>(out);
#pragma omp parallel num_threads(threads)
    {
      quantising.run(tokens, [&](long t) {
        quantize_row(from + t * w->columns, w->columns, w->format.row_group(), rows.from(t));
      });
      auto* codes = reinterpret_cast<uint8_t*>(memory + row_bytes);
      plane_linear(*w, bias, rows, tokens, to, w->rows,
                   codes + omp_get_thread_num() * unpack_bytes, threads, product);
    }
  });
  scratch.trim();
  return 1;
}

// out (A, parts, F) fp32 = first projection of hidden (T, H) of `dtype`. False: no memory.
int32_t moe_quantized_first(const QuantizedLayer* layer, const Routing* routing, const void* hidden,
                            int32_t dtype, int64_t tokens, int64_t slots, float* out,
                            int32_t threads) {
  const long A = routing->rows;
  threads = layer_team(*layer, A, threads);
  const size_t x_bytes = aligned(layer_rows_bytes(*layer, A, layer->hidden, layer->first));
  const size_t unpack_bytes = aligned(layer_unpack_bytes(*layer, A));
  char* memory = scratch.reserve(x_bytes + threads * unpack_bytes);
  if (!memory) return 0;
  const QuantizedRows x =
      place_rows(memory, layer->hidden, layer->first.row_group(), layer->digits);
  Turns quantising{stages::EXPERT_INPUT}, first{stages::EXPERT_FIRST};
  with_rows(hidden, dtype, [&](auto* from) {
#pragma omp parallel num_threads(threads)
    {
      auto* codes = reinterpret_cast<uint8_t*>(memory + x_bytes);
      quantize_tokens(*layer, *routing, from, tokens, slots, x, quantising);
      project_first_only(*layer, *routing, x, out, codes + omp_get_thread_num() * unpack_bytes,
                         first);
    }
  });
  scratch.trim();
  return 1;
}

// out (A, H) fp32 = second projection of inner (A, F) fp32. False: no memory.
int32_t moe_quantized_second(const QuantizedLayer* layer, const Routing* routing,
                             const float* inner, float* out, int32_t threads) {
  const long A = routing->rows;
  threads = layer_team(*layer, A, threads);
  const size_t x_bytes = aligned(layer_rows_bytes(*layer, A, layer->width, layer->second));
  const size_t unpack_bytes = aligned(layer_unpack_bytes(*layer, A));
  char* memory = scratch.reserve(x_bytes + threads * unpack_bytes);
  if (!memory) return 0;
  const QuantizedRows x =
      place_rows(memory, layer->width, layer->second.row_group(), layer->digits);
  Turns quantising{stages::EXPERT_INPUT}, second{stages::EXPERT_SECOND};
#pragma omp parallel num_threads(threads)
  {
    auto* codes = reinterpret_cast<uint8_t*>(memory + x_bytes);
    quantising.run(A, [&](long r) {
      quantize_row(inner + r * layer->width, layer->width, layer->second.row_group(), x.from(r));
    });
    project_second(*layer, *routing, x, out, codes + omp_get_thread_num() * unpack_bytes, threads,
                   second);
  }
  scratch.trim();
  return 1;
}

// The whole layer; see `combine` for so_far. 1: done, -1: an id outside [-1, E), 0: no memory.
int32_t moe_quantized_forward(const QuantizedLayer* layer, const Activation* activation,
                              const void* hidden, int32_t dtype, const int64_t* ids,
                              const float* weights, int64_t tokens, int64_t slots, void* out,
                              float* so_far, int32_t threads) {
  const long H = layer->hidden, S = tokens * slots;
  const size_t routing_bytes = routing_numbers(S, layer->experts) * sizeof(int32_t);
  const size_t x_bytes = layer_rows_bytes(*layer, S, H, layer->first);
  const size_t inner_bytes = layer_rows_bytes(*layer, S, layer->width, layer->second);
  const size_t out_bytes = S * H * sizeof(float);
  const size_t unpack_bytes = aligned(layer_unpack_bytes(*layer, S));
  Pieces pieces{scratch.reserve(aligned(routing_bytes) + aligned(x_bytes) + aligned(inner_bytes) +
                                aligned(out_bytes) + threads * unpack_bytes)};
  if (!pieces.next) return 0;
  Routing routing;
  auto* numbers = reinterpret_cast<int32_t*>(pieces.take(routing_bytes));
  if (!route(ids, S, layer->experts, numbers, routing)) return -1;
  const long digits = layer->digits;
  const QuantizedRows x = place_rows(pieces.take(x_bytes), H, layer->first.row_group(), digits);
  const QuantizedRows inner =
      place_rows(pieces.take(inner_bytes), layer->width, layer->second.row_group(), digits);
  auto* rows = reinterpret_cast<float*>(pieces.take(out_bytes));
  auto* unpack = reinterpret_cast<uint8_t*>(pieces.next);
  threads = layer_team(*layer, routing.rows, threads);
  Turns quantising{stages::EXPERT_INPUT}, first{stages::EXPERT_FIRST};
  Turns second{stages::EXPERT_SECOND}, norm{stages::EXPERT_SUM}, sum{stages::EXPERT_SUM};
  with_rows(hidden, dtype, [&](auto* from) {
    auto* to = static_cast<std::remove_const_t<std::remove_pointer_t<decltype(from)>>*>(out);
#pragma omp parallel num_threads(threads)
    {
      uint8_t* codes = unpack + omp_get_thread_num() * unpack_bytes;
      quantize_tokens(*layer, routing, from, tokens, slots, x, quantising);
      project_first(*layer, *activation, routing, x, inner, codes, first);
      project_second(*layer, routing, inner, rows, codes, threads, second);
      norm_rows(layer->post, routing, H, rows, norm);
      combine(routing, rows, weights, tokens, slots, H, to, so_far, sum);
    }
  });
  scratch.trim();
  return 1;
}
}

// The C interface of the CPU experts, called through ctypes (which releases the GIL): raw pointers,
// contiguous arrays. `forward` runs a whole layer whose activation C++ knows; for the others Python
// calls the three steps, with its own activation or norm between them. Letters as in grouped.h.
#include "calls.h"
#include "grouped.h"
#include "layouts.h"

struct WholeLayer {
  const void *gate_up, *down;             // (E, G, H) and (E, H, F) of `weight_dtype`
  const float *gate_up_bias, *down_bias;  // (E, G) and (E, H), or null
  int64_t experts, hidden, width, gate_up_rows;
  int32_t weight_dtype, gating;  // gating: of `moe_forward`
  PostNorm post;                 // of `moe_forward`
};

LAYOUT(WholeLayer, gate_up, down, gate_up_bias, down_bias, experts, hidden, width, gate_up_rows,
       weight_dtype, gating, post)
LAYOUT(PostNorm, norm, scale)
LAYOUT(Routing, slot, position, begin, active, rows, num_active)

namespace {

int32_t layer_team(const WholeLayer& layer, long rows, int32_t threads) {
  return team(rows * layer.hidden * (layer.gate_up_rows + layer.width), threads);
}

}  // namespace

extern "C" {

int64_t moe_routing_numbers(int64_t slots, int64_t experts) {
  return routing_numbers(slots, experts);
}

// Sorted rows in use, or -1 where an id is outside [-1, E).
int64_t moe_route(const int64_t* ids, int64_t slots, int64_t experts, int32_t* numbers,
                  Routing* routing) {
  return route(ids, slots, experts, numbers, *routing) ? routing->rows : -1;
}

// out (A, G) fp32 = first projection of hidden (T, H) of `dtype` (FP32 or BF16).
void moe_first(const WholeLayer* layer, const Routing* routing, const void* hidden, int32_t dtype,
               int64_t slots, float* out, int32_t threads) {
  threads = layer_team(*layer, routing->rows, threads);
  Turns turns{stages::EXPERT_FIRST};
  with_mode(layer->weight_dtype, dtype, [&](auto mode) {
    with_rows(hidden, dtype, [&](auto* x) {
#pragma omp parallel num_threads(threads)
      project<decltype(mode)>(*routing, x, slots, layer->gate_up, layer->gate_up_bias,
                              layer->gate_up_rows, layer->hidden, out, threads, turns);
    });
  });
}

// out (A, H) fp32 = second projection of inner (A, F) fp32; `dtype` is hidden's.
void moe_second(const WholeLayer* layer, const Routing* routing, const float* inner, int32_t dtype,
                float* out, int32_t threads) {
  threads = layer_team(*layer, routing->rows, threads);
  Turns turns{stages::EXPERT_SECOND};
  with_mode(layer->weight_dtype, dtype, [&](auto mode) {
#pragma omp parallel num_threads(threads)
    project<decltype(mode)>(*routing, inner, 0, layer->down, layer->down_bias, layer->hidden,
                            layer->width, out, threads, turns);
  });
}

// out (T, H) of `dtype` = each token's weighted sum of its rows (A, H); see `combine` for so_far.
void moe_combine(const Routing* routing, const float* rows, const float* weights, int64_t tokens,
                 int64_t slots, int64_t hidden, void* out, int32_t dtype, float* so_far,
                 int32_t threads) {
  threads = team(routing->rows * hidden, threads);
  Turns turns{stages::EXPERT_SUM};
  with_rows(out, dtype, [&](auto* to) {
#pragma omp parallel num_threads(threads)
    combine(*routing, rows, weights, tokens, slots, hidden, to, so_far, turns);
  });
}

// The whole layer; see `combine` for so_far. 1: done, -1: an id outside
// [-1, E), 0: no memory.
int32_t moe_forward(const WholeLayer* layer, const Activation* activation, const void* hidden,
                    int32_t dtype, const int64_t* ids, const float* weights, int64_t tokens,
                    int64_t slots, void* out, float* so_far, int32_t threads) {
  const long H = layer->hidden, F = layer->width, S = tokens * slots;
  const size_t routing_bytes = aligned(routing_numbers(S, layer->experts) * sizeof(int32_t));
  const size_t inner_bytes = aligned(S * F * sizeof(float));
  char* memory = scratch.reserve(routing_bytes + inner_bytes + S * H * sizeof(float));
  if (!memory) return 0;
  Routing routing;
  if (!route(ids, S, layer->experts, reinterpret_cast<int32_t*>(memory), routing)) return -1;
  float* row = reinterpret_cast<float*>(memory + routing_bytes + inner_bytes);
  threads = layer_team(*layer, routing.rows, threads);
  Turns first{stages::EXPERT_FIRST}, second{stages::EXPERT_SECOND};
  Turns norm{stages::EXPERT_SUM}, sum{stages::EXPERT_SUM};
  with_mode(layer->weight_dtype, dtype, [&](auto mode) {
    using M = decltype(mode);
    auto* inner = reinterpret_cast<typename M::X*>(memory + routing_bytes);
    with_rows(hidden, dtype, [&](auto* x) {
      auto* to = static_cast<std::remove_const_t<std::remove_pointer_t<decltype(x)>>*>(out);
#pragma omp parallel num_threads(threads)
      {
        project_inner<M>(routing, x, slots, layer->gate_up, layer->gate_up_bias, *activation,
                         Gating(layer->gating), F, H, inner, threads, first);
        project<M>(routing, inner, 0, layer->down, layer->down_bias, H, F, row, threads, second);
        norm_rows(layer->post, routing, H, row, norm);
        combine(routing, row, weights, tokens, slots, H, to, so_far, sum);
      }
    });
  });
  scratch.trim();
  return 1;
}
}

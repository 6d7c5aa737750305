// A whole decode step in one call: its layers, their experts, all in memory, and the head, by the
// same functions that Python calls one by one where it has to act in between.
#include "decode.h"

#include <chrono>

// Layers from `done` on, and the head behind the last. Fills ids and weights (MoE layers, B, top_k)
// and out (B, rows of the head); `routed` (B, H) is the caller's from one call to the next. How many
// layers are done: fewer than all once patience has ended, so that the caller can be interrupted.
// 0: no memory.
extern "C" int64_t moe_decode_model(const decode::Step* step, const decode::Model* model,
                                    int64_t done, float* routed, int64_t* ids, float* weights,
                                    float* out) {
  using clock = std::chrono::steady_clock;
  const auto end = clock::now() + std::chrono::duration<double>(model->patience);
  const decode::Layer* before = done ? model->layers + done - 1 : nullptr;
  const float* due = done && model->experts[done - 1].forward ? routed : nullptr;
  for (int64_t i = done; i < model->count; ++i) {
    if (i > done && clock::now() > end) return i;
    const decode::Layer* layer = model->layers + i;
    const decode::Experts& experts = model->experts[i];
    const int64_t at = experts.index * step->rows * model->top_k;
    if (!moe_decode_layer(step, before, layer, due, ids + at, weights + at)) return 0;
    // The ids are a router's own, and so are in range: only memory can lack.
    if (experts.forward &&
        experts.forward(experts.layer, experts.activation, step->h, FP32, ids + at, weights + at,
                        step->rows, model->top_k, routed, nullptr, step->threads) != 1)
      return 0;
    before = layer;
    due = experts.forward ? routed : nullptr;
  }
  const bool made = moe_decode_head(step, before, due, model->norm, model->head, out);
  return made ? model->count : 0;
}

// A whole decode step in one call: the layers, their experts (on this rank or on several) and the head.
// It calls the functions that Python calls one by one where Python has to act in between.
#include "decode.h"
#include "all_to_all.h"
#include "program.h"

#include <chrono>
#include <vector>

namespace {

enum : int32_t { NO_MEMORY = 0, ALL = 1, CONTINUE = 2, WAITING = 3 };

// The slots of `count` experts, in `places` unless all experts are in order; null: one is not in
// memory. -1, an unused slot, stays -1.
const int64_t* find(const decode::Experts& experts, const int64_t* ids, int64_t count,
                    int64_t* places) {
  if (!experts.slots) return ids;
  for (int64_t i = 0; i < count; ++i) {
    places[i] = ids[i] < 0 ? -1 : experts.slots[ids[i]];
    if (places[i] < 0 && ids[i] >= 0) return nullptr;
  }
  return places;
}

// routed (B, H) = the experts' output for the step's rows. False: the caller must run the layer.
bool run_experts(const decode::Step& step, const decode::Experts& experts, int64_t top_k,
                 AllToAll* all_to_all, const int64_t* ids, const float* weights, float* routed) {
  const auto run = [&](const void* rows, const int64_t* chosen, const float* weighed,
                       int64_t tokens, int64_t slots, float* to) {
    return experts.forward(experts.layer, experts.activation, rows, FP32, chosen, weighed, tokens,
                           slots, to, nullptr, step.threads) == 1;
  };
  if (!experts.forward) return false;
  if (!all_to_all) {
    thread_local std::vector<int64_t> places;
    places.resize(step.rows * top_k);
    const int64_t* chosen = find(experts, ids, step.rows * top_k, places.data());
    return chosen && run(step.h, chosen, weights, step.rows, top_k, routed);
  }
  int32_t result = moe_dispatch(all_to_all, experts.index, ids, step.h);
  if (result != DONE) {
    all_to_all->had = result == LOST ? NOTHING : TOLD;
    return false;
  }
  all_to_all->had = TOLD;
  const Serving serving(*all_to_all);
  const int64_t* chosen = find(experts, serving.experts, serving.count, all_to_all->chosen);
  if (!chosen) return false;
  if (serving.count &&
      !run(all_to_all->served, chosen, all_to_all->ones, serving.count, 1, all_to_all->results))
    return false;
  result = moe_return(all_to_all, all_to_all->results, weights, routed, FP32, step.threads);
  if (result == OTHERWISE) all_to_all->had = RETURNED;
  return result == DONE;
}

template <class T>
void embed(const decode::Step& step, const T* table, float scale) {
  const long H = step.hidden;
  for (long b = 0; b < step.rows; ++b)
    for (long c = 0; c < H; c += LANES)
      store_fp32_as(step.x + b * H + c,
                    load_as_fp32(table + step.tokens[b] * H + c, H - c) * scale, H - c);
}

void embed(const decode::Step& step, const decode::Embedding& own) {
  if (own.dtype == FP32) embed(step, static_cast<const float*>(own.table), own.scale);
  else embed(step, static_cast<const uint16_t*>(own.table), own.scale);
}

}  // namespace

// Runs the layers from `done` on, and then the head. Fills ids and weights (MoE layers, B, top_k) and
// out (B, rows of the head); the caller keeps `routed` (B, H) from call to call. CONTINUE: `patience`
// has passed; the caller handles interrupts and calls again with the same arguments. WAITING: the
// caller runs the experts of layer `done`, puts their output into `routed`, increments `done` and calls
// again; what the ranks have exchanged for the layer is not exchanged again.
extern "C" int32_t moe_decode_model(const decode::Step* step, const decode::Model* model,
                                    AllToAll* all_to_all, int64_t* done, float* routed, int64_t* ids,
                                    float* weights, float* out) {
  using clock = std::chrono::steady_clock;
  const auto end = clock::now() + std::chrono::duration<double>(model->patience);
  const auto due = [&](int64_t i) {
    return i && model->experts[i - 1].index >= 0 ? routed : nullptr;
  };
  const auto before = [&](int64_t i) { return i ? model->layers + i - 1 : nullptr; };
  const auto run = [&](int64_t i, int64_t* own_ids, float* own_weights) {
    if (model->program)
      return program::run_segment(*model->program, *step, *step->states, i, routed, own_ids,
                                  own_weights, out);
    if (i < model->count)
      return moe_decode_layer(step, before(i), model->layers + i, due(i), own_ids, own_weights) != 0;
    return moe_decode_head(step, before(i), due(i), model->norm, model->head, out) != 0;
  };
  if (*done == 0 && model->embedding) embed(*step, *model->embedding);
  for (const int64_t begun = *done; *done < model->count; ++*done) {
    const int64_t i = *done;
    if (i > begun && clock::now() > end) return CONTINUE;
    const decode::Experts& experts = model->experts[i];
    const int64_t at = experts.index * step->rows * model->top_k;
    int64_t* own_ids = experts.index < 0 ? nullptr : ids + at;
    float* own_weights = experts.index < 0 ? nullptr : weights + at;
    if (!run(i, own_ids, own_weights)) return NO_MEMORY;
    if (experts.index >= 0 && !run_experts(*step, experts, model->top_k, all_to_all, own_ids,
                                           own_weights, routed))
      return WAITING;
  }
  return run(model->count, nullptr, nullptr) ? ALL : NO_MEMORY;
}

// A whole decode step in one call: its layers, their experts, here or with those of other ranks, and
// the head, by the same functions that Python calls one by one where it has to act in between.
#include "decode.h"
#include "all_to_all.h"

#include <chrono>
#include <vector>

namespace {

enum : int32_t { NO_MEMORY = 0, ALL = 1, LATER = 2, WAITS = 3 };

// Where `count` experts are, in `places` if they are not where their numbers say; null: not all of
// them are in memory.
const int64_t* find(const decode::Experts& experts, const int64_t* ids, int64_t count,
                    int64_t* places) {
  if (!experts.slots) return ids;
  for (int64_t i = 0; i < count; ++i)
    if ((places[i] = experts.slots[ids[i]]) < 0) return nullptr;
  return places;
}

// routed (B, H) = the experts' rows for those of the step; false: the caller has to see to it.
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
  int32_t said = moe_dispatch(all_to_all, experts.index, ids, step.h);
  if (said != DONE) {
    all_to_all->had = said == LOST ? NOTHING : TOLD;
    return false;
  }
  all_to_all->had = TOLD;
  const Serving serving(*all_to_all);
  const int64_t* chosen = find(experts, serving.experts, serving.count, all_to_all->chosen);
  if (!chosen) return false;
  if (serving.count &&
      !run(all_to_all->served, chosen, all_to_all->ones, serving.count, 1, all_to_all->results))
    return false;
  said = moe_return(all_to_all, all_to_all->results, weights, routed, FP32, step.threads);
  if (said == OTHERWISE) all_to_all->had = RETURNED;
  return said == DONE;
}

}  // namespace

// Layers from `done` on, and the head behind the last. Fills ids and weights (MoE layers, B, top_k)
// and out (B, rows of the head); `routed` (B, H) is the caller's from one call to the next. LATER:
// patience has ended, so that the caller can be interrupted; the same call goes on. WAITS: layer
// `done` waits for its experts' rows, which the caller brings in `routed` to a call from the layer
// behind it on; what ranks have exchanged for it is not exchanged again.
extern "C" int32_t moe_decode_model(const decode::Step* step, const decode::Model* model,
                                    AllToAll* all_to_all, int64_t* done, float* routed, int64_t* ids,
                                    float* weights, float* out) {
  using clock = std::chrono::steady_clock;
  const auto end = clock::now() + std::chrono::duration<double>(model->patience);
  const auto due = [&](int64_t i) {
    return i && model->experts[i - 1].index >= 0 ? routed : nullptr;
  };
  const auto before = [&](int64_t i) { return i ? model->layers + i - 1 : nullptr; };
  for (const int64_t begun = *done; *done < model->count; ++*done) {
    const int64_t i = *done;
    if (i > begun && clock::now() > end) return LATER;
    const decode::Experts& experts = model->experts[i];
    const int64_t at = experts.index * step->rows * model->top_k;
    int64_t* own_ids = experts.index < 0 ? nullptr : ids + at;
    float* own_weights = experts.index < 0 ? nullptr : weights + at;
    if (!moe_decode_layer(step, before(i), model->layers + i, due(i), own_ids, own_weights))
      return NO_MEMORY;
    if (experts.index >= 0 && !run_experts(*step, experts, model->top_k, all_to_all, own_ids,
                                           own_weights, routed))
      return WAITS;
  }
  const int64_t n = model->count;
  return moe_decode_head(step, before(n), due(n), model->norm, model->head, out) ? ALL : NO_MEMORY;
}

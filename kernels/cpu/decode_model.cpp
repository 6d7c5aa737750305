// A whole decode step in one call: the layers, their experts (on this rank or on several) and the head;
// and a whole draft of a multi-token-prediction layer, which is several steps.
#include "decode.h"
#include "all_to_all.h"
#include "program.h"

#include <algorithm>
#include <chrono>
#include <cmath>
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

// Fills the rows of a step. False: no memory.
bool enter(const decode::Step& step, const decode::Model& model) {
  if (model.embedding) embed(step, *model.embedding);
  return !model.join || moe_decode_join(&step, model.join);
}

// The rows of a pass of a chain, in memory that lasts as long as the thread.
struct ChainRows {
  std::vector<float> x, h, beside, routed, weights, past, logits;
  std::vector<int64_t> tokens, position, capacity;
  std::vector<const void*> cache;

  void fit(long rows, long hidden, long top_k) {
    for (auto* each : {&x, &h, &beside, &routed})
      each->resize(rows * hidden + LANES);
    weights.resize(rows * top_k);
  }
};

// Keeps the rows `from` of `each`, in their order, which is ascending.
template <class T>
void keep(T* each, const std::vector<long>& from, long width) {
  for (size_t i = 0; i < from.size(); ++i)
    if (long(i) != from[i]) memmove(each + i * width, each + from[i] * width, width * sizeof(T));
}

struct Drafted {
  int64_t token;
  float chance;  // 0: logits are not finite
};

float largest(const float* logits, long count) {
  vf peaks = splat(logits[0]);
  long c = 0;
  for (; c + LANES <= count; c += LANES) {
    const vf each = load<vf>(logits + c);
    peaks = each > peaks ? each : peaks;
  }
  float most = largest_lane(peaks);
  for (; c < count; ++c) most = logits[c] > most ? logits[c] : most;
  return most;
}

// The largest of `count` logits, and its part in their softmax.
Drafted likeliest(const float* logits, long count, float sharpness) {
  const float most = largest(logits, count);
  vf sum = {};
  for (long c = 0; c < count; c += LANES) {
    const long left = count - c;
    vf each = exp_lanes((load_as_fp32(logits + c, left) - most) * sharpness);
    for (long i = left; i < LANES; ++i) each[i] = 0;
    sum += each;
  }
  const float all = decode::total(sum);
  if (!std::isfinite(all) || !std::isfinite(most)) return {0, 0};
  return {std::find(logits, logits + count, most) - logits, 1 / all};
}

constexpr float LEAST = 1e-4;  // times the likeliest token's chance, that of any other one

// Draws one of the likely tokens by a number in [0, 1); leaves them and their weights.
Drafted draw(const float* logits, long count, float sharpness, double uniform, long most_choices,
             int64_t* choices, float* weights, int64_t* num_choices) {
  const float most = largest(logits, count);
  long found = 0;
  double all = 0;
  for (float least = LEAST; ; least *= 10) {
    const float from = least < 1 ? most + std::log(least) / sharpness : most;
    found = 0;
    for (long c = 0; c < count && found <= most_choices; ++c)
      if (logits[c] >= from) {
        if (found < most_choices) choices[found] = c;
        ++found;
      }
    if (found <= most_choices || least >= 1) break;
  }
  *num_choices = found = std::min(found, most_choices);
  for (long i = 0; i < found; ++i) {
    weights[i] = std::exp((logits[choices[i]] - most) * sharpness);
    all += weights[i];
  }
  if (!found || !std::isfinite(all) || !std::isfinite(most)) return {0, 0};
  double goal = uniform * all;
  long at = 0;
  while (at + 1 < found && goal >= weights[at]) goal -= weights[at++];
  return {choices[at], float(weights[at] / all)};
}

// The layers of a pass; all its experts are in memory.
bool run_layers(const decode::Step& step, const decode::Model& model, ChainRows& rows, int64_t* ids) {
  if (!enter(step, model)) return false;
  for (int64_t i = 0; i < model.count; ++i) {
    const decode::Experts& experts = model.experts[i];
    const bool due = i && model.experts[i - 1].index >= 0;
    int64_t* own = experts.index < 0 ? nullptr : ids + experts.index * step.rows * model.top_k;
    if (!moe_decode_layer(&step, i ? model.layers + i - 1 : nullptr, model.layers + i,
                          due ? rows.routed.data() : nullptr, own, rows.weights.data()))
      return false;
    if (own && !run_experts(step, experts, model.top_k, nullptr, own, rows.weights.data(),
                            rows.routed.data()))
      return false;
  }
  return true;
}

// Whether a sequence's draft goes on behind `count` tokens.
bool goes_on(const decode::Chain& chain, long s, long count) {
  double survives = chain.accepted[count];
  for (long i = 0; i < count; ++i)
    survives *= (chain.confidence[s * chain.most + i] + chain.accepted[i]) / 2;
  return count < chain.depth[s] && survives >= chain.price;
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
  if (*done == 0 && !enter(*step, *model)) return NO_MEMORY;
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

// Drafts tokens as far as `chain` lets them go. Leaves the keys and values of all rows in
// their caches, which have room for them. A draft ends early where logits are not finite.
extern "C" int32_t moe_draft_chain(const decode::Chain* chain) {
  const decode::Model& model = *chain->model;
  const long S = chain->sequences, H = chain->first->hidden, V = model.head->rows();
  const long tables = 2 * chain->first->layers;
  thread_local ChainRows rows;
  decode::Step step = *chain->first;
  long moe_layers = 0;
  for (int64_t i = 0; i < model.count; ++i) moe_layers += model.experts[i].index >= 0;
  std::vector<long> at(chain->last, chain->last + S), active(S);
  for (long s = 0; s < S; ++s) active[s] = s, chain->made[s] = 0;
  std::fill(chain->rows, chain->rows + chain->most, 0);
  rows.tokens.assign(step.tokens, step.tokens + step.rows);
  rows.position.assign(step.position, step.position + step.rows);
  rows.capacity.assign(step.capacity, step.capacity + step.rows);
  rows.cache.assign(step.cache, step.cache + step.rows * tables);
  rows.logits.resize(S * V);
  rows.past.resize(S * H + LANES);
  step.tokens = rows.tokens.data(), step.position = rows.position.data();
  step.capacity = rows.capacity.data(), step.cache = rows.cache.data();
  int64_t* ids = chain->ids;
  for (long pass = 0; !active.empty(); ++pass) {
    rows.fit(step.rows, H, model.top_k);
    step.x = rows.x.data(), step.h = rows.h.data(), step.beside = rows.beside.data();
    if (!run_layers(step, model, rows, ids)) return NO_MEMORY;
    chain->rows[pass] = step.rows;
    ids += moe_layers * step.rows * model.top_k;
    for (float* each : {step.x, step.beside, rows.routed.data()}) keep(each, at, H);
    keep(rows.position.data(), at, 1);
    keep(rows.capacity.data(), at, 1);
    keep(rows.cache.data(), at, tables);
    step.rows = at.size();
    const bool due = model.experts[model.count - 1].index >= 0;
    if (!moe_decode_head(&step, model.layers + model.count - 1, due ? rows.routed.data() : nullptr,
                         model.norm, model.head, rows.logits.data()))
      return NO_MEMORY;
    std::vector<long> left;
    at.clear();
    for (long i = 0; i < step.rows; ++i) {
      const long s = active[i];
      const long place = s * chain->most + pass, C = chain->most_choices;
      const float *logits = rows.logits.data() + i * V, sharpness = chain->sharpness[s];
      const double uniform = chain->uniform[place];
      const Drafted found =
          uniform < 0 ? likeliest(logits, V, sharpness)
                      : draw(logits, V, sharpness, uniform, C, chain->choices + place * C,
                             chain->weights + place * C, chain->num_choices + place);
      if (found.chance <= 0) continue;
      chain->tokens[place] = found.token;
      chain->confidence[place] = found.chance;
      chain->made[s] = pass + 1;
      if (!goes_on(*chain, s, pass + 1)) continue;
      rows.tokens[left.size()] = found.token;
      left.push_back(s), at.push_back(i);
    }
    memcpy(rows.past.data(), step.h, step.rows * H * sizeof(float));
    keep(rows.past.data(), at, H);
    keep(rows.position.data(), at, 1);
    keep(rows.capacity.data(), at, 1);
    keep(rows.cache.data(), at, tables);
    for (size_t i = 0; i < at.size(); ++i) ++rows.position[i], at[i] = i;
    step.past = rows.past.data(), step.rows = at.size();
    active = left;
  }
  return ALL;
}

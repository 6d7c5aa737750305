// What a cache of experts learns from what is asked for: how often each is, and which follow which;
// and what each is worth keeping. At every layer of every step somebody waits for it. The same as
// `offload.policies` in numpy, which says why.
//
// Letters: L layers, E experts of the widest, M memories, H heads (visits ahead), R layers looked
// back to, D visits of a layer that are remembered.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "layouts.h"

namespace {

double log_odds(double p) { return std::log(p / (1 - p)); }
double sigmoid(double x) { return 1 / (1 + std::exp(-std::min(std::max(x, -9.2), 9.2))); }

constexpr int64_t LINE = 16;  // numbers

struct Learner {  // filled by learning.py
  int64_t layers, width, memories, heads, reach, depth;
  double cycle, rate_step, transition_step, forget, margin;
  const double *keep, *discounts;  // (M), (L, L)
  double *shares, *memory;         // (M), (L, M, E)
  double *rates, *odds;            // (H, L, E)
  double *tails, *worth, *losses;  // (L, E), (L, E), (H, 2)
  float *transitions, *parts;           // (L, E, H, R, E) by who was asked for, (H, L, R, E)
  int64_t *visits, *call_of;       // (L), (L, D)
  int64_t *count_of, *asked_of;    // (L, D), (L, D, E)

  int64_t part(int64_t head, int64_t layer, int64_t back) const {
    return (head * layers + layer) * reach + back;
  }
  int64_t around(int64_t layer) const { return (layer % layers + layers) % layers; }
  double* row(double* table, int64_t head, int64_t layer) const {
    return table + (head * layers + layer) * width;
  }
  // Weights from an expert that layer `from` asked for to those of the layer `back` behind it.
  float* transition(int64_t from, int64_t expert, int64_t head, int64_t back) const {
    return transitions + (((from * width + expert) * heads + head) * reach + back) * width;
  }
  // The rows of transitions that predict a layer's experts, as of a call.
  void spoke(std::vector<float*>& rows, int64_t head, int64_t layer, int64_t call) const {
    rows.clear();
    for (int64_t back = 0; back < reach; ++back) {
      const int64_t from = around(layer - back);
      const int64_t oldest = std::max<int64_t>(0, visits[from] - depth);
      for (int64_t visit = visits[from] - 1; visit >= oldest; --visit) {
        const int64_t at = from * depth + visit % depth;
        if (call_of[at] > call) continue;
        const int64_t* asked = asked_of + at * width;
        for (int64_t i = 0; i < count_of[at]; ++i) {
          rows.push_back(transition(from, asked[i], head, back));
          __builtin_prefetch(rows.back(), 1);  // kernels have run since, so they are in no cache
          for (int64_t e = LINE; e < width; e += LINE) __builtin_prefetch(rows.back() + e, 1);
        }
        break;
      }
    }
  }

  void learn_transitions(int64_t call, const int64_t* ahead, int64_t layer, const char* is_asked) {
    constexpr int TERMS = 16;  // of at least 1e-4 each: their product is a double
    std::vector<float> step(width);
    std::vector<float*> rows;
    for (int64_t head = 0; head < heads; ++head) {
      spoke(rows, head, layer, call - ahead[head]);
      std::fill(step.begin(), step.end(), 0.0f);
      for (const float* own : rows)
        for (int64_t e = 0; e < width; ++e) step[e] += own[e];
      const double *usual = row(rates, head, layer), *odd = row(odds, head, layer);
      const float rate = transition_step / std::max<int64_t>(1, rows.size());
      double right[2] = {0, 0};
      for (int64_t first = 0; first < width; first += TERMS) {
        double without = 1, with = 1;
        for (int64_t e = first; e < std::min(first + TERMS, width); ++e) {
          const double error = sigmoid(odd[e] + step[e]) - is_asked[e];
          without *= 1 - std::abs(usual[e] - is_asked[e]);
          with *= 1 - std::abs(error);
          step[e] = float(error) * rate;
        }
        right[0] += std::log(without);
        right[1] += std::log(with);
      }
      for (int i = 0; i < 2; ++i) {
        double& loss = losses[2 * head + i];
        loss -= forget * (right[i] / width + loss);
      }
      for (float* own : rows)
        for (int64_t e = 0; e < width; ++e) own[e] -= step[e];
    }
  }

  void remember(int64_t call, int64_t layer, const int64_t* experts, int64_t count) {
    const int64_t at = layer * depth + visits[layer] % depth;
    call_of[at] = call;
    count_of[at] = count;
    std::copy(experts, experts + count, asked_of + at * width);
    ++visits[layer];
    for (int64_t i = 0; i < count; ++i)
      for (int64_t head = 0; head < heads; ++head)
        for (int64_t back = 0; back < reach; ++back) {
          const float* own = transition(layer, experts[i], head, back);
          float* sum = parts + part(head, around(layer + back), back) * width;
          for (int64_t e = 0; e < width; ++e) sum[e] = i ? sum[e] + own[e] : own[e];
        }
  }

  void learn_rates(int64_t layer, const int64_t* experts, int64_t count) {
    double* memory_ME = memory + layer * memories * width;
    std::vector<double> told(memories, 0.0);
    for (int64_t i = 0; i < count; ++i) {
      double all = 1e-12;
      for (int64_t m = 0; m < memories; ++m) all += shares[m] * memory_ME[m * width + experts[i]];
      for (int64_t m = 0; m < memories; ++m)
        told[m] += shares[m] * memory_ME[m * width + experts[i]] / all;
    }
    double *next = row(rates, 0, layer), *usual = row(rates, 1, layer);
    std::fill(next, next + width, 0.0);
    for (int64_t m = 0; m < memories; ++m) {
      shares[m] += rate_step * (told[m] / count - shares[m]);
      const double kept = std::min(keep[m], 1 - 1.0 / (visits[layer] + 1));
      double* own = memory_ME + m * width;
      for (int64_t e = 0; e < width; ++e) own[e] *= kept;
      for (int64_t i = 0; i < count; ++i) own[experts[i]] += 1 - kept;
      for (int64_t e = 0; e < width; ++e) next[e] += shares[m] * own[e];
    }
    std::copy(memory_ME, memory_ME + width, usual);
    double* tail = tails + layer * width;
    for (int64_t head = 0; head < heads; ++head) {
      double *own = row(rates, head, layer), *odd = row(odds, head, layer);
      for (int64_t e = 0; e < width; ++e) {
        own[e] = std::min(std::max(own[e], 1e-3), 0.999);
        if (reach) odd[e] = log_odds(own[e]);
      }
    }
    for (int64_t e = 0; e < width; ++e) tail[e] = usual[e] / (1 - (1 - usual[e]) * cycle);
  }

  void value(int64_t layer) const {
    const double* tail = tails + layer * width;
    double* out = worth + layer * width;
    std::vector<float> moved(width);
    std::copy(tail, tail + width, out);
    for (int64_t head = heads - 1; head >= 0; --head) {
      const double *usual = row(rates, head, layer), *odd = row(odds, head, layer);
      const bool better = reach && losses[2 * head + 1] < losses[2 * head] - margin;
      if (better) {
        std::fill(moved.begin(), moved.end(), 0.0f);
        const float* sum = parts + part(head, layer, 0) * width;
        for (int64_t back = 0; back < reach; ++back, sum += width)
          for (int64_t e = 0; e < width; ++e) moved[e] += sum[e];
      }
      for (int64_t e = 0; e < width; ++e) {
        const double p = better ? sigmoid(odd[e] + moved[e]) : usual[e];
        out[e] = p + (1 - p) * cycle * out[e];
      }
    }
  }
};

}  // namespace

LAYOUT(Learner, layers, width, memories, heads, reach, depth, cycle, rate_step, transition_step,
       forget, margin, keep, discounts, shares, memory, rates, odds, tails, worth, losses,
       transitions, parts, visits, call_of, count_of, asked_of)

extern "C" {

// Learns from `calls` calls, each as its number, what it is foretold from (H numbers, calls before
// it), how many units it asks for and these, ascending; then puts into `values` (L, E) what each
// unit is worth where `layer` has just been.
void moe_learn(Learner* learner, const int64_t* news, int64_t calls, int64_t layer,
               double* values) {
  Learner& l = *learner;
  std::vector<char> is_asked(l.width), is_new(l.layers);
  std::vector<int64_t> experts;
  for (int64_t call = 0; call < calls; ++call) {
    const int64_t number = news[0], *ahead = news + 1, count = news[1 + l.heads];
    const int64_t* units = news + 2 + l.heads;
    const int64_t at = units[0] / l.width;
    experts.resize(count);
    std::fill(is_asked.begin(), is_asked.end(), 0);
    for (int64_t i = 0; i < count; ++i) is_asked[experts[i] = units[i] - at * l.width] = 1;
    if (l.reach) l.learn_transitions(number, ahead, at, is_asked.data());
    l.remember(number, at, experts.data(), count);
    l.learn_rates(at, experts.data(), count);
    for (int64_t back = 0; back < std::max<int64_t>(1, l.reach); ++back)
      is_new[l.around(at + back)] = 1;
    news = units + count;
  }
  for (int64_t one = 0; one < l.layers; ++one) {
    if (is_new[one]) l.value(one);
    const double by = l.discounts[layer * l.layers + one];
    const double* worth = l.worth + one * l.width;
    for (int64_t e = 0; e < l.width; ++e) values[one * l.width + e] = by * worth[e];
  }
}
}

// How soon experts are asked for next, by a small network. The same as `offload.policies.foresight`
// in numpy, which says why. Sums run over the outer index, so that compilers vectorise the inner.
//
// Letters: L layers, E experts of the widest, F memories, H hidden, D hidden units of the network.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "layouts.h"

namespace {

float log_odds(float p, float least) {
  const float kept = std::min(std::max(p, least), 1 - least);
  return std::log(kept / (1 - kept));
}
float sigmoid(float x) { return 1 / (1 + std::exp(std::min(-x, 60.0f))); }
float gelu(float x) {
  return 0.5f * x * (1 + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
}
void add(float* to, float by, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += by * from[i];
}

struct Foresight {  // filled by foresight.py
  int64_t layers, width, memories, hidden, units;
  double discount, correction, least;
  const int64_t* experts;                                // (L)
  const float *keep, *gates, *gate_bias;                 // (F), (L, H, E), (L, E)
  const float *shares, *down, *down_bias;                // (F + 1, L, L), (L, D, E), (L, E)
  const float *up_now, *up_before, *up_row, *up_layer;   // (L, E, D), (L, E, D), (H, D), (L, D)
  float *means, *said, *scores, *before, *row;           // (F, L, E) twice, (L, E) twice, (H)
  float *sums, *drift, *soon;                            // (D), (L, E), (L, E)
  int64_t* visits;                                       // (L)

  void hear(int64_t layer, const float* read, const float* given) {
    std::vector<float> found(width, 0.0f);
    const int64_t count = experts[layer];
    if (given) {
      std::copy(given, given + count, found.begin());
    } else {
      std::copy(gate_bias + layer * width, gate_bias + layer * width + count, found.begin());
      const float* gate = gates + layer * hidden * width;
      for (int64_t h = 0; h < hidden; ++h) add(found.data(), read[h], gate + h * width, count);
    }
    float mean = 0;
    for (int64_t e = 0; e < count; ++e) mean += found[e] / count;
    for (int64_t e = 0; e < count; ++e) {
      const int64_t at = layer * width + e;
      const float score = found[e] - mean;
      add(sums, score - scores[at], up_now + at * units, units);
      add(sums, scores[at] - before[at], up_before + at * units, units);
      before[at] = scores[at];
      scores[at] = score;
    }
    if (layer < layers - 1) return;
    for (int64_t h = 0; h < hidden; ++h) {
      add(sums, read[h] - row[h], up_row + h * units, units);
      row[h] = read[h];
    }
  }

  void visit(int64_t layer, const int64_t* asked, int64_t count) {
    const float even = 1 - 1.0f / (++visits[layer] + 1);
    for (int64_t f = 0; f < memories; ++f) {
      const int64_t first = (f * layers + layer) * width;
      const float kept = std::min(keep[f], even);
      for (int64_t e = first; e < first + width; ++e) means[e] *= kept;
      for (int64_t i = 0; i < count; ++i) means[first + asked[i]] += 1 - kept;
      for (int64_t e = first; e < first + width; ++e) said[e] = log_odds(means[e], float(least));
    }
  }

  // Log-odds (E) of a layer's experts by the network.
  void value(int64_t layer, int64_t now, const double* learning, double by, const float* inside,
             float* odds) const {
    std::copy(down_bias + layer * width, down_bias + (layer + 1) * width, odds);
    for (int64_t f = 0; f < memories; ++f)
      add(odds, shares[(f * layers + now) * layers + layer], said + (f * layers + layer) * width,
          width);
    const float share = shares[(memories * layers + now) * layers + layer];
    for (int64_t e = 0; e < width; ++e)
      odds[e] += share * log_odds(float(learning[layer * width + e] / by), float(least));
    for (int64_t d = 0; d < units; ++d)
      add(odds, inside[d], down + (layer * units + d) * width, width);
  }

  void correct(int64_t layer, const int64_t* asked, int64_t count, const float* odds) {
    std::vector<float> target(width);
    float *own = drift + layer * width, *was = soon + layer * width;
    for (int64_t e = 0; e < width; ++e) target[e] = float(discount) * sigmoid(odds[e] + own[e]);
    for (int64_t i = 0; i < count; ++i) target[asked[i]] = 1;
    for (int64_t e = 0; e < width; ++e) own[e] += float(correction) * (target[e] - was[e]);
  }
};

}  // namespace

LAYOUT(Foresight, layers, width, memories, hidden, units, discount, correction, least, experts, keep,
       gates, gate_bias, shares, down, down_bias, up_now, up_before, up_row, up_layer, means, said,
       scores, before, row, sums, drift, soon, visits)

extern "C" {

// A layer's router has read a row (H), to which it gave these scores (E), or null: find them.
void moe_hear(Foresight* foresight, int64_t layer, const float* row, const float* scores) {
  foresight->hear(layer, row, scores);
}

// Takes in visits, each as its layer, how many experts it asks for and these; then values units
// anew, of all layers or of those that have been: `learning` is what they are worth by others,
// `discounts` (L) what of this is due to when their layers come.
void moe_foresee(Foresight* foresight, const int64_t* news, int64_t count, int64_t whole,
                 const double* learning, const double* discounts) {
  Foresight& f = *foresight;
  std::vector<const int64_t*> last(f.layers, nullptr);
  int64_t now = 0;
  for (int64_t i = 0; i < count; ++i, news += 2 + news[1]) {
    now = news[0];
    f.visit(now, news + 2, news[1]);
    last[now] = news;
  }
  std::vector<float> inside(f.sums, f.sums + f.units), odds(f.width);
  for (int64_t d = 0; d < f.units; ++d) inside[d] = gelu(inside[d] + f.up_layer[now * f.units + d]);
  for (int64_t layer = 0; layer < f.layers; ++layer) {
    if (!whole && !last[layer]) continue;
    f.value(layer, now, learning, discounts[layer], inside.data(), odds.data());
    if (last[layer]) f.correct(layer, last[layer] + 2, last[layer][1], odds.data());
    for (int64_t e = 0; e < f.width; ++e)
      f.soon[layer * f.width + e] = sigmoid(odds[e] + f.drift[layer * f.width + e]);
  }
}
}

// A decode step's stages around attention, and its C interface, called through ctypes (which
// releases the GIL). See decode.h.
#include "attention.h"
#include "decode_attention.h"
#include "latents.h"
#include "layouts.h"

#include <initializer_list>

LAYOUT(decode::Norm, weight, bias, eps, centered)
LAYOUT(decode::Matrix, planes, weight, bias, format)
LAYOUT(decode::Rotation, cos, sin, begin, size, pairs_in, pairs_out)
LAYOUT(decode::Heads, norm, rotation, count, size, per_head, after_rotation)
LAYOUT(decode::Rule, correction, experts, top_k, groups, groups_kept, score, best_two, renormalise,
       scale, threshold)
LAYOUT(decode::Attention, q_a, q, k, v, o, kv_b, q_norm, k_norm, rotation, expansion, sinks, cache,
       heads, kv_heads, head_dim, value_dim, plain_dim, latent, window, q_norm_per_head,
       k_norm_per_head, norm_after_rotation, half, scale, softcap)
LAYOUT(decode::Layer, attention_norm, attention_post, feed_norm, feed_post, attention, router,
       shared_gate, gate, up, down, activation, rule, attention_scale, feed_scale, routed_scale)
LAYOUT(decode::Embedding, table, scale, dtype)
LAYOUT(decode::Join, embedding, hidden, project, hidden_first)
LAYOUT(decode::Seen, blocks, count, most, newest, gap, gap_end)
LAYOUT(decode::Step, rows, hidden, layers, x, h, beside, tokens, position, capacity, cache, states,
       seen, whole, keys, values, threads, bounds, past, prompts)
LAYOUT(decode::Prompts, sequences, first, num_wanted, wanted)
LAYOUT(decode::Experts, forward, layer, activation, slots, index)
LAYOUT(decode::Model, layers, program, experts, norm, head, embedding, count, top_k, patience, join)
LAYOUT(decode::Chain, first, model, sequences, most, last, depth, sharpness, accepted, price, tokens,
       confidence, made, rows, ids, uniform, most_choices, choices, num_choices, weights)

namespace decode {

// Rows of `width` at `x` or in the arena, with codes if one of their readers is quantised.
static Rows take_rows(Arena& arena, float* x, long rows, long width,
                      std::initializer_list<const Matrix*> readers) {
  Rows made{x ? x : arena.take(rows * width), width, {}, {}};
  for (long group : {32, 64}) {
    bool wanted = false;
    for (const Matrix* m : readers)
      wanted |= m->quantized() && m->planes.format.row_group() == group;
    if (wanted) made.place(arena.take_bytes(rows_bytes(rows, width, group)), group);
  }
  return made;
}

void Pass::place_attention(Arena& arena) {
  const long Q = a().heads, size = a().expansion ? a().latent : a().value_dim;
  low = take_rows(arena, nullptr, B, a().q_a.rows(), {&a().q});
  heads = take_rows(arena, given.out, B, Q * a().value_dim, {&a().o});
  q = given.q ? given.q : arena.take(B * a().q.rows());
  k = given.k ? given.k : arena.take(B * a().k.rows());
  v = given.v ? given.v : arena.take(B * a().v.rows());
  made = arena.take(B * a().o.rows());
  inward = arena.take(a().expansion && !step.prompts ? B * Q * size : 0);
  partial = reinterpret_cast<Partial*>(arena.take_bytes(B * Q * longest * sizeof(Partial)));
  sums = arena.take(B * Q * longest * size);
  const long D = a().head_dim, T = a().rotation.size;
  const bool latent = a().expansion, alone = !step.prompts;
  const bool turned = alone && (latent ? step.values.turned : step.keys.turned);
  begins = reinterpret_cast<int64_t*>(arena.take_bytes(alone ? 0 : B * sizeof(int64_t)));
  asked = turned && !latent ? arena.take(B * Q * D) : q;
  asked_beside = turned && latent ? arena.take(B * Q * T) : q + a().plain_dim;
  beside_stride = turned && latent ? T : D;
  for (long b = 0; b < B; ++b)
    if (const Seen* own = seen(b, 0); own && picks_some(*own)) {  // then all heads follow it
      picks = std::max(picks, long(own->most));
      scored = std::max(scored, 2 * long(own->count) + 2 * D);
    }
  picked = reinterpret_cast<int32_t*>(arena.take(B * a().kv_heads * picks));
  near = arena.take(B * a().kv_heads * scored);
}

void Pass::place(Arena& arena) {
  if (!layer && step.prompts) {
    hidden = take_rows(arena, step.h, B, H, {});
    wanted = take_rows(arena, nullptr, step.prompts->num_wanted, H, {head});
    return;
  }
  if (!layer) {
    hidden = take_rows(arena, step.h, B, H, {head});
    return;
  }
  const Layer& l = *layer;
  hidden = take_rows(arena, step.h, B, H,
                     {&a().q_a, &a().q, &a().k, &a().v, &l.router, &l.shared_gate, &l.gate, &l.up});
  inner = take_rows(arena, nullptr, B, l.gate.rows(), {&l.down});
  place_attention(arena);
  up = arena.take(B * l.up.rows());
  shared = arena.take(B);
  logits = arena.take(B * l.router.rows());
  choice = arena.take(B * l.router.rows());
}

// About how many products the pass computes; decides the number of threads.
long Pass::work() const {
  if (!layer) return B * head->size();
  const Layer& l = *layer;
  const long heads = a().expansion ? 1 : a().kv_heads;
  long weights = 0, keys = 0;
  for (const Matrix* m : {&a().q_a, &a().q, &a().k, &a().v, &a().o, &l.router, &l.gate, &l.up,
                          &l.down})
    weights += m->size();
  for (long b = 0; b < B; ++b)
    for (long n = 0; n < heads; ++n) keys += this->keys(b, n) + entries(b);
  const long a_key = a().expansion ? a().heads * 2 * a().latent : a().head_dim + a().value_dim;
  return B * weights + keys * a_key;
}

void Pass::measure() {
  if (step.prompts) {
    longest = 0;  // their splits are the prompt kernel's own
    return;
  }
  for (long b = 0; b < B; ++b)
    for (long n = 0; n < a().kv_heads; ++n) longest = std::max(longest, splits(b, n));
}

bool Pass::go() {
  if (layer) measure();
  Arena counting{nullptr};
  place(counting);
  Arena arena{scratch.reserve(counting.used)};
  if (!arena.memory) return false;
  place(arena);
  threads = team(work(), step.threads);
  const bool by_sequence = layer && step.prompts;
  if (!by_sequence) {
#pragma omp parallel num_threads(threads)
    run();
  }
  const bool done = !by_sequence || run_prompts();
  if (!by_sequence) scratch.trim();  // a prompt's next layer needs as much
  return done;
}

// Prompts: between two parallel regions attention has its own, a sequence at a time.
bool Pass::run_prompts() {
#pragma omp parallel num_threads(threads)
  {
    entering.run(B, [&](long b) { begin(b); });
    if (a().expansion) {
      project_latents();
      turning_queries.run(B, [&](long b) { turn_latent_queries(b); });
    } else {
      project();
      turn_all();
    }
  }
  if (!attend_prompts()) return false;
#pragma omp parallel num_threads(threads)
  leave();
  return true;
}

bool Pass::attend_prompts() {
  const long Q = a().heads, D = a().head_dim, V = a().value_dim;
  for (long b = 0; b < B; ++b) begins[b] = first_key(b);
  for (long s = 0; s < step.prompts->sequences; ++s) {
    const long first = step.prompts->first[s], end = step.prompts->first[s + 1];
    const void* const* tables = step.cache + (first * step.layers + a().cache) * 2;
    Attend all{q + first * Q * D, nullptr, nullptr, heads.x + first * Q * V, begins + first,
               a().sinks, tables[0], tables[1], D, Q * D, 0, 0, 0, 0, Q, a().kv_heads, D, V,
               end - first, length(end - 1), a().scale, a().softcap, step.keys, step.values};
    if (a().expansion) {
      const Latents latents{a().kv_b, cached(first, 0, 0, a().latent),
                            cached(first, 1, 0, a().rotation.size)};
      all.kv_heads = Q, all.k_format.turned = all.v_format.turned = 0;  // of what is expanded
      if (!attend_latents(all, latents, step.threads)) return false;
    } else if (!moe_attend(&all, step.threads)) {
      return false;
    }
  }
  return true;
}

// The first stage: adds the output of the layer before to the residual, and norms the row.
void Pass::begin(long b) {
  float *x = step.x + b * H, *h = step.h + b * H, *given = step.beside + b * H;
  if (before) {
    if (routed) {
      if (!before->down) memset(given, 0, H * sizeof(float));
      add_scaled(routed + b * H, before->routed_scale, H, given);
    }
    if (before->feed_post.weight) normalise(before->feed_post, given, H, given);
    add_scaled(given, before->feed_scale, H, x);
  }
  if (norm.weight) normalise(norm, x, H, h);
  else memcpy(h, x, H * sizeof(float));
  hidden.prepare(b);
}

void Pass::add_attention(long b) {
  float *x = step.x + b * H, *h = step.h + b * H, *row = made + b * H;
  if (layer->attention_post.weight) normalise(layer->attention_post, row, H, row);
  add_scaled(row, layer->attention_scale, H, x);
  if (layer->feed_norm.weight) normalise(layer->feed_norm, x, H, h);
  else memcpy(h, x, H * sizeof(float));
  hidden.prepare(b);
}

void Pass::route_row(long b) {
  const Rule& rule = layer->rule;
  if (layer->router) {
    int64_t* own_ids = ids + b * rule.top_k;
    float* own_weights = weights + b * rule.top_k;
    choose_experts(rule, logits + b * rule.experts, choice + b * rule.experts, own_ids,
                   own_weights);
    sort_choice(rule.top_k, own_ids, own_weights);
  }
  float* x = inner.x + b * inner.width;
  for (long c = 0; c < inner.width; c += LANES) {
    const long left = inner.width - c;
    store_fp32_as(x + c, activate(layer->activation, load_as_fp32(x + c, left),
                                  load_as_fp32(up + b * inner.width + c, left)), left);
  }
  if (inner.width) inner.prepare(b);
}

void Pass::finish_feed(long b) {
  const float weight = 1.0f / (1.0f + std::exp(-shared[b]));
  float* given = step.beside + b * H;
  for (long c = 0; c < H; ++c) given[c] *= weight;
}

void Pass::feed() {
  const Layer& l = *layer;
  const Product first[] = {{&l.router, &hidden, logits, l.router.rows()},
                           {&l.shared_gate, &hidden, shared, 1},
                           {&l.gate, &hidden, inner.x, inner.width},
                           {&l.up, &hidden, up, inner.width}};
  products(first, 4, B, threads, scoring);
  choosing.run(B, [&](long b) { route_row(b); });
  const Product second[] = {{&l.down, &inner, step.beside, H}};
  products(second, 1, B, threads, sharing);
  if (l.shared_gate) weighing.run(B, [&](long b) { finish_feed(b); });
}

void Pass::attend_given() {
  if (!a().expansion) return attend_heads();
  turning.run(B, [&](long b) { turn_latent(b); });
  attend_latent_heads();
}

// The same of prompts, in parallel regions of its own. False: no memory.
bool Pass::attend_given_prompts() {
#pragma omp parallel num_threads(threads)
  if (a().expansion) {
    turning.run(B, [&](long b) { turn_latent(b); });
    turning_queries.run(B, [&](long b) { turn_latent_queries(b); });
  } else {
    turn_all();
  }
  return attend_prompts();
}

void Pass::run() {
  entering.run(B, [&](long b) { begin(b); });
  if (!layer) return run_head();
  a().expansion ? attend_latent_all() : attend_all();
  leave();
}

void Pass::run_head() {
  const Prompts* prompts = step.prompts;
  if (prompts)
    gathering.run(prompts->num_wanted, [&](long i) {
      memcpy(wanted.x + i * H, step.h + prompts->wanted[i] * H, H * sizeof(float));
      wanted.prepare(i);
    });
  const Product last[] = {{head, prompts ? &wanted : &hidden, out, head->rows()}};
  products(last, 1, prompts ? prompts->num_wanted : B, threads, heading);
}

// From the attention's heads to the experts' rows.
void Pass::leave() {
  if (heads.quantized()) coding.run(B, [&](long b) { heads.prepare(b); });
  const Product output[] = {{&a().o, &heads, made, H}};
  products(output, 1, B, threads, leaving);
  adding.run(B, [&](long b) { add_attention(b); });
  feed();
}

}  // namespace decode

extern "C" {

// Adds the feed-forward of the layer `before` (`routed`: its experts' output), and runs `layer` up to
// its experts. Leaves their input rows in step->h, and their ids and weights if C++ knows the router.
// 0: no memory.
int32_t moe_decode_layer(const decode::Step* step, const decode::Layer* before,
                         const decode::Layer* layer, const float* routed, int64_t* ids,
                         float* weights) {
  return decode::Pass{*step, before, layer, routed, layer->attention_norm, ids, weights}.go();
}

// out (B, V) = the head's product with the normed output of the last layer, `before`.
int32_t moe_decode_head(const decode::Step* step, const decode::Layer* before,
                        const float* routed, const decode::Norm* norm, const decode::Matrix* head,
                        float* out) {
  return decode::Pass{*step, before, nullptr, routed, *norm, nullptr, nullptr, head, out}.go();
}

// Joins the step's rows, which are embeddings, with `past`. 0: no memory.
int32_t moe_decode_join(const decode::Step* step, const decode::Join* join) {
  using namespace decode;
  const long B = step->rows, H = step->hidden;
  const auto place = [&](Arena& arena) {
    return take_rows(arena, nullptr, B, 2 * H, {&join->project});
  };
  Arena counting{nullptr};
  place(counting);
  Arena arena{scratch.reserve(counting.used)};
  if (!arena.memory) return 0;
  const decode::Rows both = place(arena);
  const Product product{&join->project, &both, step->x, H};
  const int threads = team(B * join->project.size(), step->threads);
  Turns norming{stages::NORMS}, projecting{stages::PROJECTIONS};
#pragma omp parallel num_threads(threads)
  {
    norming.run(B, [&](long b) {
      const float *x = step->x + b * H, *past = step->past ? step->past + b * H : x;
      float* to = both.x + b * 2 * H;
      normalise(join->embedding, x, H, join->hidden_first ? to + H : to);
      normalise(join->hidden, past, H, join->hidden_first ? to : to + H);
      both.prepare(b);
    });
    products(&product, 1, B, threads, projecting);
  }
  scratch.trim();
  return 1;
}
}

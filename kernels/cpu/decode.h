// One decoder layer for one new token of each of B sequences. It starts with the output of the routed
// experts of the layer before, and ends with the rows that this layer's experts read, and their ids
// and weights. Stages follow each other in one parallel region; a stage's tasks are rows, heads or
// panels of weights. A row's sums never depend on another row or on the number of threads.
#pragma once
#include "choice.h"
#include "curves.h"
#include "heads.h"
#include "indexer.h"
#include "kv.h"
#include "product.h"

namespace program {
struct Program;
struct States;
}

namespace decode {

struct Attention {
  Matrix q_a, q, k, v, o;  // latent attention: q_a before q or absent, k for latent and rotated key
  Matrix kv_b;             // latent attention: the expansion as prompts multiply by it; else absent
  Norm q_norm, k_norm;     // latent attention: of q_a's rows and of the latent
  Rotation rotation;
  const void* expansion;   // latent attention: (heads, plain + value, latent); else null
  const float* sinks;      // (heads,) or null
  int64_t cache;           // index of its keys and values
  int64_t heads, kv_heads, head_dim, value_dim, plain_dim, latent;
  int64_t window;  // keys that may be seen; 0: all; negative: those of the row's chunk of that size
  int32_t q_norm_per_head, k_norm_per_head, norm_after_rotation;
  int32_t half;  // whether the expansion is float16, not float32
  float scale, softcap;  // softcap 0: none
};

struct Layer {
  Norm attention_norm, attention_post, feed_norm, feed_post;
  Attention attention;
  Matrix router, shared_gate, gate, up, down;  // the last three: feed-forward, or shared expert
  Activation activation;
  Rule rule;
  float attention_scale, feed_scale, routed_scale;
};

// The table that a step's rows begin with; its width is H.
struct Embedding {
  const void* table;  // (V, H)
  float scale;
  int32_t dtype;
};

// How rows of a multi-token-prediction layer begin: from the embedding of a token, and the model's
// final hidden state of the token before it.
struct Join {
  Norm embedding, hidden;
  Matrix project;        // (H, 2 H)
  int32_t hidden_first;  // of its columns
};

// What a row attends to where a policy leaves some out, in layers that see all tokens.
struct Seen {
  const int32_t* blocks;  // ascending, the last is the row's own; null: all of its sequence
  int64_t count;          // 0: no policy
  int64_t most;           // if there are more, each key head chooses so many by their bounds; 0: none does
  int64_t newest;         // of these the last so many, which no head has to choose; 2 or more
  int64_t gap, gap_end;   // of the tokens in these blocks, one behind the other, those that it leaves out;
                          // where none chooses
};

// The rows of a step that reads prompts: a sequence's new tokens one behind the other, which attend
// together.
struct Prompts {
  int64_t sequences;
  const int64_t* first;   // (sequences + 1,) the first row of each, and behind the last
  int64_t num_wanted;
  const int64_t* wanted;  // the rows whose logits are wanted, ascending
};

struct Step {
  int64_t rows, hidden, layers;  // B; H; layers that have a cache
  float *x, *h, *beside;         // (B, H) residual; a block's input; output of `down`, of a program final
                                 // hidden states
  const int64_t* tokens;         // (B,)
  const int64_t* position;       // (B,) of the new token
  const int64_t* capacity;       // (B,) tokens of the blocks of its caches
  const void* const* cache;      // (B, layers, 2) tables of keys and values, or latents and rotated keys
  const program::States* states; // of a program
  const Seen* seen;              // (B,) or null
  const uint8_t* const* whole;   // (layers,) of each cache, which key heads (kv_heads,) attend to all
                                 // whatever `seen` says; null: none
  kv::Format keys, values;       // of the caches
  int32_t threads;
  int32_t bounds;                // blocks have the bounds of their keys
  const float* past;             // (B, H) what `Join` reads; null: the embeddings
  const Prompts* prompts;        // null: a decode step, whose rows attend each by itself
};

// A layer's routed experts: moe_forward or moe_quantized_forward, and its arguments.
struct Experts {
  int32_t (*forward)(const void* layer, const Activation*, const void* hidden, int32_t dtype,
                     const int64_t* ids, const float* weights, int64_t tokens, int64_t slots,
                     void* out, float* so_far, int32_t threads);  // null: the caller runs them
  const void* layer;
  const Activation* activation;
  const int64_t* slots;  // slot of each expert in memory, else -1; null: all are, in order
  int64_t index;  // counted over MoE layers; -1: the layer has none
};

struct Model {
  const Layer* layers;     // (count,); or, with norm and head, null
  const program::Program* program;  // or null
  const Experts* experts;  // (count,)
  const Norm* norm;
  const Matrix* head;
  const Embedding* embedding;  // or null: the caller has filled x
  int64_t count, top_k;
  double patience;  // seconds after which a call returns between two layers
  const Join* join;  // or null: rows begin with their embeddings
};

// Drafts of S sequences by a layer that predicts several tokens: pass after pass, in one call. The
// first reads the rows of `first`; each further one the token that a sequence has just drafted, with
// the layer's own hidden state of the token before.
struct Chain {
  const Step* first;      // without x, h and beside
  const Model* model;     // all experts in memory, all routers known
  int64_t sequences, most;
  const int64_t* last;    // (S,) the row of `first` behind which a sequence drafts, ascending
  const int64_t* depth;   // (S,) most tokens; >= 1
  const float* sharpness; // (S,) factor of the logits whose softmax is a token's confidence
  const float* accepted;  // (most + 1,) how often a token there is accepted if those before it are
  double price;           // tokens that a further one has to bring
  int64_t* tokens;        // (S, most)
  float* confidence;      // (S, most)
  int64_t* made;          // (S,) tokens of each draft
  int64_t* rows;          // (most,) of each pass; 0: there was none
  int64_t* ids;           // of each pass (MoE layers, its rows, top_k), one behind the other
  // A drawn token is one of at most `most_choices`, drawn by weights.
  const double* uniform;  // (S, most) in [0, 1); below 0: the likeliest token is drafted
  int64_t most_choices;
  int64_t *choices, *num_choices;  // (S, most, most_choices); (S, most)
  float* weights;                  // (S, most, most_choices)
};

// A call's scratch memory, handed out in order; with null memory it only counts bytes.
struct Arena {
  char* memory;
  size_t used = 0;
  char* take_bytes(size_t bytes) {
    char* place = memory + used;
    used += aligned(bytes) + 64;  // room for a vector behind the end
    return place;
  }
  float* take(long count) { return reinterpret_cast<float*>(take_bytes(count * sizeof(float))); }
};

// Rows that a program gives in place of the attention's projections, and takes in place of `heads`.
struct Given {
  float *q, *k, *v, *out;  // latent attention: k has latents and rotated keys; v is null
  const int64_t* chosen;   // (B, most) positions of the keys that a row attends to, in order; null: all
  const float* sinks;      // (B, heads) in place of the layer's, or null
  const float* bias;       // (B, heads, reach) of the score of the key so many positions back, or null
  int64_t most, reach;     // a row that has fewer keys than `most` attends to all of them
  int64_t pool;            // see Indexer
  // Beside its keys a row attends to entries, rows of another cache of floats that are keys and values
  // at once. Each stands for `rate` tokens (0: there are none), the last of which writes it.
  const float* entry;      // (B, D)
  int64_t entries, rate;   // index of their cache; `chosen` and `most` are of entries then
};

struct Pass {
  const Step& step;
  const Layer* before;  // its feed-forward is yet to be added; null at the first layer
  const Layer* layer;   // null after the last
  const float* routed;  // (B, H) of `before`'s experts, or null
  const Norm& norm;     // norm of the first stage's rows
  int64_t* ids;         // (B, top_k)
  float* weights;       // (B, top_k)
  const Matrix* head = nullptr;
  float* out = nullptr;  // (B, rows of the head); of prompts (num_wanted, rows of the head)
  Given given{};

  const long B = step.rows, H = step.hidden;
  int threads = 1;
  long longest = 1;  // splits of the longest sequence
  Rows hidden, low, heads, inner, wanted;
  int64_t* begins;  // (B,) of prompts: the first key that a row sees
  float *q, *k, *v, *made, *up, *shared, *logits, *choice, *sums, *inward;
  float *asked, *asked_beside;  // queries as caches have keys, and those for rotated keys of latents
  long beside_stride;
  int32_t* picked;  // (B, N, picks) blocks that key heads chose
  float* near;      // (B, N, scored) scores of a key head's blocks, and behind them `signs`
  long picks = 0, scored = 0;
  Partial* partial;
  Turns gathering{stages::NORMS}, entering{stages::NORMS}, projecting{stages::PROJECTIONS},
      turning{stages::POSITIONS}, turning_queries{stages::POSITIONS},
      projecting_again{stages::PROJECTIONS}, inwards{stages::PROJECTIONS},
      picking{stages::ATTENTION}, attending{stages::ATTENTION}, merging{stages::ATTENTION}, outwards{stages::PROJECTIONS},
      coding{stages::OUTPUT}, leaving{stages::OUTPUT}, adding{stages::NORMS},
      scoring{stages::ROUTER}, choosing{stages::CHOICE}, sharing{stages::SHARED},
      weighing{stages::SHARED}, heading{stages::HEAD};

  bool go();
  void measure();
  void place(Arena& arena);
  void place_attention(Arena& arena);
  long work() const;
  void run();
  void run_head();
  bool run_prompts();
  void project();
  void turn_all();
  bool attend_prompts();
  void leave();
  void attend_given();
  bool attend_given_prompts();
  void attend_all();
  void attend_heads();
  void project_latents();
  void attend_latent_all();
  void attend_latent_heads();
  void feed();

  const Attention& a() const { return layer->attention; }
  long length(long b) const { return step.position[b] + 1; }
  long first_key(long b) const {
    const long window = a().window, own = length(b);
    if (window < 0) return (own - 1) / -window * -window;
    return window && own > window ? own - window : 0;
  }
  // Keys that the queries of a key head attend to, without entries. Only a policy tells heads apart:
  // without one any head will do.
  long keys(long b, long kv_head = 0) const {
    if (const Seen* own = seen(b, kv_head))
      return blocks(*own) * kv::TOKENS - (-length(b) & (kv::TOKENS - 1)) - (own->gap_end - own->gap);
    if (!given.chosen || given.rate) return length(b) - first_key(b);
    return Indexer::most(given.most / given.pool, given.pool, length(b));
  }
  long entries(long b) const {
    if (!given.rate) return 0;
    const long all = length(b) / given.rate;
    return given.chosen && all > given.most ? given.most : all;
  }
  bool writes_entry(long b) const { return given.rate && length(b) % given.rate == 0; }
  // Splits of keys, and behind them those of entries.
  long key_splits(long b, long kv_head = 0) const { return (keys(b, kv_head) + SPLIT - 1) / SPLIT; }
  long splits(long b, long kv_head = 0) const {
    return key_splits(b, kv_head) + (entries(b) + SPLIT - 1) / SPLIT;
  }
  bool of_entries(long b, long kv_head, long split) const { return split >= key_splits(b, kv_head); }
  long split_keys(long b, long kv_head, long split) const {
    const long left = of_entries(b, kv_head, split)
                          ? entries(b) - (split - key_splits(b, kv_head)) * SPLIT
                          : keys(b, kv_head) - split * SPLIT;
    return left < SPLIT ? left : SPLIT;
  }
  bool attends_to_all(long kv_head) const {
    const uint8_t* own = step.whole ? step.whole[a().cache] : nullptr;
    return own && own[kv_head];
  }
  const Seen* seen(long b, long kv_head) const {
    const bool all = !step.seen || a().window || a().expansion || given.chosen || given.rate;
    return all || !step.seen[b].count || attends_to_all(kv_head) ? nullptr : step.seen + b;
  }
  static bool picks_some(const Seen& seen) { return seen.most && seen.count > seen.most; }
  static long blocks(const Seen& seen) { return picks_some(seen) ? seen.most : seen.count; }
  // Place of key or entry t of a split in its cache, where none are chosen. Places follow each other
  // within a block, but for what `until_gap` says.
  long place_of(long b, long kv_head, long split, long t) const {
    if (of_entries(b, kv_head, split)) return (split - key_splits(b, kv_head)) * SPLIT + t;
    const Seen* own = seen(b, kv_head);
    if (!own) return first_key(b) + split * SPLIT + t;
    const int32_t* list = picks_some(*own) ? picked + (b * a().kv_heads + kv_head) * picks
                                           : own->blocks;
    long at = split * SPLIT + t;
    if (at >= own->gap) at += own->gap_end - own->gap;
    return list ? (long(list[at >> kv::SHIFT]) << kv::SHIFT) + (at & (kv::TOKENS - 1)) : at;
  }
  // Keys from key t of a split to the gap of a row; more than there are where none lies ahead.
  long until_gap(long b, long kv_head, long split, long t) const {
    const Seen* own = seen(b, kv_head);
    const long left = own ? own->gap - (split * SPLIT + t) : 0;
    return left > 0 && own->gap < own->gap_end ? left : SPLIT;
  }
  kv::Bounds bounds(long b, long head) const {
    const kv::Rows keys = cached(b, 0, head, a().head_dim);
    const long begin = kv::bounds_begin(step.keys, keys.size, step.values, a().value_dim,
                                        a().kv_heads);
    return {keys, begin, head};
  }
  const int64_t* split_chosen(long b, long split) const {
    if (!given.chosen || bool(given.rate) != of_entries(b, 0, split)) return nullptr;
    return given.chosen + b * given.most + (given.rate ? split - key_splits(b) : split) * SPLIT;
  }
  kv::Rows cached(long b, int which, long head, long size) const {
    return {step.cache[(b * step.layers + a().cache) * 2 + which], which ? step.values : step.keys,
            size, step.capacity[b], head};
  }
  kv::Rows entry_rows(long b) const {  // in one block
    const void* table = step.cache[(b * step.layers + given.entries) * 2];
    return {table, kv::Format{32, 0}, a().head_dim, 0, 0};
  }
  void list(const kv::Rows& rows, long b, long kv_head, long split, const char** to) const;
  void pick(long b, long kv_head);
  void begin(long b);
  void turn_queries(long b);
  void turn_keys(long b);
  long most_together() const;
  long together(long b, long kv_head) const;
  void attend(long b, long rows_together, long kv_head, long split);
  Partial weights_of(long b, long row, long split, float* score) const;
  void merge_head(long b, long head);
  void turn_latent(long b);
  void turn_latent_queries(long b);
  template <class Numbers>
  void inward_head(const Numbers& numbers, long head);
  void attend_latent(long b, long first, long split);
  template <class Numbers>
  void outward_head(const Numbers& numbers, long head);
  void add_attention(long b);
  void route_row(long b);
  void finish_feed(long b);
};

}  // namespace decode

extern "C" {
int32_t moe_decode_layer(const decode::Step* step, const decode::Layer* before,
                         const decode::Layer* layer, const float* routed, int64_t* ids,
                         float* weights);
int32_t moe_decode_head(const decode::Step* step, const decode::Layer* before,
                        const float* routed, const decode::Norm* norm, const decode::Matrix* head,
                        float* out);
int32_t moe_decode_join(const decode::Step* step, const decode::Join* join);
}

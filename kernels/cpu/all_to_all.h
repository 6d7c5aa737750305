// What ranks of one machine exchange at a layer as long as all bring what they brought before.
//
// Letters: R ranks, T tokens of all ranks, K slots, W bytes of a row, H hidden, L layers.
#pragma once
#include <cstdint>

extern "C" {

struct AllToAllLayer {
  const int64_t* holders;  // as `moe_assign` takes them
  int64_t experts;
  int64_t* assigned;  // what `moe_assign` writes
};

// What of a layer the ranks have exchanged before the call that does: where a walk over layers had
// to leave one to its caller, who calls for it once more.
enum Had : int64_t { NOTHING = 0, TOLD = 1, RETURNED = 2 };

struct AllToAll {
  int64_t ranks, rank, slots, width, hidden, timeout_ms;
  int64_t rows_at;            // where rows begin in a message; ids begin behind the head
  int64_t epoch;              // of the placements
  const int32_t* files;       // (R) sockets; the own is not used
  const int64_t *tokens, *slots_R, *message_bytes;  // (R)
  char* const* messages;      // (R) what each rank tells; ids that are not used are zeros
  const char* heads;          // (R, HEAD) what they are expected to say
  const AllToAllLayer* layers;  // (L)
  char *served, *returned;    // rows (T K, W) and (own T K, H) float32
  float *results, *ones;      // (T K, H) and (T K): of a walk, what it serves, and their weights
  int64_t* chosen;            // (T K): and their slots
  int64_t layer, had;         // of the last dispatch; see `Had`
  int64_t lost, error;        // the rank that an exchange failed with or -1; errno, 0: it has left
  double seconds;             // spent in exchanges
};

enum : int32_t { LOST = -2, BAD_ID = -1, DONE = 0, OTHERWISE = 1 };

// Tells the others a layer and an epoch, ids (own T, K) and rows (own T, W), hears theirs, and leaves
// in `assigned` and `served` what this rank serves. OTHERWISE: somebody is elsewhere or brings
// something else, see `messages`.
int32_t moe_dispatch(AllToAll* m, int64_t layer, const int64_t* ids, const void* rows);

// Brings results (served, H) back to those whose they are, and sums this rank's: out (own T, H) of
// `dtype`, FP32 or BF16. OTHERWISE: one of them begins with NaN, as rows do that have failed.
int32_t moe_return(AllToAll* m, float* rows, const float* weights, void* out, int32_t dtype,
                   int32_t threads);

int32_t moe_assign(const int16_t* const* tables, const int64_t* tokens, const int64_t* width,
                   const int64_t* begin, int64_t ranks, int64_t slots, int64_t experts,
                   int64_t rank, int64_t* out);

}  // extern "C"

// What `moe_assign` has written of the slots that this rank serves.
struct Serving {
  const int64_t *token, *experts, *served_R, *returned_R;
  const int32_t* position;
  int64_t count;

  explicit Serving(const AllToAll& m) {
    const AllToAllLayer& layer = m.layers[m.layer];
    int64_t size = 0;
    for (int64_t r = 0; r < m.ranks; ++r) size += m.tokens[r] * m.slots;
    token = layer.assigned + 2 * size;
    experts = token + size;
    served_R = experts + size;
    returned_R = served_R + m.ranks;
    count = returned_R[m.ranks + 1];
    position = reinterpret_cast<const int32_t*>(returned_R + m.ranks + 2);
  }
};

// The exchange between ranks of one machine at a layer, while all bring the shapes that they brought
// to the step before.
//
// Letters: R ranks, T tokens of all ranks, K slots, W bytes of a row, H hidden, L layers.
#pragma once
#include <cstdint>

extern "C" {

struct AllToAllLayer {
  const int64_t* holders;  // see `moe_assign`
  int64_t experts;
  int64_t* assigned;       // output of `moe_assign`
};

// How much of a layer is exchanged already when a call begins: `moe_decode_model` may leave a layer
// to its caller after the dispatch or after the return.
enum Had : int64_t { NOTHING = 0, TOLD = 1, RETURNED = 2 };

struct AllToAll {
  int64_t ranks, rank, slots, width, hidden, timeout_ms;
  int64_t rows_at;            // offset of the rows in a message; ids follow the header
  int64_t epoch;              // version of the placements
  const int32_t* files;       // (R) sockets; this rank's own is not used
  const int64_t *tokens, *slots_R, *message_bytes;  // (R)
  char* const* messages;      // (R) message of each rank; unused ids are zeros
  const char* heads;          // (R, HEAD) the headers that are expected
  const AllToAllLayer* layers;  // (L)
  char *served, *returned;    // rows (T K, W) and (own T K, H) float32
  float *results, *ones;      // (T K, H) and (T K): results of compiled callers; weights 1
  int64_t* chosen;            // (T K): slots of the experts served
  int64_t layer, had;         // of the last dispatch, and a `Had`
  int64_t lost, error;        // the rank that an exchange failed with or -1; errno, 0: it has left
  double seconds;             // spent in exchanges
};

enum : int32_t { LOST = -2, BAD_ID = -1, DONE = 0, OTHERWISE = 1 };

// Sends layer, epoch, header, ids (own T, K) and rows (own T, W) to the other ranks, receives theirs,
// and leaves in `assigned` and `served` what this rank serves. OTHERWISE: a rank is at another layer
// or sent another header, see `messages`.
int32_t moe_dispatch(AllToAll* m, int64_t layer, const int64_t* ids, const void* rows);

// Sends results (served, H) back to the ranks of their tokens, and sums this rank's own into out
// (own T, H) of `dtype`, FP32 or BF16. OTHERWISE: a row begins with NaN, which marks a failed rank.
int32_t moe_return(AllToAll* m, float* rows, const float* weights, void* out, int32_t dtype,
                   int32_t threads);

int32_t moe_assign(const int16_t* const* tables, const int64_t* tokens, const int64_t* width,
                   const int64_t* begin, int64_t ranks, int64_t slots, int64_t experts,
                   int64_t rank, int64_t* out);

}  // extern "C"

// The parts of `moe_assign`'s output about the slots that this rank serves.
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

// A decode step or a prompt as a program: moe/decode/trace.py records it from one token of transformers'
// own forward. Instructions are written for one row (one new token); a stage runs some of them for every
// row of the step, or the products, attention, choices of keys or recurrent updates of all rows. A
// row's results depend neither on the other rows nor on the number of threads. A segment, from one
// layer of experts to the next, goes through the rows in chunks, one behind the other.
#pragma once
#include "decode.h"
#include "indexer.h"

namespace program {

constexpr int DIMS = 6;
constexpr long SQUARE = 256;  // most elements of a matrix for SINKHORN

// Where an operand lies. ROW, KEPT: in the step's memory, of which a buffer takes `pitch` bytes a row;
// ROW only lasts until the next layer of experts, and holds a chunk of the rows. CONSTANT: at an
// address. BEFORE, AFTER: in the recurrent states that a row reads and writes. The others: in the
// arrays of the step and of its experts, `pitch` bytes a row; FINAL: hidden states behind all layers.
enum Space : int32_t {
  ROW, CONSTANT, BEFORE, AFTER, EMBEDDED, TOKEN, POSITION, HIDDEN, IDS, WEIGHTS, ROUTED, LOGITS, FINAL,
  KEPT, SPACES
};

enum Element : int32_t { FLOAT, INTEGER, BOOLEAN };  // float, int64_t, uint8_t

struct Place {
  int64_t base, pitch, offset;  // in bytes; base: of a buffer in ROW or KEPT, for each row
  int32_t space, element;
};

struct Operand {
  Place place;
  int64_t strides[DIMS];  // in elements
};

enum Code : int32_t {
  // out = f(a), elementwise
  COPY, NEGATE, EXP, LOG, LOG1P, SIGMOID, SILU, TANH, RELU, RSQRT, SQRT, RECIPROCAL, COS, SIN, ABS,
  SOFTPLUS, GELU, GELU_TANH, ERF, FLOOR, NOT,
  // out = f(a, b)
  ADD, SUBTRACT, MULTIPLY, DIVIDE, POWER, MAXIMUM, MINIMUM, EQUAL, UNEQUAL, LESS, LESS_EQUAL, AND, OR,
  WHERE,  // a ? b : c
  // of the last dimension
  SUM, LARGEST, SMALLEST, CUMULATE,
  TOP,  // values out and indices c of the `count` largest, in order; `number` < 0: smallest
  // at index b of one dimension, whose elements lie `count` apart
  GATHER, SCATTER, SCATTER_ADD,
  MATMUL,   // sizes (..., m, n, k): out += a b over k
  QUANTISE, // codes of `count` dense rows for the quantised products that read them
  SORT_CHOICE,  // of `count` experts, by id
  // out = f(a, b), of integers
  XOR, REMAINDER,  // the latter has the divisor's sign
  // the last two dimensions, `count` times divided by the sums + `number` of the last, of the other, ...
  SINKHORN,
  // of the last dimension, whose elements lie side by side
  NORM,     // a / sqrt(mean(a^2) + `number`), times b if `count`
  SOFTMAX,
  ROTATE,   // a b + (-second half of a, first half) c
};

struct Instruction {
  Operand out, a, b, c;
  int64_t sizes[DIMS];
  int64_t count;
  int64_t every;  // only rows at the last of so many positions need what it makes
  float number;
  int32_t code, dims;
};

struct Projected {  // `multiple` dense rows of each row times a matrix
  decode::Matrix matrix;
  Place from, codes, out;
  int64_t multiple, group;
};

struct Selected {  // `multiple` dense rows of each row, each times the matrix of its id
  const float* matrices;  // (any, rows, columns)
  Place from, ids, out;
  int64_t multiple, rows, columns;
};

struct Attended {  // of dense queries, keys and values; latent: k has latents and rotated keys, v nothing
  decode::Layer layer;  // only its attention
  Place q, k, v, out;
  Place chosen, sinks, bias, entry;  // see decode::Given; CONSTANT 0: none
  int64_t most, reach, pool, entries, rate;
};

// The choice of an indexer, of dense queries, weights of its heads and its row. It fills as many of
// the `most` places as positions are chosen.
struct Indexed {
  decode::Indexer indexer;
  Place q, weights, key, chosen;
  int64_t most;
};

enum Recurrence : int32_t { GATED, SCAN, CONVOLUTION };

// One token of a recurrent layer, on floats that lie as the call's records say.
struct Recurred {
  const void* call;  // recurrence::GatedCall, ScanCall or ConvolutionCall without addresses of these:
  Place rows[5];     // the inputs in the record's order; CONSTANT 0: none
  Place before, after, out;
  int32_t kind, inputs;
  int32_t together;    // one call takes all tokens up to the next whose states are kept
};

enum Kind : int32_t { ROWS, PRODUCTS, ATTENTION, RECURRENCE, INDEXER, SELECTION };

struct Stage {
  int64_t begin, end;  // instructions, products; one attention, recurrent layer, indexer, selection
  int32_t kind;
  int32_t in_order;  // it updates states: rows of one sequence follow each other
};

struct Program {
  const Instruction* instructions;
  const Projected* products;
  const Attended* attention;
  const Recurred* recurrent;
  const Indexed* indexers;
  const Selected* selections;
  const Stage* stages;
  const int64_t* segments;  // (count + 1,) first stage behind each layer of experts; the last: none
  int64_t count;       // layers of experts, and the rest
  int64_t row_bytes, kept_bytes;  // of a row in ROW and in KEPT
  int64_t logit_bytes; // of a row
  int64_t tail;        // from this stage on only rows whose logits are wanted matter
  int64_t work;        // products a row, about
};

struct States {  // of the rows of a step
  char* const* before;     // (B,)
  char* const* after;      // (B,) not the same memory as before
  const int64_t* to_kept;  // (B,) rows from each one on to the next whose states are kept, that included
  const int64_t* tokens;   // (B,)
  const int64_t* sequence; // (sequences + 1,) first row of each
  int64_t sequences;
  char *memory, *kept;     // (chunk * row_bytes,) (B * kept_bytes,)
  int64_t chunk;           // most rows that go through a segment together
};

struct Arrays {
  char* at[SPACES];
  long rows, chunk, first;  // B; rows in ROW, the first of which is row `first`
};

// One instruction for some rows; for one row if it reads or writes states.
struct Rows {
  const Arrays& arrays;
  const States& states;
  long row, count = 1;

  template <class T = float>
  T* at(const Place& p) const {
    return reinterpret_cast<T*>(start(p) + p.offset);
  }
  void run(const Instruction& i) const;

 private:
  char* start(const Place& p) const {
    switch (p.space) {
      case ROW: return arrays.at[ROW] + p.base * arrays.chunk + (row - arrays.first) * p.pitch;
      case KEPT: return arrays.at[KEPT] + p.base * arrays.rows + row * p.pitch;
      case BEFORE: return states.before[row];
      case AFTER: return states.after[row];
      case CONSTANT: return reinterpret_cast<char*>(p.base);
      default: return arrays.at[p.space] + row * p.pitch;
    }
  }
};

// Runs a segment of the program: up to the next layer of experts, or to the end. False: no memory.
bool run_segment(const Program& program, const decode::Step& step, const States& states, long segment,
                 float* routed, int64_t* ids, float* weights, float* out);

}  // namespace program

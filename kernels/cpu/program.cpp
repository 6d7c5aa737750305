// The stages of a program, see program.h.
#include "program.h"
#include "decode_attention.h"
#include "layouts.h"
#include "recurrence.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

LAYOUT(program::Place, base, pitch, offset, space, element)
LAYOUT(program::Operand, place, strides)
LAYOUT(program::Instruction, out, a, b, c, sizes, count, every, number, code, dims)
LAYOUT(program::Projected, matrix, from, codes, out, multiple, group)
LAYOUT(program::Selected, matrices, from, ids, out, multiple, rows, columns)
LAYOUT(program::Attended, layer, q, k, v, out, chosen, sinks, bias, entry, most, reach, pool,
       entries, rate)
LAYOUT(decode::Indexer, cache, heads, size, top_k, rate, pool, stride, bias, norm, rotation)
LAYOUT(program::Indexed, indexer, q, weights, key, chosen, most)
LAYOUT(program::Recurred, call, rows, before, after, out, kind, inputs, together)
LAYOUT(program::Stage, begin, end, kind, in_order)
LAYOUT(program::Program, instructions, products, attention, recurrent, indexers, selections, stages,
       segments, count, row_bytes, kept_bytes, logit_bytes, tail, work)
LAYOUT(program::States, before, after, to_kept, tokens, sequence, sequences, memory, kept, chunk)

namespace program {

namespace {

// Some rows of a step as a step of their own, and which of them are whose if they are of prompts.
struct Chunk {
  decode::Step step, alone;  // `alone` has rows that attend each by itself
  decode::Prompts prompts{};
  std::vector<int64_t> first;  // row of each sequence, and the end
  const long begin, end;       // in the whole step

  Chunk(const decode::Step& whole, const States& states, long begin, long end)
      : step(whole), begin(begin), end(end) {
    for (long n = 0; n < states.sequences; ++n)
      if (states.sequence[n] < end && states.sequence[n + 1] > begin)
        first.push_back(std::max(states.sequence[n] - begin, 0l));
    first.push_back(end - begin);
    step.rows = end - begin;
    step.tokens += begin, step.position += begin, step.capacity += begin;
    step.cache += begin * step.layers * 2;
    if (step.seen) step.seen += begin;
    alone = step;
    alone.prompts = nullptr;
    if (!step.prompts) return;
    prompts = {sequences(), first.data(), 0, nullptr};
    step.prompts = &prompts;
  }
  Chunk(const Chunk&) = delete;

  long sequences() const { return first.size() - 1; }
};

// One attention of a segment: the rows that its pass reads and writes.
struct Attending {
  decode::Pass pass;

  Attending(const Chunk& chunk, const Attended& attended, const Rows& first)
      : pass{together(attended) ? chunk.step : chunk.alone, nullptr, &attended.layer, nullptr,
             attended.layer.attention_norm, nullptr, nullptr} {
    const bool latent = attended.layer.attention.expansion;
    pass.given = {first.at(attended.q), first.at(attended.k),
                  latent ? nullptr : first.at(attended.v), first.at(attended.out),
                  first.at<int64_t>(attended.chosen), first.at(attended.sinks),
                  first.at(attended.bias), attended.most, attended.reach, attended.pool,
                  first.at(attended.entry), attended.entries, attended.rate};
    pass.measure();
  }
  // Whether the new tokens of a prompt attend together: all of them to what they see by the same rule.
  static bool together(const Attended& attended) {
    const auto absent = [](const Place& p) { return p.space == CONSTANT && !p.base; };
    return absent(attended.chosen) && absent(attended.sinks) && absent(attended.bias) &&
           !attended.rate;
  }
  void place(decode::Arena& arena) { pass.place_attention(arena); }
  long work() const { return pass.work(); }
};

// One indexer of a segment.
struct Choosing {
  const decode::Step& step;
  const decode::Indexer& indexer;
  const float *q, *weights, *key;
  int64_t* chosen;
  const long most;
  long longest = 0;  // keys or pools of a row that has more than are chosen
  float* scores = nullptr;  // (B, longest)
  Turns storing{stages::INDEXER}, scoring{stages::INDEXER}, choosing{stages::INDEXER};

  Choosing(const decode::Step& step, const Indexed& indexed, const Rows& first)
      : step(step), indexer(indexed.indexer), q(first.at(indexed.q)),
        weights(first.at(indexed.weights)), key(first.at(indexed.key)),
        chosen(first.at<int64_t>(indexed.chosen)), most(indexed.most) {
    for (long b = 0; b < step.rows; ++b)
      if (keys(b) > indexer.top_k) longest = std::max(longest, keys(b));
  }

  long length(long b) const { return (step.position[b] + 1) / indexer.rate; }  // rows in the cache
  long keys(long b) const { return length(b) / indexer.pool; }
  float* cached(long b) const {  // of floats, in one block
    return *static_cast<float* const*>(step.cache[(b * step.layers + indexer.cache) * 2]);
  }
  void place(decode::Arena& arena) { scores = arena.take(step.rows * longest); }
  long work() const {
    return step.rows * longest * (indexer.heads + 4 * indexer.pool - 4) * indexer.size;
  }

  void score(long b, long first) const {
    const long left = keys(b) - first;
    if (keys(b) > indexer.top_k && left > 0)
      decode::index_scores(indexer, q + b * indexer.heads * indexer.size,
                           weights + b * indexer.heads,
                           cached(b) + first * indexer.pool * indexer.stride,
                           first, std::min(left, decode::SPLIT), scores + b * longest + first);
  }

  void run() {
    const long W = indexer.stride, splits = (longest + decode::SPLIT - 1) / decode::SPLIT;
    storing.run(step.rows, [&](long b) {
      if ((step.position[b] + 1) % indexer.rate) return;  // a later token writes the row
      memcpy(cached(b) + (length(b) - 1) * W, key + b * W, W * sizeof(float));
    });
    scoring.run(step.rows * splits,
                [&](long task) { score(task / splits, task % splits * decode::SPLIT); });
    choosing.run(step.rows, [&](long b) {
      decode::choose_positions(indexer, scores + b * longest, length(b), chosen + b * most);
    });
  }
};

stages::Name name_of(const Stage& stage) {
  if (stage.kind == PRODUCTS) return stages::PROJECTIONS;
  return stage.kind == RECURRENCE ? stages::RECURRENCE : stages::ROWS;
}

// Rows whose logits are wanted, one behind the other, and the place of the first one's among these.
struct Wanted {
  long begin, end, logits;
};

// A segment's stages on their way, for the rows of a chunk.
struct Segment {
  const Program& program;
  const States& states;
  const Arrays& arrays;
  const Chunk& chunk;
  std::vector<std::unique_ptr<Attending>>& attending;
  std::vector<std::unique_ptr<Choosing>>& choosing;
  int threads;

  Rows row(long b) const { return {arrays, states, b}; }

  void instructions(const Stage& stage, long begin, long end) const {
    const auto position = [&](long b) {
      return *row(b).at<int64_t>({0, sizeof(int64_t), 0, POSITION, INTEGER}) + 1;
    };
    for (long i = stage.begin; i < stage.end; ++i) {
      const Instruction& each = program.instructions[i];
      if (each.every == 1) {
        Rows{arrays, states, begin, end - begin}.run(each);
        continue;
      }
      for (long b = begin; b < end; ++b)
        if (position(b) % each.every == 0) row(b).run(each);
    }
  }

  // Rows [begin, end), some of them at a time, so that what one instruction writes is near for the next.
  void instructions(const Stage& stage, long begin, long end, Turns& turn) const {
    constexpr long SOME = 16;
    const long count = end - begin, share = (count + threads - 1) / threads;
    const long some = std::min(SOME, share);
    turn.run((count + some - 1) / some, [&](long task) {
      const long first = begin + task * some;
      instructions(stage, first, std::min(first + some, end));
    });
  }

  void project(const Stage& stage, long begin, long end, Turns& turn) const {
    const long count = stage.end - stage.begin;
    std::vector<decode::Rows> from(count);
    std::vector<decode::Product> list(count);
    const Rows first = row(begin);
    for (long i = 0; i < count; ++i) {
      const Projected& p = program.products[stage.begin + i];
      const long width = p.matrix.planes.columns;
      from[i] = {first.at(p.from), width, {}, {}};
      if (p.group) from[i].place(first.at<char>(p.codes), p.group);
      list[i] = {&p.matrix, &from[i], first.at(p.out), p.matrix.rows()};
    }
    const long multiple = program.products[stage.begin].multiple;
    decode::products(list.data(), count, (end - begin) * multiple, threads, turn);
  }

  // A task is a part of one matrix.
  void select(const Selected& unit, long begin, long end, Turns& turn) const {
    constexpr long SOME = 32;  // rows of a matrix
    const long parts = (unit.rows + SOME - 1) / SOME, tasks = unit.multiple * parts;
    turn.run((end - begin) * tasks, [&](long task) {
      const Rows own = row(begin + task / tasks);
      const long m = task % tasks / parts, n = task % parts * SOME, K = unit.columns;
      const float* matrix = unit.matrices + own.at<int64_t>(unit.ids)[m] * unit.rows * K;
      decode::scores_of(own.at(unit.from) + m * K, decode::Straight<float>{matrix + n * K, K},
                        std::min(unit.rows - n, SOME), K,
                        own.at(unit.out) + m * unit.rows + n);
    });
  }

  // Each task goes through the rows of a sequence in order: each row's state is the next one's, up to
  // the next that is kept by one call. The last one's is read by the next step, behind all weights: it
  // leaves the caches to others.
  template <class Call>
  void recur(const Recurred& unit, Turns& turn) const {
    const Call& model = *static_cast<const Call*>(unit.call);
    const long items = model.items(), count = chunk.sequences() * items;
    const bool streamed = count * model.state() * long(sizeof(float)) >= STREAMED_BYTES;
    const recurrence::Division work(model, count, threads);
    const auto start = [&](long n) { return chunk.begin + chunk.first[n]; };
    turn.run_ahead(work.tasks(), [&](long task, long next) {
      const long item = work.item(task) % items, n = work.item(task) / items;
      recurrence::Hints hints;
      if (next < work.tasks())
        hints.next = row(start(work.item(next) / items)).at(unit.before) +
                     work.item(next) % items * model.state();
      for (long b = start(n), end = start(n + 1), tokens; b < end; b += tokens) {
        tokens = unit.together ? std::min<long>(states.to_kept[b], end - b) : 1;
        const Rows own = row(b);
        Call call = model;
        recurrence::Floats* inputs = call.inputs();
        for (long i = 0; i < unit.inputs; ++i) {
          inputs[i].data = own.at(unit.rows[i]);
          if (unit.together) inputs[i].token = unit.rows[i].pitch / long(sizeof(float));
        }
        call.before = own.at(unit.before), call.after = row(b + tokens - 1).at(unit.after);
        call.out = own.at(unit.out);
        if (unit.together) call.tokens = tokens;
        hints.streamed = streamed && b + tokens == end;
        call.run(item, work.begin(task), work.end(task), hints);
      }
      end_stream();
    });
  }

  void recur(const Recurred& unit, Turns& turn) const {
    switch (unit.kind) {
      case GATED: return recur<recurrence::GatedCall>(unit, turn);
      case SCAN: return recur<recurrence::ScanCall>(unit, turn);
      default: return recur<recurrence::ConvolutionCall>(unit, turn);
    }
  }

  // Which attention or indexer of the segment's a stage is.
  long place_of(long begin, long s, int32_t kind) const {
    return std::count_if(program.stages + begin, program.stages + s,
                         [&](const Stage& each) { return each.kind == kind; });
  }

  // A stage of a parallel region, for rows [begin, end).
  void run(const Stage& stage, long at, long begin, long end, Turns& turn) const {
    switch (stage.kind) {
      case PRODUCTS: return project(stage, begin, end, turn);
      case SELECTION: return select(program.selections[stage.begin], begin, end, turn);
      case RECURRENCE: return recur(program.recurrent[stage.begin], turn);
      case INDEXER: return choosing[at]->run();
      case ATTENTION: {
        decode::Pass& pass = attending[at]->pass;
        pass.threads = threads;
        return pass.attend_given();
      }
      default: break;
    }
    if (!stage.in_order) return instructions(stage, begin, end, turn);
    turn.run(chunk.sequences(), [&](long n) {  // a row's states are the next one's
      for (long b = chunk.first[n]; b < chunk.first[n + 1]; ++b)
        instructions(stage, chunk.begin + b, chunk.begin + b + 1);
    });
  }

  // All of its stages from `s` to `last`, in parallel regions, between which prompts attend. False: no
  // memory.
  bool run(long s, long last) const {
    const long first = s;
    const auto alone = [&](long at) {  // attention of prompts has regions of its own
      const Stage& stage = program.stages[at];
      return stage.kind == ATTENTION &&
             attending[place_of(first, at, ATTENTION)]->pass.step.prompts != nullptr;
    };
    while (s < last) {
      long end = s;
      while (end < last && !alone(end)) ++end;
      std::deque<Turns> turns;
      for (long i = s; i < end; ++i) turns.emplace_back(name_of(program.stages[i]));
      if (end > s) {
#pragma omp parallel num_threads(threads)
        for (long i = s; i < end; ++i) {
          const Stage& stage = program.stages[i];
          run(stage, place_of(first, i, stage.kind), chunk.begin, chunk.end, turns[i - s]);
        }
      }
      if (end < last) {
        decode::Pass& pass = attending[place_of(first, end, ATTENTION)]->pass;
        pass.threads = threads;
        if (!pass.attend_given_prompts()) return false;
      }
      s = end + 1;
    }
    return true;
  }

  // The stages that only make logits, for rows of which they are wanted.
  void run_tail(long s, long last, const Wanted& wanted) const {
    std::deque<Turns> turns;
    for (long i = s; i < last; ++i) turns.emplace_back(name_of(program.stages[i]));
    const long begin = std::max(wanted.begin, chunk.begin), end = std::min(wanted.end, chunk.end);
    Arrays own = arrays;
    own.at[LOGITS] += (wanted.logits - wanted.begin) * program.logit_bytes;
    const Segment segment{program, states, own, chunk, attending, choosing, threads};
#pragma omp parallel num_threads(threads)
    for (long i = s; i < last; ++i) segment.run(program.stages[i], 0, begin, end, turns[i - s]);
  }
};

// The rows whose logits are wanted; of a decode step all are.
std::vector<Wanted> wanted_rows(const decode::Step& step) {
  if (!step.prompts) return {{0, step.rows, 0}};
  std::vector<Wanted> found;
  for (long i = 0; i < step.prompts->num_wanted; ++i) {
    const long row = step.prompts->wanted[i];
    if (found.empty() || found.back().end != row) found.push_back({row, row, i});
    ++found.back().end;
  }
  return found;
}

bool run_chunk(const Program& program, const States& states, const Arrays& arrays, const Chunk& chunk,
               long segment, const std::vector<Wanted>& wanted) {
  const long begin = program.segments[segment], end = program.segments[segment + 1];
  std::vector<std::unique_ptr<Attending>> attending;
  std::vector<std::unique_ptr<Choosing>> choosing;
  const Rows first{arrays, states, chunk.begin};
  for (long s = begin; s < end; ++s) {
    const Stage& stage = program.stages[s];
    if (stage.kind == ATTENTION)
      attending.push_back(
          std::make_unique<Attending>(chunk, program.attention[stage.begin], first));
    if (stage.kind == INDEXER)
      choosing.push_back(
          std::make_unique<Choosing>(chunk.alone, program.indexers[stage.begin], first));
  }
  const auto place_all = [&](char* memory) {  // one after the other, in the same memory
    size_t bytes = 0;
    const auto place = [&](auto& each) {
      decode::Arena arena{memory};
      each.place(arena);
      bytes = std::max(bytes, arena.used);
    };
    for (auto& each : attending) place(*each);
    for (auto& each : choosing) place(*each);
    return bytes;
  };
  if (const size_t bytes = place_all(nullptr)) {
    char* memory = scratch.reserve(bytes);
    if (!memory) return false;
    place_all(memory);
  }
  long work = chunk.step.rows * program.work / (program.count + 1);
  for (const auto& each : attending) work += each->work();
  for (const auto& each : choosing) work += each->work();
  const int threads = team(work, chunk.step.threads);
  const Segment all{program, states, arrays, chunk, attending, choosing, threads};
  const long tail = std::max(begin, std::min(end, long(program.tail)));
  if (!all.run(begin, tail)) return false;
  for (const Wanted& rows : wanted)
    if (tail < end && rows.begin < chunk.end && rows.end > chunk.begin) all.run_tail(tail, end, rows);
  return true;
}

}  // namespace

bool run_segment(const Program& program, const decode::Step& step, const States& states, long segment,
                 float* routed, int64_t* ids, float* weights, float* out) {
  const auto bytes = [](const void* p) { return const_cast<char*>(static_cast<const char*>(p)); };
  const std::vector<Wanted> wanted = wanted_rows(step);
  for (long begin = 0; begin < step.rows; begin += states.chunk) {
    const long end = std::min<long>(begin + states.chunk, step.rows);
    const Arrays arrays{{states.memory, nullptr, nullptr, nullptr, bytes(step.x), bytes(states.tokens),
                         bytes(step.position), bytes(step.h), bytes(ids), bytes(weights),
                         bytes(routed), bytes(out), bytes(step.beside), states.kept},
                        step.rows, states.chunk, begin};
    const Chunk chunk(step, states, begin, end);
    if (!run_chunk(program, states, arrays, chunk, segment, wanted)) return false;
  }
  scratch.trim();
  return true;
}

}  // namespace program

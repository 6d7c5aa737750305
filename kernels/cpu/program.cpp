// The stages of a program, see program.h.
#include "program.h"
#include "decode_attention.h"
#include "layouts.h"
#include "recurrence.h"

#include <deque>
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
LAYOUT(program::Recurred, call, rows, before, after, out, kind, inputs)
LAYOUT(program::Stage, begin, end, kind, in_order)
LAYOUT(program::Program, instructions, products, attention, recurrent, indexers, selections, stages,
       segments, count, row_bytes, work)
LAYOUT(program::States, before, after, tokens, sequence, sequences, memory)

namespace program {

namespace {

// One attention of a segment: the rows that its pass reads and writes.
struct Attending {
  decode::Pass pass;

  Attending(const decode::Step& step, const Attended& attended, const Row& first)
      : pass{step, nullptr, &attended.layer, nullptr, attended.layer.attention_norm,
                       nullptr, nullptr} {
    const bool latent = attended.layer.attention.expansion;
    pass.given = {first.at(attended.q), first.at(attended.k),
                  latent ? nullptr : first.at(attended.v), first.at(attended.out),
                  first.at<int64_t>(attended.chosen), first.at(attended.sinks),
                  first.at(attended.bias), attended.most, attended.reach, attended.pool,
                  first.at(attended.entry), attended.entries, attended.rate};
    pass.measure();
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

  Choosing(const decode::Step& step, const Indexed& indexed, const Row& first)
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

// A segment's stages on their way.
struct Segment {
  const Program& program;
  const States& states;
  const Arrays& arrays;
  std::vector<std::unique_ptr<Attending>>& attending;
  std::vector<std::unique_ptr<Choosing>>& choosing;
  std::deque<Turns>& turns;
  long rows, begin, end;  // stages
  int threads;

  Row row(long b) const { return {arrays, states, rows, b}; }

  void instructions(const Stage& stage, long first, long last) const {
    for (long b = first; b < last; ++b) {
      const Row own = row(b);
      const long end = *own.at<int64_t>({0, sizeof(int64_t), 0, POSITION, INTEGER}) + 1;
      for (long i = stage.begin; i < stage.end; ++i)
        if (const Instruction& each = program.instructions[i]; each.every == 1 || end % each.every == 0)
          own.run(each);
    }
  }

  void project(const Stage& stage, Turns& turn) const {
    const long count = stage.end - stage.begin;
    std::vector<decode::Rows> from(count);
    std::vector<decode::Product> list(count);
    const Row first = row(0);
    for (long i = 0; i < count; ++i) {
      const Projected& p = program.products[stage.begin + i];
      const long width = p.matrix.planes.columns;
      from[i] = {first.at(p.from), width, {}, {}};
      if (p.group) from[i].place(first.at<char>(p.codes), p.group);
      list[i] = {&p.matrix, &from[i], first.at(p.out), p.matrix.rows()};
    }
    const long multiple = program.products[stage.begin].multiple;
    decode::products(list.data(), count, rows * multiple, threads, turn);
  }

  // A task is a part of one matrix.
  void select(const Selected& unit, Turns& turn) const {
    constexpr long SOME = 32;  // rows of a matrix
    const long parts = (unit.rows + SOME - 1) / SOME, tasks = unit.multiple * parts;
    turn.run(rows * tasks, [&](long task) {
      const Row own = row(task / tasks);
      const long m = task % tasks / parts, n = task % parts * SOME, K = unit.columns;
      const float* matrix = unit.matrices + own.at<int64_t>(unit.ids)[m] * unit.rows * K;
      decode::scores_of(own.at(unit.from) + m * K, decode::Straight<float>{matrix + n * K, K},
                        std::min(unit.rows - n, SOME), K,
                        own.at(unit.out) + m * unit.rows + n);
    });
  }

  // Each task goes through the rows of a sequence in order: each row's state is the next one's. The
  // last one's is read by the next step, behind all weights: it leaves the caches to others.
  template <class Call>
  void recur(const Recurred& unit, Turns& turn) const {
    const Call& model = *static_cast<const Call*>(unit.call);
    const long items = model.items(), count = states.sequences * items;
    const bool streamed = count * model.state() * long(sizeof(float)) >= STREAMED_BYTES;
    const recurrence::Division work(model, count, threads);
    turn.run_ahead(work.tasks(), [&](long task, long next) {
      const long item = work.item(task) % items, n = work.item(task) / items;
      recurrence::Hints hints;
      if (next < work.tasks()) {
        const long first = states.sequence[work.item(next) / items];
        hints.next = row(first).at(unit.before) + work.item(next) % items * model.state();
      }
      for (long b = states.sequence[n]; b < states.sequence[n + 1]; ++b) {
        const Row own = row(b);
        Call call = model;
        recurrence::Floats* inputs = call.inputs();
        for (long i = 0; i < unit.inputs; ++i) inputs[i].data = own.at(unit.rows[i]);
        call.before = own.at(unit.before), call.after = own.at(unit.after);
        call.out = own.at(unit.out);
        hints.streamed = streamed && b + 1 == states.sequence[n + 1];
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

  void run() const {
    for (long s = begin, attention = 0, indexer = 0; s < end; ++s) {
      const Stage& stage = program.stages[s];
      Turns& turn = turns[s - begin];
      if (stage.kind == PRODUCTS) {
        project(stage, turn);
      } else if (stage.kind == ATTENTION) {
        decode::Pass& pass = attending[attention++]->pass;
        pass.threads = threads;
        pass.attend_given();
      } else if (stage.kind == RECURRENCE) {
        recur(program.recurrent[stage.begin], turn);
      } else if (stage.kind == INDEXER) {
        choosing[indexer++]->run();
      } else if (stage.kind == SELECTION) {
        select(program.selections[stage.begin], turn);
      } else if (stage.in_order) {
        turn.run(states.sequences, [&](long n) {
          instructions(stage, states.sequence[n], states.sequence[n + 1]);
        });
      } else {
        turn.run(rows, [&](long b) { instructions(stage, b, b + 1); });
      }
    }
  }
};

}  // namespace

bool run_segment(const Program& program, const decode::Step& step, const States& states, long segment,
                 float* routed, int64_t* ids, float* weights, float* out) {
  const auto bytes = [](const void* p) { return const_cast<char*>(static_cast<const char*>(p)); };
  const Arrays arrays{{states.memory, nullptr, nullptr, nullptr, bytes(step.x), bytes(states.tokens),
                       bytes(step.position), bytes(step.h), bytes(ids), bytes(weights),
                       bytes(routed), bytes(out)}};
  const long begin = program.segments[segment], end = program.segments[segment + 1];
  std::vector<std::unique_ptr<Attending>> attending;
  std::vector<std::unique_ptr<Choosing>> choosing;
  const Row first{arrays, states, long(step.rows), 0};
  for (long s = begin; s < end; ++s) {
    const Stage& stage = program.stages[s];
    if (stage.kind == ATTENTION)
      attending.push_back(
          std::make_unique<Attending>(step, program.attention[stage.begin], first));
    if (stage.kind == INDEXER)
      choosing.push_back(std::make_unique<Choosing>(step, program.indexers[stage.begin], first));
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
  std::deque<Turns> turns;
  for (long s = begin; s < end; ++s) turns.emplace_back(name_of(program.stages[s]));
  long work = step.rows * program.work / (program.count + 1);
  for (const auto& each : attending) work += each->work();
  for (const auto& each : choosing) work += each->work();
  const int threads = team(work, step.threads);
  const Segment all{program, states, arrays, attending, choosing, turns, long(step.rows), begin, end,
                    threads};
#pragma omp parallel num_threads(threads)
  all.run();
  scratch.trim();
  return true;
}

}  // namespace program

// The rank that serves each slot of a layer; every rank computes the same assignment. Every layer of
// every step waits for it, and in Python it takes longer than reading three experts. `routing.balance`
// and `experts.dispatch.assignment` explain the algorithm and give the same integers, because ranks
// with and without a compiler must agree.
//
// Letters: R ranks, T tokens of all ranks, K slots, E experts, S experts that several ranks hold.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace {

using Ints = std::vector<int64_t>;

// The tokens of shared experts on the ranks that hold them.
struct Sharing {
  int64_t ranks;
  Ints load, reads;          // (R) tokens of each rank; experts that it reads
  Ints tokens;               // (S)
  Ints count;                // (S, R) tokens of an expert that a rank takes
  std::vector<char> held{};  // (S, R)
  Ints poured{};             // experts with tokens, most tokens first

  int64_t& at(int64_t expert, int64_t rank) { return count[expert * ranks + rank]; }
  bool has(int64_t expert, int64_t rank) const { return held[expert * ranks + rank]; }

  void share() {
    for (size_t expert = 0; expert < tokens.size(); ++expert)
      if (tokens[expert]) poured.push_back(expert);
    std::stable_sort(poured.begin(), poured.end(),
                     [&](int64_t a, int64_t b) { return tokens[a] > tokens[b]; });
    for (int64_t expert : poured) pour(expert);
    while (level()) {}
    gather();
    for (int64_t expert : poured)
      for (int64_t rank = 0; rank < ranks; ++rank) reads[rank] += at(expert, rank) > 0;
    while (trade()) {}
  }

 private:
  Ints sorted(const Ints& by, bool descending) const {
    Ints order(ranks);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return descending ? by[a] > by[b] : by[a] < by[b];
    });
    return order;
  }

  void pour(int64_t expert) {
    Ints order = sorted(load, false);
    order.erase(std::remove_if(order.begin(), order.end(),
                               [&](int64_t rank) { return !has(expert, rank); }),
                order.end());
    int64_t filled = 1, under = load[order[0]];
    const int64_t most = order.size();
    while (filled < most && tokens[expert] + under > filled * load[order[filled]])
      under += load[order[filled++]];
    const int64_t height = (tokens[expert] + under) / filled;
    const int64_t over = (tokens[expert] + under) % filled;
    for (int64_t place = 0; place < filled; ++place) {
      const int64_t rank = order[place];
      at(expert, rank) = height + (place < over) - load[rank];
      load[rank] += at(expert, rank);
    }
  }

  struct Move {
    int64_t expert, from, to;
  };

  bool level() {
    const int64_t heaviest = *std::max_element(load.begin(), load.end());
    if (heaviest - *std::min_element(load.begin(), load.end()) <= 1) return false;
    for (int64_t start = 0; start < ranks; ++start) {
      if (load[start] != heaviest) continue;
      const std::vector<Move> moves = chain(start);
      if (moves.empty()) continue;
      const int64_t end = moves.front().to;
      int64_t moved = (load[start] - load[end]) / 2;
      for (const Move& move : moves) moved = std::min(moved, at(move.expert, move.from));
      for (const Move& move : moves) {
        at(move.expert, move.from) -= moved;
        at(move.expert, move.to) += moved;
      }
      load[start] -= moved;
      load[end] += moved;
      return true;
    }
    return false;
  }

  // The chain of moves, from its end back to `start`.
  std::vector<Move> chain(int64_t start) {
    std::vector<Move> came(ranks, Move{-1, -1, -1}), moves;
    std::vector<char> seen(ranks, 0);
    Ints queue{start};
    seen[start] = 1;
    for (size_t next = 0; next < queue.size(); ++next)
      for (int64_t expert : poured) {
        if (!at(expert, queue[next])) continue;
        for (int64_t target = 0; target < ranks; ++target) {
          if (!has(expert, target) || seen[target]) continue;
          seen[target] = 1;
          came[target] = {expert, queue[next], target};
          queue.push_back(target);
          if (load[target] > load[start] - 2) continue;
          for (int64_t rank = target; rank != start; rank = came[rank].from)
            moves.push_back(came[rank]);
          return moves;
        }
      }
    return moves;
  }

  void gather() {
    Ints open(ranks * ranks, -1);
    for (int64_t expert : poured)
      for (int64_t a = 0; a < ranks; ++a)
        for (int64_t b = a + 1; b < ranks; ++b)
          while (at(expert, a) && at(expert, b)) {
            const int64_t other = open[a * ranks + b];
            if (other < 0 || other == expert || !at(other, a) || !at(other, b)) {
              open[a * ranks + b] = expert;
              break;
            }
            const int64_t to_a = std::min(at(expert, b), at(other, a));
            const int64_t to_b = std::min(at(expert, a), at(other, b));
            const int64_t moved = to_a <= to_b ? to_a : -to_b;
            at(expert, a) += moved;
            at(expert, b) -= moved;
            at(other, a) -= moved;
            at(other, b) += moved;
          }
  }

  bool trade() {
    const Ints most = sorted(reads, true), least = sorted(reads, false);
    for (int64_t x : most)
      for (int64_t y : least) {
        if (reads[x] - reads[y] < 2) break;
        if (trade(x, y)) return true;
      }
    return false;
  }

  bool whole(int64_t expert, int64_t here, int64_t there) {
    return at(expert, here) == tokens[expert] && has(expert, there);
  }

  bool trade(int64_t x, int64_t y) {
    for (size_t i = 0; i < poured.size(); ++i) {
      const int64_t one = poured[i];
      if (!whole(one, x, y)) continue;
      for (size_t j = i + 1; j < poured.size(); ++j) {
        const int64_t two = poured[j];
        if (!whole(two, x, y)) continue;
        for (int64_t back : poured) {
          if (!whole(back, y, x) || at(back, y) != at(one, x) + at(two, x)) continue;
          for (int64_t given : {one, two}) std::swap(at(given, x), at(given, y));
          std::swap(at(back, x), at(back, y));
          --reads[x];
          ++reads[y];
          return true;
        }
      }
    }
    return false;
  }
};

// Deals one expert's slots to its ranks: each rank first takes the slots of its own tokens.
void deal(const Ints& places, const Ints& source, const int64_t* part, int64_t ranks,
          int64_t* serving) {
  Ints left(part, part + ranks), rest;
  for (int64_t place : places) {
    const int64_t rank = source[place];
    if (left[rank] > 0) {
      serving[place] = rank;
      --left[rank];
    } else {
      rest.push_back(place);
    }
  }
  int64_t rank = 0;
  for (int64_t place : rest) {
    while (!left[rank]) ++rank;
    serving[place] = rank;
    --left[rank];
  }
}

}  // namespace

extern "C" {

// Each rank r brings `tokens[r]` tokens with `width[r]` ids each, `tables[r]`; -1: an unused slot.
// Ranks `holders[begin[e]:begin[e + 1]]` hold expert e. Writes to `out`, one after the other:
//   ids of all ranks' tokens, and the rank that serves each slot (T, K each; K the largest width)
//   token and expert of each slot that this rank serves (T K each, `served` of them used)
//   how many of those slots are of each rank's tokens (R)
//   how many slots of this rank's tokens each rank serves (R)
//   the numbers of pairs and of served slots
//   in 32 bits, the position of the result of each of this rank's slots (own tokens, K)
//   tokens of each expert (E); last, so that the rest is at the same place in all layers
// See `experts.dispatch.assignment`. 0: done, -1: an id outside [-1, E).
int32_t moe_assign(const int16_t* const* tables, const int64_t* tokens, const int64_t* width,
                   const int64_t* begin, int64_t ranks, int64_t slots, int64_t experts,
                   int64_t rank, int64_t* out) {
  const int64_t* holders = begin + experts + 1;
  Ints starts(ranks + 1, 0);
  for (int64_t r = 0; r < ranks; ++r) starts[r + 1] = starts[r] + tokens[r] * slots;
  const int64_t size = starts[ranks];
  int64_t *ids = out, *serving = ids + size, *token = serving + size, *expert_of = token + size,
          *served_R = expert_of + size, *returned_R = served_R + ranks, *pairs = returned_R + ranks,
          *served = pairs + 1, *loads = served + 1 + (tokens[rank] * slots + 1) / 2;
  int32_t* position = reinterpret_cast<int32_t*>(served + 1);
  std::fill(loads, loads + experts, 0);
  for (int64_t r = 0, i = 0; r < ranks; ++r)
    for (int64_t t = 0; t < tokens[r]; ++t)
      for (int64_t k = 0; k < slots; ++k, ++i) {
        ids[i] = k < width[r] ? tables[r][t * width[r] + k] : -1;
        if (ids[i] < -1 || ids[i] >= experts) return -1;
        if (ids[i] >= 0) ++loads[ids[i]];
      }

  Sharing sharing{ranks, Ints(ranks, 0), Ints(ranks, 0), {}, {}};
  Ints home(experts), shared;
  for (int64_t e = 0; e < experts; ++e) {
    home[e] = holders[begin[e]];
    if (begin[e + 1] - begin[e] > 1) {
      shared.push_back(e);
      sharing.tokens.push_back(loads[e]);
    } else {
      sharing.load[home[e]] += loads[e];
      sharing.reads[home[e]] += loads[e] > 0;
    }
  }
  sharing.count.assign(shared.size() * ranks, 0);
  sharing.held.assign(shared.size() * ranks, 0);
  for (size_t s = 0; s < shared.size(); ++s)
    for (int64_t i = begin[shared[s]]; i < begin[shared[s] + 1]; ++i)
      sharing.held[s * ranks + holders[i]] = 1;
  sharing.share();
  Ints split;
  for (size_t s = 0; s < shared.size(); ++s) {
    const int64_t* part = &sharing.count[s * ranks];
    const int64_t most = std::max_element(part, part + ranks) - part;
    if (loads[shared[s]]) home[shared[s]] = most;
    if (part[most] < loads[shared[s]]) split.push_back(s);
  }
  for (int64_t i = 0; i < size; ++i) serving[i] = ids[i] < 0 ? -1 : home[ids[i]];
  if (!split.empty()) {
    Ints source(size);
    for (int64_t r = 0; r < ranks; ++r)
      std::fill(source.begin() + starts[r], source.begin() + starts[r + 1], r);
    for (int64_t s : split) {
      Ints places;
      for (int64_t i = 0; i < size; ++i)
        if (ids[i] == shared[s]) places.push_back(i);
      deal(places, source, &sharing.count[s * ranks], ranks, serving);
    }
  }

  std::fill(served_R, served, 0);
  Ints order;  // own last
  for (int64_t r = 0; r < ranks; ++r)
    if (r != rank) order.push_back(r);
  order.push_back(rank);
  *served = 0;
  for (int64_t r : order)
    for (int64_t i = starts[r]; i < starts[r + 1]; ++i)
      if (serving[i] == rank) {
        token[*served] = i / slots;
        expert_of[(*served)++] = ids[i];
        ++served_R[r];
      }
  const int64_t first = starts[rank], last = starts[rank + 1];
  for (int64_t i = first; i < last; ++i)
    if (serving[i] >= 0) ++returned_R[serving[i]];
  Ints next(ranks, 0);
  int64_t sum = 0;
  for (int64_t r : order) {
    next[r] = sum;
    sum += returned_R[r];
  }
  for (int64_t row = first; row < last; row += slots)
    for (int64_t i = row; i < row + slots; ++i) {
      const int64_t by = serving[i];
      position[i - first] = by < 0 ? -1 : next[by]++;
      *pairs += by >= 0 && by != rank && std::find(serving + row, serving + i, by) == serving + i;
    }
  return 0;
}
}

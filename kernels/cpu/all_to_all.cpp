// Dispatch and combine between ranks of one machine whose shapes have not changed, one call each.
// `experts.dispatch.all_to_all` defines the exchange and sends the same bytes. It makes some 200 small
// Python calls a layer, whose code the experts' weights have just evicted from the CPU's caches.
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <vector>

#include "calls.h"
#include "gemm.h"
#include "layouts.h"
#include "all_to_all.h"

LAYOUT(AllToAll, ranks, rank, slots, width, hidden, timeout_ms, rows_at, epoch, files, tokens, slots_R,
       message_bytes, messages, heads, layers, served, returned, results, ones, chosen, layer, had, lost,
       error, seconds)
LAYOUT(AllToAllLayer, holders, experts, assigned)

namespace {

// How long to poll before sleeping. A sleeping core of a virtual machine takes long to wake while other
// ranks wait for it; while polling, this thread yields to any other that is ready.
constexpr std::chrono::microseconds AWAKE{1000};

constexpr int64_t PLACE = 16, HEAD = 40;  // bytes of a message: layer and epoch; header

struct Part {
  char* at;
  int64_t left;
  void moved(ssize_t bytes) { at += bytes, left -= bytes; }
};

// Sends and receives one part to and from each other rank, like the sockets of
// `experts.dispatch.exchange`.
class Exchange {
 public:
  std::vector<Part> going, coming;  // (R)

  explicit Exchange(AllToAll& all_to_all)
      : going(all_to_all.ranks), coming(all_to_all.ranks), all_to_all_(all_to_all) {}

  // False: a rank is lost, in this call or before.
  bool run() {
    using clock = std::chrono::steady_clock;
    const auto begun = clock::now();
    const bool done = all_to_all_.lost < 0 && move();
    all_to_all_.seconds += std::chrono::duration<double>(clock::now() - begun).count();
    return done;
  }

 private:
  AllToAll& all_to_all_;

  bool move() {
    for (int64_t r = 0; r < all_to_all_.ranks; ++r)
      if (!push(r)) return false;
    for (int64_t r = 0; r < all_to_all_.ranks; ++r)
      while (going[r].left || coming[r].left)
        if (!(is_sending() ? poll_all(r) : pull_all(r))) return false;
    return true;
  }

  bool is_sending() const {
    for (const Part& part : going)
      if (part.left) return true;
    return false;
  }

  bool fail(int64_t rank, int error) {
    all_to_all_.lost = rank, all_to_all_.error = error;
    return false;
  }

  static bool later(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

  bool push(int64_t r) {
    while (going[r].left) {
      const ssize_t n =
          send(all_to_all_.files[r], going[r].at, going[r].left, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n >= 0) going[r].moved(n);
      else if (later(errno)) return true;
      else if (errno != EINTR) return fail(r, errno);
    }
    return true;
  }

  bool pull(int64_t r, int how) {
    const ssize_t n = recv(all_to_all_.files[r], coming[r].at, coming[r].left, how);
    if (n > 0) coming[r].moved(n);
    else if (!n) return fail(r, 0);
    else if (later(errno) && how == MSG_DONTWAIT) return true;
    else if (errno != EINTR) return fail(r, errno);
    return true;
  }

  bool pull_all(int64_t r) {
    using clock = std::chrono::steady_clock;
    for (const auto sleep = clock::now() + AWAKE; clock::now() < sleep; sched_yield()) {
      if (!pull(r, MSG_DONTWAIT)) return false;
      if (!coming[r].left) return true;
    }
    return pull(r, MSG_WAITALL);
  }

  bool poll_all(int64_t late) {
    std::vector<pollfd> files;
    for (int64_t r = 0; r < all_to_all_.ranks; ++r) {
      const short events = (going[r].left ? POLLOUT : 0) | (coming[r].left ? POLLIN : 0);
      if (events) files.push_back({all_to_all_.files[r], events, 0});
    }
    const int ready = poll(files.data(), files.size(), all_to_all_.timeout_ms);
    if (!ready) return fail(late, EAGAIN);
    if (ready < 0) return errno == EINTR || fail(late, errno);
    for (int64_t r = 0; r < all_to_all_.ranks; ++r)
      if (!push(r) || (coming[r].left && !pull(r, MSG_DONTWAIT))) return false;
    return true;
  }
};

bool is_nan(float x) { return x != x; }
bool is_nan(uint16_t bf16) { return (bf16 & 0x7fff) > 0x7f80; }

}  // namespace

extern "C" {

int32_t moe_dispatch(AllToAll* m, int64_t layer, const int64_t* ids, const void* rows) {
  const int64_t place[] = {layer, m->epoch};
  char* own = m->messages[m->rank];
  memcpy(own, place, PLACE);
  memcpy(own + PLACE, m->heads + m->rank * HEAD, HEAD);
  auto* table = reinterpret_cast<int16_t*>(own + PLACE + HEAD);
  const int64_t count = m->tokens[m->rank] * m->slots_R[m->rank];
  for (int64_t i = 0; i < count; ++i) table[i] = ids[i];
  if (count) memcpy(own + m->rows_at, rows, m->tokens[m->rank] * m->width);

  Exchange exchange(*m);
  for (int64_t r = 0; r < m->ranks; ++r)
    if (r != m->rank) {
      exchange.going[r] = {own, m->message_bytes[m->rank]};
      exchange.coming[r] = {m->messages[r], m->message_bytes[r]};
    }
  if (m->had == NOTHING && !exchange.run()) return LOST;

  std::vector<const int16_t*> tables;
  for (int64_t r = 0; r < m->ranks; ++r) {
    const char* told = m->messages[r];
    if (memcmp(told, place, PLACE) || memcmp(told + PLACE, m->heads + r * HEAD, HEAD)) {
      m->had = NOTHING;
      return OTHERWISE;
    }
    tables.push_back(reinterpret_cast<const int16_t*>(told + PLACE + HEAD));
  }
  m->layer = layer;
  const AllToAllLayer& own_layer = m->layers[layer];
  if (moe_assign(tables.data(), m->tokens, m->slots_R, own_layer.holders, m->ranks, m->slots,
                 own_layer.experts, m->rank, own_layer.assigned)) {
    m->had = NOTHING;
    return BAD_ID;
  }
  const Serving serving(*m);
  for (int64_t i = 0; i < serving.count; ++i) {
    int64_t at = serving.token[i], r = 0;
    while (at >= m->tokens[r]) at -= m->tokens[r++];
    memcpy(m->served + i * m->width, m->messages[r] + m->rows_at + at * m->width, m->width);
  }
  return DONE;
}

// out (T, H) of `dtype` = sum over k, in order, of weight[t, k] * row[position[t, k]]; negative
// positions are skipped. Rows 0 to `count - 1` lie at `rows`, the others at `more`. Products are
// rounded before they are added, as in `combine` of grouped.h, so the bits are those of one whole layer.
void moe_weighted_sum(const float* rows, int64_t count, const float* more, const int32_t* position,
                      const float* weights, int64_t tokens, int64_t slots, int64_t hidden,
                      void* out, int32_t dtype, int32_t threads) {
  threads = team(tokens * slots * hidden, threads);
  with_rows(out, dtype, [&](auto* to) {
#pragma omp parallel for num_threads(threads)
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t c = 0; c < hidden; c += LANES) {
        vf sum{};
        for (int64_t s = t * slots; s < (t + 1) * slots; ++s) {
          const int64_t at = position[s];
          if (at < 0) continue;
          const float* row = at < count ? rows + at * hidden : more + (at - count) * hidden;
          vf product = weights[s] * load_as_fp32(row + c, hidden - c);
          IN_REGISTER(product);  // never fused with the addition
          sum += product;
        }
        store_fp32_as(to + t * hidden + c, sum, hidden - c);
      }
  });
}

int32_t moe_return(AllToAll* m, float* rows, const float* weights, void* out, int32_t dtype,
                   int32_t threads) {
  const Serving serving(*m);
  const int64_t row_bytes = m->hidden * sizeof(float);
  Exchange exchange(*m);
  int64_t leave = 0, come = 0;
  for (int64_t r = 0; r < m->ranks; ++r)
    if (r != m->rank) {
      exchange.going[r] = {reinterpret_cast<char*>(rows) + leave * row_bytes,
                           serving.served_R[r] * row_bytes};
      exchange.coming[r] = {m->returned + come * row_bytes, serving.returned_R[r] * row_bytes};
      leave += serving.served_R[r], come += serving.returned_R[r];
    }
  if (m->had != RETURNED && !exchange.run()) return LOST;
  m->had = NOTHING;
  const int64_t tokens = m->tokens[m->rank];
  moe_weighted_sum(reinterpret_cast<float*>(m->returned), come, rows + leave * m->hidden,
                   serving.position, weights, tokens, m->slots, m->hidden, out, dtype, threads);
  bool failed = false;
  with_rows(out, dtype, [&](auto* to) {
    for (int64_t t = 0; t < tokens; ++t) failed |= is_nan(to[t * m->hidden]);
  });
  return failed ? OTHERWISE : DONE;
}
}

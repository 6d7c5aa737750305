// Recurrent layers of whole batches, called through ctypes (which releases the GIL): every sequence
// and head by the functions of recurrence.h.
#include "recurrence.h"

#include "calls.h"
#include "grouped.h"
#include "layouts.h"

namespace recurrence {

void GatedCall::run(long item, long begin, long end, const Hints& hints) const {
  const long s = item / heads, h = item % heads, of_keys = h / group;
  const GatedHead head{q.tokens(s, of_keys),
                       k.tokens(s, of_keys),
                       v.tokens(s, h),
                       decay.tokens(s, h),
                       beta.tokens(s, h),
                       before ? before + item * state() : nullptr,
                       after + item * state(),
                       {out + (s * tokens * heads + h) * rule.values, heads * rule.values},
                       hints};
  gated(rule, head, tokens, begin, end);
}

void ScanCall::run(long item, long begin, long end, const Hints& hints) const {
  const long s = item / heads, h = item % heads, of_states = h / group;
  const long each = rule.by_channel ? rule.channels : 1;
  const auto own = [&](const float* each_head) {
    return each_head ? each_head + h * each : nullptr;
  };
  const ScanHead head{x.tokens(s, h),
                      dt.tokens(s, h),
                      b.tokens(s, of_states),
                      c.tokens(s, of_states),
                      z.tokens(s, h),
                      a + h * (rule.by_channel ? state() : 1),
                      own(d),
                      own(bias),
                      before ? before + item * state() : nullptr,
                      after + item * state(),
                      {out + (s * tokens * heads + h) * rule.channels, heads * rule.channels},
                      hints};
  scan(rule, head, tokens, begin, end);
}

void ConvolutionCall::run(long sequence, long begin, long end, const Hints&) const {
  const Channels rows{x.tokens(sequence, 0),
                      before ? before + sequence * state() : nullptr,
                      after ? after + sequence * state() : nullptr,
                      {out + sequence * tokens * width(), width()}};
  convolve(rule, rows, tokens, begin, end);
}

namespace {

template <class Call>
void run_all(const Call& call, int32_t threads) {
  threads = team(call.products(), threads);
  const Division work(call, call.items(), threads);
  Turns turns{stages::RECURRENCE};
#pragma omp parallel num_threads(threads) if (threads > 1)
  turns.run(work.tasks(), [&](long task) {
    call.run(work.item(task), work.begin(task), work.end(task));
  });
}

}  // namespace
}  // namespace recurrence

LAYOUT(recurrence::Gated, keys, values, scale, corrected, by_key, normalised)
LAYOUT(recurrence::Scan, channels, states, by_channel, softplus, least, most)
LAYOUT(recurrence::Convolution, weight, bias, channels, taps, kept, silu)
LAYOUT(recurrence::Floats, data, sequence, token, head)
LAYOUT(recurrence::GatedCall, rule, q, k, v, decay, beta, before, after, out, sequences, tokens,
       heads, group)
LAYOUT(recurrence::ScanCall, rule, x, dt, b, c, z, a, d, bias, before, after, out, sequences, tokens,
       heads, group)
LAYOUT(recurrence::ConvolutionCall, rule, x, before, after, out, sequences, tokens)

using namespace recurrence;

extern "C" {

void moe_gated(const GatedCall* call, int32_t threads) { run_all(*call, threads); }
void moe_scan(const ScanCall* call, int32_t threads) { run_all(*call, threads); }
void moe_convolve(const ConvolutionCall* call, int32_t threads) { run_all(*call, threads); }
}

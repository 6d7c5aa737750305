"""The engine: the step loop that drives sequences through a model.

- `Engine` (engine): submits, steps and cancels; start reading here.
- `Scheduler` (scheduler): admission, priority and preemption; plans a `ScheduledStep`.
- `KVAccount` (kv_account): the memory that sequences take, in tokens.
- `SequenceGroup`, `PromptChunk`, `PrefillBatch` (prefill_batch): what a step reads.
- `PrefillPlanner` (prefill_mode): which mode reads prompts, and where a layered batch sleeps.
- `ModelRunner` (runner): the forward pass of a step and its new tokens
  hides the exchange between ranks behind the other half of a step.
- `PrefixCache` (prefix_cache): keys and values of prompts that others begin with.
- `RequestOrder` (request_order): the order of waiting requests, where a method brings one.
- `Writer` (writer): what a method answers that writes a model's sequences in place of the sampler.
- `KVBorrowing` (borrowing): lends unused memory of the KV cache to the expert cache.
"""

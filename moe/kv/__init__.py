"""Keys and values of sequences: what one has of its tokens, and where it lies.

- `cache.SequenceCache`: the state of one sequence. A `cache.KVCache` has its rows in buffers of its
  own, a `blocks.BlockKVCache` in blocks of a `blocks.BlockPool` (`host_blocks` in main memory,
  `device_blocks` on a GPU); a `transformers_cache.TransformersCache` is for its model alone.
- `ledger.BlockLedger`: counts the blocks that the `tables` of sequences list.
- `visibility`: which of these rows a token behind the prompt attends to, and which may be given up.
- `hidden.HiddenRows`: final hidden states of the last tokens, beside them.
- `prefix_cache.PrefixCache`: those of prompts, for requests that begin alike; `prefix_store` keeps
  them on disk, `block_codec` writes a block as bytes.
"""

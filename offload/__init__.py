"""Experts that stay on disk, and are read into memory when a layer needs them.

Nouns, from a model down to its bytes:

- `Offloaded` (offloaded.py): a model's offloaded layers, prefetcher and tiers (`open_store` opens
  it). A *tier* is a memory with a cache: main memory; or a GPU over host memory.
- `OffloadedExperts` (layer.py): one MoE layer. Its module says how a call runs.
- `Prefetcher` (prefetch.py): reads experts before a layer asks for them.
- `ExpertCache` (cache.py): which experts are in one memory. A call *acquires* its experts; an
  expert is a *hit* if it is there, else a *miss*, which is read and may *evict* others.
- `PinnedExperts` (pins.py): the experts of a call, which cannot be evicted; run in *rounds*.
- `SlotManager` (slot_manager.py): begins and ends reads; asks an `EvictionPolicy` (policies/)
  through the `EvictionRanking` (eviction.py) which experts go.
- `SlotTable` (slots.py) and `Arena` (arena.py): the *slots*, each room for one expert, and their
  memory. A *unit* is an expert of a layer as a number; a *grain* is the unit of slot sizes.
- `ExpertSource` (slot_manager.py): fills slots by a `Transfer` (transfer.py): from disk with a
  `Reader` (`open_store.DiskSource`, readers/), or from host memory (`host_tier.HostSource`).

Rooms below: experts, kernels, routing.
"""

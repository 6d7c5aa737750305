"""``moe convert`` writes a checkpoint as a store; ``moe inspect`` shows a store's bits.

- `convert` (`convert`): the conversion, with its `Journal` of finished files.
- `BitBudget`, `BitAllocation` (`bit_allocation`): bits of each expert under a size limit.
- `repair_routers` (`repair`): fits routers to the outputs of compressed experts.
"""

"""`moe convert` and `moe inspect`: from a checkpoint to a store, bits under a budget."""

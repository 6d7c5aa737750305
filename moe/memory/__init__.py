"""Plans the memory of a model before it is loaded.

- `Footprint` (`footprint`): activations, keys and values, measured on the meta device.
- `KVPrecision` (`kv_precision`): in how many bits keys and values are kept.
- `plan_memory` (`budget`): from sizes and a profile to a `moe.loading.memory_plan.MemoryPlan`.
- `PlannedModel` (`planning`): an opened model with its plan; `check_fit` refuses what cannot fit.
"""

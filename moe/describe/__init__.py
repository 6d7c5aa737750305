"""Finds what a transformers model computes by watching a pass and by trying; no names needed.

- `description.Description`: a decoder model as values, which decode steps run by.
- `observe.Observation`: one pass of transformers' forward, with every module's inputs and outputs.
- `decoder.describe`: from an observation to a description; `attention`, `routers` and `parts` do so
  for attention modules, routers, and norms, projections and rotations.
- `probe`: compares two ways of reading the same tokens; may sequences share a pass?
- `routers.find_selectors`: each MoE layer's router as a value that can choose again.
- `row_wise`: gives each token the same bits whatever else is in its pass.
"""

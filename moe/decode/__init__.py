"""Faster decode steps: compiled on a CPU, CUDA graphs on a GPU, proven equal or not used.

- `step`: the ways of a decode step, and `DecodeForward`, which chooses one for each step.
- `enable`: which step a model gets when it is loaded, and why.
- `compiled.CompiledStep`: the step in C++; `records` are what it reads and writes.
- `trace`, `recorder`, `history`: one token of transformers' forward as operations, for models that
  no description covers; `lower` makes `units` of them, and `program.Program` records for
  `traced.TracedStep`.
- `recorded`, `cuda_graph.GraphStep`: the step as CUDA graphs; `device_operations` computes it with
  fused kernels.
- `reference`: the step in plain torch, which the others must equal.
- `proof`: tries a step beside transformers' own forward.
- `prompts`: prompts through transformers' layers, with norms and rotations compiled.

All but the traced step run a model by its `moe.describe.description.Description`.
"""

"""From a name to weights in place.

- `hub`: what a user typed -> a model directory (`ModelFiles`) and its configuration.
- `remote/`: models of a hub, downloaded, or read where they are by HTTP range requests.
- `Checkpoint` (`checkpoint`): opened safetensors files; a `ByteSource` says where their bytes are.
  `quantized` presents FP8, MXFP4, GPTQ, AWQ and compressed-tensors weights as floats (a `Scheme`
  each), `gguf/` does so for GGUF files.
- `LoadPlan` (`plan`): which checkpoint tensors become which parameters, through transformers' own
  conversion rules. `WeightPlan` (`load`) adds dtypes and bytes.
- `WeightSource` (`sources`): a checkpoint or a store; plans first, then loads.
- `Takeover` (`takeover`): takes experts out of the model and turns linear layers into bit planes.
- `MemoryPlan` (`memory_plan`): what a model takes; `moe.memory` works it out.
"""

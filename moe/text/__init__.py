"""Text: prompts to token ids, tokens to text, and the formats in which a model writes.

`TextCodec` (`tokenizer.py`) is a model's tokenizer with its chat template (`chat.py`).
`IncrementalDecoder`, `TokenBytes` and `StopStrings` (`detokenize.py`) turn new tokens into text.
`ModelSampling` (`generation_config.py`) has the model's own sampling defaults. `tool_calls/` finds
how a model writes tool calls and reasoning, and parses them.
"""

"""The next token, from logits and the parameters of a request.

`SamplingParams` (`params.py`) are the parameters, validated once; a `Structure` in them is the form
that the text must have. A `Sampler` (`sampler.py`) is the state of one sequence's tokens, and
`sample_batch` draws the next tokens of many where their logits are: `batch.py` copies what decides
them there and the tokens back, `draws.py` is the arithmetic on rows of logits. `DraftedTokens`
(`drafted.py`) stay there until a draft is done. `Structures`
(`constraint.py`) compiles structures for a model; a `Constraint` is one sequence's state in its
structure. `grammar.py` compiles a structure in another process first, to see whether it is too
complex.
"""

"""The next token, from logits and the parameters of a request.

`SamplingParams` (`params.py`) are the parameters, validated once; a `Structure` in them is the form
that the text must have. `Sampler` (`sampler.py`) draws one sequence's tokens. `Structures`
(`constraint.py`) compiles structures for a model; a `Constraint` is one sequence's state in its
structure. `grammar.py` compiles a structure in another process first, to see whether it is too
complex.
"""

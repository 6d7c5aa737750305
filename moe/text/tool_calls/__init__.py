"""Tool calls and reasoning: how a model writes them, and how its answers are parsed.

- `CallFormat` (`format.py`) is how a model writes calls; `probe_tools` (`probe.py`) finds it by
  probing the chat template. `ReasoningFormat` and `probe_reasoning` (`reasoning.py`) are the same
  for reasoning.
- `CallParser` (`parser.py`) and `ReasoningParser` (`reasoning.py`) parse an answer while it is
  generated; both read it through a `StreamScanner` (`scanner.py`).
- `CallGrammar` and `after_reasoning` (`grammar.py`) make grammars for answers that must call a
  tool, or may reason before a structure.
- `resolved` and `types_of` (`schemas.py`) say what a tool's schema says of an argument's type.
"""

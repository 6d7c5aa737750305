"""Calls of tools, and reasoning: how a model writes them, and how they are read out of its answers.

`probe.py` and `reasoning.py` find the formats by probing the chat template; `call_parser.py` and
`reasoning_parser.py` read answers as they come; `call_grammar.py` and `reasoning_grammar.py` say
what an answer has to be that must call, or may reason first.
"""

"""StreamingLLM (arXiv 2309.17453), and RazorAttention (arXiv 2407.15891) over it: a window of keys.

``memory.kv_policy: window:TOKENS``, on a CPU with compiled decode steps. A token behind the prompt
attends to TOKENS tokens of each layer that sees all: the first block and the last ones. The blocks
between are freed. ``heads:TOKENS:COUNT`` is the same, but the COUNT key heads of the model that
look up earlier text the most attend to all: induction heads, which `moe calibrate` finds by
`induction`. Of a block that it gives up, the pages that only have rows of other heads are freed.

Differs from the papers: prompts are read with attention to all; keys keep the positions at which
they were turned, where StreamingLLM counts positions within the window; RazorAttention's
compensation token for what is left out is not there. Measured
(lab/results/2026-11-25-kv-policies.md): 512 tokens after 1,536 cost the shipped model no bits
(-1.01 %), and a step of a 1.7 B model after 32,768 tokens is 4.4 times as fast with 2,048. Where
text comes again, 2 of 12 heads that keep all are worth .6 % of the bits.

    python -m lab.keys_values.policies
"""

from moe.hooks import Method

METHOD = Method(
    about="decode steps attend to the first block of keys and the last ones; or some heads do",
    price="keeps TOKENS tokens of keys and values instead of all; moe eval prices the loss",
    choices={
        "memory.kv_policy": {
            "window": "moe.methods.kv_window.policy:Window.parse",
            "heads": "moe.methods.kv_window.policy:HeadWindow.parse",
        }
    },
    hooks={"score_heads": "moe.methods.kv_window.induction:score_heads"},
    changes_answers="leaves out keys and values",
    files=("tests/methods/test_kv_window.py",),
)

"""Quest (arXiv 2406.10774): each step attends to the blocks of keys that promise most.

``memory.kv_policy: select:TOKENS``, on a CPU with compiled decode steps. A token behind the prompt
attends to TOKENS tokens of each layer that sees all: half of them are the first block and those
whose keys promise each key head the highest scores, half are the last ones. A block's promise comes
from the largest and smallest number of its keys in each dimension, which are kept beside it. Each
step chooses anew, so nothing is lost for later tokens and nothing is freed: what falls is what a
step reads.

Differs from the paper: blocks of 64 tokens, half of the tokens are always the last ones, and the
query heads of a key head choose together, by the promise that is nearest to each one's own best.
Measured (lab/results/2026-11-25-kv-policies.md): 512 tokens after 1,536 cost the shipped model no
bits (-.21 %), and a step of a 1.7 B model after 32,768 tokens is 3.3 times as fast with 2,048.

    python -m lab.keys_values.policies
"""

from moe.hooks import Method

METHOD = Method(
    about="decode steps attend to the blocks of keys that promise most",
    price="reads TOKENS tokens of keys and values a step instead of all; moe eval prices the loss",
    choices={"memory.kv_policy": {"select": "moe.methods.kv_select.policy:Select.parse"}},
    changes_answers="leaves out keys and values",
    files=("tests/methods/test_kv_select.py",),
)

"""PESF, prefill-time expert skipping by frequency (EAC-MoE).

``routing.policies: [pesf:SHARE]``. In the tokens of a prompt, experts with fewer than SHARE of
their equal part of the visits, ``T K / E``, are skipped. A token's other weights are scaled to the
old sum; a token whose experts are all skipped gets no expert output. What is skipped depends on
the prompts that are read together.

Differs from the paper: nothing known. Measured with the shipped model
(lab/results/2026-11-21-policies.md): at 0.3 and prompts of 2,048 tokens 0.5 % of the visits are
skipped for 0.09 % more bits per byte; at 0.7 it skips 10 to 15 % and costs 6 % and more at any
length, where the paper has 1.5 %.

    python -m lab.policies
"""

from moe.hooks import Method

METHOD = Method(
    about="prompts skip experts that few of their tokens want",
    price="at 0.3: 0.5 % fewer visits, 0.1 to 0.5 % more bits per byte",
    choices={"routing.policies": {"pesf": "moe.methods.pesf.policy:PrefillSkipping.parse"}},
    changes_answers="leaves out experts",
    files=("tests/methods/test_pesf.py",),
)

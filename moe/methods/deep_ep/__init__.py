"""DeepEP (deepseek-ai): its kernels carry the rows of prompts between GPUs.

``methods.deep_ep.prompts: true``, with ``parallel.enabled``, where version 2 of ``deep_ep`` is
installed on all ranks and gives what our own dispatch gives when the ranks meet. Rows of exact
sizes travel by ``deep_ep.ElasticBuffer``; ids, copies of experts, counters and failures are as
ever. It takes at most an eighth of the memory that is free then, which the memory plan does not
count.

Differs from DeepEP's own use: it deals experts to ranks in equal parts by their ids, but here any
rank may serve any expert, so each rank has a range of ids as large as the layer has experts. Decode
steps do not go this way: the kernels are compiled for a capacity, and without a wait for sizes each
rank receives that many rows from every other. Nor do ``combine: exact``, ``payload: int8`` and
``on_rank_loss: continue``. No GPU has run this: a stand-in with its published parameters carries
whole models over gloo (tests/parallel/test_receipts.py).

    python -m benchmarks.expert_parallel
"""

from moe.hooks import Method
from moe.section import Settings


class DeepEPSettings(Settings):
    """DeepEP's kernels for rows of prompts between GPUs."""

    prompts: bool = False
    """Let rows of prompts travel by DeepEP between GPUs, if it gives what our own dispatch gives;
    `MoE.status()` says whether it does, and why not."""


METHOD = Method(
    about="rows of prompts travel between GPUs by DeepEP's kernels",
    price="an eighth of the free GPU memory; has not run on a GPU",
    settings=DeepEPSettings,
    switch="prompts",
    hooks={"dispatcher": "moe.methods.deep_ep.dispatcher:carry_prompts"},
    files=("tests/methods/test_deep_ep.py",),
)

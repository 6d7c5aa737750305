"""Cache-conditional routing: an expert in memory replaces a missing one with nearly its score.

``routing.policies: [resident:MARGIN]``. An expert that is not in memory gives way to one that is,
if the router scores that one lower by at most the share MARGIN of the missing one's score: a
slightly worse choice for a disk read less (Mixture of Cache-Conditional Experts, arXiv 2412.00099).
Prompts are left alone, whose tokens together want most experts anyway.

Differs from the paper: one margin for all layers, no running estimate of the spread of scores. The
output depends on what is in the cache, so runs differ. `moe eval` measures what it costs on a text:

    moe eval STORE --text FILE --profile offload --set lossless=false
        --set 'routing.policies=["resident:0.1"]'
"""

from moe.hooks import Method

METHOD = Method(
    about="a missing expert gives way to one in memory that the router scores nearly as high",
    price="fewer reads from disk; answers depend on what was in memory",
    choices={"routing.policies": {"resident": "moe.methods.resident.policy:PreferResident.parse"}},
    changes_answers="takes other experts",
    files=("tests/methods/test_resident.py",),
)

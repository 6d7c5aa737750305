"""ODP, online dynamic pruning (MC-MoE, arXiv 2410.06270): weak experts of a token are dropped.

``routing.policies: [odp:RATIO]``. Experts that weigh less than RATIO of a token's heaviest are
dropped, and the weights of the others scaled to the old sum. RATIO is one number, or one for each
MoE layer with commas between; the paper takes each layer's median of second over first weight,
which `moe trace` prints in this form. The paper is about two experts a token; with more, every
expert is compared with the heaviest. With two experts it is NAEE's dropping, too.

Differs from the paper: no token is protected. Protection by attention received was built and
measured (lab/results/2026-11-21-policies.md): where as many visits are dropped it cost 2 to 15 %
more divergence than none, with two experts a token as with four, and no less than protection by
chance. Measured with the shipped model, four experts a token: half of the visits for 1.6 % more
bits per byte, behind ``top_p``.

    python -m lab.policies
"""

from moe.hooks import Method

METHOD = Method(
    about="tokens drop experts that weigh little beside their heaviest",
    price="half of the visits, 1.6 % more bits per byte; top_p is better",
    choices={"routing.policies": {"odp": "moe.methods.odp.policy:OnlineDynamicPruning.parse"}},
    changes_answers="leaves out experts",
    files=("tests/methods/test_odp.py",),
)

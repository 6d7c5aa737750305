"""Dynamic expert sharing (DES, arXiv 2602.00879): tokens read together share a core of experts.

``routing.policies: [des_vote:SHARE:TOKENS[:POWER]]`` or ``[des_seq:K:TOKENS]``. A run of TOKENS
tokens, of a decoded batch, a verified window or a canvas, costs the union of its experts. The
policies bound the union to a core set, and each token chooses again, as many experts as ever,
within it; that second choice keeps the quality, without it this is ``top_k``. ``des_vote``: the
SHARE of all experts with most votes; a token's vote for an expert is its weight to the POWER.
``des_seq``: the K heaviest experts of each token. SHARE is one number, or one for each MoE layer
with commas between. Prompts are left alone. In a window, rejected drafts take part too, so the
output depends on the drafts.

Differs from the paper: votes to a power and a share for each layer; batches and windows, too.
Measured with the shipped model (lab/results/2026-11-21-policies.md): 8 tokens visit 9.2 experts
in place of 18.6 for 0.67 % more bits per byte. On a block-diffusion model half of the experts of a
canvas cost .2 % (lab/results/2026-11-26-diffusion.md).

    python -m lab.policies
    python -m lab.diffusion --parts sharing
"""

from moe.hooks import Method

METHOD = Method(
    about="tokens of a step choose again within a core of experts that they share",
    price="half of the experts for 8 tokens, 0.7 % more bits per byte",
    choices={
        "routing.policies": {
            "des_seq": "moe.methods.des.policies:SequenceSharing.parse",
            "des_vote": "moe.methods.des.policies:VoteSharing.parse",
        }
    },
    changes_answers="takes other experts",
    files=("tests/methods/test_des.py",),
)

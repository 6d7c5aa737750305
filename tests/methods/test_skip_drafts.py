"""Drafts without the experts of some layers."""

from __future__ import annotations

import torch

from kernels import experts_forward
from moe.methods.skip_drafts.rule import Skip
from moe.network.lanes import ExpertCall
from moe.settings.profile import load_profile
from moe.speculate.draft import Mode
from moe.speculate.elastic import DraftLayers
from routing import Routing
from tests.moe.speculate.test_layers import HIDDEN, layer


def test_the_middle_is_left_out_and_never_the_ends() -> None:
    assert Skip(0.25).skips(8) == {3, 4}
    assert Skip(1.0).skips(8) == set(range(1, 7))
    assert Skip(1.0).skips(2) == Skip(1.0).skips(1) == Skip(0.0).skips(8) == set()


def test_a_profile_makes_the_rule() -> None:
    rule = Skip.of(load_profile({"methods.skip_drafts.share": 0.5}, environ={}).profile)
    assert Mode("elastic", bits=4, rules=(rule,)).name == "elastic:4b:skip0.5"


def test_skipped_layers_give_nothing_and_cost_nothing() -> None:
    layers = DraftLayers([layer()] * 4, experts_forward, [None] * 4)
    layers.begin(Mode("elastic", rules=(Skip(0.5),)))
    routing = Routing(torch.tensor([[0, 1]]), torch.ones(1, 2))
    (made,) = layers.run(1, [ExpertCall(1, torch.ones(1, HIDDEN), routing)])
    assert isinstance(made, torch.Tensor)
    assert (layers.bytes_read, int(made.count_nonzero())) == (0, 0)

"""The shipped model in memory and with part of its experts on disk, and engines that speculate."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from experts.manifest import read_manifest
from moe import MoE, SamplingParams
from moe.commands.convert.convert import convert
from moe.engine.engine import Engine
from moe.engine.prefill_batch import SequenceGroup
from moe.engine.runner import ModelRunner
from moe.loading.memory_plan import GIB
from moe.settings import ModelSettings, SpeculationSettings
from moe.speculate import enable_speculation
from moe.speculate.draft import Controller, DraftRule, Round
from offload.capacity import fixed_bytes, slot_bytes
from tests.oracles.draft_modes import NEW_TOKENS, WAYS

__all__ = ["MODES", "PROMPTS", "Models", "Watched", "greedy", "speculating", "tokens_of"]

MODES: dict[str, dict[str, Any]] = {
    name: WAYS[name]
    for name in (
        *("8 bits", "4 bits", "2 bits", "voted, 4 bits", "first experts, 2 bits"),
        *("skipping, 3 bits", "ngram", "recycling", "auto"),
    )
    if name in WAYS
}
DEMO = Path("examples/demo-model")
PROMPTS = 120
MEMORY: dict[str, Any] = {"kv_tokens": 1024, "reserve_gib": 0.0}
PROFILE: dict[str, Any] = {
    "prefill": {"wave_tokens": 64, "mode": "layered", "group_tokens": 32},
    "engine": {"max_batch_size": 8},
    "offload": {"hot_set": False},
}


class Models:
    """The shipped model in memory and with part of its experts on disk; loaded once."""

    def __init__(self, folder: Path) -> None:
        settings = ModelSettings(expert_bits=8)
        self._store = convert(DEMO, folder / "store", settings)
        self._loaded = {1.0: MoE.from_pretrained(self._store, PROFILE, memory=MEMORY)}
        whole = self._loaded[1.0]
        text = (DEMO / "README.md").read_text()
        ids = whole.codec.encode(text)
        draw = random.Random(0)
        starts = [draw.randrange(len(ids) - 30) for _ in range(PROMPTS)]
        self.prompts = [ids[start : start + draw.randint(2, 20)] for start in starts]
        self.expected = [c.token_ids for c in whole.generate(self.prompts, greedy())]

    def at(self, residency: float) -> MoE:
        """With this share of its experts in memory: which, depends on what tests did before."""
        if residency not in self._loaded:
            self._loaded[residency] = self.fresh(residency)
        return self._loaded[residency]

    def fresh(self, residency: float) -> MoE:
        """One of the test's own, that has read nothing yet."""
        manifest, plan = read_manifest(self._store).without_drafts(), self._loaded[1.0].memory_plan
        slots = round(residency * sum(layer.experts for layer in manifest.layers))
        rest = sum(line.bytes for line in plan.lines if line.name != "experts")
        room = rest + slots * slot_bytes(manifest, manifest.bits) + fixed_bytes(manifest) + 16
        memory = MEMORY | {"device_gib": room / GIB}
        model = MoE.from_pretrained(self._store, PROFILE, memory=memory)
        assert model.memory_plan.expert_slots == slots
        return model


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, **params)


class Watched:
    """A controller that keeps what became of drafts."""

    def __init__(self, controller: Controller) -> None:
        self.rounds: list[Round] = []
        self._controller = controller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)

    def observe(self, round: Round) -> None:
        self.rounds.append(round)
        self._controller.observe(round)

    @property
    def drafted(self) -> int:
        return sum(trial.drafted for round in self.rounds for trial in round.trials)

    @property
    def accepted(self) -> int:
        return sum(trial.accepted for round in self.rounds for trial in round.trials)


def speculating(
    model: MoE, *, rules: Sequence[DraftRule] = (), **settings: Any
) -> tuple[Engine, Watched]:
    """An engine of its own for a model that may be shared."""
    loaded, engine = model._loaded, model.engine()
    assert isinstance(engine, Engine)
    made = enable_speculation(
        SpeculationSettings(**settings),
        loaded.backbone,
        loaded.experts,
        loaded.backend.forward,
        rules=rules,
    )
    assert made.speculator is not None, made.reason
    watched = Watched(made.speculator.controller)
    made.speculator.controller = cast(Controller, watched)
    engine.runner = ModelRunner(loaded.backbone, loaded.experts, made.speculator)
    return engine, watched


def tokens_of(engine: Engine, groups: list[SequenceGroup]) -> list[list[int]]:
    for group in groups:
        engine.submit(group)
    while not engine.idle:
        for _, event in engine.step():
            assert not isinstance(event, Exception), event
    return [group.sequences[0].token_ids for group in groups]

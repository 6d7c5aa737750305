"""`moe plan` of models that write canvases: canvases in memory, and steps over all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe.commands.plan import command
from moe.commands.plan.decode_speed import Bandwidths, DecodeSizes, UniformRouting, estimate_decode
from moe.commands.plan.rank_command import NETWORK, plan_many
from moe.commands.plan.speeds import MachineSpeeds
from moe.errors import UnsupportedModelError
from moe.settings import Profile
from moe.settings.profile import load_profile
from tests.methods.diffusion.test_writer import SIZES, STEPS, make_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("canvases") / "model", **SIZES[1])


def test_a_step_reads_all_canvases_and_a_canvas_takes_several() -> None:
    sizes = DecodeSizes(10, 16, 2, 1000, 50_000, 80, rows=8, steps=5, flops=1e6)
    routing = UniformRouting(sizes)
    one = estimate_decode(sizes, Bandwidths(1e6, 1e6), routing, 3)
    assert one.tokens == 3 * 8 / 5
    wanted = 10 * routing.distinct(24) * 1000
    assert one.seconds["memory"] == pytest.approx((50_000 + wanted) / 1e6)
    assert one.seconds["disk"] == pytest.approx(0.5 * wanted / 1e6)
    assert one.disk_bytes_per_token == pytest.approx(0.5 * wanted / one.tokens)
    slow = estimate_decode(sizes, Bandwidths(1e6, 1e6, products=1e7), routing, 3)
    assert slow.seconds["memory"] == pytest.approx(24 * 1e6 / 1e7)
    assert slow.tokens_per_second <= slow.best_tokens_per_second * (1 + 1e-9)
    assert slow.tokens_per_second > slow.tokens / sum(slow.seconds.values())


@pytest.mark.parametrize("most", [None, 2])
def test_the_plan_counts_canvases_and_the_passes_of_the_schedule(
    path: Path, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MachineSpeeds, "steps", lambda *_: Bandwidths(1e10))
    monkeypatch.setattr(MachineSpeeds, "products", lambda _: 1e11)
    own = {} if most is None else {"lossless": False, "methods.diffusion.max_steps": most}
    made = command.plan_speed(path, load_profile(overrides=own))
    canvas, passes = SIZES[1]["canvas"], (most or STEPS) + 1
    assert (made.sizes.rows, made.sizes.steps) == (canvas, passes)
    assert [one.tokens for one in made.expected] == [
        pytest.approx(batch * canvas / passes) for batch in (1, 4, 16)
    ]
    assert made.speeds.products == 1e11
    (line,) = [one for one in made.memory.lines if one.name == "canvases"]
    assert line.bytes == Profile().engine.max_batch_size * canvas * 32 * 4  # no vocabulary
    text = " ".join(command.sentences(made))
    assert f"each step refines {canvas} tokens of every sequence" in text
    assert f"with {passes} passes" in text
    assert "moe calibrate" not in text


def test_ranks_are_not_compared(path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match="a step of this model reads 8; plan it without"
    ):
        plan_many(path, load_profile(), 2, 1, None, NETWORK)

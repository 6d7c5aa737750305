"""Receipts: logits have the same bits on one, two and four ranks.

Four processes joined by gloo read the same sequences; with and without copies of experts, with all
experts in memory and with a quarter of them, before, at and after changes of placement, in halves
that overlap and whole, by a call a layer and one for all, prompts in two stages, and (on four
ranks) with a rank that has no sequence.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kernels.cpu import choose_kernel
from moe.commands.convert.convert import convert
from moe.settings import ModelSettings
from tests.parallel import receipts_worker
from tests.parallel.receipts_worker import DEVICE_WAYS, HALVES_WAYS, PROMPTS, RANKS, SECONDS, STEPS

pytestmark = pytest.mark.deep  # four processes, and 48 cases


@pytest.fixture(scope="module")
def receipts(
    tiny_checkpoint: Callable[[str], Path],
    launch: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    """What each rank found."""
    directory = tmp_path_factory.mktemp("receipts")
    for bits in (8, 16):
        settings = ModelSettings(expert_bits=bits, group_size=32)
        convert(tiny_checkpoint("qwen3_moe"), directory / f"store{bits}", settings)
    with launch(RANKS, [receipts_worker.__file__, directory]) as launched:
        assert launched.codes(SECONDS) == [0] * RANKS, launched.everything()
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]


def summed_up(receipts: list[dict[str, Any]], case: str) -> tuple[int, int, float]:
    """Rows of all ranks, how many of them are equal, and the largest error."""
    found = [rank[case] for rank in receipts if case in rank]
    rows, equal = sum(f["rows"] for f in found), sum(f["equal"] for f in found)
    return rows, equal, max(f["error"] for f in found)


def expected_rows(size: int) -> int:
    return (len(PROMPTS) - (size == 4)) * STEPS


WAYS = ("exact", *HALVES_WAYS, "joint")
CASES = list(product((8, 16), ("resident", "quarter"), (2, 4), (0, 3), WAYS))


@pytest.mark.parametrize(("bits", "residency", "size", "copies", "how"), CASES)
def test_bits_do_not_depend_on_ranks(
    receipts: list[dict[str, Any]], bits: int, residency: str, size: int, copies: int, how: str
) -> None:
    case = f"{bits}-{residency}-{size}-{copies}-{how}"
    rows, equal, _ = summed_up(receipts, case)
    assert rows == equal == expected_rows(size)
    assert sum(rank[case]["travelled"] for rank in receipts if case in rank) > rows
    walked = sum(rank[case]["walked"] for rank in receipts if case in rank)
    if how != "joint" or bits == 8 or choose_kernel()[0] is None:  # sockets are used with 16
        assert not walked
    elif residency == "resident":
        assert walked


@pytest.mark.parametrize("size", [2, 4])
def test_rows_come_back_while_a_shared_expert_runs(
    receipts: list[dict[str, Any]], size: int
) -> None:
    assert [rank[f"{size}-meanwhile"] for rank in receipts[:size]] == [True] * size


@pytest.mark.parametrize(("size", "copies"), list(product((2, 4), (0, 3))))
def test_the_dispatch_of_gpus_gives_the_tokens_of_one_rank(
    receipts: list[dict[str, Any]], size: int, copies: int
) -> None:
    """Its tensor code, over gloo; "exact" gives the bits, too."""
    for how in DEVICE_WAYS:
        case = f"{size}-{copies}-{how}"
        rows, equal, error = summed_up(receipts, case)
        assert rows == expected_rows(size)
        assert sum(rank[case]["tokens"] for rank in receipts if case in rank) == rows
        assert equal == rows if how == "device-exact" else error < 1e-3
    asked = [rank[case]["dispatched"] for rank in receipts if case in rank]
    assert asked == asked[:1] * size
    assert asked[0] > 0


@pytest.mark.parametrize(("size", "copies"), list(product((2, 4), (0, 3))))
def test_summed_rows_are_equal_up_to_their_order(
    receipts: list[dict[str, Any]], size: int, copies: int
) -> None:
    rows, _, error = summed_up(receipts, f"16-resident-{size}-{copies}-summed")
    assert rows == expected_rows(size)
    assert error < 1e-3

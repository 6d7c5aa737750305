"""Every rule of SamplingParams, its message, and what it normalises."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from moe.errors import RequestError
from moe.sampling.params import SamplingParams

NAN, INF = float("nan"), float("inf")

REFUSED = [
    ("max_new_tokens", 0, "must be a whole number >= 1, got 0"),
    ("max_new_tokens", 1.5, "must be a whole number >= 1, got 1.5"),
    ("max_new_tokens", True, "must be a whole number >= 1, got True"),
    ("temperature", -1.0, "must be a finite number >= 0, got -1.0; 0 is greedy"),
    ("temperature", NAN, "must be a finite number >= 0, got nan; 0 is greedy"),
    ("temperature", INF, "must be a finite number >= 0, got inf; 0 is greedy"),
    ("temperature", "1", "must be a finite number >= 0, got '1'; 0 is greedy"),
    ("temperature", 10**400, "must be a finite number >= 0, got 1000"),
    ("top_p", -0.01, "must be a finite number in [0, 1], got -0.01; 1 keeps every token"),
    ("top_p", 1.01, "must be a finite number in [0, 1], got 1.01; 1 keeps every token"),
    ("top_p", NAN, "must be a finite number in [0, 1], got nan; 1 keeps every token"),
    ("top_k", -1, "must be a whole number >= 0, got -1; 0 keeps every token"),
    ("min_p", 1.5, "must be a finite number in [0, 1], got 1.5; 0 keeps every token"),
    ("min_p", -0.1, "must be a finite number in [0, 1], got -0.1; 0 keeps every token"),
    ("repetition_penalty", 0, "must be a finite number > 0, got 0; 1 is neutral"),
    ("presence_penalty", 2.5, "must be a finite number in [-2, 2], got 2.5"),
    ("frequency_penalty", -3, "must be a finite number in [-2, 2], got -3"),
    (
        "seed",
        -(2**63) - 1,
        "must be a whole number in [-9223372036854775808, 9223372036854775807], ",
    ),
    ("seed", 2**63, "must be a whole number in [-9223372036854775808, 9223372036854775807], got"),
    ("stop", "", "must be a non-empty string or a list of them, got ''"),
    ("stop", ["a", ""], "must be a non-empty string or a list of them, got ''"),
    ("stop", [3], "must be a non-empty string or a list of them, got 3"),
    ("stop", 3, "must be a non-empty string or a list of them, got 3"),
    ("stop_token_ids", [-1], "entries must be a whole number >= 0, got -1"),
    ("stop_token_ids", "12", "must be a list of whole numbers >= 0, got '12'"),
    ("ignore_eos", 1, "must be true or false, got 1"),
    ("logprobs", 21, "must be a whole number in [0, 20], got 21"),
    ("prompt_logprobs", -1, "must be a whole number in [0, 20], got -1"),
    ("logit_bias", [1], "must map token ids to numbers, got [1]"),
    ("logit_bias", {-1: 0}, "token ids must be a whole number >= 0, got -1"),
    ("logit_bias", {"5": 0}, "token ids must be a whole number >= 0, got '5'"),
    ("logit_bias", {5: 101}, "values must be a finite number in [-100, 100], got 101"),
    ("logit_bias", {5: NAN}, "values must be a finite number in [-100, 100], got nan"),
    ("n", 0, "must be a whole number in [1, 128], got 0"),
    ("n", 129, "must be a whole number in [1, 128], got 129"),
]


@pytest.mark.parametrize(("field", "value", "message"), REFUSED)
def test_a_value_outside_the_rule_is_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{field} " + re.escape(message)):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_limits_themselves_are_accepted() -> None:
    SamplingParams(temperature=0, top_p=1, min_p=1, seed=2**63 - 1, logprobs=20, n=128)
    SamplingParams(temperature=1e-300, top_p=0, min_p=0, seed=-(2**63), logprobs=0, n=1)


def test_equal_requests_compare_equal_however_they_were_written() -> None:
    written = SamplingParams(temperature=1, stop="x", stop_token_ids=[2], seed=np.int64(3))  # type: ignore[arg-type]
    assert written == SamplingParams(temperature=1.0, stop=("x",), stop_token_ids=(2,), seed=3)
    assert type(written.temperature) is float
    assert type(written.seed) is int
    assert hash(written) == hash(dataclasses.replace(written))
    biased = SamplingParams(logit_bias={np.int64(5): 1})  # type: ignore[dict-item]
    assert biased == SamplingParams(logit_bias={5: 1.0})
    assert hash(biased) == hash(dataclasses.replace(biased))


def test_unknown_names_and_later_changes_are_refused() -> None:
    with pytest.raises(TypeError, match="topp"):
        SamplingParams(topp=0.5)  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_p = 0.5  # type: ignore[misc]

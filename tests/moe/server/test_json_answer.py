"""Answers that are written in pieces are those that starlette writes at once."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from moe.server.json_answer import JSONAnswer, _pieces

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    PLAIN | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)


@given(VALUES)
def test_the_same_bytes(value: object) -> None:
    assert JSONAnswer(value).body == JSONResponse(value).body


def test_long_lists_come_in_pieces() -> None:
    value = {"choices": [{"tokens": list(range(5000))}] * 3}
    pieces = list(_pieces(value))
    assert json.loads("".join(pieces)) == value
    assert max(map(len, pieces)) < 6000


def test_what_json_lacks_is_an_error() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        JSONAnswer({"x": [float("nan")]})

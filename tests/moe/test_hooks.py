"""Hooks: methods are found, switched on by a profile, and refused with what they need."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from moe import hooks
from moe.errors import ProfileError
from moe.hooks import Hook, Method, Registry
from moe.settings import Profile
from moe.settings.profile import load_profile

FIRST = Method(
    name="first",
    about="a",
    price="b",
    choices={"routing.policies": {"one": "operator:add", "two": "operator:mul"}},
    hooks={"corner": "os.path:join"},
    changes_answers="does what it does",
    moved={"old.key": "engine.max_batch_size"},
)
SECOND = Method(
    name="second",
    about="a",
    price="b",
    choices={"prefill.mode": {"whole": "operator:sub"}},
    hooks={"corner": "os.path:split"},
    changes_answers="reads otherwise",
    needs={"engine.pin_threads": True, "speculation.mode": "off"},
    readings=2,
)


@pytest.fixture(autouse=True)
def two_methods(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hooks, "methods", lambda: (FIRST, SECOND))
    hooks.moved_keys.cache_clear()
    yield
    hooks.moved_keys.cache_clear()


def profile(**keys: object) -> Profile:
    return load_profile(None, keys, {}).profile


def test_a_value_or_an_entry_of_a_list_switches_a_method_on() -> None:
    assert hooks.methods_on(Profile()) == ()
    lossy = profile(lossless=False, **{"routing.policies": ["top_k:1", "two:0.5"]})
    assert [method.name for method in hooks.methods_on(lossy)] == ["first"]
    assert FIRST.on_by(lossy) == "routing.policies"
    assert hooks.readings(lossy) == 1


def test_a_hook_has_what_the_methods_bring_that_are_on() -> None:
    import os

    corner = Hook[Callable[..., str]]("corner")
    assert corner.filled(Profile()) == []
    keys = {"routing.policies": ["one"], "prefill.mode": "whole", "engine.pin_threads": True}
    both = profile(lossless=False, **keys)
    assert corner.filled(both) == [os.path.join, os.path.split]
    assert hooks.readings(both) == 2


def test_a_choice_has_the_values_of_all_methods() -> None:
    import operator

    policies = Registry[Callable[..., int]]("routing.policies")
    assert policies.names() == ("one", "two")
    assert policies.find("two") is operator.mul
    assert policies.find("three") is None


def test_what_changes_answers_is_refused_while_lossless() -> None:
    message = (
        "prefill.mode: whole reads otherwise, which lossless: true refuses; set lossless: false or "
        "prefill.mode: auto"
    )
    with pytest.raises(ProfileError, match=re.escape(message)):
        profile(**{"prefill.mode": "whole"})


def test_what_a_method_needs_is_said() -> None:
    message = "prefill.mode: whole needs engine.pin_threads: true; set that, or prefill.mode: auto"
    with pytest.raises(ProfileError, match=re.escape(message)):
        profile(lossless=False, **{"prefill.mode": "whole"})


def test_a_former_key_says_where_it_is_today() -> None:
    with pytest.raises(ProfileError, match=r"key 'old\.key' is 'engine\.max_batch_size' today"):
        profile(**{"old.key": 1})
    message = "variable 'MOE_OLD__KEY' is 'MOE_ENGINE__MAX_BATCH_SIZE' today"
    with pytest.raises(ProfileError, match=message):
        load_profile(None, {}, {"MOE_OLD__KEY": "1"})

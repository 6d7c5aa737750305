"""Guards of the server by themselves: limits of keys, and versions of TLS."""

from __future__ import annotations

import ssl
from typing import Any

import pytest

from moe.server import keys as keys_module
from moe.server import serve
from moe.server.errors import APIError
from moe.server.keys import ApiKey, KeyRecord


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.monotonic_s, self.time_s = 1000.0, 10 * 86_400.0 + 86_000

    def monotonic(self) -> float:
        return self.monotonic_s

    def time(self) -> float:
        return self.time_s

    def pass_(self, seconds: float) -> None:
        self.monotonic_s += seconds
        self.time_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(keys_module, "time", made)
    return made


def key(**limits: Any) -> ApiKey:
    return ApiKey("bob", b"s3cret", KeyRecord.model_validate({"key": "s3cret"} | limits))


def test_requests_at_once(clock: Clock) -> None:
    bob = key(requests_at_once=2)
    bob.begin()
    bob.begin()
    with pytest.raises(APIError, match="may have 2 requests at once") as error:
        bob.begin()
    assert (error.value.status, error.value.retry_after_s) == (429, 1)
    bob.end()
    bob.begin()
    with pytest.raises(APIError, match="2 requests at once"):
        bob.begin()


def test_requests_per_minute(clock: Clock) -> None:
    bob = key(requests_per_minute=2)
    for _ in range(2):
        bob.begin()
        bob.end()
        clock.monotonic_s += 20
    with pytest.raises(APIError, match="may have 2 requests a minute") as error:
        bob.begin()
    assert error.value.retry_after_s == 21
    clock.monotonic_s += 21
    bob.begin()
    with pytest.raises(APIError, match="2 requests a minute"):
        bob.begin()


def test_tokens_per_day(clock: Clock) -> None:
    bob = key(tokens_per_day=10)
    bob.begin()
    bob.spend(10)
    with pytest.raises(APIError, match=r"may have 10 tokens a day \(UTC\)") as error:
        bob.begin()
    assert error.value.retry_after_s == 400
    clock.pass_(400)
    bob.begin()


def test_a_clock_that_jumps_gives_no_tokens_again(clock: Clock) -> None:
    """Nor takes a day away from the next."""
    bob = key(tokens_per_day=10)
    bob.spend(10)
    for jump in (7200, -10 * 7200, 40 * 86_400, -86_400 * 80):
        clock.time_s += jump
        with pytest.raises(APIError, match="tokens a day"):
            bob.begin()
    clock.time_s = 20 * 86_400.0 + 86_000  # as late as before
    clock.pass_(390)
    clock.time_s -= 60  # so that midnight comes twice
    clock.pass_(10)
    bob.begin()
    bob.spend(10)
    clock.pass_(70)
    with pytest.raises(APIError, match="tokens a day") as error:
        bob.begin()
    assert error.value.retry_after_s == 86_400 - 10
    clock.pass_(86_400 - 10)
    bob.begin()


def test_tls_1_2_is_the_least_whatever_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lax:
        """A context, of a Python or a system that allows older versions."""

        minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED

        def load_cert_chain(self, *_: Any, **__: Any) -> None:
            pass

    monkeypatch.setattr(ssl, "SSLContext", lambda _: Lax())
    context = serve.make_tls("some.pem", None)
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2

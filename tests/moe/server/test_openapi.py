"""Requests made up from the server's own description: what it promises, it keeps."""

from __future__ import annotations

import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from tests.amounts import amount

CHECKS = [
    not_a_server_error,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.status_code_conformance,
]


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
def test_the_description_is_kept(mode: GenerationMode, server: Any) -> None:
    """With bodies that fit the description, and with such that do not."""
    description: Any = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses = set()
    for operation in description.get_all_operations():
        if mode is GenerationMode.NEGATIVE and operation.ok().method == "get":
            continue
        if operation.ok().path == "/v1/experts/stream":  # it does not end
            continue

        @settings(
            max_examples=int(os.environ.get("FUZZ_EXAMPLES", amount(9, quick=4))),
            derandomize="FUZZ_EXAMPLES" not in os.environ,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.ok().as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            if isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = "tiny"
                limit = "max_output_tokens" if "responses" in case.path else "max_tokens"
                if "count" not in case.path:
                    case.body.setdefault(limit, 2)  # the default takes a while
            response = case.call()
            statuses.add(response.status_code)
            if response.status_code != 504 or "timeout" not in case.body:  # that one is its wish
                case.validate_response(response, checks=CHECKS)

        check()
    assert 400 in statuses
    assert 200 in statuses or mode is GenerationMode.NEGATIVE
    assert server.is_idle()

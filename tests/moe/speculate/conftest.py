"""The shipped model, loaded once for all tests of speculation."""

from __future__ import annotations

import pytest

from tests.moe.speculate.demo_models import Models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("demo"))

"""docs/server.md shows the recipes that `make world` runs."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from tests.world import recipes
from tests.world.clients import CLIENTS
from tests.world.recipes import RECIPES, Block

BLOCKS = [block for recipe in RECIPES for block in recipe.blocks]


def test_the_page_shows_them() -> None:
    page = recipes.PAGE.read_text()
    assert recipes.in_page(page) == page, "run python -m tests.world.recipes --write"


def test_each_is_run_unless_it_says_otherwise() -> None:
    run = {client.starts.name for client in CLIENTS if not isinstance(client.starts, str)}
    told = {recipe.name for recipe in RECIPES if "does not run" in recipe.about}
    assert run | told == {recipe.name for recipe in RECIPES}
    assert not run & told


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.file], ids=lambda b: b.file)
def test_files_are_what_they_are_called(block: Block) -> None:
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "yaml":
        assert yaml.safe_load(block.text)["models"]
    elif block.language == "python":
        compile(block.text, block.file, "exec")


def test_only_this_machine_is_asked() -> None:
    """Addresses in what is pasted, but for a schema's name, are those of the server."""
    texts = "\n".join(block.text for block in BLOCKS)
    addresses = set(re.findall(r"https?://[^/\s\",]+", texts))
    assert addresses == {recipes.ADDRESS, "https://opencode.ai"}


def test_words_in_capitals_are_replaced_whole() -> None:
    text = f"ANTHROPIC_MODEL=MODEL {recipes.ADDRESS}/v1 MODELS"
    there = recipes.at(text, "http://127.0.0.1:9", MODEL="tiny")
    assert there == "ANTHROPIC_MODEL=tiny http://127.0.0.1:9/v1 MODELS"

"""The core has no word of diffusion, and a canvas is no block."""

from __future__ import annotations

import re

from tests import floors

OWN = "moe.methods.diffusion"


def test_the_core_has_no_word_of_diffusion() -> None:
    found = [
        f"{module}: {word}"
        for module, file in floors.modules().items()
        if not module.startswith("moe.methods.")
        for word in re.findall(r"(?i)\w*(?:diffus|canvas|denois)\w*", file.read_text())
    ]
    assert found == []


def test_a_block_is_one_of_keys_and_values() -> None:
    """The method imports their room, and names nothing of its own so."""
    found = [
        f"{module}: {line}"
        for module, file in floors.modules().items()
        if module.startswith(OWN)
        for line in file.read_text().splitlines()
        if re.search(r"(?i)(?<!moe\.kv\.)block(?!-?\s?diffusion)", line)
    ]
    assert found == []

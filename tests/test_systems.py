"""docs/systems.md names every system, and only files, commands and policies that are there."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from moe.hooks import methods

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/systems.md").read_text()

SYSTEMS = """ExpertFlow; Layered prefill; MC-MoE, PMQ; MC-MoE, ODP; EAC-MoE; SliceMoE; ELMoE-3D;
MoE-SpeQ; MoE-Spec (; MoESD; Read-ME; DES; OEA; SmallThinker; M2R2; 2408.15664; 2512.03915;
Sinkhorn; Similarity- and attention-aware; SCMoE; OpenMoE; Local routing consistency;
CloudMatrix384; EPLB; BlockFFN; SpecMQuant; SpecKV; SpecDec++; SmartSpec, TurboSpec; PEARL; DySpec;
S2D; EasySpec; FlexDraft; MTP; SWIFT; Kangaroo; FFN-SkipLLM; SkipDecode; LoRA-Drop; Duo-LLM;
Token Recycling; BitStack; Sparsing law; STEM; SARATHI; DistServe; Splitwise; NanoFlow; TokenWeave;
Cache-MoE; SE-MoE; Pregated-MoE; TLP, SLP; GPTQ; BSP; Quant-SD; EAGLE; Medusa; DEED;
Lookahead decoding; NAEE; ReMoE; Expert Choice; StreamingLLM; SnapKV, H2O; Quest, TokenSelect;
ShadowKV; RazorAttention, DuoAttention; CompressKV; KIVI, GEAR; RotateKV, OScaR; Mustafar;
MiniCache; CacheGen; Hydragen, BatchLLM"""


@pytest.mark.parametrize("system", re.split(r";\s+", SYSTEMS))
def test_every_system_has_a_row(system: str) -> None:
    assert any(system in line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| "))


def test_every_row_has_its_cells_and_says_what_is_missing_or_built() -> None:
    for table in PAGE.split("## ")[1:]:
        for line in table.splitlines():
            if line.startswith("| ") and not line.startswith("| system"):
                _, built, where, shown, absent = (cell.strip() for cell in line.split("|")[1:-1])
                assert built
                if built.startswith("nothing"):
                    assert absent
                else:
                    assert where
                    assert shown


def test_every_file_is_there() -> None:
    files = re.findall(r"`([\w/.-]+/[\w.-]+\.py)`", PAGE)
    assert len(files) > 40
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_every_command_is_there() -> None:
    modules = set(re.findall(r"python -m ([\w.]+)", PAGE))
    assert [name for name in modules if find_spec(name) is None] == []


def test_methods_are_named() -> None:
    unnamed = [one.name for one in methods() if f"`moe/methods/{one.name}/" not in PAGE]
    assert unnamed == []

"""lm-eval's own client against a server: perplexity through the API is that of the library.

lm-eval brings pandas, scikit-learn and more, so it is no part of the development tools:

    pip install "lm-eval[api]" && pytest -m deep tests/moe/server/test_lm_eval.py

`test_echo.py` sends the same requests without it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from moe import MoE

lm_eval = pytest.importorskip("lm_eval")

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "examples" / "demo-model"
TASK = """
task: heldout
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
WINDOW = 512


@pytest.fixture(scope="module")
def demo() -> MoE:
    return MoE.from_pretrained(DEMO)


@pytest.mark.deep
def test_bits_per_byte_of_heldout_text(
    demo: MoE, serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    text = (ROOT / "tests" / "data" / "heldout_prose.txt").read_text()[:8000]
    file = tmp_path / "heldout.jsonl"
    file.write_text(json.dumps({"text": text}) + "\n")
    (tmp_path / "heldout.yaml").write_text(TASK.format(file=file))
    with serve(load=lambda: demo) as server:
        results = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": "tiny",
                "base_url": f"{server.url}/v1/completions",
                "tokenizer": str(DEMO),
                "tokenizer_backend": "huggingface",
                "max_length": WINDOW + 2,
            },
            tasks=["heldout"],
            task_manager=lm_eval.tasks.TaskManager(include_path=str(tmp_path)),
        )
    measured = results["results"]["heldout"]["bits_per_byte,none"]
    assert measured == pytest.approx(bits_per_byte(demo, text), rel=1e-3)


def bits_per_byte(model: MoE, text: str) -> float:
    """From the library's logits, in lm-eval's windows: each token given those before it."""
    [end] = model.codec.encode("<|endoftext|>")
    ids = model.codec.encode(text)
    nats = 0.0
    for done in range(0, len(ids), WINDOW):
        stop = min(done + WINDOW, len(ids))
        start = max(stop - WINDOW, 0)
        before = end if start == 0 else ids[start - 1]
        rows = model.logits([before, *ids[start : stop - 1]]).double().log_softmax(-1)
        nats -= sum(float(rows[i - start, ids[i]]) for i in range(done, stop))
    return nats / math.log(2) / len(text.encode())

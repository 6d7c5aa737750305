"""How soon a command answers: by the modules that it imports, on whatever machine."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from examples.models.tiny import composite_architectures, moe_architectures, tiny_config
from moe.errors import CheckpointError, UnsupportedModelError
from moe.loading.config_file import check_dense, read_json
from moe.loading.local import check_model

ROOT = Path(__file__).parents[3]
HEAVY = {"torch", "transformers", "fastapi", "huggingface_hub", "rich"}
MODEL = "examples/demo-model"
PROGRAM = """
import sys
from moe.cli import main
code = None
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
print(code, *sorted(sys.modules), file=sys.stderr)
"""


def run(*command: str) -> tuple[str, str, set[str]]:
    """The exit code of a command in a process of its own, what it wrote on stderr before, and
    the modules that it imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    *said, last = done.stderr.splitlines()
    code, *modules = last.split()
    return code, "\n".join(said), set(modules)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("dense")
    CONFIG_MAPPING["llama"]().save_pretrained(path)
    return str(path)


@pytest.fixture
def used_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


def test_the_version_needs_nothing() -> None:
    code, _, modules = run("--version")
    assert code == "0"
    assert not modules & (HEAVY | {"numpy", "pydantic", "yaml"})


@pytest.mark.parametrize(
    "command",
    [
        ("generate", MODEL, "--no-such-option"),
        ("generate", MODEL, "--set", "no.such=1"),
        ("serve", MODEL, "--port", "many"),
        ("generate", "no/such/path", "--prompt", "x"),
        ("serve", "/no/such/path"),
        ("run", "/no/such/path"),
        ("chat", "/no/such/path"),
        ("plan", "/no/such/path"),
        ("convert", "/no/such/path", "store"),
        ("bench", "/no/such/path"),
        ("eval", "/no/such/path", "--text", "x"),
        ("trace", "/no/such/path", "--text", "x"),
        ("calibrate", "/no/such/path", "--text", "x"),
    ],
    ids=" ".join,
)
def test_what_cannot_work_is_refused_before_torch_is_imported(command: tuple[str, ...]) -> None:
    code, said, modules = run(*command)
    assert code == "2", said
    assert "Traceback" not in said
    assert not modules & HEAVY


@pytest.mark.parametrize("command", ["generate", "serve", "run", "plan"])
def test_a_dense_model_is_refused_before_torch_is_imported(command: str, dense: str) -> None:
    code, said, modules = run(command, dense, *(["--prompt", "x"] * (command == "generate")))
    assert code == "2"
    assert "'llama' is a dense model: it has no experts" in said
    assert "llama.cpp, Ollama and vLLM run dense models" in said
    assert not modules & HEAVY


@pytest.mark.parametrize("command", ["serve", "run"])
def test_a_used_port_is_refused_before_torch_is_imported(command: str, used_port: str) -> None:
    code, said, modules = run(command, MODEL, "--port", used_port)
    assert code == "2"
    assert f"cannot listen on 127.0.0.1 port {used_port}" in said
    assert not modules & HEAVY


def test_a_wrong_path_takes_little_time() -> None:
    """0.2 s on an Emerald Rapids; the room is for slow machines."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run("generate", "/no/such/path", "--prompt", "x")[0] == "2"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json in"):
        check_model(tmp_path)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("model_type", [*moe_architectures(), *composite_architectures()])
def test_no_mixture_is_taken_for_dense(model_type: str, whole: bool, tmp_path: Path) -> None:
    """Not by a configuration that leaves out what is as in its class, either."""
    config = tiny_config(model_type)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=not whole))
    check_dense(read_json(tmp_path / "config.json"), tmp_path)


def test_dense_members_of_a_family_say_so(tmp_path: Path) -> None:
    config = tiny_config("granitemoehybrid").to_dict()
    check_dense(config, tmp_path)
    with pytest.raises(UnsupportedModelError, match="no experts"):
        check_dense(config | {"num_local_experts": 0}, tmp_path)


def test_parts_of_a_composite_model_decide(tmp_path: Path) -> None:
    vision = {"model_type": "siglip_vision_model"}
    llava = {"model_type": "llava", "text_config": {"model_type": "qwen3_moe"}}
    check_dense(llava | {"vision_config": vision}, tmp_path)
    check_dense({"model_type": "llava"}, tmp_path)  # the parts are those of the class


def test_a_dense_gguf_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    import gguf
    import numpy as np

    file = tmp_path / "dense.gguf"
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_tensor("blk.0.ffn_gate.weight", np.zeros((4, 4), np.float32))
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"dense\.gguf: none of its layers has experts"):
        check_model(file)

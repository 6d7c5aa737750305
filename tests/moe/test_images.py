"""Images in prompts: rows, decoding, and answers equal to transformers' own whole forward."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, PreTrainedModel

from moe import MoE, SamplingParams
from moe.cli import main
from moe.commands.convert.convert import convert
from moe.errors import RequestError
from moe.images.decode import decode
from moe.images.reader import ImageReader, load_processor
from moe.memory.planning import planning
from moe.network.lanes import run_lanes
from moe.network.packed_pass import Work
from moe.network.prompt_rows import NotRows, PromptRows
from moe.settings import ModelSettings
from moe.settings.profile import load_profile
from moe.text.chat import take_images
from moe.text.tokenizer import ImagePrompt, Prompt
from tests.moe.image_models import CASES, make, picture, write_texts

COUNT = 4
# Tokens that stand for images and sounds mean something else to transformers if they are generated.
MARKS = range(12)
GREEDY = SamplingParams(
    max_new_tokens=COUNT, temperature=0.0, ignore_eos=True, logit_bias=dict.fromkeys(MARKS, -100.0)
)
SMALL: dict[str, Any] = {
    "memory": {"kv_tokens": 2048, "reserve_gib": 0.0, "prefix_tokens": 1024},
    "prefill": {"mode": "chunked", "chunk_tokens": 16, "wave_tokens": 64},
    "engine": {"max_batch_size": 4},
    "offload": {"hot_set": False},
    "model": {"images": True},
}
Messages = list[dict[str, Any]]


def asking(*images: object, before: str = "w9 w10 w11 w12 w13 w14 w15 w16 w17") -> Messages:
    parts: Messages = [{"type": "text", "text": before}]
    for image in images:
        parts += [{"type": "image", "image": image}, {"type": "text", "text": "w20 w21"}]
    return [{"role": "user", "content": parts}]


def png(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def data_url(image: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, PreTrainedModel]]:
    known: dict[str, tuple[Path, PreTrainedModel]] = {}

    def get(name: str) -> tuple[Path, PreTrainedModel]:
        if name not in known:
            path = tmp_path_factory.mktemp(name)
            known[name] = path, make(name, path)
        return known[name]

    return get


def inputs_of(model: MoE, messages: Messages) -> dict[str, Any]:
    """What transformers' own processor makes of a conversation."""
    assert isinstance(model.codec.images, ImageReader)
    assert model.codec.tokenizer is not None
    plain, images = take_images(messages)
    text = model.codec.tokenizer.apply_chat_template(plain, tokenize=False)
    return model.codec.images.inputs(str(text), images)


@torch.no_grad()
def greedy(reference: PreTrainedModel, inputs: dict[str, Any]) -> list[int]:
    """Tokens by whole forwards, each over all tokens and images."""
    inputs, said = dict(inputs), list[int]()
    shape = inputs["input_ids"].shape
    per_token = [k for k, v in inputs.items() if torch.is_tensor(v) and v.shape == shape]
    for _ in range(COUNT):
        logits = reference(**inputs, use_cache=False).logits[0, -1]
        said.append(len(MARKS) + int(logits[len(MARKS) :].argmax()))
        for name in per_token:
            more = {"input_ids": said[-1], "attention_mask": 1}.get(name, 0)
            column = torch.full_like(inputs[name][:, :1], more)
            inputs[name] = torch.cat([inputs[name], column], 1)
    return said


HAS_TORCHVISION = find_spec("torchvision") is not None
MAYBE = [
    pytest.param(
        name, marks=pytest.mark.skipif(case.torchvision > HAS_TORCHVISION, reason="no torchvision")
    )
    for name, case in CASES.items()
    if name != "llama4"  # transformers 5.24's own forward fails with images
]


@pytest.mark.parametrize("name", MAYBE)
def test_logits_and_tokens_are_those_of_the_whole_model(
    name: str, made: Callable[[str], tuple[Path, PreTrainedModel]]
) -> None:
    path, reference = made(name)
    fused = {} if name == "qwen3_vl_moe" else {"fused": "off"}
    model = MoE.from_pretrained(path, SMALL | {"engine": {"max_batch_size": 4, **fused}})
    assert model.status()["images"] == {
        "enabled": True,
        "why": "equal to transformers' own forward",
    }
    messages = asking(picture(1, 96, 64), picture(2, 50, 90))
    inputs = inputs_of(model, messages)
    prompt = model.codec.encode(messages)
    assert isinstance(prompt, ImagePrompt)
    assert prompt == inputs["input_ids"][0].tolist()
    cache = model.backbone.new_cache(len(prompt))
    work = Work(prompt, cache, all_logits=True, rows=prompt.rows.part(0, len(prompt)))
    with torch.inference_mode():
        lanes = model.backbone.lanes([work])
        run_lanes(lanes, model.experts.run)
        expected = reference(**inputs, use_cache=False).logits[0]
    assert float((lanes[0].result()[0] - expected).abs().max()) <= CASES[name].within
    text = [5, 9, 2, 30, 31]
    (alone,) = model.generate([text], GREEDY)
    both: list[Prompt] = [messages, text]
    first, beside = model.generate(both, GREEDY)
    assert first.token_ids == greedy(reference, inputs)
    assert beside.token_ids == alone.token_ids
    (again,) = model.generate([messages], GREEDY)
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "gemma4"])
def test_a_turn_with_a_further_picture_encodes_one(
    name: str, made: Callable[[str], tuple[Path, PreTrainedModel]]
) -> None:
    path, reference = made(name)
    model = MoE.from_pretrained(path, SMALL | {"engine": {"fused": "off"}})
    first, second = asking(picture(1, 96, 64)), asking(picture(1, 96, 64), picture(2, 50, 90))
    found = []
    for messages in (first, second, first, second):
        prompt = model.codec.encode(messages)
        images = model.stats()["images"]
        found.append((images["encoded"], images["reused"]))
    assert found == [(1, 0), (2, 1), (2, 1), (2, 1)]  # the last two prompts are known whole
    assert images["kept_bytes"] > 0
    assert isinstance(prompt, ImagePrompt)
    (said,) = model.generate([second], GREEDY)
    assert said.token_ids == greedy(reference, inputs_of(model, second))
    model.reset_stats()
    assert model.stats()["images"]["encoded"] == 0


@pytest.mark.skipif(HAS_TORCHVISION, reason="torchvision is installed")
@pytest.mark.parametrize("name", ["mistral_large4", "llama4", "kimi_k25"])
def test_a_processor_that_needs_torchvision_says_so(name: str, tmp_path: Path) -> None:
    config = write_texts(name, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    found = load_processor(tmp_path, config, tokenizer)
    assert isinstance(found, str)
    assert "pip install torchvision" in found


def test_several_ranks_say_that_they_read_no_images(tmp_path: Path) -> None:
    make("qwen3_vl_moe", tmp_path)
    profile = load_profile(SMALL, environ={}).profile
    with planning(tmp_path, profile, torch.device("cpu"), lambda _: None, ranks=2) as planned:
        assert isinstance(planned.towers, str)
        assert "start without the launcher" in planned.towers


def test_prefixes_are_shared_by_content(
    made: Callable[[str], tuple[Path, PreTrainedModel]],
) -> None:
    model = MoE.from_pretrained(made("qwen3_vl_moe")[0], SMALL)
    engine = model.engine()

    def ask(messages: Messages) -> int:
        group = model.request(model.codec.encode(messages), GREEDY, chat=True)
        engine.submit(group)
        while not engine.idle:
            engine.step()
        return group.sequences[0].num_cached_tokens

    one, other = picture(1, 128, 128), picture(2, 128, 128)
    size = len(model.codec.encode(asking(one)))
    assert ask(asking(one)) == 0
    assert ask(asking(one)) == (size - 1) // 16 * 16
    assert ask(asking(other)) == 0  # the same token ids
    ids = list(model.codec.encode(asking(one)))
    group = model.request(ids, GREEDY)  # without its image
    engine.submit(group)
    while not engine.idle:
        engine.step()
    assert group.sequences[0].num_cached_tokens == 0


def test_a_store_reads_images_and_text_needs_none_of_it(
    made: Callable[[str], tuple[Path, PreTrainedModel]], tmp_path: Path
) -> None:
    path, reference = made("qwen3_vl_moe")
    settings = ModelSettings.model_validate(
        {"expert_bits": 16, "trunk_bits": 16, "head_bits": 16, "group_size": 32}
    )
    store = convert(path, tmp_path / "store", settings)
    model = MoE.from_pretrained(store, SMALL)
    assert any(line.name == "image towers" for line in model.memory_plan.lines)
    messages = asking(picture(3, 64, 64))
    (said,) = model.generate([messages], GREEDY)
    assert said.token_ids == greedy(reference, inputs_of(model, messages))
    (store / "towers.safetensors").chmod(0)
    plain = MoE.from_pretrained(path, SMALL | {"model": {}})
    assert plain.status()["images"]["enabled"] is False
    assert not any(line.name == "image towers" for line in plain.memory_plan.lines)
    with pytest.raises(RequestError, match=r"model\.images=true"):
        plain.generate([messages], GREEDY)
    text = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "w9"}, {"type": "text", "text": " w8"}],
        }
    ]
    assert plain.codec.encode(text) == plain.codec.encode([{"role": "user", "content": "w9 w8"}])


def _bomb(width: int, height: int) -> bytes:
    """A PNG of zeros: few bytes, many pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + crc

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1 << 20), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


HOSTILE = {
    "a bomb": (_bomb(60_000, 60_000), "more than 1000000"),
    "100 megapixels": (_bomb(10_000, 10_000), "more than 1000000"),
    "truncated": (png(picture(4, 300, 300), "JPEG")[:2000], "truncated"),
    "rows that are missing": (_bomb(900, 900), "cannot be read"),
    "another type": (png(picture(5, 20, 20), "GIF"), "no PNG, JPEG or WebP"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "no PNG, JPEG or WebP"),
    "no image": (b"hello", "no PNG, JPEG or WebP"),
    "nothing": (b"", "no PNG, JPEG or WebP"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_images_are_refused(what: str) -> None:
    data, message = HOSTILE[what]
    with pytest.raises(RequestError, match=message):
        decode([data], 1_000_000)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("https://example.org/a.png", "no files are opened, and links only by a server"),
        ("file:///etc/passwd", "no files are opened, and links only by a server"),
        ("/etc/passwd", "no files are opened, and links only by a server"),
        ("data:image/svg+xml;base64,AAAA", "must be a data URL"),
        ("data:image/png;base64,!!!!", "not valid base64"),
        (7, "must be the bytes"),
        (bytes((32 << 20) + 1), "may have 33554432 bytes"),
    ],
)
def test_what_is_no_image_is_refused(source: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        decode([source], 1_000_000)


def test_images_are_decoded_in_a_process_of_their_own() -> None:
    plain = picture(6, 31, 17)
    rotated = Image.Exif()
    rotated[0x0112] = 6
    file = io.BytesIO()
    plain.save(file, "PNG", exif=rotated)
    found = decode([png(plain), data_url(png(plain)), plain, file.getvalue()], 10_000)
    assert [each.image.tobytes() for each in found[:3]] == [plain.tobytes()] * 3
    assert found[0].digest == found[2].digest != found[3].digest
    assert found[3].image.size == (17, 31)
    with pytest.raises(RequestError, match="image 1 of the prompt"):
        decode([plain, plain], 31 * 17 + 1)


def test_rows_belong_to_their_tokens() -> None:
    tokens = 6
    marks = torch.tensor([[False, True, True, False, True, False, False]])
    found: dict[str, Any] = {
        "inputs_embeds": torch.randn(1, tokens + 1, 8),
        "position_ids": torch.tensor([[0, 1, 1, 2, 3, 4, 5]]).expand(3, 1, -1),
        "marks": marks,
        "features": [torch.randn(3, 8), torch.randn(3, 8)],
        "use_cache": False,
    }
    rows = PromptRows(found, tokens)
    assert rows.offset == -1
    for cut in range(tokens + 1):
        parts = [rows.part(0, cut), rows.part(cut, tokens)]
        for name, dim in (("inputs_embeds", 1), ("position_ids", -1), ("marks", 1)):
            joined = torch.cat([part[name] for part in parts], dim)
            assert torch.equal(joined, found[name].narrow(dim, 0, tokens))
        for index in range(2):
            joined = torch.cat([part["features"][index] for part in parts])
            assert torch.equal(joined, found["features"][index])
    changed = found | {"features": [found["features"][0], found["features"][1].clone()]}
    changed["features"][1][1] += 1
    differs = [a != b for a, b in zip(rows.keys, PromptRows(changed, tokens).keys, strict=True)]
    assert differs == [False, False, True, False, False, False]
    assert max(rows.keys) < 0
    with pytest.raises(NotRows, match=r"other \(5, 8\) has no rows"):
        PromptRows(found | {"other": torch.randn(5, 8)}, tokens)


def test_chat_shows_an_image(
    made: Callable[[str], tuple[Path, PreTrainedModel]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, _ = made("qwen3_vl_moe")
    file = tmp_path / "photo.webp"
    file.write_bytes(png(picture(8, 64, 64), "WEBP"))
    sets = [f"--set={name}" for name in ("memory.kv_tokens=512", "offload.hot_set=false")]
    command = ["chat", str(path), "--image", str(file), "--max-new-tokens", "3", *sets]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"w9\n/image {file}\nw8\n/image /none\n"))
    assert main(command) == 0
    out = capsys.readouterr()
    assert out.out.strip()
    assert "cannot read the image /none" in out.err


def test_grey_of_16_bits_is_scaled_and_alpha_stands_on_white() -> None:
    grey = Image.new("I;16", (4, 1))
    for x, value in enumerate((0, 255, 32768, 65535)):
        grey.putpixel((x, 0), value)
    clear = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    clear.putpixel((1, 0), (255, 0, 0, 128))
    coded = Image.new("P", (1, 1))
    coded.info["transparency"] = 0
    for source in (grey, png(grey)):
        (found,) = decode([source], 100)
        assert [*found.image.getchannel(0).tobytes()] == [0, 0, 128, 255]
    for source, first in ((clear, 255), (png(clear), 255), (png(coded), 255)):
        (found,) = decode([source], 100)
        assert found.image.getpixel((0, 0)) == (first, first, first)
    assert decode([png(clear, "WEBP")], 100)[0].image.getpixel((0, 0)) == (255, 255, 255)
    assert decode([clear], 100)[0].image.getpixel((1, 0)) == (255, 127, 127)

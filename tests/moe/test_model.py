"""`MoE` as a user meets it: generation, streaming, statistics, and everything that is refused."""

from __future__ import annotations

import gc
import pickle
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe import MoE, SamplingParams
from moe.errors import ContextError, ProfileError, RequestError, UnsupportedModelError
from moe.network.lanes import Lane, LaneState
from tests.amounts import deep_except
from tests.moe.text.test_detokenize import TOKENIZERS, ids_of

GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 9, 33], [7], [90, 91, 92, 93, 94, 95, 96]]


@pytest.fixture(scope="module")
def model(tiny_moe: Callable[[str], MoE]) -> MoE:
    return tiny_moe("qwen3_moe")


def test_greedy_tokens_equal_transformers_generate(
    model: MoE, tiny_checkpoint: Callable[[str], Path]
) -> None:
    reference: Any = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("qwen3_moe"))
    reference.generation_config.eos_token_id = None
    for prompt, completion in zip(PROMPTS, model.generate(PROMPTS, GREEDY), strict=True):
        output = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=6,
        )
        assert completion.token_ids == output[0, len(prompt) :].tolist()
        assert (completion.finish_reason, completion.prompt_token_ids) == ("length", prompt)


def test_a_batch_limited_to_one_sequence_gives_the_same(
    model: MoE, tiny_checkpoint: Callable[[str], Path]
) -> None:
    narrow = MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), engine={"max_batch_size": 1})
    expected = [completion.token_ids for completion in model.generate(PROMPTS, GREEDY)]
    assert [c.token_ids for c in narrow.generate(PROMPTS, GREEDY)] == expected


def test_n_samples_of_a_prompt_are_those_of_separate_requests(model: MoE) -> None:
    params = SamplingParams(max_new_tokens=5, temperature=1.0, seed=3, n=3, ignore_eos=True)
    samples = model.generate([5, 9, 33], params)
    assert [(c.prompt, c.sample) for c in samples] == [(0, 0), (0, 1), (0, 2)]
    assert len({tuple(c.token_ids) for c in samples}) > 1
    again = model.generate([[5, 9, 33], [8]], params)
    assert [c.token_ids for c in again[:3]] == [c.token_ids for c in samples]


@pytest.mark.parametrize("model_type", deep_except(["qwen3_moe"], ["qwen3_moe", "qwen3_next"]))
def test_n_greedy_samples_are_all_the_greedy_continuation(
    model_type: str, tiny_moe: Callable[[str], MoE]
) -> None:
    """Samples share the reading of their prompt and nothing after it."""
    model = tiny_moe(model_type)
    (alone,) = model.generate([5, 9, 33], GREEDY)
    params = SamplingParams(max_new_tokens=6, temperature=0.0, n=3, ignore_eos=True)
    samples = model.generate([5, 9, 33], params)
    assert [c.token_ids for c in samples] == [alone.token_ids] * 3


def test_a_stop_token_ends_the_sequence_and_counts(model: MoE) -> None:
    (free,) = model.generate([5, 9, 33], GREEDY)
    stop = free.token_ids[2]
    params = SamplingParams(
        max_new_tokens=6, temperature=0.0, stop_token_ids=(stop,), ignore_eos=True
    )
    (stopped,) = model.generate([5, 9, 33], params)
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"


def test_logprobs_are_those_of_the_logits(model: MoE) -> None:
    params = SamplingParams(max_new_tokens=3, temperature=0.0, logprobs=2, ignore_eos=True)
    (completion,) = model.generate([5, 9, 33], params)
    rows = model.logits([5, 9, 33, *completion.token_ids[:-1]])[2:].log_softmax(-1)
    for token, row in zip(completion.tokens, rows, strict=True):
        assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-4)
        assert token.top is not None
        assert [i for i, _ in token.top] == row.topk(2).indices.tolist()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "chosen",
    [
        lambda: default_dtype(torch.bfloat16),
        lambda: default_dtype(torch.float64),
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.enable_grad,
    ],
)
def test_what_the_caller_has_set_for_torch_changes_nothing_here(
    model: MoE,
    tiny_checkpoint: Callable[[str], Path],
    chosen: Callable[[], AbstractContextManager[object]],
) -> None:
    prompts, params = PROMPTS + [[3] * 40], replace(GREEDY, repetition_penalty=1.1)
    tokens = [completion.token_ids for completion in model.generate(prompts, params)]
    logits = model.logits([5, 9, 33])
    with chosen():
        dtype, device = torch.get_default_dtype(), torch.get_default_device()
        loaded = MoE.from_pretrained(tiny_checkpoint("qwen3_moe"))
        for one in (model, loaded):
            assert [found.token_ids for found in one.generate(prompts, params)] == tokens
            assert torch.Tensor.equal(one.logits([5, 9, 33]), logits)
        stream = model.stream(prompts, params)
        next(stream)  # between steps the caller's own hold
        assert (torch.get_default_dtype(), torch.get_default_device()) == (dtype, device)
        stream.close()
    assert loaded.status()["fused"] == model.status()["fused"]
    assert loaded.status()["packing"] == model.status()["packing"]


def test_closing_a_stream_stops_it(model: MoE) -> None:
    stream = model.stream(PROMPTS, GREEDY)
    next(stream)
    stream.close()
    (completion,) = model.generate([5, 9, 33], GREEDY)
    assert len(completion.token_ids) == 6


@pytest.mark.deep
def test_a_program_may_end_in_the_midst_of_a_stream(tiny_checkpoint: Callable[[str], Path]) -> None:
    """Of a module: what it holds is let go when torch is half gone."""
    program = (
        "from moe import MoE\n"
        f"model = MoE.from_pretrained({str(tiny_checkpoint('qwen3_moe'))!r})\n"
        "events = model.stream([5, 9, 33])\n"
        "for event in events:\n"
        "    break\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_closing_a_stream_ends_a_pass_that_sleeps(tiny_checkpoint: Callable[[str], Path]) -> None:
    """Python's collector would never find it."""

    def asleep() -> set[Lane[Any]]:
        lanes = [found for found in gc.get_objects() if type(found) is Lane]
        return {lane for lane in lanes if lane.state is LaneState.WAITING}

    prefill = {"mode": "layered", "group_tokens": 1, "wave_tokens": 8}
    model = MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), prefill=prefill)
    others = asleep()
    stream = model.stream([[5, 9, 33], [7] * 40], GREEDY)
    next(event for event in stream if asleep() - others)
    stream.close()
    assert asleep() == others


def test_a_model_that_nobody_holds_is_freed(tiny_checkpoint: Callable[[str], Path]) -> None:
    model = MoE.from_pretrained(tiny_checkpoint("qwen3_moe"))
    model.generate(PROMPTS, GREEDY)
    network = weakref.ref(model.backbone.model)
    del model
    gc.collect()
    assert network() is None


def test_statistics_count_tokens_and_bytes(model: MoE) -> None:
    model.reset_stats()
    model.generate([5, 9, 33], GREEDY)
    stats = model.stats()
    top_k = model.config.num_experts_per_tok
    for layer in stats["layers"]:
        # Six new tokens, the last of which is never read back.
        assert layer["tokens"] == 3 + 5
        assert sum(layer["tokens_per_expert"]) == 8 * top_k
        assert layer["steps"] == 6
    loads = sum(layer["expert_loads"] for layer in stats["layers"])
    layers, experts = len(stats["layers"]), model.config.num_experts
    assert stats["expert_bytes_read"] == loads * stats["expert_bytes"] // (layers * experts)
    assert stats["weight_bytes"] > stats["expert_bytes"]


def test_a_lossy_policy_is_refused_unless_allowed(tiny_checkpoint: Callable[[str], Path]) -> None:
    path = tiny_checkpoint("qwen3_moe")
    with pytest.raises(ProfileError, match=r"routing\.policies: policy 'top_k:1' changes"):
        MoE.from_pretrained(path, routing={"policies": ["top_k:1"]})
    lossy = MoE.from_pretrained(path, routing={"policies": ["top_k:1"]}, lossless=False)
    lossy.generate([5, 9, 33], GREEDY)
    for layer in lossy.stats()["layers"]:
        assert sum(layer["tokens_per_expert"]) == layer["tokens"]


def test_dtypes_of_trunk_and_experts_follow_the_profile(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    path = tiny_checkpoint("qwen3_moe")
    small = MoE.from_pretrained(path, model={"expert_dtype": "bfloat16"})
    whole = MoE.from_pretrained(path)
    assert small.stats()["expert_bytes"] * 2 == whole.stats()["expert_bytes"]
    torch.testing.assert_close(
        small.logits([5, 9, 33]), whole.logits([5, 9, 33]), atol=0.1, rtol=0.1
    )


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ([], "no prompts were given; give at least one"),
        ([5, 128], "token ids must be whole numbers from 0 to 127 (vocabulary of 128), got 128"),
        ([5, -1], "got -1 at position 1"),
        ("text", "text prompts need a tokenizer"),
        ([1] * 300, "the prompt has 300 tokens, and the context is 256 tokens, answer included"),
        ([1] * 251, "the prompt has 251 tokens and 6 new ones are asked for, together more than"),
    ],
)
def test_prompts_that_are_refused(model: MoE, prompt: str | list[int], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        model.stream(prompt, GREEDY)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_sampling_parameters_that_are_refused(params: dict[str, float], message: str) -> None:
    with pytest.raises(RequestError, match=rf"^{message} must be"):
        SamplingParams(**params)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [{"max_new_tokens": 3}, [{"max_new_tokens": 3}], 3])
def test_params_of_another_type_are_refused(model: MoE, params: Any) -> None:
    with pytest.raises(RequestError, match="params must be SamplingParams or a list of them"):
        model.generate([5, 9], params)


def test_the_profiles_number_of_new_tokens_is_cut_to_the_context(model: MoE) -> None:
    limit = model.context_length
    assert limit is not None
    done = model.generate([7] * (limit - 3))[0]
    assert len(done.tokens) == 3
    assert done.finish_reason == "length"
    with pytest.raises(ContextError, match=f"the context is {limit} tokens, answer included"):
        model.generate([7] * limit)


def test_a_closed_model_says_so(tiny_checkpoint: Callable[[str], Path]) -> None:
    with MoE.from_pretrained(tiny_checkpoint("qwen3_moe")) as closed:
        closed.generate([5, 9], GREEDY)
        stream = closed.stream([5, 9], GREEDY)
        next(stream)
    uses = (lambda: closed.generate([5]), lambda: closed.logits([5]), closed.loop)
    for use in (*uses, lambda: next(stream)):
        with pytest.raises(RequestError, match="the model is closed; load it again"):
            use()
    assert closed.stats()["layers"]


def test_a_fork_says_that_it_cannot_run(model: MoE, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for ever for threads that it does not have."""
    monkeypatch.setattr("os.getpid", lambda: 1)
    for use in (lambda: model.generate([5]), lambda: model.logits([5]), model.loop):
        with pytest.raises(RequestError, match=r"process 1 is a fork .* load it there"):
            use()


@pytest.mark.parametrize("copy", [pickle.dumps, deepcopy])
def test_a_model_that_is_to_be_pickled_says_what_to_do(
    model: MoE, copy: Callable[[MoE], object]
) -> None:
    with pytest.raises(TypeError, match=r"cannot be pickled or copied: .* MoE\.from_pretrained"):
        copy(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threads": 4096}, r"threads is 4096, and this process may use \d+ CPUs"),
        (
            {"model": {"context_length": 9999}},
            "model.context_length is 9999, and the model's max_position_embeddings is",
        ),
    ],
)
def test_settings_beyond_machine_and_model_are_refused(
    settings: dict[str, Any], message: str, tiny_checkpoint: Callable[[str], Path]
) -> None:
    with pytest.raises(ProfileError, match=message):
        MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), settings)


def test_as_many_params_as_prompts(model: MoE) -> None:
    with pytest.raises(RequestError, match="got 2 for 3 prompts"):
        model.generate(PROMPTS, [GREEDY, GREEDY])


def test_stop_strings_need_a_tokenizer(model: MoE) -> None:
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        model.generate([5], SamplingParams(stop=("x",)))


def test_a_text_goes_on_with_its_space_and_an_answer_begins_without(
    model: MoE, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SentencePiece tokenizers leave out the space that a text begins with."""
    tokenizer = TOKENIZERS["metaspace"]
    monkeypatch.setattr(model.codec, "tokenizer", tokenizer)
    first, the = ids_of(tokenizer, ["▁a", "▁the"])
    params = SamplingParams(max_new_tokens=2, temperature=0, logit_bias={the: 100})
    assert model.generate([first], params)[0].text == " the the"
    for chat, expected in ((False, " the the"), (True, "the the")):
        engine, group = model.loop(), model.request([first], params, chat=chat)
        engine.submit(group)
        events = [engine.step()[0][1] for _ in range(2)]
        assert "".join(event.text for event in events) == expected  # type: ignore[union-attr]


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vocab_size=32,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="Qwen3ForCausalLM has no experts"):
        MoE.from_pretrained(tmp_path)


def test_an_absent_device_is_refused(tiny_checkpoint: Callable[[str], Path]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(ProfileError, match="device is 'cuda', and torch finds no CUDA device"):
        MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), device="cuda")


def test_a_device_that_is_not_there_is_refused_by_its_number(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Callable[[str], Path]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ProfileError, match="device is 'cuda:2', and torch finds 2 on this machine"):
        MoE.from_pretrained(tiny_checkpoint("qwen3_moe"), device="cuda:2")

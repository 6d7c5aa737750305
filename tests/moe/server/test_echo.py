"""``echo`` and what OpenAI's clients measure with it: log probabilities of given text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from moe import MoE

URL = "/v1/completions"
PROMPT = "def f(x):"
SCORE = {"model": "tiny", "prompt": PROMPT, "max_tokens": 0, "logprobs": 2, "echo": True}


def oracle(model: MoE, ids: list[int]) -> list[float]:
    """Log probability of every token but the first, from the library's logits."""
    rows = model.logits(ids)[:-1].double().log_softmax(-1)
    return rows[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()


def test_scores_of_a_prompt_are_those_of_the_librarys_logits(
    client: openai.OpenAI, model: MoE
) -> None:
    scored = client.completions.create(**SCORE)  # type: ignore[call-overload]
    choice = scored.choices[0]
    assert choice.text == PROMPT
    assert choice.finish_reason == "length"
    assert scored.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 9, "completion_tokens": 0, "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    logprobs = choice.logprobs
    assert logprobs.tokens == list(PROMPT)
    assert logprobs.text_offset == list(range(9))
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    expected = oracle(model, model.codec.encode(PROMPT))
    assert logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-5)
    logits = model.logits(model.codec.encode(PROMPT))[:-1]
    told = zip(PROMPT[1:], expected, logprobs.top_logprobs[1:], logits, strict=True)
    for letter, its_own, top, rows in told:
        best = rows.double().log_softmax(-1).topk(2).values.tolist()
        assert top.pop(letter) == pytest.approx(its_own, abs=1e-5)
        others = [logprob for logprob in best if abs(logprob - its_own) > 1e-5]
        assert sorted(top.values(), reverse=True) == pytest.approx(others, abs=1e-5)


@pytest.mark.parametrize("logprobs", [None, 0, 1])
@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_whole_and_streamed(
    logprobs: int | None, max_tokens: int, stream: bool, client: openai.OpenAI, model: MoE
) -> None:
    """Two prompts, one as text and one as ids, two samples each."""
    prompts = ["def f(", "hello"]
    asked: Any = {"model": "tiny", "temperature": 0, "n": 2, "logprobs": logprobs}
    for prompt in (prompts, [model.codec.encode(text) for text in prompts]):
        plain: Any = client.completions.create(
            **asked, prompt=prompt, max_tokens=max(max_tokens, 1)
        )
        body: Any = {**asked, "prompt": prompt, "max_tokens": max_tokens, "echo": True}
        if stream:
            options = {"include_usage": True}
            body |= {"stream": True, "stream_options": options}
            *chunks, last = client.completions.create(**body)
            usage, choices = last.usage, joined([c.choices[0].model_dump() for c in chunks])
        else:
            whole = client.completions.create(**body)
            usage, choices = whole.usage, [choice.model_dump() for choice in whole.choices]
        assert usage.completion_tokens == 4 * max_tokens
        for index, (choice, without) in enumerate(zip(choices, plain.choices, strict=True)):
            given = prompts[index // 2]
            assert choice["text"] == given + (without.text if max_tokens else "")
            assert (choice["logprobs"] is None) == (logprobs is None)
            if logprobs is not None:
                scores, ids = choice["logprobs"], model.codec.encode(given)
                assert scores["text_offset"] == list(range(len(ids) + max_tokens))
                assert scores["token_logprobs"][0] is None
                got = scores["token_logprobs"][1:]
                new = without.logprobs.token_logprobs if max_tokens else []
                assert got == pytest.approx(oracle(model, ids) + new, abs=1e-5)


def joined(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Deltas of several choices put together as a client does."""
    choices: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        choice = choices.setdefault(delta["index"], {"text": "", "logprobs": None})
        choice["text"] += delta["text"]
        if delta["logprobs"] is not None and choice["logprobs"] is None:
            choice["logprobs"] = delta["logprobs"]
        elif delta["logprobs"] is not None:
            for key, values in delta["logprobs"].items():
                choice["logprobs"][key] += values
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": 0}, "max_tokens may be 0 only with echo: true"),
        (
            {"echo": True, "prompt": [[7] * 200] * 2, "n": 64, "logprobs": 50},
            "logprobs: Input should be less than or equal to 20; got 50",
        ),
        (
            {"echo": True, "prompt": [[7] * 200] * 2, "n": 64, "logprobs": 20},
            "echo of 400 prompt tokens with n = 64 and logprobs = 20 asks for 537600 log "
            "probabilities, more than 500000; send several requests",
        ),
    ],
)
def test_c7_what_echo_refuses(
    body: dict[str, Any], message: str, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe.server.generation.MAX_ECHO_LOGPROBS", 500_000)
    refused = server.http.post(URL, json={"model": "tiny", "prompt": "x"} | body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == message
    assert server.http.post(URL, json=SCORE).status_code == 200


def test_logit_bias_priority_and_salt_reach_the_engine(client: openai.OpenAI, model: MoE) -> None:
    [wanted] = model.codec.encode("Z")
    biased = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=3, logit_bias={str(wanted): 100}
    )
    assert biased.choices[0].text == "ZZZ"
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=3,
        logit_bias={str(wanted): 100},
        extra_body={"priority": -5, "cache_salt": "mine"},
    )
    assert chat.choices[0].message.content == "ZZZ"


def test_priority_and_salt_are_those_of_the_request(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    request = MoE.request

    def watched(model: MoE, ids: Any, params: Any, *rest: Any, **more: Any) -> Any:
        seen.append(rest)
        return request(model, ids, params, *rest, **more)

    monkeypatch.setattr(MoE, "request", watched)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    for more in ({}, {"priority": -5, "cache_salt": "mine"}):
        assert server.http.post(URL, json=body | more).status_code == 200
    assert seen == [("", 0, ()), ("mine", -5, ())]


def lm_eval_requests(ids: list[int], window: int) -> list[tuple[list[int], int]]:
    """Prompts that lm-eval 0.4.13 sends to score a text, and how many of their tokens are context.

    Its windows have `window` tokens and one to begin with (the end token, 2, in front of the text);
    the last window reaches back, and what was scored already is its context.
    """
    requests = [([2, *ids[:window]], 1)]
    for done in range(window, len(ids), window):
        end = min(done + window, len(ids))
        requests.append((ids[end - window - 1 : end], window + 1 - (end - done)))
    return requests


def test_lm_evals_way_of_asking_gives_the_librarys_bits_per_byte(server: Any, model: MoE) -> None:
    """The requests of its ``local-completions`` and its reading of the answers, without lm-eval."""
    file = Path(__file__).parents[2] / "data" / "heldout_prose.txt"
    text = "".join(c for c in file.read_text() if 32 <= ord(c) < 127)[:900]
    total = expected = 0.0
    for ids, context in lm_eval_requests(model.codec.encode(text), window=252):
        body = {"model": "tiny", "prompt": [ids], "temperature": 0, "max_tokens": 1}
        answer = server.http.post(URL, json={**body, "logprobs": 1, "seed": 1234, "echo": True})
        [choice] = answer.json()["choices"]
        total += sum(choice["logprobs"]["token_logprobs"][context:-1])
        assert all(choice["logprobs"]["top_logprobs"][context:-1])
        expected += sum(oracle(model, ids)[context - 1 :])
        assert json.dumps(answer.json())  # no NaN
    assert total == pytest.approx(expected, rel=1e-6)

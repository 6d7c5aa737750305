"""What is drawn follows its structure, whatever the logits say; the oracles are other libraries."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe import Structure
from moe.errors import RequestError, StructureError
from moe.fair_pool import FairPool
from moe.sampling.batch import LogitsError, Token
from moe.sampling.constraint import Constraint, MaskLateError, MaskThreads, Structures
from moe.sampling.params import SamplingParams
from moe.sampling.sampler import Sampler
from moe.speculate.draft import Draft, Mode
from moe.text.tokenizer import TextCodec, load_tokenizer
from tests.moe.speculate.test_verify import verify

MODEL = Path(__file__).parents[3] / "examples" / "demo-model"
ENDS = (0, 2)
VOCAB = 4096 + 37  # padded beyond the tokenizer
LONGEST = 400


@pytest.fixture(scope="session")
def codec() -> TextCodec:
    tokenizer, _ = load_tokenizer(MODEL)
    return TextCodec(tokenizer, 4096, ENDS)


@pytest.fixture(scope="session")
def structures(codec: TextCodec) -> Structures:
    return Structures(codec, VOCAB)


def make(structures: Structures, structure: Structure, **options: Any) -> Sampler:
    params = SamplingParams(structure=structure, **options)
    return Sampler(params, [7], VOCAB, constraint=structures.constraint(params))


def row(noise: random.Random) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(noise.getrandbits(32))) * 3


def draw(sampler: Sampler, noise: random.Random, most: int = LONGEST) -> tuple[list[int], bool]:
    """Tokens drawn from random logits, and whether the text came to its end."""
    drawn: list[int] = []
    while len(drawn) < most:
        token = sampler.sample(row(noise))
        if token.id in ENDS:
            return drawn, True
        drawn.append(token.id)
        if token.is_last:
            return drawn, True
    return drawn, False


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(st.sampled_from(["a", "b c", 'd"', "é", "n"]), inner, max_size=3)
    return properties.flatmap(
        lambda made: st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.just(made),
                "required": st.lists(st.sampled_from(sorted(made)), unique=True)
                if made
                else st.just([]),
                "additionalProperties": st.just(False),
            }
        )
    )


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer", "minimum": -3, "maximum": 1234},
            {"type": "string", "maxLength": 5},
            {"type": "string", "pattern": "^[a-c]{1,3}x?$"},
            {"type": "string", "format": "date"},
            {"enum": ["x", 1, None, 'q"uo\\te', "ü😀"]},
            {"const": {"k": [1, "two"]}},
        ]
    ),
    lambda inner: st.one_of(
        objects(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
        st.builds(
            lambda item, few, more: {
                "type": "array",
                "items": item,
                "minItems": few,
                "maxItems": few + more,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
    ),
    max_leaves=5,
)


@given(SCHEMAS, st.integers(0, 2**32), st.sampled_from([0.0, 0.7, 2.0]))
def test_json_is_valid_by_another_validator(
    codec: TextCodec, structures: Structures, schema: Any, seed: int, temperature: float
) -> None:
    sampler = make(
        structures,
        Structure.json_schema(schema),
        temperature=temperature,
        seed=seed,
        logit_bias={5: 100.0, 90: 100.0},
    )
    # Sixteen items in nine parts each, with twenty blanks before every part.
    drawn, ended = draw(sampler, random.Random(seed), 10 * LONGEST)
    assert ended
    assert jsonschema_rs.is_valid(schema, json.loads(codec.decode(drawn)))


ATOMS = st.sampled_from(["a", "bc", "[x-z]", "[^a]", r"\.", "é", r"[0-9]", "(?:u|v)"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, b: f"(?:{a}|{b})", inner, inner),
        st.builds(lambda a, n, m: f"(?:{a}){{{n},{n + m}}}", inner, *[st.integers(0, 3)] * 2),
    ),
    max_leaves=6,
)


@given(PATTERNS, st.integers(0, 2**32))
def test_matches_are_matches_of_another_library(
    codec: TextCodec, structures: Structures, pattern: str, seed: int
) -> None:
    sampler = make(structures, Structure.regex(pattern), seed=seed)
    drawn, ended = draw(sampler, random.Random(seed), 3 * LONGEST)
    assert ended
    assert re.fullmatch(pattern, codec.decode(drawn), re.DOTALL), pattern


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=5))
@settings(max_examples=25)
def test_choices(codec: TextCodec, structures: Structures, texts: list[str]) -> None:
    drawn, ended = draw(
        make(structures, Structure.choice(texts), seed=1), random.Random(1), 10 * LONGEST
    )
    assert ended
    assert codec.decode(drawn) in texts


def test_any_object_and_a_grammar(codec: TextCodec, structures: Structures) -> None:
    for seed in range(5):
        sampler = make(structures, Structure.json_object(), seed=seed, logit_bias={0: 50.0})
        drawn, ended = draw(sampler, random.Random(seed))
        text = codec.decode(drawn)
        assert text.startswith("{")
        assert not ended or isinstance(json.loads(text), dict)
    for text in ('start: "(" start ")" | "x"', 'root ::= "(" root ")" | "x"'):
        drawn, ended = draw(make(structures, Structure.grammar(text), seed=0), random.Random(0))
        depth = codec.decode(drawn).index("x")
        assert ended
        assert codec.decode(drawn) == "(" * depth + "x" + ")" * depth


def test_a_complete_text_ends_by_itself_or_by_an_end_token(structures: Structures) -> None:
    logits = torch.zeros(VOCAB)
    logits[3000] = 50.0
    sampler = make(structures, Structure.choice(["a"]), temperature=0, logprobs=1)
    token = sampler.sample(logits)
    assert token.is_last
    assert token.top is not None
    assert token.top[0] == pytest.approx((3000, 0), abs=1e-6)  # what the model itself says
    with pytest.raises(LogitsError, match="the text is complete"):
        sampler.sample(logits)
    for options, ends in (({}, True), ({"ignore_eos": True}, False)):
        sampler = make(structures, Structure.regex("a*"), temperature=0, **options)
        logits[list(ENDS)] = 100.0
        assert (sampler.sample(logits).id in ENDS) == ends


def test_where_the_model_masks_all_that_is_allowed(structures: Structures) -> None:
    logits = torch.full((VOCAB,), float("-inf"))
    logits[9] = 1.0
    with pytest.raises(LogitsError, match="every token is masked"):
        make(structures, Structure.choice(["maybe"])).sample(logits)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


@given(st.integers(0, 2**32), st.integers(0, 12))
@settings(max_examples=15)
def test_a_replayed_sampler_goes_on_as_the_first(
    structures: Structures, seed: int, cut: int
) -> None:
    structure = Structure.json_schema(SCHEMA)
    noise = random.Random(seed)
    first = make(structures, structure, seed=seed, presence_penalty=1)
    drawn, _ = draw(first, noise, cut)
    again = make(structures, structure, seed=seed, presence_penalty=1)
    again.replay(drawn)
    if not (first._constraint is not None and first._constraint.is_over):
        state = noise.getstate()
        rest = draw(first, noise, 20)
        noise.setstate(state)
        assert draw(again, noise, 20) == rest


@pytest.mark.parametrize("seeded", [True, False])
@given(st.integers(0, 2**32), st.lists(st.integers(1, 5), min_size=20, max_size=20))
@settings(max_examples=15)
def test_drafts_change_nothing_and_see_the_structure(
    structures: Structures, seeded: bool, seed: int, depths: list[int]
) -> None:
    """Drafts by a fork: with a seed the tokens are those of no drafts, without one valid all the
    same, and what is drafted is what the structure allows."""
    structure = Structure.json_schema({**SCHEMA, "additionalProperties": False})
    options = {"seed": seed} if seeded else {}
    rows = [row(random.Random(seed + place)) for place in range(60)]
    plain, tokens = make(structures, structure, **options), list[Token]()
    while len(tokens) < 40 and not (tokens and _ended(tokens[-1])):
        tokens.append(plain.sample(rows[len(tokens)]))
    sampler, made = make(structures, structure, **options), list[Token]()
    for depth in depths:
        fork, drafted, proposals = sampler.fork(), [], []
        for place in range(depth):
            try:
                token_id, _, proposal = fork.propose(rows[len(made) + place])
            except LogitsError:
                break
            drafted.append(token_id)
            proposals.append(proposal)
        ones = (1.0,) * len(drafted)
        draft = Draft(Mode("elastic"), tuple(drafted), ones, tuple(proposals))
        made += verify(sampler, draft, torch.stack(rows[len(made) : len(made) + len(drafted) + 1]))
        if _ended(made[-1]) or len(made) > 40:
            break
    assert not any(map(_ended, made[:-1]))
    judge = make(structures, structure)
    judge.replay([token.id for token in made])  # raises where one is not allowed
    if seeded:
        assert [t.id for t in made[:40]] == [t.id for t in tokens][: len(made)]


def _ended(token: Token) -> bool:
    return token.is_last or token.id in ENDS


DEEP = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(5000)) + 'r5000: "a"'
HARD = {
    "allOf": [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{i}}}$"} for i in range(30)],
}


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (Structure.json_schema({"not": {}}), r"JSON schema cannot be followed: .*\[\"not\"\]"),
        (
            Structure.json_schema({"uniqueItems": True, "x-guidance": {"lenient": True}}),
            r"Unimplemented keys: \[\"uniqueItems\"\]",
        ),
        (Structure.json_schema({"type": "thing"}), "Invalid type: thing"),
        (
            Structure.json_schema({"$ref": "https://example.com/x"}),
            r"\$ref leads out of the schema; put what it names under \$defs",
        ),
        (Structure.json_schema({"$ref": "#"}), "no text is like that"),
        (Structure.regex("("), "regular expression cannot be followed: .*unclosed group"),
        (Structure.regex("(?=a)b"), "look-around"),
        (Structure.grammar("start: other"), 'grammar cannot be followed: .*unknown name: "other"'),
        (Structure.grammar("nothing"), r"Expected ::= at line 1"),
        (Structure.json_schema(HARD), "takes more than 2 s of a processor"),
        (Structure.grammar(DEEP), "or is nested too deeply"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    structures: Structures, structure: Structure, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        structures.check(structure)


OF_TOOLS = [("a tool", Structure.json_object())]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Structure.regex(""), "a regular expression must be a text that is not empty"),
        (lambda: Structure.regex(3), "a regular expression must be a text"),  # type: ignore[arg-type]
        (lambda: Structure.regex("a\ud800"), "lone surrogate"),
        (lambda: Structure.grammar("x" * 65537), "may have 65536 characters, got 65537"),
        (lambda: Structure.grammar("x" * 262145, OF_TOOLS), "may make a grammar of 262144 chara"),
        (lambda: Structure.json_schema("{"), r"a JSON schema must be JSON \(.*\), got '{'"),
        (lambda: Structure.json_schema("[1]"), r"a JSON schema must be an object, got '\[1\]'"),
        (lambda: Structure.json_schema({"a": {1}}), "a JSON schema must be JSON"),
        (lambda: Structure.choice([]), r"choices must be a list of texts.*, got \[\]"),
        (lambda: Structure.choice("ab"), "choices must be a list of texts.*, got 'ab'"),
        (lambda: Structure.choice(["a", ""]), "choices must be a list of texts.*, got ''"),
        (lambda: Structure("html", "x"), "must be one of json_schema, .*, got 'html'"),
        (lambda: SamplingParams(structure="json"), "structure must be a Structure or None"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_structure_is_refused(make: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make()


def test_models_without_a_tokenizer_that_can_be_read() -> None:
    with pytest.raises(RequestError, match="structured outputs need a tokenizer, and the model"):
        Structures(TextCodec(None, 10), 10).check(Structure.json_object())
    slow = type("Slow", (), {"__len__": lambda _: 10})()
    with pytest.raises(RequestError, match="need a fast tokenizer whose tokens are bytes"):
        Structures(TextCodec(slow, 10), 10).check(Structure.json_object())


def test_what_becomes_too_complex_while_it_is_followed_ends_with_the_reason(
    structures: Structures,
) -> None:
    structure = Structure.regex(".*a.{50}b.{50}c.{50}")
    structures.check(structure)
    sampler, noise = make(structures, structure, seed=0), random.Random(0)
    with pytest.raises(StructureError, match=r"cannot be followed any further: .*too many"):
        draw(sampler, noise, 1000)


def test_a_step_waits_once_for_all_masks_that_are_late() -> None:
    """Not for each of them a little longer."""
    go_on = threading.Event()

    class Stuck:
        def is_stopped(self) -> bool:
            return False

        def compute_bitmask(self) -> bytes:
            assert go_on.wait(30)
            return b""

    pool = FairPool(1, "test", each=1)
    made = [Constraint(Stuck(), VOCAB, threads=MaskThreads(pool)) for _ in range(2000)]  # type: ignore[arg-type]
    for constraint in made:
        constraint.begin_mask()
    begun = time.monotonic()
    for constraint in made:
        constraint.wait_until(begun + 0.02)
    for constraint in made:
        with pytest.raises(MaskLateError):
            constraint.allowed_bits()
    assert time.monotonic() - begun < 2  # else 4
    go_on.set()

"""Block diffusion: the model refines a canvas of tokens in several passes, then all are final.

Papers: Block Diffusion (BD3-LM, arXiv 2503.09573); the models that run are DiffusionGemma's kind. A
sequence reads its prompt, refines a canvas of ``canvas_length`` tokens until they are final, reads
them, and goes on. The model's own generation code decides each pass, so with a seed the tokens are
those of transformers' own ``generate``, which each load proves on short canvases. No key switches
the method on: a model does, by its structure (`kind.serves`).

Differs from the model's own code: all sequences of a step share the pass over their canvases,
whatever their step of refinement, and each expert is read once for all of them.

Two keys change what is written, and need ``lossless: false``. ``max_steps`` bounds the passes.
``refresh`` leaves rows of a canvas out of passes while their input hardly moves (Elastic-Cache,
arXiv 2510.14973; the full refresh after some passes is dLLM-Cache's, 2506.06295). It differs from
the paper: the test of drift looks at what a row reads, for each row, in place of attention to the
most attended token, for a layer and all above it.

Measured with the shipped model (lab/results/2026-11-26-diffusion.md): 2.5 times the tokens/s of
transformers one by one, 2.1 times those of its batch; 2.7 times fewer bytes of experts from disk
with four sequences at half of them in memory. ``refresh: elastic:0.3:4`` gives 1.6 times the
tokens/s, and half of the passes (``max_steps``) 1.9 times, with text as good by the measures there.
Other rules of which predictions stay and when to stop were built, measured there, and removed: they
saved at most 12 % of the passes.

    python -m lab.diffusion
"""

import re
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from moe.hooks import Method
from moe.section import Settings


def _check_refresh(text: str) -> str:
    if text != "all" and not re.fullmatch(r"elastic:(0?\.\d+|[01](\.0*)?):[1-9]\d{0,3}", text):
        raise PydanticCustomError(
            "refresh",
            "must be all, or elastic:S:N with a similarity S in [0, 1] and N of 1 to 9999 passes",
        )
    return text


class DiffusionSettings(Settings):
    """How models that write canvases refine them; other models ignore it."""

    max_steps: int | None = Field(default=None, ge=1, le=4096)
    """Most passes that refine a canvas. null: as many as the model's schedule has."""

    refresh: Annotated[str, AfterValidator(_check_refresh)] = "all"
    """Which rows of a canvas a pass computes. all: every one. elastic:S:N: those whose input has a
    cosine similarity below S to the one they were last computed with; the others keep keys, values
    and predictions. Each N-th pass computes all."""


_HERE = "moe.methods.diffusion"
METHOD = Method(
    about="models that refine a canvas of tokens in several passes write by their own code",
    price="2.1 times the tokens/s of transformers' batch, with the same tokens",
    serves=f"{_HERE}.kind:serves",
    hooks={
        "built": f"{_HERE}.kind:share_tied_modules",
        "text_model": f"{_HERE}.kind:text_model",
        "generation": f"{_HERE}.kind:set_generation",
        "refuse": f"{_HERE}.limits:refuse",
        "measure": f"{_HERE}.footprint:measure",
        "images": f"{_HERE}.images:CanvasImageProbe",
        "writer": f"{_HERE}.writer:make_writer",
        "sizes": f"{_HERE}.plan:canvas_sizes",
        "evaluate": f"{_HERE}.evaluate:evaluate_canvases",
    },
    settings=DiffusionSettings,
    changes_answers="changes what a model writes",
    moved={
        f"diffusion.{key}": f"methods.diffusion.{key}" for key in DiffusionSettings.model_fields
    },
    files=(
        "lab/diffusion/__init__.py",
        "lab/diffusion/__main__.py",
        "lab/diffusion/fewer_passes.py",
        "lab/diffusion/own_generate.py",
        "tests/lab/test_fewer_passes.py",
        "tests/methods/diffusion/conftest.py",
        *(
            f"tests/methods/diffusion/test_{name}.py"
            for name in (
                *("denoise", "evaluate", "images", "kept_rows", "names", "plan"),
                *("ranks", "runner", "server", "writer"),
            )
        ),
    ),
)

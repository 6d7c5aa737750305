"""The sampling defaults in a model's generation_config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experts.files import read_small
from moe.errors import CheckpointError, RequestError
from moe.sampling.params import SamplingParams

GENERATION_CONFIG = "generation_config.json"
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


@dataclass(frozen=True)
class ModelSampling:
    """A model's own sampling defaults.

    Attributes:
        values: those of `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty` and
            `max_new_tokens` that it has.
        notices: a sentence for each value that is not valid and not used.
    """

    values: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    @classmethod
    def from_directory(cls, directory: Path) -> ModelSampling:
        """Read them from a model's directory. Raises `CheckpointError` if the file is damaged."""
        return cls.of(read_generation_config(directory))

    @classmethod
    def of(cls, config: dict[str, Any]) -> ModelSampling:
        """``do_sample: false`` means temperature 0; true means 1 if no temperature is given."""
        own = cls()
        for name in _NAMES:
            value = config.get(name)
            if value is None:
                continue
            try:
                SamplingParams(**{name: value})
            except RequestError as error:
                own.notices.append(
                    f"{GENERATION_CONFIG} of the model: {error}; the value is not used"
                )
            else:
                own.values[name] = value
        sampled = config.get("do_sample")
        if sampled is False:
            own.values["temperature"] = 0.0
        elif sampled is True:
            own.values.setdefault("temperature", 1.0)
        elif sampled is not None:
            own.notices.append(
                f"{GENERATION_CONFIG} of the model: do_sample must be true or false, "
                f"got {sampled!r}; the value is not used"
            )
        return own


def read_generation_config(directory: Path) -> dict[str, Any]:
    """The file's object, empty where there is no file. Raises `CheckpointError` if damaged."""
    path = directory / GENERATION_CONFIG
    try:
        config = json.loads(read_small(path).decode())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} must be a JSON object: {error}; repair or remove the file"
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must be a JSON object; repair or remove the file")
    return config

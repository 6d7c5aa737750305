"""Prefill and decode in different servers (DistServe, arXiv 2401.09670; Splitwise, 2311.18677).

``methods.prefill_apart.role``. A decode server takes all requests, and asks prefill servers for the
keys and values of long prompts, so that reading a prompt delays no running answer. They come by
HTTP, block by block, each with a code by the secret that the servers share. Whatever fails in
between costs time only: the decode server then reads the prompt itself.

Differs from the papers: no search for how many servers of each kind (`moe plan --ranks` simulates
it), and no transfer layer by layer while the prompt is still read. Measured with two chats beside
prompts of 1,500 tokens on two cores (docs/scale.md):

    python -m lab.prefill_apart
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from moe.hooks import Method
from moe.section import Settings


def _check_server(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#@]+", text):
        raise PydanticCustomError("server", 'must be like "http://10.0.0.7:8000"')
    return text


class PrefillApartSettings(Settings):
    """The role of this server beside others of the same model and settings."""

    role: Literal["both", "prefill", "decode"] = "both"
    """decode: take all requests, and get the keys and values of long prompts from servers. prefill:
    compute them for servers that know MOE_LAUNCH_SECRET. Both keep them in the prefix cache
    (memory.prefix_tokens). both: one server does both."""

    servers: tuple[Annotated[str, AfterValidator(_check_server)], ...] = Field(
        default=(), strict=False
    )
    """decode: addresses of servers with the role prefill, such as http://10.0.0.7:8000. Where none
    answers within parallel.timeout_s, prompts are read here."""

    tokens: int = Field(default=512, ge=1)
    """decode: prompts with fewer unknown tokens are read here."""

    @model_validator(mode="after")
    def _check_servers(self) -> "PrefillApartSettings":
        if (self.role == "decode") != bool(self.servers):
            raise PydanticCustomError(
                "role",
                "methods.prefill_apart.role: decode and methods.prefill_apart.servers go together: "
                "set both or none",
            )
        return self


METHOD = Method(
    about="servers that read prompts for the servers that decode",
    price="running answers are not delayed by prompts; a server more, and bytes between them",
    hooks={
        "server_role": "moe.methods.prefill_apart.role:make_role",
        "rank_advice": "moe.methods.prefill_apart.planner:advise",
    },
    settings=PrefillApartSettings,
    switch="role",
    needs={"parallel.enabled": False},
    moved={
        "parallel.role": "methods.prefill_apart.role",
        "parallel.prefill_servers": "methods.prefill_apart.servers",
        "parallel.prefill_tokens": "methods.prefill_apart.tokens",
    },
    files=(
        "tests/moe/server/test_prefill_apart.py",
        "tests/methods/test_prefill_split.py",
        "lab/prefill_apart.py",
        "lab/simulation/apart.py",
        "tests/lab/test_simulate_apart.py",
    ),
)

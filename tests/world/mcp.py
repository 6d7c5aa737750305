"""Schemas that MCP servers give their tools: each is followed to its end, or refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe.sampling import grammar
from tests.moe.sampling.test_schema_suite import written
from tests.world.install import FOLDERS, installed

SECONDS, TEXTS = 120, 20
SERVERS: tuple[tuple[str, tuple[str, ...], dict[str, str]], ...] = (
    ("mcp-npm", ("mcp-server-filesystem", "/tmp"), {}),
    ("mcp-npm", ("mcp-server-memory",), {}),
    ("mcp-npm", ("mcp-server-everything",), {}),
    ("mcp-npm", ("mcp-server-sequential-thinking",), {}),
    ("mcp-npm", ("mcp-server-github",), {}),
    ("mcp-npm", ("playwright-mcp",), {}),
    ("mcp-npm", ("chrome-devtools-mcp",), {}),
    ("mcp-npm", ("notion-mcp-server",), {"NOTION_TOKEN": "none"}),
    ("mcp-pypi", ("mcp-server-git",), {}),
    ("mcp-pypi", ("mcp-server-time",), {}),
    ("mcp-pypi", ("mcp-server-fetch",), {}),
    ("mcp-pypi", ("excel-mcp-server", "stdio"), {}),
)
"""Folders of `FOLDERS`, commands and environments: a server lists its tools without an account."""


def schemas_are_followed(fresh: bool) -> str:
    """Ask every server for its tools, and try the schema of each.

    Args:
        fresh: install today's releases.

    Returns:
        How many tools there are, and why some are refused.

    Raises:
        AssertionError: a text of a schema that was not refused comes to a dead end.
        OSError: a server cannot be started, or ends.
    """
    places = {name: installed(name, fresh) for name in dict.fromkeys(row[0] for row in SERVERS)}
    tools, refused = 0, Counter[str]()
    for name, command, environ in SERVERS:
        program = FOLDERS[name].programs(places[name]) / command[0]
        for tool in tools_of([str(program), *command[1:]], environ):
            tools += 1
            schema = tool["inputSchema"]
            if why := grammar._fault("json_schema", json.dumps(schema)):
                refused[why] += 1
                continue
            for seed in range(TEXTS):
                written(schema, seed)
    followed = tools - refused.total()
    reasons = "".join(f"; {count} refused: {why}" for why, count in refused.items())
    return f"{followed} of {tools} tools of {len(SERVERS)} servers are followed{reasons}"


def tools_of(command: list[str], environ: dict[str, str]) -> list[dict[str, Any]]:
    """The tools that a server lists over its standard input and output."""
    found: list[dict[str, Any]] = []
    with running(command, environ) as server:
        about = {"protocolVersion": "2025-06-18", "clientInfo": {"name": "moe", "version": "0"}}
        ask(server, 0, "initialize", about | {"capabilities": {}})
        send(server, {"method": "notifications/initialized"})
        where: dict[str, Any] = {}
        while True:
            page = ask(server, len(found) + 1, "tools/list", where)
            found += page["tools"]
            if not page.get("nextCursor"):
                return found
            where = {"cursor": page["nextCursor"]}


@contextmanager
def running(command: list[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A server that ends with the block, or after `SECONDS`."""
    server = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path("/tmp"),
        env={"PATH": os.environ["PATH"], "HOME": "/tmp"} | environ,
        text=True,
    )
    ends = threading.Timer(SECONDS, server.kill)
    ends.start()
    try:
        yield server
    finally:
        ends.cancel()
        server.kill()
        server.communicate()


def send(server: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert server.stdin is not None
    server.stdin.write(json.dumps({"jsonrpc": "2.0"} | message) + "\n")
    server.stdin.flush()


def ask(server: subprocess.Popen[str], number: int, method: str, about: dict[str, Any]) -> Any:
    """The result of a call."""
    send(server, {"id": number, "method": method, "params": about})
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith("{") and (answer := json.loads(line)).get("id") == number:
            return answer["result"]
    raise OSError(f"{server.args!r} has ended before it answered {method}")

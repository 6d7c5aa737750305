"""Fixtures of servers, for the method's own."""

from __future__ import annotations

from tests.moe.server.conftest import model, serve, text_checkpoint

__all__ = ["model", "serve", "text_checkpoint"]

"""``python -m moe``."""

from moe.cli import command

command()

"""``moe generate --batch``: many requests from a file, without a server."""

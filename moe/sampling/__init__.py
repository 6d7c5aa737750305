"""The next token, from logits and what a request asks for."""

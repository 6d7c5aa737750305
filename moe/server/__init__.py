"""``moe serve``: an HTTP server for OpenAI's and Anthropic's clients around one model.

`service.py` is the life of a server, `runner.py` the queue in front of the engine thread, `app.py`
and `routes.py` the routes. `openai/` says what chats and completions may ask for and how they are
answered; `responses/` and `anthropic/` translate theirs to chats and back. `guard.py`, `bodies.py`
and `streams.py` keep out what is not allowed, too large or too slow.
"""

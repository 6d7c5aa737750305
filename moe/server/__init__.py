"""``moe serve``: an OpenAI-compatible HTTP server around one model.

`runner.py` has the queue in front of the engine thread, `app.py` the routes, `service.py` the life
of a server. Requests are checked by `protocol.py` and answered in the shapes of `outputs.py`;
`guard.py`, `bodies.py` and `streams.py` keep what is wrong, too large or too slow away.
"""

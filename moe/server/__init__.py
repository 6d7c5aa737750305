"""``moe serve``: one model over HTTP, for OpenAI's and Anthropic's clients.

The three dialects are translations of one request. Chats and completions (`openai/`) are the
native one: `openai/request.py` and `openai/options.py` say what a request may ask for,
`openai/answers.py` writes its answer. `responses.py` and `anthropic.py` turn their requests into
chats and write the answer in their own words; `translation.py` is what those two share.
`paths.py` has paths as clients write them.

A request passes through these, in this order:

- `connections.Acceptor` accepts its connection, when there is room;
- `guard.Guard` checks the API key and the host name, and gives the request its id;
- `bodies.json_body` reads the body within limits and checks it against a pydantic model
  (`fields.py` has the types of fields, `contents.py` content in parts, `unsupported.py` the table
  of what is not honoured, and `ignored.py` names what is taken all the same);
- `routes.py` and `app.py` hold the routes: the first those that read prompts, the second those
  that describe the server;
- `generation.answer` builds the sequence groups, and returns the answer whole or as a stream;
- `engine_queue.EngineQueue` bounds what waits;
- `engine_thread.EngineThread` steps the engine; a `GenerationJob` carries tokens from there to the
  event loop;
- an `answers.Answer` turns tokens into the JSON of its dialect;
- `event_stream.py` stops the work when the client goes away or does not read.

`experts_stream.py` shows the experts at work to any number of viewers, `page/` is the page for
browsers that does so. `serve.py` is the process, `metrics.py` what Prometheus reads, `errors.py`
the shape of errors.
"""

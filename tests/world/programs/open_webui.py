"""Open WebUI by its own HTTP API, as its page uses it: a chat in which it runs one of its tools."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
import uuid
from typing import Any

ADDRESS, MODEL, QUESTION = f"http://127.0.0.1:{os.environ['PORT']}", *sys.argv[1:3]
TOOL = '''
class Tools:
    def read_file(self, path: str) -> str:
        """
        Read a text file.
        :param path: of the file
        """
        with open(path) as file:
            return file.read()
'''
headers = {"Content-Type": "application/json"}


def ask(path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(ADDRESS + path, data, headers)
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)


def is_up() -> bool:
    try:
        return bool(ask("/health"))
    except (urllib.error.URLError, ConnectionError):
        return False


while not is_up():
    time.sleep(1)
user = {"name": "world", "email": "world@example.com", "password": str(uuid.uuid4())}
headers["Authorization"] = f"Bearer {ask('/api/v1/auths/signup', user)['token']}"
assert [model["id"] for model in ask("/api/models")["data"]] == [MODEL]
about = {"id": "files", "name": "files", "meta": {"description": "Files."}, "access_grants": []}
ask("/api/v1/tools/create", {**about, "content": TOOL})

said = {"id": "said", "parentId": None, "childrenIds": ["made"], "role": "user"}
said |= {"content": QUESTION, "models": [MODEL]}
made = {"id": "made", "parentId": "said", "childrenIds": [], "role": "assistant", "content": ""}
turns = {"said": said, "made": {**made, "model": MODEL}}
history = {"messages": turns, "currentId": "made"}
chat = ask("/api/v1/chats/new", {"chat": {"title": "world", "models": [MODEL], "history": history}})
tasks = ("title_generation", "tags_generation", "follow_up_generation")
question = {
    **{"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "stream": True},
    **{"tool_ids": ["files"], "params": {"function_calling": "native"}},
    **{"chat_id": chat["id"], "id": "made", "session_id": "world", "parent_id": "said"},
    **{"user_message": said, "background_tasks": dict.fromkeys(tasks, False)},
}
ask("/api/chat/completions", question)
while not (answer := ask(f"/api/v1/chats/{chat['id']}")["chat"]["history"]["messages"]["made"]).get(
    "done"
):
    time.sleep(1)
print(json.dumps(answer))

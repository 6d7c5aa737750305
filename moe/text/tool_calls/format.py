"""`CallFormat`: how a model writes tool calls.

An answer with calls is text, `section_open`, calls with `separator` between them, `section_close`;
a call is `call_open`, its body, `call_close`. Each of these may be empty. Literals are as the chat
template writes them; where a model puts its whitespace does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

KeyPath = tuple[str, ...]
"""Keys from the outside of a JSON object inwards."""


@dataclass(frozen=True)
class ObjectBody:
    """A JSON object that holds name and arguments, as in ``{"name": ..., "arguments": {...}}``.

    Attributes:
        sample: such an object, of the call that the template was asked to write.
        varying: keys of what else differs from call to call, such as their number.
    """

    name: KeyPath
    arguments: KeyPath
    sample: str = ""
    varying: tuple[KeyPath, ...] = ()

    @property
    def literals(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class NamedBody:
    """The name, a literal, and the arguments as a JSON object.

    Attributes:
        number: the text before the call's number, which follows the name; "": it has none.
    """

    middle: str
    number: str = ""

    @property
    def literals(self) -> tuple[str, ...]:
        return (self.middle,)


@dataclass(frozen=True)
class TaggedBody:
    """The name, a literal, and of each argument its key and its value between literals.

    Strings are written as they are, everything else as JSON.

    Attributes:
        marked: what stands for `open` and `key_close` before values that are JSON, where tags say
            which of both a value is (DeepSeek V3.2); None: tags do not say it.
    """

    middle: str
    open: str
    key_close: str
    close: str
    marked: tuple[str, str] | None = None

    @property
    def literals(self) -> tuple[str, ...]:
        return (self.middle, self.open, self.key_close, self.close, *(self.marked or ()))


@dataclass(frozen=True)
class BracedBody:
    """The name, a literal, and the arguments in a notation like JSON's (Gemma 4): keys are bare,
    and strings stand between two quotes, without escapes.

    Attributes:
        is_sorted: keys come in the order of the alphabet.
    """

    middle: str
    quote: str
    is_sorted: bool = False

    @property
    def literals(self) -> tuple[str, ...]:
        return (self.middle, self.quote)


Body = ObjectBody | NamedBody | TaggedBody | BracedBody


@dataclass(frozen=True)
class Channels:
    """The format of an answer as messages on channels: each is a header, `message`, the content,
    one of `ends`. A header names a channel behind `channel`, and a recipient behind `recipient` if
    the message is a call.

    Attributes:
        start: the special token that begins the header of every message but the first.
        thought: the channel of reasoning; "": not known.
    """

    start: str
    channel: str
    message: str
    ends: tuple[str, ...]
    recipient: str
    thought: str = ""

    @property
    def literals(self) -> tuple[str, ...]:
        return (self.start, self.channel, self.message, *self.ends)


@dataclass(frozen=True)
class CallFormat:
    """The format of an answer with calls; the module's docstring explains the literals.

    Attributes:
        several: the template writes more than one call in an answer.
        arguments_as_text: the template takes arguments as JSON text, not as an object.
        no_content: what the template takes as the content of an answer that only calls.
        ids: the template writes only the ids of calls: this text, the name, and the number of the
            call in the conversation (`NamedBody.number`); "": it writes names.
        first: the number of the first call.
        restarts: calls are counted in their answer, not in the conversation.
        channels: answers are messages on channels, and a call is one of them.
    """

    body: Body
    section_open: str = ""
    call_open: str = ""
    call_close: str = ""
    separator: str = ""
    section_close: str = ""
    several: bool = True
    arguments_as_text: bool = False
    no_content: str | None = None
    ids: str = ""
    first: int = 0
    restarts: bool = False
    channels: Channels | None = None

    @property
    def opening(self) -> str:
        """The word that begins every answer's first call; "" if that is the JSON itself.

        Without such a word, calls are only looked for at the start of an answer.
        """
        words = f"{self.section_open} {self.call_open}".split()
        return words[0] if words and any(map(str.isalnum, words[0])) else ""

    @property
    def literals(self) -> tuple[str, ...]:
        outside = (self.section_open, self.call_open, self.call_close, self.section_close)
        channels = () if self.channels is None else self.channels.literals
        return (*outside, self.separator, *self.body.literals, *channels)

    def as_dict(self) -> dict[str, str]:
        """The shape and the literals around a call, for the server's status."""
        names = {ObjectBody: "JSON object", NamedBody: "name and JSON", TaggedBody: "tagged values"}
        names[BracedBody] = "name and a notation like JSON"
        if self.channels is not None:
            names[NamedBody] = "a message on a channel"
        around = {"opens": self.section_open + self.call_open}
        return {"shape": names[type(self.body)], **around, "closes": self.call_close}

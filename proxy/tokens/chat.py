"""How a chat becomes a prompt: what each message, call, result and field of the request costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

from proxy.conversation import Message, Messages, Opaque, Part, ToolCall
from proxy.tokens import images, tools
from proxy.tokens.calibration import EXACT, Calibration
from proxy.tokens.families import LONGEST_GIVEN, Family, family
from proxy.tokens.formats import Format, minimal, read_format
from proxy.tokens.memory import Remembered
from proxy.tokens.rewritten import compact, dumped, read_json, read_result
from proxy.tokens.steps import Step, called, held, shared, spoken_by, steps, texts
from proxy.tokens.vocabulary import Vocabulary, utf8_size, vocabulary

REMEMBERED_BYTES = 16 * 2**20
"""Costs of messages and of whole steps: about twenty long conversations."""

SEAM = 64
"""Characters at the end of a text that what follows it can merge with."""

MOST_WRITTEN = 4
"""Characters of TypeScript for one of JSON: it is shorter, unless references multiply, and then it would never end."""

NAME = 64
"""The longest name that the API takes."""

MOST_KEPT, MOST_KEPT_BYTES = 64, 128 * 1024
"""Combinations of fields whose ruler is kept at hand, and their size: 8 MB at the most."""

FIELDS_AT_ONCE = 16_384
"""Bytes of tools and response_format that are read without a second thought: a millisecond."""

FieldKey = tuple[str, str, bytes, bytes]
"""What it is, the encoding, and the raw JSON that it depends on."""


_STEPS: Remembered[tuple[str, Step]] = Remembered(REMEMBERED_BYTES)
_FIELDS: Remembered[FieldKey] = Remembered(REMEMBERED_BYTES // 4)
_THOUGHTS: Remembered[tuple[str, bytes]] = Remembered(REMEMBERED_BYTES // 4)


class _Noted(NamedTuple):
    """What a history's steps cost. closed: all but the last, which may still get results. start: where that one begins."""

    closed: int
    start: int
    total: int


Found = TypeVar("Found")


class _Settled(Generic[Found]):
    """A property that follows from a ruler's rules and fields alone: found once for all the calibrations that it is given."""

    def __init__(self, find: Callable[[ChatRuler], Found]) -> None:
        self._find, self._name = find, find.__name__

    def __get__(self, ruler: ChatRuler, owner: type[ChatRuler]) -> Found:
        settled = ruler._settled
        if self._name not in settled:
            settled[self._name] = self._find(ruler)
        found: Found = settled[self._name]
        return found


class ChatRuler:
    """The ruler of one request. `fields`: the raw JSON of those of the body's top-level fields that SETTLING names."""

    __slots__ = ("_noted_as", "_settled", "_words", "around", "calibration", "fields", "rules")

    around: int
    """Tells apart what stands around the messages: rules, tools, formats. Good within this process only."""

    def __init__(self, rules: Family, fields: Mapping[str, bytes], calibration: Calibration = EXACT) -> None:
        self.rules, self.fields, self.calibration = rules, fields, calibration
        self._words: Vocabulary = vocabulary(rules.encoding)
        self._settled: dict[str, Any] = {}
        self.around = hash((rules, *fields.items()))
        self._noted_as = "raw", self.around

    def calibrated(self, calibration: Calibration) -> ChatRuler:
        """The same counts, told as this upstream tells them."""
        made = ChatRuler.__new__(ChatRuler)
        made.rules, made.fields, made._words, made._settled = self.rules, self.fields, self._words, self._settled
        made.around, made._noted_as, made.calibration = self.around, self._noted_as, calibration
        return made

    @_Settled
    def _tag(self) -> str:
        return f"{self.rules.tag}/{self._answered}"

    @property
    def encoding(self) -> str:
        """The name of the vocabulary that it counts with."""
        return self.rules.encoding

    @property
    def fixed(self) -> int:
        """Tokens of everything but the messages: tools, response_format, tool_choice, priming, and what the upstream adds."""
        return math.ceil(self._fixed * self._scale + max(0.0, self.calibration.offset))

    @property
    def _scale(self) -> float:
        """Theirs for one of ours, where it is about parts of a request."""
        return self.calibration.least or self.calibration.slope

    def text(self, text: str) -> int:
        """Tokens of a plain string."""
        return math.ceil(self._words.count(text) * self._scale)

    def message(self, message: Message) -> int:
        """Tokens that this message adds; of a batch's results, what each would cost alone."""
        return math.ceil(self._step((message,)) * self._scale)

    def total(self, messages: Sequence[Message]) -> int:
        """Tokens of the whole request with these messages."""
        return math.ceil(self.calibration.tokens(self.raw(messages)))

    def raw(self, messages: Sequence[Message]) -> int:
        """Our own count of the whole request, before calibration: what calibration learns from."""
        if not isinstance(messages, Messages):
            return self._raw(messages)
        noted: int | None = messages.notes.get(self._noted_as)
        if noted is None:
            noted = self._raw(messages)
            messages.keep(self._noted_as, noted)
        return noted

    def _raw(self, messages: Sequence[Message]) -> int:
        thoughts = sum(tokens for _, tokens in self._thoughts(messages))
        return self._fixed + self._steps(messages) + self._instructed(messages) + thoughts

    def _steps(self, messages: Sequence[Message]) -> int:
        """What the steps cost; of a history that grew, only what is new is looked up."""
        if not isinstance(messages, Messages):
            return sum(map(self._step, steps(messages)))
        name = ("steps", self._tag)
        noted: _Noted | None = messages.note(name)
        if noted is None:
            before: _Noted | None = messages.noted_of_base(name)
            closed, start = (before.closed, before.start) if before is not None else (0, 0)
            last, end = 0, start
            for step in steps(messages[start:]):
                closed, last, start, end = closed + last, self._step(step), end, end + len(step)
            noted = _Noted(closed, start, closed + last)
            messages.keep(name, noted)
        return noted.total

    def shares(self, messages: Sequence[Message]) -> list[int]:
        """Our own count of each message as it stands in this request; with `raw(())` they add up to `raw`."""
        shares = [0] * len(messages)
        start = 0
        for step in steps(messages):
            for index, cost in self.costs(step):
                shares[start + index] += cost
            start += len(step)
        first = next((index for index, message in enumerate(messages) if message.is_instruction), 0)
        if messages:
            shares[first] += self._instructed(messages)
        for index, cost in self._thoughts(messages):
            shares[index] += cost
        return shares

    def part(self, part: Part) -> int:
        """Our own count of what a part says, without what frames its message."""
        if isinstance(part, ToolCall):
            return self._call(part)
        return self._opaque(part) if isinstance(part, Opaque) else self._words.count(part.text)

    def cold_bytes(self, messages: Sequence[Message], enough: int | None = None) -> int:
        """UTF-8 bytes of text that a `total` of these messages would have to tokenize now; looks no further than `enough`."""
        cold = sum(len(raw) for _, _, *raws in self._unknown_fields() for raw in raws)
        if cold > FIELDS_AT_ONCE:
            # What a message costs depends on the wanted format, which is too big to be read here.
            return cold + sum(utf8_size(text) for message in messages for text in texts(message))
        for size in self._cold_sizes(messages):
            cold += size
            if enough is not None and cold > enough:
                break
        return cold

    def _cold_sizes(self, messages: Sequence[Message]) -> Iterator[int]:
        for step in self._new_steps(messages):
            if (self._tag, step) not in _STEPS:
                yield sum(utf8_size(text) for message in step for text in texts(message) if not self._words.knows(text))
        for index in self._thinking(messages):
            for part in _reasoning(messages[index]):
                if (self.rules.encoding, part.raw) not in _THOUGHTS:
                    yield len(part.raw)

    def known(self, messages: Sequence[Message]) -> int | None:
        """The `raw` of these messages where that takes look-ups only; None where there is anything to tokenize."""
        if isinstance(messages, Messages) and (noted := messages.notes.get(self._noted_as)) is not None:
            return cast(int, noted)
        return None if self.cold_bytes(messages, 0) else self.raw(messages)

    def _new_steps(self, messages: Sequence[Message]) -> Iterator[Step]:
        """The steps that are not known to have been counted."""
        if not isinstance(messages, Messages):
            return steps(messages)
        name = ("steps", self._tag)
        if messages.note(name) is not None:
            return iter(())
        before: _Noted | None = messages.noted_of_base(name)
        return steps(messages[before.start :] if before is not None else messages)

    def _unknown_fields(self) -> Iterator[FieldKey]:
        """What is still to be read of tools and response_format."""
        if any(self._tools_key[2:]) and self._tools_key not in _FIELDS:
            yield self._tools_key
        asked = _FIELDS.get(self._answered_key)
        if self._answered_key[2] and asked != 0 and not any(self._format_key(after) in _FIELDS for after in (True, False)):
            yield self._answered_key

    # What the messages cost.

    def _step(self, step: Step) -> int:
        key = (self._tag, step)
        cost = _STEPS.get(key)
        if cost is None:
            cost = sum(cost for _, cost in self.costs(step))
            _STEPS.put(key, cost, sum(map(held, step)))
        return cost

    def costs(self, step: Step) -> Iterator[tuple[int, int]]:
        """(index in the step, tokens) of everything in it."""
        head = step[0]
        calls = head.calls
        batch = len(calls) > 1 and not self.rules.reasoning
        for index, message in enumerate(step):
            yield index, self._media(message)
            if index and batch:
                continue
            if message.is_result:
                yield index, self._result(message, called(message, index, calls))
            else:
                yield index, self._said(message)
        if batch:
            yield from self._batch(step)

    def _said(self, message: Message) -> int:
        count = self._words.count
        calls = message.calls
        speaker = count(spoken_by(message))
        tokens = 0 if calls and not message.text else 3 + speaker + count(message.text)
        if message.role == "assistant" and not calls:
            tokens += self._answered
        if len(calls) == 1 or (calls and self.rules.reasoning):
            # Each further call of the same answer needs no new speaker.
            tokens += sum(map(self._call, calls)) + 1 + speaker + (4 if self.rules.gpt5 else 0)
        return tokens

    def _call(self, call: ToolCall) -> int:
        count = self._words.count
        arguments = compact(call.arguments)
        # On record, gpt-5 sees one token more where there is nothing in the braces.
        return 4 + count(f" to=functions.{call.name}") + count(arguments) + (self.rules.gpt5 and arguments == "{}")

    def _result(self, message: Message, name: str) -> int:
        count = self._words.count
        # The name is a word of its own here: its dot does not merge with it.
        return 4 + count(name) + count(message.text) + (2 if self.rules.gpt5 else 0)

    def _batch(self, step: Step) -> Iterator[tuple[int, int]]:
        """Parallel calls are sent as one message with a JSON body, their results as one JSON list."""
        count = self._words.count
        uses = ",".join(
            f'{{"recipient_name":"functions.{call.name}","parameters":{compact(call.arguments or "{}")}}}'
            for call in step[0].calls
        )
        yield 0, 3 + count(spoken_by(step[0])) + count(" to=multi_tool_use.parallel") + count(f'{{"tool_uses":[{uses}]}}')
        if len(step) > 1:
            results = [read_result(message.text) for message in step[1:]]
            whole = 6 + count("multi_tool_use.parallel") + count(dumped(results, ascii_only=not self.rules.plain))
            yield from shared(whole, step)

    def _media(self, message: Message) -> int:
        return sum(self._opaque(part) for part in message.parts if isinstance(part, Opaque))

    def _opaque(self, part: Opaque) -> int:
        if part.kind == "image":
            return images.picture(self.rules.rate, part.raw)
        if part.kind == "audio":
            return images.recording(part.raw)
        if part.kind == "file":
            return images.document(part.raw)
        if part.raw.strip() in _NOTHING or part.place not in _SHOWN:
            return 0
        if part.kind in ("reasoning", "refusal"):
            return self._thought(part)
        if part.place == "content" and images.carries_data(part.raw):
            return images.document(part.raw)
        return self._words.count(part.raw.decode("utf-8", "replace"))

    # What stands around them.

    @_Settled
    def _tools_key(self) -> FieldKey:
        return (
            "gpt-5 tools" if self.rules.gpt5 else "tools",
            self.rules.encoding,
            self.fields.get("tools", b""),
            self.fields.get("functions", b""),
        )

    def _format_key(self, after_tools: bool) -> FieldKey:
        return "format after tools" if after_tools else "format", *self._answered_key[1:]

    @_Settled
    def _answered_key(self) -> FieldKey:
        return "answered", self.rules.encoding, self.fields.get("response_format", b""), b""

    @property
    def offers_tools(self) -> bool:
        return bool(self._offered)

    @_Settled
    def _offered(self) -> int:
        """Tokens of the tools as the model reads them."""
        _, _, offered, legacy = self._tools_key
        return self._remembered(self._tools_key, lambda: _tools_tokens(self._words, offered, legacy, self.rules.gpt5))

    def _remembered(self, key: FieldKey, count: Callable[[], int]) -> int:
        if not any(key[2:]):
            return 0
        cost = _FIELDS.get(key)
        if cost is None:
            cost = count()
            _FIELDS.put(key, cost, 200 + len(key[2]) + len(key[3]))
        return cost

    @_Settled
    def tools(self) -> int:
        """Tokens of the tools and of what introduces them, before calibration."""
        if not self._offered:
            return 0
        if self.rules.reasoning:
            return self._offered + (91 if self.rules.gpt5 else 10)
        return self._offered + 9

    @_Settled
    def _fixed(self) -> int:
        return self.rules.priming + self.tools + self._forced() + self._format

    def _forced(self) -> int:
        choice = read_json(self.fields.get("tool_choice", b"")) or read_json(self.fields.get("function_call", b""))
        if not isinstance(choice, dict) or self.rules.gpt5:
            return 0
        function = choice.get("function")
        name = (function if isinstance(function, dict) else choice).get("name")
        return 4 + self._words.count(f" to=functions.{name}") if isinstance(name, str) and name else 0

    @_Settled
    def _wanted(self) -> Format | None:
        """The JSON schema that the answer must follow."""
        return read_format(read_json(self.fields.get("response_format", b"")))

    @_Settled
    def _format(self) -> int:
        """Tokens of the wanted format, which stands after the tools, or alone in a system message of its own."""
        return self._remembered(self._format_key(bool(self._offered)), self._format_tokens) if self._answered else 0

    def _format_tokens(self) -> int:
        wanted = self._wanted
        if wanted is None:
            return 0
        text = wanted.render(after_tools=bool(self._offered))
        if self._offered:
            return self._words.count(f"\n\n{text}")
        return self._words.count(text) + 4 + (0 if wanted.strict else 1)

    @_Settled
    def _answered(self) -> int:
        """What an earlier answer costs more when a format is wanted: it is addressed to that format."""
        return self._remembered(self._answered_key, self._answered_tokens)

    def _answered_tokens(self) -> int:
        return 0 if self._wanted is None else 2 + self._words.count(self._wanted.name[:NAME])

    def _thoughts(self, messages: Sequence[Message]) -> Iterator[tuple[int, int]]:
        """(index, tokens) of reasoning that is sent back beside the content; one form where it is there in several."""
        for index in self._thinking(messages):
            yield index, max(map(self._thought, _reasoning(messages[index])), default=0)

    def _thinking(self, messages: Sequence[Message]) -> Iterator[int]:
        """Indices whose reasoning is shown again: while the last user message is still worked on; it is dropped then."""
        if self.rules.openai:
            return
        for index in range(len(messages) - 1, -1, -1):
            if messages[index].role == "user" and not self._keeps_thoughts:
                return
            yield index

    def _thought(self, part: Opaque) -> int:
        key = (self.rules.encoding, part.raw)
        cost = _THOUGHTS.get(key)
        if cost is None:
            cost = self._words.count(_words_of(read_json(part.raw)))
            _THOUGHTS.put(key, cost, 100 + len(part.raw))
        return cost

    @_Settled
    def _keeps_thoughts(self) -> bool:
        """GLM shows all earlier reasoning when it is asked to."""
        thinking = read_json(self.fields.get("thinking", b"")[:FIELDS_AT_ONCE])
        return isinstance(thinking, dict) and thinking.get("clear_thinking") is False

    def _instructed(self, messages: Sequence[Message]) -> int:
        """What tools and format change about the first system message: they follow it there instead of in one of their own."""
        if self.rules.reasoning or not (self._offered or self._answered):
            return 0
        first = next((message for message in messages if message.is_instruction), None)
        if first is None:
            return 0
        # Only the last word of the text can merge with the newline.
        end = first.text[-SEAM:]
        return self._words.count(end + "\n") - self._words.count(end) - 4


def _reasoning(message: Message) -> Iterator[Opaque]:
    return (part for part in message.parts if isinstance(part, Opaque) and part.kind == "reasoning" and part.place != "content")


def _words_of(value: object, depth: int = 0) -> str:
    """The text within reasoning or a refusal: a string, or objects that hold it beside signatures and encrypted copies."""
    if isinstance(value, str):
        return value
    if depth > 8:
        return ""
    if isinstance(value, list):
        return "".join(_words_of(each, depth + 1) for each in value)
    return "".join(_words_of(value.get(key), depth + 1) for key in _WORDY) if isinstance(value, dict) else ""


_WORDY = ("text", "thinking", "reasoning", "summary", "content", "refusal")

_SHOWN = frozenset({"content", "message", "refusal"})
"""Where the model sees what we do not read; vendors' fields beside the content are not text."""

_NOTHING = frozenset({b"", b"null", b"[]", b"{}", b'""', b"false"})


def ruler(
    model: str, fields: Mapping[str, bytes], *, encoding: str | None = None, calibration: Calibration | None = None
) -> ChatRuler:
    """The ruler of a request.

    model: the name as the client wrote it. fields: the raw JSON of every top-level field of the body but `messages`.
    encoding: from the configuration, instead of the one that the name tells. calibration: what was learned about this
    upstream and model; None takes our own count as it is.
    """
    key = (model[-LONGEST_GIVEN:], encoding, *map(fields.get, SETTLING))
    made = _RULERS.get(key)
    if made is None:
        made = ChatRuler(family(model, encoding), {name: fields[name] for name in SETTLING if name in fields})
        if sum(map(len, made.fields.values())) <= MOST_KEPT_BYTES:
            if len(_RULERS) >= MOST_KEPT:
                _RULERS.clear()
            _RULERS[key] = made
    return made if calibration is None else made.calibrated(calibration)


SETTLING = ("tools", "functions", "tool_choice", "function_call", "response_format", "thinking")
"""The fields that settle what stands around the messages, and what is shown of them."""

_RULERS: dict[tuple[object, ...], ChatRuler] = {}
"""The rulers of the combinations of names and fields seen last: agents offer the same tools with every request."""


def _tools_tokens(words: Vocabulary, offered: bytes, legacy: bytes, gpt5: bool) -> int:
    """Tokens of decoded tools: functions as TypeScript, what else there is as its JSON."""
    decoded = read_json(offered)
    size = len(offered) + len(legacy)
    try:
        named = tools.functions(decoded, read_json(legacy))
        others = sum(words.count(minimal(other)) for other in tools.others(decoded))
        if not named:
            return others
        # On record, the heading of gpt-5 takes one token less when no comment follows it.
        return others + words.count(tools.render(named, MOST_WRITTEN * size)) - (gpt5 and not named[0].get("description"))
    except RecursionError:
        return -(-size // 3)

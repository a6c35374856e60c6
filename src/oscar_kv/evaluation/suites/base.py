# SPDX-License-Identifier: Apache-2.0
"""What every task is made of: samples, the measure of their length, and the share of quantised history they read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ...errors import OscarError


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Sample:
    """One question. Either ``prompt`` (plain text to be continued) or ``messages`` (laid out by a chat template).

    opening: the first words of the answer, given to the model: after the template's mark of the assistant's turn, or
    after the plain prompt. A back end that cannot begin an answer leaves it out and says so.
    reference: what the score compares with. stop: texts at which generation may end, behind the opening (without the
    opening they may come too early); scores do not depend on them.
    meta: facts for the results file (strings, numbers, booleans, lists of these).
    """

    id: str
    reference: tuple[str, ...]
    max_new_tokens: int
    prompt: str | None = None
    messages: tuple[Message, ...] = ()
    opening: str = ""
    stop: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.prompt is None) == (not self.messages):
            raise OscarError(f"sample {self.id}: it has either a prompt or messages")
        if self.max_new_tokens < 1:
            raise OscarError(f"sample {self.id}: max_new_tokens is {self.max_new_tokens}; it must be at least 1")


@dataclass(frozen=True)
class Measure:
    """Counts tokens as the model's own tokenizer does.

    count: tokens of a plain text, special tokens that the tokenizer itself adds included.
    template: messages → text, up to and including the mark of the assistant's turn; None for a model without one, for
    which tasks make plain prompts. count_rendered: tokens of such a text, to which nothing is added.
    """

    count: Callable[[str], int]
    template: Callable[[Sequence[Message]], str] | None = None
    count_rendered: Callable[[str], int] | None = None

    @classmethod
    def of(cls, tokenizer: Any, chat: bool | None = None) -> Measure:
        """From a Transformers tokenizer. chat: None where it has a chat template; OscarError for True without one."""

        def count(text: str) -> int:
            return len(tokenizer(text, verbose=False)["input_ids"])

        def rendered(text: str) -> int:
            return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

        def template(messages: Sequence[Message]) -> str:
            turns = [{"role": m.role, "content": m.content} for m in messages]
            return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

        has = bool(getattr(tokenizer, "chat_template", None))
        if chat and not has:
            raise OscarError("chat prompts were asked for, but the tokenizer has no chat template")
        return cls(count, template, rendered) if has and chat is not False else cls(count)

    @classmethod
    def from_any(cls, measure: Measure | Callable[[str], int] | Any) -> Measure:
        """A Measure as it is; a Transformers tokenizer (anything that encodes); else a function text → tokens."""
        if isinstance(measure, Measure):
            return measure
        return cls.of(measure) if hasattr(measure, "encode") else cls(measure)

    def render(self, sample: Sample) -> str:
        """The text that the model continues."""
        if sample.prompt is not None:
            return sample.prompt + sample.opening
        if self.template is None:
            raise OscarError(f"sample {sample.id} is a conversation, and this model has no chat template")
        return self.template(sample.messages) + sample.opening

    def length(self, sample: Sample) -> int:
        """Tokens of the rendered sample."""
        return self.tokens(sample, self.render(sample))

    def tokens(self, sample: Sample, text: str) -> int:
        """Tokens of ``text``, the beginning of the rendered sample."""
        counter = self.count if sample.prompt is not None else self.count_rendered or self.count
        return counter(text)

    def ask(self, text: str, opening: str = "") -> dict[str, Any]:
        """Fields of a Sample that puts one question: a user's turn, or plain text where there is no template."""
        if self.template is None:
            return {"prompt": f"{text}\n", "opening": opening}
        return {"messages": (Message("user", text),), "opening": opening}


def history_share(prompt: int, generated: int, sink: int, recent: int) -> float:
    """Share of the tokens attended by generated positions that are read from the quantised history.

    Position i (from 0; the prompt's last token writes the first answer token) attends i + 1 tokens, its own included;
    tokens t with sink <= t <= i − recent are history. Positions prompt − 1 … prompt + generated − 2 count. A cache that
    quantises whole pages holds up to a page less in its history. OscarError unless prompt and generated are at least 1.
    """
    if prompt < 1 or generated < 1 or sink < 0 or recent < 1:
        raise OscarError(
            f"history_share needs prompt and generated >= 1, sink >= 0, recent >= 1; "
            f"got {prompt}, {generated}, {sink}, {recent}"
        )
    history = attended = 0
    for i in range(prompt - 1, prompt + generated - 1):
        attended += i + 1
        history += max(0, i - recent - sink + 1)
    return history / attended


@runtime_checkable
class Task(Protocol):
    """One task of a suite. Samples depend on (seed, tokenizer, context, index) alone: sample i never on n."""

    @property
    def name(self) -> str: ...
    @property
    def suite(self) -> str: ...

    def samples(self, measure: Any, context: int, n: int, seed: int = 0) -> list[Sample]:
        """n samples of at most ``context`` tokens each, prompt and max_new_tokens together.

        measure: a Measure, a Transformers tokenizer, or a function text → tokens.
        """
        ...

    def score(self, sample: Sample, answer: str) -> float:
        """0 (wrong) … 1 (right). ``answer``: what was generated, without the sample's opening."""
        ...

    def history_share(self, lengths: Iterable[tuple[int, int]], sink: int, recent: int) -> float:
        """Mean of :func:`history_share` over samples, each given as (prompt tokens, generated tokens)."""
        ...


class TaskBase:
    """What tasks share."""

    def history_share(self, lengths: Iterable[tuple[int, int]], sink: int, recent: int) -> float:
        shares = [history_share(p, g, sink, recent) for p, g in lengths]
        if not shares:
            raise OscarError("a mean share of the history needs at least one sample")
        return sum(shares) / len(shares)


def rng_of(*parts: object) -> random.Random:
    """A generator for one purpose: the same parts give the same numbers on every machine and Python."""
    return random.Random(" ".join(map(str, parts)))


def fill(build: Callable[[int], Sample], measure: Measure, context: int, least: int, most: int | None = None) -> Sample:
    """A sample of ``build(units)`` that fills ``context`` tokens, its answer included, and at most 1 % less if it can.

    Length must grow with units, roughly in proportion: the search interpolates, so that few samples are built. Where a
    unit is longer than 1 %, the largest sample that fits is returned. OscarError where not even ``least`` units fit.
    """
    aim = context - context // 250

    def length(units: int) -> tuple[Sample, int]:
        sample = build(units)
        return sample, measure.length(sample) + sample.max_new_tokens

    best, used = length(least)
    if used > context:
        raise OscarError(f"{best.id}: a context of {context} tokens is too short; the smallest sample takes {used}")
    low, low_at, high, high_at = least, used, None if most is None else most + 1, 0
    step = max(1, least)
    while context - low_at > context // 100 and (high is None or high - low > 1):
        if high_at:  # both sides known
            assert high is not None
            guess = low + (high - low) * (aim - low_at) // (high_at - low_at)
        elif low_at > used:  # the slope so far tells where the limit lies
            guess = low + max(1, (aim - low_at) * (low - least) // (low_at - used))
        else:
            guess, step = low + step, step * 2
        guess = max(low + 1, guess if high is None else min(high - 1, guess))
        sample, now = length(guess)
        if now <= context:
            best, low, low_at = sample, guess, now
        else:
            high, high_at = guess, now
    return best

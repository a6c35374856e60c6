# SPDX-License-Identifier: Apache-2.0
"""Perplexity and KL(full precision ‖ quantised) a token, from exact emulation.

A text is run once in full precision and once a recipe, down to the last hidden states; logits are then made in slices
of positions, so that a vocabulary of 150K times a context of 8K never lies in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..artifact import Artifact
from ..errors import OscarError, UnsupportedModelError
from .emulation import Attending, Emulation, emulated

FIRST = 512
"""First position that counts; earlier ones see little or no history."""
REFERENCE = "bf16"
"""Name of the full-precision rows (results files call it so, whatever the model's own dtype)."""
_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits held at a time (fp32: 64 MB on a CPU, 512 MB on a GPU)."""

Progress = Callable[[int, int], None]
Subject = Artifact | Attending | None


class NamedText(Protocol):
    """Anything with a name and a text."""

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...


@dataclass(frozen=True)
class Tokens:
    """An evaluation text: its name, its kind ("code", "prose" …) and ids int64 [context]."""

    name: str
    kind: str
    ids: Tensor


@dataclass(frozen=True)
class TextResult:
    """One recipe on one text, over positions first … context−2 (each predicts the next token).

    kl, ppl, ppl_reference: means over those positions (perplexities: exp of the mean). top1: share of positions whose
    likeliest token is full precision's. kl_by_position: fp32 [positions], on the CPU.
    """

    recipe: str
    text: str
    kind: str
    context: int
    first: int
    kl: float
    nll: float
    nll_reference: float
    top1: float
    kl_by_position: Tensor

    @property
    def ppl(self) -> float:
        return perplexity(self.nll)

    @property
    def ppl_reference(self) -> float:
        return perplexity(self.nll_reference)


def perplexity(nll: float) -> float:
    """exp of a mean negative log-likelihood in nats; the largest float where that overflows."""
    return math.exp(min(nll, 709.0))


def tokenise(texts: Sequence[NamedText], kind: str, tokenizer: Any, context: int) -> list[Tokens]:
    """The first ``context`` tokens of each text. OscarError for a text that has fewer."""
    out = []
    for text in texts:
        ids = tokenizer(text.text, verbose=False)["input_ids"][:context]
        if len(ids) < context:
            raise OscarError(f"text {text.name!r} has {len(ids)} tokens, the context is {context}: use a longer text")
        out.append(Tokens(text.name, kind, torch.tensor(ids, dtype=torch.int64)))
    return out


def hidden_states(model: nn.Module, ids: Tensor) -> Tensor:
    """What the head sees: ids [n] → [n, hidden] on the model's device."""
    body: Any = getattr(model, "base_model", model)
    with torch.no_grad():
        return body(input_ids=ids.to(next(model.parameters()).device)[None], use_cache=False).last_hidden_state[0]


class Head:
    """The model's last step, hidden states [m, hidden] → logits [m, vocabulary] in the model's dtype.

    Its output matrix, and the scale and cap that some configs put after it. Raises UnsupportedModelError where the
    model's own forward pass gives other logits.
    """

    def __init__(self, model: nn.Module, ids: Tensor) -> None:
        config: Any = model.config
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.matrix: Any = model.get_output_embeddings()  # type: ignore[operator]
        if self.matrix is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no output embeddings: it is no causal language model"
            )
        self.scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self.cap = getattr(config, "final_logit_softcapping", None)
        short = ids[:16]
        with torch.no_grad():
            own = (
                model(input_ids=short.to(next(model.parameters()).device)[None], use_cache=False).logits[0, -1].float()
            )
            mine = self(hidden_states(model, short)[-1:])[0].float()
        if not torch.allclose(own, mine, rtol=0.02, atol=0.02 * float(own.abs().max())):
            raise UnsupportedModelError(
                f"{type(model).__name__}: its logits are not those of its output matrix on the last hidden states "
                f"(off by {(own - mine).abs().max():.3g}); report this model"
            )

    def __call__(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.matrix(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


@torch.no_grad()
def compare(
    model: nn.Module,
    head: Head,
    text: Tokens,
    subjects: Mapping[str, Subject],
    *,
    first: int = FIRST,
    tick: Callable[[], None] = lambda: None,
) -> list[TextResult]:
    """Every recipe on one text; a subject of None is full precision itself. One result a recipe, in order."""
    n = len(text.ids)
    if n < first + 2:
        raise OscarError(
            f"text {text.name!r} has {n} tokens: positions from {first} on count, so it needs at least {first + 2}"
        )
    exact = hidden_states(model, text.ids)
    tick()
    hidden: dict[str, Tensor] = {}
    for name, subject in subjects.items():
        with nullcontext() if subject is None else emulated(model, subject):
            hidden[name] = exact if subject is None else hidden_states(model, text.ids)
        tick()
    target = text.ids.to(exact.device)[first + 1 :]
    kl, nll, same = ({name: [] for name in subjects} for _ in range(3))  # type: ignore[var-annotated]
    reference = []
    width = head.matrix.weight.shape[0]
    step = max(1, _LOGITS.get(exact.device.type, 1 << 24) // width)
    for start in range(first, n - 1, step):
        stop = min(start + step, n - 1)
        goal = target[start - first : stop - first, None]
        p = _log_softmax(head(exact[start:stop]))
        reference.append(-p.gather(-1, goal)[:, 0])
        weight, best = p.exp(), p.argmax(-1)
        for name, states in hidden.items():
            q = p if states is exact else _log_softmax(head(states[start:stop]))
            nll[name].append(-q.gather(-1, goal)[:, 0])
            same[name].append(q.argmax(-1) == best)
            kl[name].append(((p - q) * weight).sum(-1))
    full = float(torch.cat(reference).double().mean())
    out = []
    for name in subjects:
        curve = torch.cat(kl[name])
        out.append(
            TextResult(
                name, text.name, text.kind, n, first, kl=float(curve.double().mean()),
                nll=float(torch.cat(nll[name]).double().mean()), nll_reference=full,
                top1=float(torch.cat(same[name]).double().mean()), kl_by_position=curve.float().cpu(),
            )
        )  # fmt: skip
    return out


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)


def evaluate(
    model: nn.Module,
    texts: Sequence[Tokens],
    subjects: Mapping[str, Subject],
    *,
    first: int = FIRST,
    fast: bool = False,
    progress: Progress | None = None,
) -> list[TextResult]:
    """Every recipe on every text, text by text; ``subjects``: recipe name → artifact or rival (None: full precision).

    ``fast``: see ``Emulation``. ``progress(done, total)`` counts forward passes. A text's full-precision pass and
    logits serve all recipes. Raises OscarError for a text too short, and what ``emulated`` raises.
    """
    if not texts:
        raise OscarError("there is no evaluation text")
    ready: dict[str, Subject] = {
        name: Emulation.of(s, model, fast=fast) if isinstance(s, Artifact) else s for name, s in subjects.items()
    }
    done, total = 0, len(texts) * (1 + len(ready))

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    was = model.training
    model.eval()
    try:
        head = Head(model, texts[0].ids)
        return [result for text in texts for result in compare(model, head, text, ready, first=first, tick=tick)]
    finally:
        model.train(was)


@dataclass(frozen=True)
class Summary:
    """One recipe on one kind of text: means over texts, perplexities of all their tokens together."""

    recipe: str
    kind: str
    context: int
    texts: int
    kl: float
    ppl: float
    ppl_reference: float
    top1: float
    kl_by_text: list[float]


def summarise(results: Sequence[TextResult]) -> list[Summary]:
    """Results grouped by recipe, kind and context, in the order they came."""
    groups: dict[tuple[str, str, int], list[TextResult]] = {}
    for r in results:
        groups.setdefault((r.recipe, r.kind, r.context), []).append(r)
    out = []
    for (recipe, kind, context), own in groups.items():

        def mean(field: str, own: list[TextResult] = own) -> float:
            return float(sum(getattr(r, field) for r in own) / len(own))

        out.append(
            Summary(
                recipe, kind, context, len(own), kl=mean("kl"), ppl=perplexity(mean("nll")),
                ppl_reference=perplexity(mean("nll_reference")), top1=mean("top1"), kl_by_text=[r.kl for r in own],
            )
        )  # fmt: skip
    return out


def curve(results: Sequence[TextResult], recipe: str, bucket: int) -> list[float]:
    """Mean KL of a recipe in buckets of ``bucket`` positions from ``first`` on, over texts of one context."""
    own = torch.stack([r.kl_by_position for r in results if r.recipe == recipe]).mean(0)
    return [float(part.mean()) for part in own.split(bucket)]

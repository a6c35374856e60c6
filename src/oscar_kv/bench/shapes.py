# SPDX-License-Identifier: Apache-2.0
"""What is measured: shapes, presets, and the bytes that a call must move."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

from ..errors import OscarError
from ..layout import PAGE, PageLayout

SINK, RECENT, RING = 64, 256, 288
"""Raw tokens at both ends of a context, and rows of the ring that holds the recent ones (32 to spare)."""
SHORT = {
    "q": "q_heads", "kv": "kv_heads", "d": "head_dim", "k": "k_bits", "v": "v_bits", "batch": "batch",
    "context": "context", "prefix": "prefix", "chunk": "chunk", "layers": "layers", "hidden": "hidden", "mlp": "mlp",
    "vocab": "vocab",
}  # fmt: skip
"""Names in ``--shape`` → fields."""


@dataclass(frozen=True)
class Shape:
    """Attention's shape, common to all parts. Raises OscarError for heads that cannot be shared evenly."""

    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    k_bits: int = 2
    v_bits: int = 2
    batch: int = 1
    least_batch: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.q_heads < 1 or self.kv_heads < 1 or self.q_heads % self.kv_heads:
            raise OscarError(f"--shape: {self.q_heads} query heads cannot share {self.kv_heads} KV heads evenly")
        if self.batch < self.least_batch:
            raise OscarError(f"--shape: a batch of {self.batch} has nothing to measure; at least 1 is needed")
        _ = self.layout  # refuses head sizes and bits that no page has

    @property
    def layout(self) -> PageLayout:
        return PageLayout(self.head_dim, self.head_dim, self.k_bits, self.v_bits)

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def raw_row(self) -> int:
        """Bytes of one token's key and value of one KV head in 16 bits."""
        return 4 * self.head_dim

    def row(self) -> dict[str, Any]:
        """The fields, as a results file holds them."""
        return asdict(self)

    @classmethod
    def parse(cls, text: str, **defaults: int) -> Self:
        """``q=32,kv=8,…``; what is not named keeps its default. Raises OscarError that names the part it cannot use."""
        known = {f.name for f in fields(cls)}
        given: dict[str, int] = dict(defaults)
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, _, value = part.partition("=")
            field = SHORT.get(name, name)
            if field not in known or not value.isdigit():
                names = ", ".join(k for k, v in SHORT.items() if v in known)
                raise OscarError(f"--shape {text}: {part!r} is not NAME=NUMBER with a name of {names}")
            given[field] = int(value)
        return cls(**given)


@dataclass(frozen=True)
class DecodeShape(Shape):
    """One new token a request over ``context`` tokens (the new one counted)."""

    context: int = 98304

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context <= SINK + RECENT:
            raise OscarError(
                f"--shape: a context of {self.context} has no quantised history; more than {SINK + RECENT} is needed"
            )

    @property
    def bytes(self) -> int:
        """What a call must read: history in pages, windows raw."""
        history = self.context - SINK - RECENT
        windows = self.raw_row * (SINK + RECENT)
        return self.batch * self.kv_heads * (history * self.layout.page_bytes // PAGE + windows)

    def dense_bytes(self, element: int) -> int:
        """What a call over an unquantised cache of ``element`` bytes a number must read."""
        return 2 * self.head_dim * element * self.batch * self.kv_heads * self.context

    def __str__(self) -> str:
        return (
            f"q{self.q_heads}/{self.kv_heads} d{self.head_dim} {self.k_bits}/{self.v_bits} "
            f"batch {self.batch} context {self.context:,}"
        )


@dataclass(frozen=True)
class PrefillShape(Shape):
    """``chunk`` new tokens over ``prefix`` tokens before them."""

    prefix: int = 65536
    chunk: int = 32768

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefix <= SINK + RECENT or self.chunk < 1:
            raise OscarError(f"--shape: the prefix must be longer than {SINK + RECENT} and the chunk not empty")

    def __str__(self) -> str:
        return f"q{self.q_heads}/{self.kv_heads} d{self.head_dim} chunk {self.chunk:,} over {self.prefix:,}"


@dataclass(frozen=True)
class PromptShape(Shape):
    """A prompt of ``chunk`` tokens with nothing before it."""

    chunk: int = 32768

    def __str__(self) -> str:
        return f"q{self.q_heads}/{self.kv_heads} d{self.head_dim} prompt of {self.chunk:,}"


@dataclass(frozen=True)
class ModelShape(DecodeShape):
    """A dense decoder; the defaults are Qwen3-8B's. ``batch`` 0: the largest that fits."""

    batch: int = 1
    layers: int = 36
    hidden: int = 4096
    mlp: int = 12288
    vocab: int = 151936
    least_batch: ClassVar[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("layers", "hidden", "mlp", "vocab"):
            if getattr(self, name) < 1:
                raise OscarError(f"--shape: {name} is {getattr(self, name)}; at least 1 is needed")

    @property
    def weights(self) -> int:
        """Parameters."""
        d = self.head_dim
        attention = self.hidden * d * (2 * self.q_heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp) + 2 * self.vocab * self.hidden

    def __str__(self) -> str:
        batch = self.batch or "largest"
        return f"{self.layers} layers, hidden {self.hidden}, batch {batch}, context {self.context:,}"


TABLE = (
    *(DecodeShape(batch=b) for b in (1, 8, 32)),
    *(DecodeShape(q_heads=q, batch=b) for q in (64, 96) for b in (8, 32)),
    DecodeShape(batch=128, context=8192),
)
OTHERS = (
    *(DecodeShape(head_dim=d, batch=8) for d in (64, 256)),
    *(DecodeShape(k_bits=k, v_bits=v, batch=8) for k, v in ((4, 4), (2, 1), (3, 2), (3, 3))),
)
PRESETS = {"table": TABLE, "others": OTHERS, "all": TABLE + OTHERS, "small": TABLE[:2]}
"""Shapes of ``bench decode``."""
STORE = (DecodeShape(batch=1), DecodeShape(batch=32))
TINY = DecodeShape(q_heads=4, kv_heads=2, head_dim=16, batch=2, context=520)
TINY_PREFILL = PrefillShape(q_heads=4, kv_heads=2, head_dim=16, prefix=640, chunk=128)
TINY_MODEL = ModelShape(
    q_heads=4, kv_heads=2, head_dim=16, batch=2, context=448, layers=2, hidden=64, mlp=96, vocab=128
)

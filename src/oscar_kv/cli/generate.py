# SPDX-License-Identifier: Apache-2.0
"""``oscar-kv generate``: text from a quantised cache, beside full precision if asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OscarError
from .common import Steps, check_outputs, console, number, print_table, quiet_transformers, read_text, size, write_json

if TYPE_CHECKING:
    from ..artifact import Artifact


@dataclass(frozen=True)
class Sample:
    """One generation: what it ran on, what it cost, what came out.

    dtype : of the model and of raw rows. bits_per_element : of the whole cache at this context, raw rows counted in 16
    bits. history_tokens : tokens whose codes the last query read. cache_bytes : the sum of the cache's tensors.
    bf16_bytes : what the same tokens take in BF16. tokens_per_s : after the first token.
    """

    recipe: str
    kernel: str
    dtype: str
    bits_per_element: float
    prompt_tokens: int
    new_tokens: int
    history_tokens: int
    cache_bytes: int
    bf16_bytes: int
    first_token_s: float
    tokens_per_s: float | None
    text: str


class _Clock:
    """Stands where Transformers expects a streamer: notes when the first and the last token came."""

    def __init__(self, report: Callable[[int, int], None], total: int) -> None:
        self.report, self.total = report, total
        self.start = time.perf_counter()
        self.times: list[float] = []
        self._prompt = True

    def put(self, value: Any) -> None:
        if self._prompt:  # the first call hands over the prompt
            self._prompt = False
            return
        self.times.append(time.perf_counter() - self.start)
        self.report(len(self.times), self.total)

    def end(self) -> None:
        """Nothing is buffered."""


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub name of a Transformers causal model.")],
    artifact: Annotated[Path, typer.Option(metavar="FILE", help="What `oscar-kv calibrate` wrote for this model.")],
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(metavar="FILE", help="A file with the prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 128,
    compare: Annotated[bool, typer.Option("--compare", help="Generate with the full-precision cache too.")] = False,
    recipe: Annotated[str | None, typer.Option(metavar="NAME", help="Another recipe over the same statistics.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the model's chat template.")] = False,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="float32, bfloat16, float16 or auto.")] = "auto",
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1 … or auto.")] = "auto",
    kernels: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="cuda, triton or torch; what serves the device if left out."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write texts and figures as JSON.")
    ] = None,
) -> None:
    """Generate text with a quantised cache; --compare shows full precision beside it."""
    text = _prompt(prompt, prompt_file)
    check_outputs(("--json", json_file))
    from ..artifact import Artifact
    from ..kernels.registry import NAMES

    if kernels is not None and kernels not in NAMES:
        raise OscarError(f"--kernels {kernels}: the kernels are {', '.join(NAMES)}")
    loaded = Artifact.load(artifact)
    if recipe is not None:
        loaded = loaded.with_recipe(recipe)
    with Steps() as steps:
        with steps.task(f"loading {model}"):
            from ..integrations.transformers.loading import load_model

            quiet_transformers()
            net, tokenizer = load_model(model, dtype, device)
        ids = encode(tokenizer, text, chat).to(net.device)
        kinds: list[Artifact | None] = [loaded, None] if compare else [loaded]
        samples = []
        for kind in kinds:
            with steps.task(f"generating with {'full precision' if kind is None else kind.label}") as report:
                samples.append(sample(net, tokenizer, ids, kind, max_new_tokens, temperature, seed, report, kernels))
    show(samples, loaded)
    if json_file:
        meta = {
            "model": model, "artifact_sha256": loaded.sha256, "recipe": loaded.recipe.model_dump(mode="json"),
            "seed": seed, "temperature": temperature, "prompt": text,
        }  # fmt: skip
        write_json(json_file, {"meta": meta, "rows": [asdict(s) for s in samples]})


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise OscarError("give the prompt by --prompt TEXT or by --prompt-file FILE, one of the two")
    if prompt_file is not None:
        return read_text(prompt_file, "--prompt-file")
    if not prompt:
        raise OscarError("--prompt is empty: give it some text")
    return prompt


def encode(tokenizer: Any, text: str, chat: bool) -> Any:
    """Token ids [1, n] of the prompt."""
    if not chat:
        return tokenizer(text, return_tensors="pt").input_ids
    if not getattr(tokenizer, "chat_template", None):
        raise OscarError("--chat: this tokenizer has no chat template; leave the option out")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids


def sample(
    model: Any, tokenizer: Any, ids: Any, artifact: Artifact | None, max_new_tokens: int,
    temperature: float = 0.0, seed: int = 0, report: Callable[[int, int], None] = lambda done, total: None,
    kernels: str | None = None,
) -> Sample:  # fmt: skip
    """Generate after ids [1, n] with the quantised cache, or with the model's own where ``artifact`` is None."""
    import torch
    from transformers import set_seed

    from ..integrations.transformers import disable, enable
    from ..integrations.transformers.compat import cache_argument

    set_seed(seed)
    how: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": max_new_tokens}
    if temperature > 0:
        how["temperature"] = temperature
    if artifact is not None:
        enable(model, artifact, kernels=kernels)
    try:
        cache = _new_cache(model, artifact, kernels)
        clock = _Clock(report, max_new_tokens)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), streamer=clock, **{cache_argument(): cache}, **how
            )
    finally:
        if artifact is not None:
            disable(model)
    new = out[0, ids.shape[1] :]
    later = clock.times[-1] - clock.times[0]
    return Sample(
        **_facts(model, artifact, cache), prompt_tokens=ids.shape[1], new_tokens=len(new), first_token_s=clock.times[0],
        tokens_per_s=(len(clock.times) - 1) / later if later > 0 else None,
        text=tokenizer.decode(new, skip_special_tokens=True),
    )  # fmt: skip


def _new_cache(model: Any, artifact: Artifact | None, kernels: str | None) -> Any:
    from transformers import DynamicCache

    from ..integrations.transformers import OscarCache

    if artifact is None:
        return DynamicCache(config=model.config)
    return OscarCache(artifact, model.config, kernels=kernels)


def _facts(model: Any, artifact: Artifact | None, cache: Any) -> dict[str, Any]:
    """What a sample says of its cache, from the cache itself."""
    from ..integrations.transformers.cache import layer_tensors
    from ..memory import bits_per_element

    dtype, tokens = str(model.dtype).removeprefix("torch."), cache.get_seq_length()
    if artifact is None:
        tensors = [t for layer in cache.layers for t in layer_tensors(layer)]
        return {
            "recipe": FULL, "kernel": model.config._attn_implementation, "dtype": dtype, "bits_per_element": 16.0,
            "history_tokens": 0, "cache_bytes": sum(t.nbytes for t in tensors),
            "bf16_bytes": 2 * sum(t.numel() for t in tensors),
        }  # fmt: skip
    others = [t for i, layer in enumerate(cache.layers) if i not in artifact.layers for t in layer_tensors(layer)]
    elements = sum(layer.store.elements for layer in cache.packed_layers) + sum(t.numel() for t in others)
    return {
        "recipe": artifact.label, "kernel": cache.describe()["kernel"], "dtype": dtype,
        "bits_per_element": bits_per_element(artifact, tokens),
        "history_tokens": max(0, tokens - sum(artifact.recipe.windows)), "cache_bytes": cache.nbytes,
        "bf16_bytes": 2 * elements,
    }  # fmt: skip


def show(samples: list[Sample], artifact: Artifact) -> None:
    """Print texts, then the figures."""
    for s in samples:
        console.rule(s.recipe, align="left", characters="─")
        console.print(s.text.strip(), markup=False)
    n = samples[0].prompt_tokens + samples[0].new_tokens
    rows = [
        ["kernel", *(s.kernel for s in samples)],
        [f"bits/element at {n:,} tokens", *(number(s.bits_per_element, 2) for s in samples)],
        ["times below BF16", *(number(16 / s.bits_per_element, 2) for s in samples)],
        ["tokens read from codes", *(f"{s.history_tokens:,}" for s in samples)],
        ["cache now", *(f"{size(s.cache_bytes)} ({s.dtype})" for s in samples)],
        ["the same in BF16", *(size(s.bf16_bytes) for s in samples)],
        ["first token", *(f"{s.first_token_s:.2f} s" for s in samples)],
        ["then tokens/s", *(number(s.tokens_per_s, 1) for s in samples)],
    ]
    note = "" if samples[0].dtype in ("bfloat16", "float16") else RAW_NOTE.format(samples[0].dtype)
    print_table("", ("cache", *(s.recipe for s in samples)), rows, caption=note)
    console.print(f"artifact {artifact.sha256[:16]}  recipe {artifact.label}", markup=False)
    if not samples[0].history_tokens:
        windows = sum(artifact.recipe.windows)
        console.print(
            f"Nothing was quantised: contexts up to {windows} tokens lie in the windows. Give it a longer prompt."
        )


FULL = "full precision"
RAW_NOTE = (
    "This model runs in {0}, and so do the windows (cache now); "
    "bits/element and times below BF16 count them in 16 bits."
)

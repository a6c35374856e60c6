# SPDX-License-Identifier: Apache-2.0
"""Each rival does what its paper says; sizes are those of what is stored."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oscar_kv.errors import OscarError, RecipeError
from oscar_kv.evaluation.baselines import (
    BASELINES,
    OURS,
    Baseline,
    BaselineEmulation,
    Fp8,
    Kivi,
    SawInt4,
    Squat,
    TurboQuant,
    Windows,
    get_baseline,
    is_baseline,
)  # fmt: skip
from oscar_kv.evaluation.baselines.base import by_token
from oscar_kv.evaluation.baselines.quantized_cache import TransformersCache
from oscar_kv.evaluation.baselines.saw_int4 import blocks
from oscar_kv.evaluation.baselines.squat import leading_queries
from oscar_kv.evaluation.baselines.turboquant import codebook, random_rotation
from oscar_kv.evaluation.rivals import NAMES
from oscar_kv.geometry import LayerGeometry

GQA = LayerGeometry(kind="full", num_q_heads=4, num_kv_heads=2, k_head_dim=64, v_head_dim=64)
WIDE = LayerGeometry(kind="full", num_q_heads=8, num_kv_heads=2, k_head_dim=128, v_head_dim=128)
ALL = list(BASELINES.values())
names = {"ids": lambda m: m.name}


def rows(n: int, heads: int = 2, d: int = 64, batch: int = 1, seed: int = 0) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, n, d, generator=gen, dtype=torch.float64)


def error(x: Tensor, hat: Tensor) -> float:
    return float((x - hat).square().mean())


@pytest.mark.parametrize("method", ALL, **names)
@pytest.mark.parametrize("windows", ["published", "ours"])
def test_shapes_sinks_and_unfinished_groups(method: Baseline, windows: str) -> None:
    method = method.at_windows(windows)
    k, v, q = rows(200, batch=2), rows(200, batch=2, seed=1), rows(64, heads=4, batch=2, seed=2)
    k_hat, v_hat = method.quantise_layer(0, k, v, q)
    assert k_hat.shape == k.shape
    assert v_hat.shape == v.shape
    assert k_hat.isfinite().all()
    assert v_hat.isfinite().all()
    sink = method.windows.sink
    assert torch.equal(k_hat[:, :, :sink], k[:, :, :sink])
    assert torch.equal(v_hat[:, :, :sink], v[:, :, :sink])
    assert not torch.equal(k_hat[:, :, sink : sink + 1], k[:, :, sink : sink + 1])
    # One request's rows do not change another's.
    alone = method.quantise_layer(0, k[1:], v[1:], q[1:])
    assert torch.allclose(alone[0], k_hat[1:])
    assert torch.allclose(alone[1], v_hat[1:])


@pytest.mark.parametrize("method", ALL, **names)
def test_a_constant_text_of_zeros_and_a_short_one_are_held(method: Baseline) -> None:
    for n in (1, 31, 33):
        zero = torch.zeros(1, 2, n, 64)
        assert all(x.isfinite().all() for x in method.quantise_layer(0, zero, zero, torch.zeros(1, 4, 1, 64)))


@pytest.mark.parametrize(
    ("name", "layer", "history"),
    [
        ("kivi-2", GQA, 2 + 32 / 32), ("kivi-2", WIDE, 3.0), ("kivi-2-g64", WIDE, 2 + 32 / 64), ("kivi-4", WIDE, 5.0),
        ("turboquant-2", GQA, 2 + 16 / 64), ("turboquant-3", WIDE, 3 + 16 / 128),
        ("turboquant-3-prod", WIDE, 3 + 1.5 * 16 / 128), ("saw-int4", WIDE, 4 + 32 / 128), ("saw-int4", GQA, 4.5),
        ("squat-2", WIDE, 3.0), ("fp8", WIDE, 8.0), ("fp8-unit", GQA, 8.0),
    ],
)  # fmt: skip
def test_bits_of_the_history(name: str, layer: LayerGeometry, history: float) -> None:
    assert BaselineEmulation(get_baseline(name), (layer,)).bits_per_element() == history


def test_bits_at_a_context_count_windows_and_what_a_request_pays_once() -> None:
    sliding = LayerGeometry(kind="sliding", num_q_heads=4, num_kv_heads=2, k_head_dim=64, v_head_dim=64)
    kivi = BaselineEmulation(get_baseline("kivi-2"), (GQA, sliding))
    assert kivi.bits_per_element(4096) == pytest.approx((3 * (4096 - 128) + 16 * 128) / 4096)
    ours = BaselineEmulation(get_baseline("kivi-2@ours"), (GQA, sliding))
    assert ours.bits_per_element(4096) == pytest.approx((3 * (4096 - 320) + 16 * 320) / 4096)
    squat = BaselineEmulation(Squat(rank=8), (GQA,))
    once = 16 * 8 * 64 / (2 * 64 * 4096)  # Q̂ in 16 bits, over the elements of k and v of one head
    assert squat.bits_per_element(4096) == pytest.approx((3 * (4096 - 32) + 16 * 32) / 4096 + once)
    fp8 = BaselineEmulation(get_baseline("fp8-head"), (GQA,))
    assert fp8.bits_per_element(4096) == pytest.approx(8 + 32 / (64 * 4096))
    with pytest.raises(OscarError, match="nothing to quantise"):
        BaselineEmulation(get_baseline("fp8"), (sliding,)).bits_per_element()


@pytest.mark.parametrize("kind", [Kivi, TurboQuant, Squat])
def test_more_bits_less_error(kind: type[Baseline]) -> None:
    k, v, q = rows(256), rows(256, seed=1), rows(64, heads=4, seed=2)
    found = [kind(name="x", k_bits=b, v_bits=b).quantise_layer(0, k, v, q) for b in (2, 3, 4)]
    for x, hats in ((k, [f[0] for f in found]), (v, [f[1] for f in found])):
        two, three, four = (error(x, hat) for hat in hats)
        assert two > 2 * three > 4 * four


def test_kivi_serves_key_channels_that_are_large_throughout_better_than_token_groups_do() -> None:
    k = rows(256)
    k[..., 5] = 40 + k[..., 5]
    k[..., 33] *= 20
    by_channel = Kivi().keys(k, k).hat
    tokenwise = by_token(k, 2, 32).hat
    quiet = [c for c in range(64) if c not in (5, 33)]
    assert error(k[..., quiet], by_channel[..., quiet]) < error(k[..., quiet], tokenwise[..., quiet]) / 4
    # A key's group is 32 tokens of one channel: its extremes come back, up to fp16.
    first = k[0, 0, :32, 5]
    assert torch.allclose(by_channel[0, 0, :32, 5].aminmax().max, first.max(), rtol=2e-3)
    # Values: changing one token leaves the others' codes alone; keys of the same group change with it.
    changed = k.clone()
    changed[:, :, 0] *= 3
    assert torch.equal(Kivi().values(changed).hat[:, :, 1:], Kivi().values(k).hat[:, :, 1:])
    assert not torch.equal(Kivi().keys(changed, k).hat[:, :, 1:32], by_channel[:, :, 1:32])
    assert torch.equal(Kivi().keys(changed, k).hat[:, :, 32:], by_channel[:, :, 32:])


def test_kivi_needs_a_window_that_holds_its_groups() -> None:
    with pytest.raises(OscarError, match="groups of 64 tokens"):
        Kivi(group=64, windows=Windows(0, 32))
    with pytest.raises(OscarError, match="do not divide"):
        Kivi().values(rows(8, d=48))
    with pytest.raises(OscarError, match="key_block"):
        Windows(4, 32, key_block=32)


@pytest.mark.parametrize(("bits", "paper"), [(1, 0.36), (2, 0.117), (3, 0.034), (4, 0.0095)])
def test_turboquant_reaches_the_papers_distortion_on_any_input(bits: int, paper: float) -> None:
    """‖x − x̂‖² / ‖x‖²; the same for a spike, which only the rotation can help, as for a Gaussian row."""
    method = TurboQuant(name="t", k_bits=bits, v_bits=bits)
    spike = torch.zeros(1, 1, 128, 128, dtype=torch.float64)
    spike[0, 0].fill_diagonal_(7.0)
    for x in (spike, rows(512, d=128)):
        share = (x - method.values(x).hat).square().sum() / x.square().sum()
        assert float(share) == pytest.approx(paper, rel=0.08)


def test_turboquants_codebook_is_lloyd_max() -> None:
    """Against the known solution for a Gaussian, which the coordinate tends to; and centroids are cell means."""
    wide = codebook(4096, 2) * math.sqrt(4096)
    assert torch.allclose(wide, torch.tensor([-1.510, -0.4528, 0.4528, 1.510], dtype=torch.float64), atol=4e-3)
    unit = torch.nn.functional.normalize(rows(20_000, heads=1, d=32)[0, 0], dim=-1).flatten()
    centres = codebook(32, 3)
    cell = torch.bucketize(unit, (centres[1:] + centres[:-1]) / 2)
    means = torch.stack([unit[cell == i].mean() for i in range(8)])
    assert torch.allclose(means, centres, atol=2e-3)


def test_the_random_rotation_is_orthogonal_seeded_and_its_method_rotation_invariant() -> None:
    r = random_rotation(64, 0)
    assert torch.allclose(r @ r.mT, torch.eye(64, dtype=torch.float64), atol=1e-12)
    assert not torch.allclose(r, random_rotation(64, 1))
    # Rotating the input beforehand changes the draw, not the distribution of the error.
    x = rows(512, heads=1)
    x[..., :4] *= 30
    turned = x @ random_rotation(64, 7)

    def mean(y: Tensor, bits: int) -> float:
        draws = [TurboQuant(name="t", k_bits=bits, v_bits=bits, seed=100 + s) for s in range(30)]
        return sum(error(y, m.values(y).hat) for m in draws) / len(draws)

    for bits in (2, 3):
        assert mean(x, bits) == pytest.approx(mean(turned, bits), rel=0.03)
    # Token groups without a rotation are not: that is what the rotation is for.
    assert error(x, by_token(x, 2, 64).hat) > 1.5 * error(turned, by_token(turned, 2, 64).hat)


def test_product_keys_are_unbiased_and_mse_keys_shrink() -> None:
    """Mean over seeds of ⟨q, k̂⟩ against ⟨q, k⟩; the paper's reason for spending a bit on signs."""
    k = rows(8, heads=1)
    slopes = {}
    for how in ("mse", "product"):
        hats = [TurboQuant(name="t", k_bits=2, v_bits=2, keys_by=how, seed=2 * s).keys(k, k).hat for s in range(200)]  # type: ignore[arg-type]
        slopes[how] = float((torch.stack(hats).mean(0) * k).sum() / k.square().sum())
    assert slopes["product"] == pytest.approx(1, abs=0.03)
    assert slopes["mse"] == pytest.approx(1 - 0.117, abs=0.03)


def test_saw_int4_rotates_keys_in_blocks_and_tames_outliers() -> None:
    k = rows(256)
    k[..., 3] *= 50
    method, plain = SawInt4(), by_token(k, 4, 64).hat
    assert error(k, method.keys(k, k).hat) < error(k, plain) / 2
    assert torch.equal(method.values(k).hat, plain)
    assert error(k, SawInt4(order=64, rotate_v=True).values(k).hat) < error(k, plain) / 4
    whole = blocks(64, 16)
    assert torch.allclose(method.keys(k, k).hat, by_token(k @ whole, 4, 64).hat @ whole.mT, atol=1e-9)
    assert not whole[:16, 16:].any()
    with pytest.raises(OscarError, match="power of two"):
        SawInt4(order=24)


def test_squat_keeps_errors_out_of_the_query_subspace() -> None:
    """Queries that mostly look along few directions, as real ones do: errors along these fall, the rest may grow."""
    gen = torch.Generator().manual_seed(3)
    basis = torch.linalg.qr(torch.randn(64, 64, generator=gen, dtype=torch.float64))[0]
    q = (rows(256, heads=4, seed=4) * torch.logspace(1.5, -1.5, 64, dtype=torch.float64)) @ basis
    k = rows(512, seed=5)
    lead = leading_queries(q, 2, 4)

    def along(method: Baseline) -> float:
        return float(((k - method.keys(k, q).hat) @ lead.mT).square().mean())

    squat = Squat()
    plain = along(replace(squat, weight=0.0))
    assert along(Kivi()) == pytest.approx(plain, rel=1e-9)  # weight 0 is KIVI's rounding
    assert along(squat) < 0.7 * plain
    assert along(replace(squat, block=8)) < 0.35 * plain  # smaller blocks can correct more
    # Its objective, the sum of both terms, falls too; attention scores with it.
    e = k - squat.keys(k, q).hat
    e0 = k - Kivi().keys(k, q).hat
    full = leading_queries(q, 2, 60)
    cost = [float(x.square().sum() + squat.weight * (x @ full.mT).square().sum()) for x in (e, e0)]
    assert cost[0] < cost[1]


def test_leading_queries_are_the_singular_directions_of_a_kv_heads_queries() -> None:
    q = rows(40, heads=4)
    lead = leading_queries(q, 2, 3)
    _, s, vh = torch.linalg.svd(q[0, 2:].flatten(0, 1), full_matrices=False)
    expected = s[:3, None] * vh[:3]
    signs = (lead[0, 1] * expected).sum(-1, keepdim=True).sign()
    assert torch.allclose(lead[0, 1] * signs, expected, atol=1e-9)


def test_fp8_is_torchs_rounding_and_saturates() -> None:
    x = torch.tensor([0.0, 1.0, 1.06, -3.3, 0.0019, 447.0, 500.0, -1e4]).view(1, 1, 8, 1)
    unit = Fp8(scale="unit").values(x).hat
    assert torch.equal(unit, x.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert unit[0, 0, 7, 0] == -448
    y = rows(64).float()
    y[:, 1] *= 100
    s = y.abs().max() / 448
    assert torch.equal(Fp8().keys(y, y).hat, (y / s).to(torch.float8_e4m3fn).float() * s)
    by_head = Fp8(scale="head").keys(y, y).hat
    for h in range(2):
        s = y[:, h].abs().max() / 448
        assert torch.equal(by_head[:, h], (y[:, h] / s).to(torch.float8_e4m3fn).float() * s)
    assert Fp8().windows == Windows(0, 0)


def test_names_windows_and_wrong_knobs() -> None:
    assert get_baseline("squat-2").windows == Windows(0, 32, key_block=32)
    ours = get_baseline("turboquant-3@ours")
    assert (ours.name, ours.windows) == ("turboquant-3@ours", OURS)
    assert get_baseline("fp8") is BASELINES["fp8"]
    assert tuple(BASELINES) == NAMES
    assert is_baseline("kivi-2@ours")
    assert not is_baseline("k2v2")
    for bad in ("kivi-2@theirs", "kivi-9"):
        with pytest.raises(RecipeError, match="unknown rival"):
            get_baseline(bad)
    for build in (
        lambda: Kivi(k_bits=5),
        lambda: TurboQuant(k_bits=1, keys_by="product"),
        lambda: TurboQuant(keys_by="sketch"),  # type: ignore[arg-type]
        lambda: Fp8(k_bits=4),
        lambda: Fp8(scale="row"),  # type: ignore[arg-type]
        lambda: Squat(rank=0),
        lambda: Windows(-1, 0),
        lambda: get_baseline("fp8").at_windows("theirs"),
    ):
        with pytest.raises(OscarError):
            build()


def test_transformers_quantized_cache_works_or_says_what_to_install() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra oscar-kv[transformers]")
    with pytest.raises(OscarError, match="one of 2, 4"):
        TransformersCache(backend="quanto", bits=3)
    with pytest.raises(OscarError, match="axis_key"):
        TransformersCache(backend="hqq", axis_key=-1)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    adapter = TransformersCache()
    assert adapter.name == "hf-quanto-2"
    if transformers.utils.is_optimum_quanto_available():
        ids = torch.randint(3, 97, (1, 160))
        out = model.generate(ids, past_key_values=adapter.cache(model), max_new_tokens=4, do_sample=False)
        assert out.shape == (1, 164)
    else:
        with pytest.raises(OscarError, match="pip install optimum-quanto"):
            adapter.cache(model)

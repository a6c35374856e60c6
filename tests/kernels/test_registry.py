# SPDX-License-Identifier: Apache-2.0
"""Which kernels serve which device, recipe and dtype, and that nothing of it is silent."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from oscar_kv.errors import OscarError
from oscar_kv.kernels import registry
from oscar_kv.kernels.torch_set import kernel_set

GPU = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_said", set())
    monkeypatch.delenv(registry.ENVIRONMENT, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def machine(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), *, nvrtc: bool = True,
            triton: bool = True, hip: str | None = None) -> None:  # fmt: skip
    """A machine with such a GPU and such packages."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(registry, "has_nvrtc", lambda: nvrtc)
    monkeypatch.setattr(registry, "has_triton", lambda: triton)


@pytest.mark.parametrize(
    ("fields", "name", "level", "says"),
    [
        ({}, "cuda", logging.INFO, "sm_90"),
        ({"capability": (8, 0), "triton": False}, "cuda", logging.INFO, "sm_80"),
        ({"nvrtc": False}, "triton", logging.WARNING, "oscar-kv[cuda]"),
        ({"capability": (7, 5)}, "triton", logging.WARNING, "7.5 is older"),
        ({"capability": (7, 0), "triton": False}, "torch", logging.WARNING, "slow"),
        ({"hip": "6.4"}, "triton", logging.WARNING, "AMD"),
        ({"hip": "6.4", "triton": False}, "torch", logging.WARNING, "slow"),
    ],
)
def test_the_devices_own_choice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], name: str, level: int,
    says: str,
) -> None:  # fmt: skip
    machine(monkeypatch, **fields)
    with caplog.at_level(logging.INFO, "oscar_kv"):
        assert registry.choose(GPU) == name
        assert registry.choose("cuda:0") == name
    assert len(caplog.records) == 1  # once a process and device
    assert caplog.records[0].levelno == level
    assert says in caplog.text


def test_a_missing_compiler_is_an_error_with_both_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, nvrtc=False, triton=False)
    with pytest.raises(OscarError, match=r"oscar-kv\[cuda\].*oscar-kv\[triton\].*torch"):
        registry.choose(GPU)
    assert registry.choose(GPU, "torch") == "torch"
    with pytest.raises(OscarError, match="NVRTC"):
        registry.choose(GPU, "cuda")
    with pytest.raises(OscarError, match=r"oscar-kv\[triton\]"):
        registry.choose(GPU, "triton")


def test_argument_and_environment_override(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    assert registry.choose(GPU, "triton") == "triton"
    monkeypatch.setenv(registry.ENVIRONMENT, "torch")
    assert registry.choose(GPU) == "torch"
    assert registry.choose(GPU, "cuda") == "cuda"
    monkeypatch.setenv(registry.ENVIRONMENT, "fast")
    with pytest.raises(OscarError, match="OSCAR_KV_KERNELS='fast'.*cuda, triton, torch"):
        registry.choose(GPU)


def test_what_cannot_run_here_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, (7, 5))
    with pytest.raises(OscarError, match="8.0"):
        registry.choose(GPU, "cuda")
    for name in ("cuda", "triton"):
        with pytest.raises(OscarError, match="needs a"):
            registry.choose("cpu", name)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert registry.choose("cpu", "triton") == "triton"
    assert registry.choose("cpu") == "torch"


def test_models_that_are_not_16_bit_are_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine(monkeypatch)
    with caplog.at_level(logging.WARNING, "oscar_kv"):
        served = registry.serve(GPU, torch.float32, "least-squares")
    assert served.kernels is None
    assert set(served.as_dict().values()) == {"torch"}
    assert "float32" in caplog.text


@pytest.mark.parametrize("rule", ["minmax", "quantile"])
def test_step_rules_of_others_are_written_by_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rule: str
) -> None:
    machine(monkeypatch)
    own = kernel_set()
    monkeypatch.setattr(registry, "kernel_set", lambda device, wanted=None: own)
    with caplog.at_level(logging.WARNING, "oscar_kv"):
        served = registry.serve(GPU, torch.bfloat16, rule)
    assert (served.store, served.stores) == ("torch", False)
    assert served.kernels is own
    assert rule in caplog.text
    assert registry.serve(GPU, torch.bfloat16, "least-squares").stores


def test_kernel_sets_are_called_as_they_are() -> None:
    own = kernel_set()
    served = registry.serve("cpu", torch.float64, "least-squares", own)
    assert served.kernels is own
    assert registry.serve("cpu", torch.float64, "least-squares") is registry.REFERENCE
    assert registry.kernel_set("cpu").name == "torch"

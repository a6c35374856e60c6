# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: threads, seeds, the ``gpu`` marker, and the real model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# One thread a worker, and timings that vary between machines: neither may decide whether a test passes.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
settings.register_profile("oscar-kv", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("oscar-kv")


def transformers_version() -> str | None:
    try:
        import transformers
    except ImportError:
        return None
    return str(transformers.__version__)


def pytest_report_header() -> str:
    return f"torch {torch.__version__}, transformers {transformers_version() or 'not installed'}"


def pytest_configure() -> None:
    """A run meant for another Transformers must not pass on this one."""
    expected = os.environ.get("OSCAR_KV_EXPECT_TRANSFORMERS")
    if expected and expected != transformers_version():
        raise pytest.UsageError(
            f"expected Transformers {expected}, imported {transformers_version()}: check PYTHONPATH"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    """A test that changes the default dtype must not change the next one."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct: ``OSCAR_KV_TEST_MODEL``, or the demo model (fetched on the first use).

    Skipped where it cannot be had, except in CI.
    """
    if given := os.environ.get("OSCAR_KV_TEST_MODEL"):
        return Path(given)
    pytest.importorskip("transformers", reason="needs the extra oscar-kv[transformers]")
    from oscar_kv.demo.model import DemoError, demo_model_path

    try:
        return demo_model_path(progress=False)
    except DemoError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the demo model is not available: {error}")

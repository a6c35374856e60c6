# SPDX-License-Identifier: Apache-2.0
"""Lets the tests here import their helpers by name, whatever pytest's import mode; and leaves out the slow matrix."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The whole matrix takes minutes on two cores: OSCAR_KV_SLOW_TESTS=1 asks for it."""
    if os.environ.get("OSCAR_KV_SLOW_TESTS") == "1":
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: set OSCAR_KV_SLOW_TESTS=1"))

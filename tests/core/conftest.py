# SPDX-License-Identifier: Apache-2.0
"""Puts this folder's helper modules on the path; page_from_document is a script as well."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from oscar_kv.artifact import Artifact


@pytest.fixture
def artifact() -> Artifact:
    from core_cases import make_artifact

    return make_artifact()

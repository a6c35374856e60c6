# SPDX-License-Identifier: Apache-2.0
"""Imported first by the scripts here: puts the checkout's sources and the kernel tests' helpers on the path."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "kernels")]

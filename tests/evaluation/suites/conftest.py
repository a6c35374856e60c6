# SPDX-License-Identifier: Apache-2.0
"""Measures of length: words, and SmolLM2's own tokenizer with its chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

from oscar_kv.evaluation.suites import Measure


@pytest.fixture(scope="session")
def words() -> Measure:
    """A token a word, no chat template."""
    return Measure(lambda text: len(text.split()))


@pytest.fixture(scope="session")
def chat(smollm2: Path) -> Measure:
    from transformers import AutoTokenizer

    return Measure.of(AutoTokenizer.from_pretrained(smollm2))

# SPDX-License-Identifier: Apache-2.0
"""The tiny models are shared with the tests of the integrations."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "integrations"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer of one token a character."""
    transformers = pytest.importorskip("transformers")
    from families import tiny
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("models") / "toy-llama"
    tiny("llama").save_pretrained(path)
    words = Tokenizer(models.WordLevel({chr(32 + i): i for i in range(96)}, unk_token=" "))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token=" ").save_pretrained(path)
    return path

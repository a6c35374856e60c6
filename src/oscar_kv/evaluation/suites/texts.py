# SPDX-License-Identifier: Apache-2.0
"""Raw material of generated tasks, from the texts this package ships: haystack words, sentences, and a vocabulary."""

from __future__ import annotations

import re
from functools import cache

from ...demo import texts as shipped

HAYSTACK = "Emma (Jane Austen), shipped with oscar-kv; RULER's own essays may not be redistributed"
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""RULER's repeated noise (its definition, arXiv 2404.06654)."""

ADJECTIVES = (
    "able", "agile", "amber", "ample", "ancient", "ardent", "arid", "austere", "azure", "balmy", "bitter", "bland",
    "bold", "brassy", "breezy", "bright", "brisk", "calm", "candid", "careful", "cheery", "civic", "clever", "coarse",
    "copper", "cosmic", "crimson", "crisp", "curious", "daring", "distant", "dusty", "eager", "early", "earnest",
    "eastern", "elastic", "elegant", "even", "fabled", "faint", "famous", "fertile", "festive", "fluent", "fragile",
    "frozen", "frugal", "gentle", "giant", "glossy", "golden", "graceful", "grand", "hardy", "hasty", "hidden",
    "hollow", "humble", "icy", "idle", "ivory", "jagged", "jolly", "keen", "lavish", "lively", "lofty", "lonely",
    "loyal", "lucid", "lunar", "mellow", "merry", "mighty", "mild", "misty", "modest", "narrow", "neat", "nimble",
    "noble", "northern", "oblong", "ornate", "patient", "placid", "plain", "polite", "proud", "quaint", "quiet",
    "rapid", "rare", "regal", "rigid", "robust", "rural", "rustic", "sandy", "secret", "serene", "shallow", "silent",
    "silver", "simple", "sleepy", "slender", "smooth", "solar", "sturdy", "subtle", "sudden", "tender", "tidy", "urban",
    "vague", "velvet", "vivid", "wary", "western", "wild", "wise", "wooden", "young", "zealous",
)  # fmt: skip
NOUNS = (
    "acorn", "anchor", "anvil", "apron", "arrow", "atlas", "badger", "ballad", "banner", "barley", "basket", "beacon",
    "bishop", "blanket", "bobbin", "bonnet", "bottle", "bridge", "bucket", "button", "cabin", "cactus", "camel",
    "candle", "canyon", "carpet", "castle", "cedar", "cellar", "chapel", "cherry", "chisel", "cobbler", "comet",
    "compass", "copse", "coral", "cradle", "crater", "cricket", "dagger", "daisy", "desert", "dolphin", "donkey",
    "drum", "easel", "ember", "engine", "falcon", "feather", "ferry", "fiddle", "finch", "flute", "forest", "fountain",
    "galaxy", "garden", "geyser", "glacier", "goblet", "granite", "hammer", "harbor", "hazel", "helmet", "heron",
    "hinge", "island", "ivy", "jacket", "jasmine", "jewel", "kettle", "kite", "ladder", "lagoon", "lantern", "lemon",
    "lever", "lizard", "locket", "magnet", "mantle", "maple", "marble", "meadow", "mill", "mirror", "monsoon", "mortar",
    "needle", "nettle", "oasis", "ocean", "orchard", "otter", "oven", "paddle", "parrot", "pebble", "pepper", "piano",
    "pigeon", "pillow", "planet", "plough", "pocket", "prairie", "quarry", "quill", "rabbit", "raven", "ribbon",
    "river", "rocket", "saddle", "salmon", "sickle", "signal", "sparrow", "spindle", "statue", "summit", "tavern",
    "temple", "thimble", "thistle", "tunnel", "turnip", "umbrella", "valley", "vessel", "violin", "wagon", "walnut",
    "whistle", "willow", "window", "yarn", "zephyr",
)  # fmt: skip


@cache
def haystack_words() -> tuple[str, ...]:
    """The novel's words in order, with their punctuation; line breaks are spaces."""
    return tuple(shipped.haystack().split())


def haystack_slice(start: int, count: int) -> list[str]:
    """``count`` words from the sentence that begins at or after word ``start``; past the end the novel begins anew."""
    words = haystack_words()
    n = len(words)
    start = next((i for i in range(start, start + n) if i % n == 0 or ends_sentence(words[(i - 1) % n])), start)
    return [words[(start + i) % n] for i in range(count)]


def ends_sentence(word: str) -> bool:
    """Whether a sentence can end with this word; titles before names don't."""
    return re.fullmatch(r".*[.!?][\"')_]*", word) is not None and word not in {"Mr.", "Mrs.", "Miss.", "Dr.", "St."}


def sentences(words: list[str]) -> list[str]:
    """Words joined to sentences."""
    out: list[str] = []
    begin = 0
    for i, word in enumerate(words):
        if ends_sentence(word) or i == len(words) - 1:
            out.append(" ".join(words[begin : i + 1]))
            begin = i + 1
    return out


@cache
def vocabulary() -> tuple[str, ...]:
    """About 9,000 distinct lower-case words of 4 to 12 letters from the shipped prose, sorted."""
    sources = [shipped.haystack()]
    sources += [t.text for kind, split in shipped.NAMES if kind == "prose" for t in shipped.load(kind, split)]
    return tuple(sorted({w for text in sources for w in re.findall(r"\b[a-z]{4,12}\b", text)}))

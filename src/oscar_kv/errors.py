# SPDX-License-Identifier: Apache-2.0
"""Errors that name what is wrong, where, and what to do about it."""


class OscarError(ValueError):
    """Base of every error this package raises on purpose."""


class RecipeError(OscarError):
    """A recipe, preset or per-layer plan that cannot be carried out."""


class ArtifactError(OscarError):
    """A calibration file that is damaged, incomplete, or belongs to another model."""


class CalibrationError(OscarError):
    """Calibration that cannot give a trustworthy artifact (too few tokens, non-finite activations …)."""


class UnsupportedModelError(OscarError):
    """A model whose attention this cache cannot hold (MLA, encoder-decoder, shared KV …)."""


class CacheError(OscarError):
    """The cache was used in a way that would give wrong results (other attention function, bad crop …)."""

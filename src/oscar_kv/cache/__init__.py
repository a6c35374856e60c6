# SPDX-License-Identifier: Apache-2.0
"""Storage of a layer's keys and values: raw windows and packed pages, whatever the engine."""

from .mixed import MixedLayer as MixedLayer

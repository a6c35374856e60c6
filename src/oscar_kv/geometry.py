# SPDX-License-Identifier: Apache-2.0
"""What one layer's attention looks like, as far as its cache is concerned."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class LayerGeometry(BaseModel):
    """One decoder layer.

    kind: "full" is quantised; "sliding" and "other" (linear attention, no attention) keep the engine's own cache.
    Raises pydantic's ValidationError (a ValueError) that names the field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["full", "sliding", "other"]
    num_q_heads: int = Field(default=0, ge=0)
    num_kv_heads: int = Field(default=0, ge=0)
    k_head_dim: int = Field(default=0, ge=0)
    v_head_dim: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> LayerGeometry:
        if self.kind == "full":
            from .layout import check_head_dim

            check_head_dim(self.k_head_dim, "k_head_dim")
            check_head_dim(self.v_head_dim, "v_head_dim")
            if self.num_kv_heads < 1 or self.num_q_heads < 1 or self.num_q_heads % self.num_kv_heads:
                raise ValueError(f"{self.num_q_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")
        return self

    @property
    def group(self) -> int:
        """Query heads a KV head (0 where there is no attention)."""
        if not self.num_kv_heads:
            return 0
        return self.num_q_heads // self.num_kv_heads

# SPDX-License-Identifier: Apache-2.0
"""Centring and rotation: Hadamard matrices, bit reversal, U·H and U·H·P_br (OSCAR, arXiv 2605.17757, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .errors import OscarError


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % f for f in range(2, int(n**0.5) + 1))


def _residues(p: int) -> Tensor:
    """chi(i - j) over the integers modulo p: 0, 1 for squares, -1 for the rest."""
    squares = {x * x % p for x in range(1, p)}
    chi = torch.tensor([0] + [1 if x in squares else -1 for x in range(1, p)])
    return chi[(torch.arange(p)[:, None] - torch.arange(p)[None]) % p]


def _paley(order: int) -> Tensor | None:
    """A Hadamard matrix of this order by one of Paley's constructions, where a prime serves."""
    if order <= 2:
        return torch.tensor([[1, 1], [1, -1]])[:order, :order]
    if _is_prime(p := order - 1) and p % 4 == 3:
        core = torch.zeros(order, order, dtype=torch.long)
        core[0, 1:], core[1:, 0], core[1:, 1:] = 1, -1, _residues(p)
        return core + torch.eye(order, dtype=torch.long)
    if order % 2 == 0 and _is_prime(p := order // 2 - 1) and p % 4 == 1:
        core = torch.ones(p + 1, p + 1, dtype=torch.long)
        core[0, 0], core[1:, 1:] = 0, _residues(p)
        eye = torch.eye(p + 1, dtype=torch.long)
        return torch.kron(core, torch.tensor([[1, 1], [1, -1]])) + torch.kron(eye, torch.tensor([[1, -1], [-1, -1]]))
    return None


@cache
def _hadamard_signs(order: int) -> Tensor:
    halvings, base = [], order
    while base >= 1:
        halvings.append(base)
        if base % 2:
            break
        base //= 2
    for base in reversed(halvings):  # the smallest Paley core, then Sylvester doubling
        if (signs := _paley(base)) is not None:
            while len(signs) < order:
                signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
            return signs
    raise OscarError(f"no Hadamard matrix of order {order} is built in: head_dim must be a multiple of 16 up to 256")


def hadamard(d: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Orthonormal Hadamard matrix [d, d]: entries ±1/sqrt(d). Serves every multiple of 16 up to 256.

    Raises OscarError where no construction is known to this module.
    """
    return _hadamard_signs(d).to(dtype) / d**0.5


def bit_reversal(d: int) -> Tensor:
    """Indices [d] of the bit-reversal permutation P_br: rank r goes to slot reverse(r). d must be a power of two."""
    bits = d.bit_length() - 1
    if d < 1 or 1 << bits != d:
        raise OscarError(f"bit reversal needs a power of two, head_dim is {d}")
    return torch.tensor([int(f"{i:0{bits}b}"[::-1] or "0", 2) for i in range(d)])


def eigenbasis(covariance: Tensor) -> Tensor:
    """Eigenvectors [..., d, d] (columns, largest eigenvalue first) of symmetric matrices [..., d, d], in fp64.

    Signs are fixed (the largest entry of a column is positive), so that the same statistics give the same file.
    """
    _, vectors = torch.linalg.eigh(covariance.double())
    vectors = vectors.flip(-1)
    pivot = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return vectors * torch.where(pivot < 0, -1.0, 1.0)


def rotation(kind: str, covariance: Tensor) -> Tensor:
    """Orthogonal matrices [heads, d, d] in fp64 of a recipe's rotation kind, from covariances [heads, d, d].

    "hadamard": H · "eigen": U·H a head · "eigen-layer": U·H·P_br of the heads' mean covariance, the same for all
    (P_br only where d is a power of two: with one group a row a permutation changes nothing but the order).
    """
    heads, d = covariance.shape[0], covariance.shape[-1]
    h = hadamard(d)
    if kind == "none":
        return torch.eye(d, dtype=torch.float64).expand(heads, d, d).contiguous()
    if kind == "hadamard":
        return h.expand(heads, d, d).contiguous()
    if kind == "eigen":
        return eigenbasis(covariance) @ h
    if kind == "eigen-layer":
        shared = eigenbasis(covariance.double().mean(0)) @ h
        if d & (d - 1) == 0:
            shared = shared[:, bit_reversal(d)]
        return shared.expand(heads, d, d).contiguous()
    raise OscarError(f"unknown rotation {kind!r}: none, hadamard, eigen, eigen-layer")


def page_matmul(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows [pages, heads, n, d] times one matrix a head [heads, d, e] → [pages, heads, n, e].

    On a CPU each page is multiplied by a call of the same shape, however many come together: a product's last bit may
    depend on its shape, and the bytes of a page must not depend on how a text was cut into chunks.
    """
    if rows.device.type != "cpu" or rows.shape[0] <= 1:
        return torch.matmul(rows, matrix)
    out = rows.new_empty(*rows.shape[:-1], matrix.shape[-1])
    for page in range(rows.shape[0]):
        torch.matmul(rows[page], matrix, out=out[page])
    return out


@dataclass(frozen=True)
class SideTransform:
    """y = (x − centre) R for the keys or the values of one layer.

    centre [heads, d]; rotation [heads, d, d], orthogonal, columns are the new axes (``None``: identity).
    """

    centre: Tensor
    rotation: Tensor | None

    def apply(self, x: Tensor) -> Tensor:
        """x [pages, heads, n, d] → centred, rotated rows of the same shape."""
        x = x - self.centre[:, None]
        return x if self.rotation is None else page_matmul(x, self.rotation)

    def undo(self, y: Tensor) -> Tensor:
        """Inverse of ``apply``."""
        y = y if self.rotation is None else page_matmul(y, self.rotation.mT)
        return y + self.centre[:, None]

    def to(self, device: torch.device | str, dtype: torch.dtype) -> SideTransform:
        turned = None if self.rotation is None else self.rotation.to(device, dtype).contiguous()
        return SideTransform(self.centre.to(device, dtype), turned)

# SPDX-License-Identifier: Apache-2.0
"""``oscar-kv zoo-import``: published rotation files in, an artifact out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import check_outputs, console, model_name, number, print_table, write_json


def command(
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Folder, hub name or .gguf file: gives the geometry.")
    ],
    k_file: Annotated[Path, typer.Option("--k-file", metavar="FILE", help="The keys' rotations (.pt).")],
    v_file: Annotated[Path, typer.Option("--v-file", metavar="FILE", help="The values' rotations (.pt).")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where to write the artifact.")],
    k_bits: Annotated[int, typer.Option(min=1, max=4, help="Bits of a key's code.")] = 2,
    v_bits: Annotated[int, typer.Option(min=1, max=4, help="Bits of a value's code.")] = 2,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write what was done as JSON.")
    ] = None,
) -> None:
    """Make an artifact of RotationZoo files. They hold rotations alone: no centring and no shaping, and it says so."""
    check_outputs(("-o", output), ("--json", json_file))
    from ..integrations.transformers.geometry import layer_geometries
    from ..integrations.transformers.identity import config_identity
    from ..integrations.transformers.loading import load_config
    from ..memory import bits_per_element
    from ..rotationzoo import load_zoo

    config = load_config(model)
    artifact = load_zoo(
        k_file,
        v_file,
        layer_geometries(config),
        config_identity(config, model_name(model)),
        k_bits=k_bits,
        v_bits=v_bits,
    )
    artifact.save(output)
    rows = [
        ["model", f"{artifact.meta.model.id} ({artifact.meta.model.architecture})"],
        ["layers quantised", f"{len(artifact.layers)} of {len(artifact.meta.layers)}"],
        ["recipe", artifact.label],
        ["bits an element, history", number(bits_per_element(artifact), 2)],
        ["artifact sha256", artifact.sha256[:16]],
        ["written", str(output)],
    ]
    print_table("", ("", ""), rows)
    console.print("Calibrate this model instead to get centring and shaping: `oscar-kv calibrate`.", markup=False)
    if json_file is not None:
        document = {"file": str(output), "label": artifact.label, "sha256": artifact.sha256}
        write_json(json_file, {**document, "meta": artifact.meta.model_dump(mode="json")})

# SPDX-License-Identifier: Apache-2.0
"""``oscar-kv zoo-export``: an artifact's rotations as the files that other tools read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import check_outputs, console, write_json


def command(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="File of `oscar-kv calibrate`.")],
    k_file: Annotated[Path, typer.Option("--k-file", metavar="FILE", help="Where the keys' rotations go (.pt).")],
    v_file: Annotated[Path, typer.Option("--v-file", metavar="FILE", help="Where the values' rotations go (.pt).")],
    version: Annotated[
        int | None, typer.Option("--format", min=1, max=2, help="1: one rotation a layer; 2: one a KV head.")
    ] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Leave out centres and error weights, which the format cannot hold.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write what was done as JSON.")
    ] = None,
) -> None:
    """Write an artifact's rotations as a RotationZoo K file and V file."""
    check_outputs(("--k-file", k_file), ("--v-file", v_file), ("--json", json_file))
    from ..artifact import Artifact
    from ..errors import ArtifactError
    from ..rotationzoo import save_zoo

    loaded = Artifact.load(artifact)
    try:
        written = save_zoo(loaded, k_file, v_file, version, lossy=lossy)
    except ArtifactError as error:
        raise ArtifactError(str(error).replace("pass lossy=True", "add --lossy")) from error
    console.print(f"{k_file}, {v_file}: {len(loaded.layers)} layers, format version {written}", markup=False)
    if json_file is not None:
        write_json(json_file, {"k_file": str(k_file), "v_file": str(v_file), "format_version": written})

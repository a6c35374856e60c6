#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the option tables of docs/cli.md from the commands themselves.

python tools/make_cli_docs.py            rewrite what stands between the markers
python tools/make_cli_docs.py --check    exit 1 if the page differs from the commands
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from oscar_kv.cli import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
BLOCK = re.compile(r"(<!-- options:([\w-]+) -->\n).*?(<!-- /options -->)", re.DOTALL)


def table(name: str) -> str:
    """Arguments and options of one command, as Markdown."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("oscar-kv", [name], resilient_parsing=True)
    command = group.get_command(context, name)
    if command is None:
        sys.exit(f"{PAGE}: no such command: {name}")
    lines = ["| argument or option | meaning | default |", "|---|---|---|"]
    for param in command.params:
        named = param.param_type_name != "argument"
        spelt = (
            ", ".join(f"`{o}`" for o in [*param.opts, *param.secondary_opts])
            if named
            else f"`{param.metavar or param.name}`"
        )
        value = getattr(param, "metavar", None) if named and not getattr(param, "is_flag", False) else None
        default = param.default
        shown = (
            "required"
            if param.required
            else "–"
            if default is None or default is False or callable(default)
            else f"`{default}`"
        )
        meaning = (getattr(param, "help", None) or "").replace("|", "\\|").replace("\n", " ")
        spelt = f"{spelt}{f' {value}' if value else ''}".replace("|", "\\|")
        lines.append(f"| {spelt} | {meaning} | {shown} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit 1 if the page is out of date; write nothing")
    options = parser.parse_args(arguments)
    old = PAGE.read_text(encoding="utf-8")
    new = BLOCK.sub(lambda found: f"{found[1]}{table(found[2])}\n{found[3]}", old)
    if old == new:
        return 0
    if options.check:
        print(f"{PAGE} differs from the commands: run python tools/make_cli_docs.py", file=sys.stderr)
        return 1
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The command line ``oscar-kv``: one file a command, each imported when it is called, so that ``--help`` is instant."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from ..errors import OscarError

# Read once, when torch loads OpenMP: threads that wait then sleep instead of spinning, which on a busy machine slows
# many small operations manyfold. Speed alone, no result changes; a value that the user set stays.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

COMMANDS = {
    "demo": "See the whole of it on a small model: calibrate, compare recipes, generate. A few minutes on a CPU.",
    "calibrate": "Measure a model's keys, values and queries and write the artifact that a 2-bit cache needs.",
    "eval": "Perplexity, KL divergence to full precision and needle retrieval, recipes side by side.",
    "generate": "Generate text with a quantised cache; --compare shows full precision beside it.",
    "bench": "Time kernels and whole decode steps beside the fastest BF16 kernels at hand. Needs a CUDA device.",
    "inspect": "What an artifact holds and predicts: text, JSON, plots, an HTML report.",
    "zoo-import": "Make an artifact of a RotationZoo K file and V file (no centring, no shaping).",
    "zoo-export": "Write an artifact's rotations as a RotationZoo K file and V file.",
}
"""Every command that lives in a module of its own: name → the line that ``oscar-kv --help`` shows."""


class _LazyGroup(TyperGroup):
    """Imports a command's module when the command is asked for; the list of commands needs none of them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        if ctx.meta.get("oscar_kv.listing"):
            return TyperCommand(cmd_name, help=COMMANDS[cmd_name])
        return load_command(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        ctx.meta["oscar_kv.listing"] = True
        super().format_help(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            import difflib

            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"no such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Errors that this package raises on purpose become one red message and exit code 2."""
        try:
            return super().invoke(ctx)
        except OscarError as error:
            if ctx.params.get("debug"):
                raise
            from .common import print_error

            print_error(str(error))
            raise typer.Exit(2) from error


def load_command(name: str) -> Any:
    """The parser and callback of one command, from its module's function ``command``."""
    function = import_module(f".{name.replace('-', '_')}", __name__).command
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, help=function.__doc__ or COMMANDS[name])(function)
    made: Any = typer.main.get_command(app)
    made.name = name
    return made


app = typer.Typer(
    cls=_LazyGroup,
    name="oscar-kv",
    help="A 2-bit KV cache for the engine you already run.",
    epilog="Start with: oscar-kv demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """A 2-bit KV cache for the engine you already run."""


@app.command("version")
def version(
    json_file: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Versions of oscar-kv and of what it runs on."""
    from .common import show_versions

    show_versions(__version__, json_file)


def main() -> None:
    """Entry point of the console script."""
    app()

"""The command `hbmcomm`: one file for each subcommand. The library never calls the command.

A subcommand is imported on demand. A subcommand that needs torch imports it when it runs. So
`hbmcomm --help` and the start of `hbmcomm serve` are quick.
"""

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from torch_hbmcomm.version import __version__

# A subcommand's module has a function of the same name, or an `app` with subcommands of its own.
_COMMANDS = ("info", "demo", "bench", "serve", "profile")


class _OnDemand(TyperGroup):
    """Imports a subcommand when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"torch_hbmcomm.cli.{cmd_name}")
        holder = typer.Typer(add_completion=False)
        if hasattr(module, "app"):
            holder.add_typer(module.app, name=cmd_name)
        else:
            holder.command(cmd_name)(getattr(module, cmd_name))
        return typer.main.get_group(holder).commands[cmd_name]


app = typer.Typer(
    name="hbmcomm",
    cls=_OnDemand,
    help="The backend hbm of torch.distributed, its memory box, and what communication costs.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hbmcomm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    app()

"""The command `hbmcomm`: one file for each subcommand. It calls the library, never the reverse.

torch is imported inside the commands that need it, so that `hbmcomm --help` is quick.
"""

from typing import Annotated

import typer

from torch_hbmcomm.cli import bench, info

app = typer.Typer(
    name="hbmcomm",
    help="Collectives for PyTorch CPU training, staged in high-bandwidth memory.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command("info")(info.info)
app.add_typer(bench.app, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        from torch_hbmcomm.bench.machine import installed_version

        typer.echo(f"hbmcomm {installed_version() or '(not installed: run from a source tree)'}")
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

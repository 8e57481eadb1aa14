"""`hbmcomm serve`: serves a memory box until SIGTERM or SIGINT."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from torch_hbmcomm.cli.metrics import Address
    from torch_hbmcomm.smb import Server
    from torch_hbmcomm.smb.token import Token


_ENDING = (signal.SIGTERM, signal.SIGINT)


class Policy(str, Enum):
    preferred = "preferred"
    bind = "bind"
    interleave = "interleave"
    ddr = "ddr"


class Verbs(str, Enum):
    auto = "auto"
    on = "on"
    off = "off"


def serve(
    listen: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Accept clients here; repeat it for more addresses. 0.0.0.0 is every interface, "
            "port 0 any free port. The default serves this machine only.",
            show_default="127.0.0.1:7777",
        ),
    ] = None,
    memory: Annotated[str, typer.Option(help="Of all segments together, as in 16GiB.")] = "1GiB",
    policy: Annotated[Policy, typer.Option(help="Where the memory comes from.")] = Policy.preferred,
    store: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="A directory in which the segments survive the box."),
    ] = None,
    sync: Annotated[
        bool,
        typer.Option("--sync", help="With --store: keys and sums survive a crash of the machine."),
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Holds the token; made if it is not there.",
            show_default="HBMCOMM_TOKEN, HBMCOMM_TOKEN_FILE, or ~/.config/hbmcomm/token",
        ),
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Admit every client that can connect.")
    ] = False,
    no_seal: Annotated[
        bool,
        typer.Option(
            "--no-seal", help="Do not authenticate messages over the network; clients set it too."
        ),
    ] = False,
    unix: Annotated[
        Path | None,
        typer.Option(
            help="The Unix socket, for shm.",
            show_default="chosen, in HBMCOMM_SOCKET_DIR or /dev/shm",
        ),
    ] = None,
    no_unix: Annotated[bool, typer.Option("--no-unix", help="No Unix socket, so no shm.")] = False,
    verbs: Annotated[Verbs, typer.Option(help="RDMA; auto: if there is a device.")] = Verbs.auto,
    lease: Annotated[
        float, typer.Option(min=0.1, help="Seconds; a client silent for longer is released.")
    ] = 30.0,
    most_clients: Annotated[int, typer.Option(min=1)] = 4096,
    smallest_block: Annotated[str, typer.Option(help="A power of two.")] = "4KiB",
    largest_block: Annotated[str, typer.Option(help="A power of two.")] = "32GiB",
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve Prometheus text at http://HOST:PORT/metrics; 16 connections of 10 s.",
            show_default=False,
        ),
    ] = None,
    drain: Annotated[float, typer.Option(min=0, help="Seconds that clients get at the end.")] = 5.0,
) -> None:
    """Serve memory to clients until SIGTERM or SIGINT, which end it with status 0.

    The first line on standard output is the address that clients connect to.
    """
    from torch_hbmcomm import smb
    from torch_hbmcomm.smb import token as tokens

    if no_token and token_file is not None:
        raise typer.BadParameter("--no-token and --token-file exclude one another")
    if no_unix and unix is not None:
        raise typer.BadParameter("--no-unix and --unix exclude one another")

    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    with ExitStack() as stack:
        try:
            address = None if metrics is None else _metrics_address(metrics)
            if no_token:
                token = tokens.Token("", "none: every client that can connect is admitted")
            elif token_file is not None:
                token = tokens.read_or_create(token_file)
            else:
                token = tokens.find_or_create(None)
            server = stack.enter_context(
                smb.Server(
                    listen=listen or ["127.0.0.1:7777"],
                    memory=memory,
                    policy=policy.value,
                    store=store,
                    token=token.text,
                    seal=False if no_seal else None,
                    unix=False if no_unix else unix or True,
                    sync=sync,
                    lease=lease,
                    most_clients=most_clients,
                    smallest_block=smallest_block,
                    largest_block=largest_block,
                    verbs=verbs.value,
                )
            )
            exporter = None
            if address is not None:
                from torch_hbmcomm.cli.metrics import Metrics

                exporter = stack.enter_context(Metrics(server, address))
            _introduce(server, token)
            if exporter is not None:
                typer.echo(f"metrics: {exporter.url}")
        except (ValueError, MemoryError, OSError, RuntimeError) as error:
            typer.echo(f"hbmcomm serve: {error}", err=True)
            raise typer.Exit(1) from error
        _wait_for_the_end()
        typer.echo("draining", err=True)
        server.drain(drain)


def _metrics_address(text: str) -> Address:
    from torch_hbmcomm.cli.metrics import Address  # here: it imports an HTTP server

    return Address.parse(text)


def _wait_for_the_end() -> None:
    """Wait for one of the signals _ENDING, which are blocked. Then unblock them, so that a second
    signal ends the process."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.sigwait(_ENDING)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def _introduce(server: Server, token: Token) -> None:
    for url in server.urls:
        typer.echo(url)
    typer.echo(f"process: {os.getpid()}")
    typer.echo(f"token: {token.source}")
    typer.echo(f"transports: {', '.join(server.transports)}")

"""Reads and writes of a memory box over a link with a delay, compared with a plain connection.

    sudo .venv/bin/python -m benchmarks.box.distant --json distant.json

A network namespace emulates the machine of the box, another one the machine of the client, and a
program of `make bench` is the link. The program needs root and iproute2, and removes the namespaces
at the end.

The contender tcp is a plain connection in the same run. A write sends the bytes, and waits for an
answer of one byte. A read sends a header of 9 bytes, and waits for the bytes.
"""

from __future__ import annotations

import secrets
import signal
import sys
from contextlib import ExitStack
from typing import Annotated

import typer

from benchmarks.namespaces import NoNamespaces, distant_link
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.box import ROLE
from torch_hbmcomm.bench.peer import PeerFailed, peer
from torch_hbmcomm.bench.report import Json, check_file, fail, finish, names
from torch_hbmcomm.bench.result import Measurement, Result, describe_machine, sampled
from torch_hbmcomm.sizes import MIB, parse_bytes

TCP = "tcp"
_CLIENT = "benchmarks.box.distant_client"
_PORT = 29402  # in the namespaces

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def run(sizes: list[int], lanes: list[int], rounds: int, megabits: float, delay: float) -> Result:
    """Measure each operation at each size. Raises NoNamespaces, and PeerFailed."""
    token = secrets.token_hex(16)
    found: list[Measurement] = []
    with ExitStack() as stack:
        link = stack.enter_context(distant_link(megabits, delay))
        there, here = link.nodes
        box = stack.enter_context(peer(ROLE, there.launcher, ["box"]))
        memory = 2 * max(sizes) + 16 * MIB
        url = box.ask(
            "open", listen=f"{there.address}:0", memory=memory, token=token, threads=0, store=None
        )
        echo = stack.enter_context(peer(_CLIENT, there.launcher))
        echo.ask("listen", address=there.address, port=_PORT)
        echo.tell("serve")
        client = stack.enter_context(peer(_CLIENT, here.launcher))
        client.ask("connect", address=there.address, port=_PORT)
        contenders = {TCP: 0} | {_name(count): count for count in lanes}
        for contender, count in contenders.items():
            if count:
                client.ask("open", url=url, token=token, lanes=count)
            for size in sizes:
                report.say(f"{contender}, {size} bytes")
                seconds = client.ask("measure", size=size, rounds=rounds, box=count > 0)
                for operation, samples in seconds.items():
                    of = {"operation": operation, "bytes": size}
                    found.append(sampled(of, contender, [1e6 * one for one in samples]))
        client.ask("hang_up")
        echo.answer()
    return Result(
        benchmark="distant box",
        machine=describe_machine(),
        plan={"rounds": rounds, "megabits": megabits, "delay_ms": delay},
        contenders={
            TCP: "a plain connection, in Python",
            **{_name(count): f"hbm, {count} connections (lanes)" for count in lanes},
        },
        references=[TCP],
        measurements=found,
    )


def _name(lanes: int) -> str:
    return f"hbm, {lanes}"


@app.command()
def main(
    sizes: Annotated[str, typer.Option(help="Separated by commas.")] = "64KiB,1MiB,16MiB,64MiB",
    lanes: Annotated[str, typer.Option(help="Connections, separated by commas.")] = "1,4,8",
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each median.")] = 5,
    megabits: Annotated[float, typer.Option(help="Rate of the link, Mbit/s.")] = 1000,
    delay: Annotated[float, typer.Option(help="Of the link in each direction, ms.")] = 10,
    json: Json = None,
) -> None:
    """Measure a box at the other end of a link with a delay.

    The exit status never depends on a time.
    """
    check_file(json)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes the namespaces
    try:
        result = run(
            [parse_bytes(size) for size in names(sizes)],
            [int(count) for count in names(lanes)],
            rounds,
            megabits,
            delay,
        )
    except (NoNamespaces, PeerFailed) as error:
        fail(str(error))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    headings = {"operation": lambda one: str(one.of["operation"]), "bytes": report.size}
    table = report.compared(
        f"a box over {megabits:g} Mbit/s and {delay:g} ms",
        result.measurements,
        headings,
        lambda row, one: report.compared_with(one, row[TCP], reference=True),
    )
    finish(report.group([table], result), result, json)


if __name__ == "__main__":
    app()

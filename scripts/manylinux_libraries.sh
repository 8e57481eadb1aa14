#!/bin/sh
# Prepares a manylinux_2_28 container (AlmaLinux 8) to build the wheels. cibuildwheel runs it once
# per container. It builds hwloc and memkind: memkind cannot find high-bandwidth memory with the
# distribution's hwloc, which is too old, and the distribution has no memkind.
set -eu

HWLOC=2.12.2
MEMKIND=1.14.0

dnf install -y autoconf automake libtool numactl-devel openssl-devel rdma-core-devel unzip

mkdir -p /tmp/libraries
cd /tmp/libraries
curl -fsSL "https://download.open-mpi.org/release/hwloc/v${HWLOC%.*}/hwloc-$HWLOC.tar.gz" | tar xz
(cd "hwloc-$HWLOC" &&
  ./configure --prefix=/usr/local --disable-static --disable-cairo --disable-libxml2 --disable-pci \
    --disable-opencl --disable-cuda --disable-nvml --disable-rsmi --disable-levelzero &&
  make -j "$(nproc)" install)
curl -fsSL "https://github.com/memkind/memkind/archive/refs/tags/v$MEMKIND.tar.gz" | tar xz
(cd "memkind-$MEMKIND" &&
  export PKG_CONFIG_PATH=/usr/local/lib/pkgconfig &&
  ./autogen.sh && ./configure --prefix=/usr/local --disable-daxctl && make && make install)
echo /usr/local/lib >/etc/ld.so.conf.d/libraries.conf
ldconfig

# Unpacks the headers and libraries of each PyTorch that the extension is compiled for.
# HBMCOMM_TORCH names one directory per release. The files are the same for every Python.
[ "${HBMCOMM_WITHOUT_TORCH:-0}" = 0 ] || exit 0
for folder in $(echo "$HBMCOMM_TORCH" | tr : ' '); do
  python3.11 -m pip download --no-deps --only-binary :all: --dest "$folder" \
    --index-url https://download.pytorch.org/whl/cpu "torch==$(basename "$folder").*"
  (cd "$folder" &&
    unzip -q ./*.whl 'torch/version.py' 'torch/include/*' torch/lib/libc10.so \
      torch/lib/libtorch_cpu.so torch/lib/libtorch_python.so && rm ./*.whl)
done

#!/bin/sh
# Prepares a manylinux_2_28 container (AlmaLinux 8) to build the wheels: cibuildwheel runs it once a
# container. The distribution's hwloc is too old for memkind's search for high-bandwidth memory, and
# it has no memkind, so both are built here.
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

# The PyTorches whose headers and libraries the extension is compiled against, in the folders that
# HBMCOMM_TORCH names by their releases. They are the same for every Python.
[ "${HBMCOMM_WITHOUT_TORCH:-0}" = 0 ] || exit 0
for folder in $(echo "$HBMCOMM_TORCH" | tr : ' '); do
  python3.11 -m pip download --no-deps --only-binary :all: --dest "$folder" \
    --index-url https://download.pytorch.org/whl/cpu "torch==$(basename "$folder").*"
  (cd "$folder" &&
    unzip -q ./*.whl 'torch/version.py' 'torch/include/*' torch/lib/libc10.so \
      torch/lib/libtorch_cpu.so torch/lib/libtorch_python.so && rm ./*.whl)
done

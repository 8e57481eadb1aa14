# `make demo` and `make test` do all set-up on a fresh Debian or Ubuntu. Each step leaves a stamp,
# so a second run redoes only what changed.

PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/pip --disable-pip-version-check --quiet
EXTRAS := bench examples lint test
FUZZ_SECONDS ?= 60
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

BUILD_PACKAGES := g++ python3-dev python3-venv libhwloc-dev libibverbs-dev libmemkind-dev \
  libnuma-dev librdmacm-dev libssl-dev
TEST_PACKAGES := clang cmake g++-aarch64-linux-gnu googletest iperf3 iproute2 libclang-rt-dev \
  libgtest-dev mpich munge ninja-build qemu-user slurm-wlm
VM_PACKAGES := busybox-static ibverbs-providers ibverbs-utils kmod perftest qemu-system-x86 \
  rdma-core rdmacm-utils xz-utils zstd

# Directories too: their time changes when a file is added or removed.
NATIVE := $(shell find csrc -type d -o -name '*.cpp' -o -name '*.h' -o -name '*.inc' \
  -o -name '*.map' -o -name CMakeLists.txt)
NATIVE_TESTS := $(wildcard tests/native/* tests/vm/*.cpp tests/vm/*.h tests/vm/CMakeLists.txt)
CLANG_FORMAT := find csrc tests/fuzz tests/native tests/vm -name '*.cpp' -o -name '*.h' -o -name '*.inc' \
  | xargs clang-format

# Stamps.
PACKAGES := $(VENV)/.packages
EXTENSION := $(VENV)/.extension
INSTALLED := $(VENV)/.installed
KERNEL := build/vm/.kernel

# ThreadSanitizer of GCC 12 cannot start under the address randomisation of recent kernels.
TSAN_LAUNCHER := $(shell setarch -R true 2>/dev/null && echo setarch -R)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9%-]+:.*## / { sub("%", "N", $$1); printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: deps
deps:  ## install missing system packages (root or passwordless sudo), or name them
	@scripts/system_packages.sh $(BUILD_PACKAGES) $(TEST_PACKAGES) $(VM_PACKAGES)

.PHONY: venv
venv: $(PACKAGES)  ## create .venv with all Python packages

.PHONY: build
build: $(INSTALLED)  ## compile the extension and install the package, editable, in .venv

.PHONY: demo
demo: build  ## train a small classifier on 2 ranks
	$(VENV)/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 \
	  examples/ddp_digits.py

.PHONY: test
test: native native-aarch64 fuzz build vm  ## run every test: native, virtual machines, Python
	$(VENV)/bin/pytest

test-%: build  ## run the collective conformance tests at N ranks: test-1 ... test-8
	HBMCOMM_TEST_RANKS=$* $(VENV)/bin/pytest -m conformance

.PHONY: torch-suite
torch-suite: build  ## run PyTorch's own distributed suite over hbm
	$(VENV)/bin/python tests/python/run_torch_suite.py

.PHONY: native
native: build/native/.tested  ## build and run the native tests

.PHONY: native-aarch64
native-aarch64: build/aarch64/.tested  ## the portable ones of them as AArch64, emulated

.PHONY: fuzz
fuzz: build/fuzz/.tested  ## send the memory box whatever comes to mind, for FUZZ_SECONDS

.PHONY: vm
vm: native build $(KERNEL)  ## check where memory lies, in virtual machines that have HBM
	@scripts/system_packages.sh $(VM_PACKAGES)
	$(VENV)/bin/pytest tests/vm

.PHONY: sanitize
sanitize: build/address/.tested build/thread/.tested  ## native tests under ASan, UBSan and TSan

.PHONY: bench
bench: build  ## compare the collectives with Gloo and MPI
	$(VENV)/bin/hbmcomm bench collectives

.PHONY: lint
lint: $(PACKAGES)  ## check style and types of Python and C++
	ruff check
	ruff format --check
	mypy
	$(CLANG_FORMAT) --dry-run -Werror

.PHONY: format
format: $(PACKAGES)  ## rewrite Python and C++ in the project's style
	ruff check --fix
	ruff format
	$(CLANG_FORMAT) -i

.PHONY: clean
clean:  ## remove everything that was built, but not .venv
	rm -rf build dist *.egg-info torch_hbmcomm/*.so $(EXTENSION) $(INSTALLED)

$(VENV)/bin/python:
	@scripts/system_packages.sh $(BUILD_PACKAGES)
	$(PYTHON) -m venv $(VENV)

$(PACKAGES): pyproject.toml scripts/dependencies.py scripts/requirements.py | $(VENV)/bin/python
	@mkdir -p build
	$(VENV)/bin/python scripts/requirements.py $(EXTRAS) > build/requirements.txt
	$(PIP) install -r build/requirements.txt
	@touch $@

$(EXTENSION): $(PACKAGES) setup.py scripts/box_build.py scripts/native_requirements.py $(NATIVE)
	@scripts/system_packages.sh $(BUILD_PACKAGES)
	$(VENV)/bin/python setup.py --quiet build_ext --inplace
	@touch $@

$(INSTALLED): pyproject.toml setup.py | $(EXTENSION)
	$(PIP) install --no-build-isolation --no-deps --editable .
	@touch $@

build/native/.tested: CMAKE_FLAGS := -DCMAKE_BUILD_TYPE=RelWithDebInfo
build/aarch64/.tested: CMAKE_FLAGS := -DCMAKE_BUILD_TYPE=RelWithDebInfo -DHBM_PORTABLE_ONLY=ON \
  -DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/tests/native/aarch64.cmake
build/address/.tested: CMAKE_FLAGS := -DCMAKE_BUILD_TYPE=Debug \
  -DCMAKE_CXX_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all"
build/thread/.tested: CMAKE_FLAGS := -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS=-fsanitize=thread
build/thread/.tested: LAUNCHER := $(TSAN_LAUNCHER)
build/%/.tested: $(PACKAGES) $(NATIVE) $(NATIVE_TESTS)
	@scripts/system_packages.sh $(BUILD_PACKAGES) $(TEST_PACKAGES)
	cmake -S tests/native -B $(@D) -G Ninja $(CMAKE_FLAGS) \
	  -DMPI_INCLUDE="$$(python scripts/native_requirements.py)"
	cmake --build $(@D)
	$(LAUNCHER) ctest --test-dir $(@D) --output-on-failure
	@touch $@

build/fuzz/.tested: $(PACKAGES) $(NATIVE) $(wildcard tests/fuzz/*)
	@scripts/system_packages.sh $(BUILD_PACKAGES) $(TEST_PACKAGES)
	cmake -S tests/fuzz -B $(@D) -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DCMAKE_CXX_COMPILER=clang++
	cmake --build $(@D)
	python tests/fuzz/smb_frames_corpus.py $(@D)/corpus
	$(@D)/smb_frames -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=$(@D)/ $(@D)/corpus
	@touch $@

$(KERNEL): tests/vm/kernel.py tests/vm/init.sh | $(VENV)/bin/python
	@scripts/system_packages.sh $(VM_PACKAGES)
	$(VENV)/bin/python tests/vm/kernel.py
	@touch $@

# `make demo` and `make test` do all set-up on a fresh Debian or Ubuntu. Each step leaves a stamp
# file, so a second run repeats only the steps whose inputs changed.

PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/pip --disable-pip-version-check --quiet
EXTRAS := bench examples lint test wheels
FUZZ_SECONDS ?= 30
FUZZERS := smb_frames smb_replies verbs_frames
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Without the cached bytecode, hundreds of processes of a run would each compile the package, and
# all workers the tests.
unexport PYTHONDONTWRITEBYTECODE

# Number of tests that run at the same time: processors plus 2, since tests often sleep or wait;
# fewer if there is less than 3 GB of memory for each.
JOBS ?= $(shell awk -v processors=$$(env -u OMP_NUM_THREADS nproc) '/^MemAvailable/ { \
  room = int($$2 / 3e6); n = processors + 2; print room < 1 ? 1 : room < n ? room : n }' /proc/meminfo)
PYTEST = $(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal
# Runs without the user's settings, as tests/python/surroundings.py does.
CTEST = env -u HBMCOMM_BIND -u HBMCOMM_ISA -u HBMCOMM_NODE_ID -u HBMCOMM_SOCKET_DIR \
  -u HBMCOMM_VERBS_LIB -u MEMKIND_HBW_NODES ctest --output-on-failure --no-tests=error \
  --parallel $(JOBS) --timeout $(TEST_SECONDS) --test-dir
TEST_SECONDS ?= 300
# Defaults of `make flakes`.
TIER ?= quick
N ?= 20
BUSY ?= 0
COMPILE = $(if $(MAX_JOBS),CMAKE_BUILD_PARALLEL_LEVEL=$(MAX_JOBS)) cmake --build

BUILD_PACKAGES := g++ python3-dev python3-venv libhwloc-dev libibverbs-dev libmemkind-dev \
  libnuma-dev librdmacm-dev libssl-dev
TEST_PACKAGES := iproute2 libgtest-dev mpich
AARCH64_PACKAGES := g++-aarch64-linux-gnu googletest qemu-user
FULL_PACKAGES := $(AARCH64_PACKAGES) clang containernetworking-plugins iperf3 libclang-rt-dev \
  munge podman runc slurm-wlm
LONG_PACKAGES := debootstrap
TIDY_PACKAGES := clang clang-tidy libomp-dev
VM_PACKAGES := busybox-static ibverbs-providers ibverbs-utils kmod perftest qemu-system-x86 \
  rdma-core rdmacm-utils xz-utils zstd

# Includes directories: their time changes when a file is added or removed.
NATIVE := $(shell find csrc -type d -o -name '*.cpp' -o -name '*.h' -o -name '*.inc' \
  -o -name '*.map' -o -name CMakeLists.txt)
CLANG_FORMAT := find benchmarks/native csrc tests/fuzz tests/native tests/vm \
  -name '*.cpp' -o -name '*.h' -o -name '*.inc' | xargs clang-format

# The directory where setup.py compiles. The native tests are compiled there too.
BUILD = build/$(shell $(VENV)/bin/python -c 'import sys; print(sys.implementation.cache_tag)')
# Stamp files.
PACKAGES := $(VENV)/.packages
SITE_PACKAGES := $(VENV)/.site-packages
INSTALLED := build/.installed
KERNEL := build/vm/.kernel
LIBRARIES := build/libraries
LIBRARY_PACKAGES := $(LIBRARIES)/.packages

# ThreadSanitizer of GCC 12 cannot start under the address randomisation of recent kernels.
TSAN_LAUNCHER := $(shell setarch -R true 2>/dev/null && echo setarch -R)

# A built-in rule would try to make the directory csrc/box/server from csrc/box/server.cpp.
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9%-]+:.*## / { sub("%", "N", $$1); printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: deps
deps:  ## install missing system packages (root or passwordless sudo), or name them
	@scripts/system_packages.sh $(BUILD_PACKAGES) $(TEST_PACKAGES) $(FULL_PACKAGES) $(LONG_PACKAGES) $(TIDY_PACKAGES) $(VM_PACKAGES)

.PHONY: deps-full
deps-full:  ## install the packages of `make test-all`, with the virtual machines' kernel
	@scripts/system_packages.sh $(BUILD_PACKAGES) $(TEST_PACKAGES) $(FULL_PACKAGES) $(VM_PACKAGES)
	@$(MAKE) --no-print-directory $(KERNEL)

.PHONY: venv
venv: $(PACKAGES)  ## create .venv with all Python packages

.PHONY: build
build: $(INSTALLED)  ## compile the extension and install the package, editable, in .venv

.PHONY: demo
demo: build  ## train a small network on 2 ranks, over hbm and over Gloo
	$(VENV)/bin/hbmcomm demo

.PHONY: test
test: native build bench  ## run the quick tests, native and Python
	$(PYTEST)

.PHONY: test-all
test-all: test test-full  ## run every test except those that take hours

.PHONY: test-full
test-full: native-aarch64 fuzz native-kills test-full-python  ## run the tests of test-all that test leaves out

.PHONY: test-full-python
test-full-python: build bench vm-programs
	@scripts/system_packages.sh $(FULL_PACKAGES)
	$(PYTEST) -m 'full and not long' tests/python tests/vm

.PHONY: test-long
test-long: export TEST_SECONDS := 7200
test-long: export HBM_STRESS_SECONDS ?= 600
test-long: export HBM_STRESS_KILLS ?= 1000
test-long: LONG_FUZZ_SECONDS ?= 3600
test-long: sanitize native build  ## run the tests that take hours: sanitizers, soaks
	@scripts/system_packages.sh $(LONG_PACKAGES)
	$(MAKE) fuzz FUZZ_SECONDS=$(LONG_FUZZ_SECONDS)
	$(MAKE) sanitize-accelerator
	$(MAKE) test-libraries
	$(PYTEST) -m long

test-%: accelerator  ## run the collective conformance tests at N ranks: test-1 ... test-8
	HBMCOMM_TEST_RANKS=$* $(VENV)/bin/python -m pytest -m conformance

.PHONY: test-libraries
test-libraries: build $(LIBRARY_PACKAGES)  ## train with libraries that call torch.distributed
	$(LIBRARIES)/bin/python -m pytest -n $(JOBS) --dist loadgroup tests/libraries

.PHONY: test-torch
test-torch: bench  ## run the Python tests on another PyTorch or PYTHON, as TORCH=2.15.0 (5 to 6 GB)
	scripts/test_torch.sh $(TORCH) -n $(JOBS) --dist worksteal

TORCH_SUITE := PYTHONPATH=tests/python $(VENV)/bin/python -m harness.run_torch_suite

.PHONY: torch-suite
torch-suite: build  ## run PyTorch's own distributed suite over hbm, by name and instead of others
	$(TORCH_SUITE)
	for name in gloo mpi ucc ccl; do \
	  $(TORCH_SUITE) --backend instead-of-$$name || exit; \
	done
	$(TORCH_SUITE) --backend instead-of-gloo --suite rpc

# Adds the native tests and the benchmarks' programs to the build of setup.py.
.PHONY: configured
configured: $(INSTALLED)
	@scripts/system_packages.sh $(TEST_PACKAGES)
	cmake -S csrc -B $(BUILD) -G Ninja -DHBM_TESTS=ON -DHBM_BENCHMARKS=ON \
	  -DMPI_INCLUDE="$$(python scripts/mpi_include.py)"

.PHONY: native
native: configured  ## build and run the native tests
	$(COMPILE) $(BUILD) --target native_tests
	$(CTEST) $(BUILD)

.PHONY: flakes
flakes: bench $(if $(filter full,$(TIER)),vm-programs)  ## run a TIER (native, quick, full) N times in random order, with TESTS, BUSY, SEED
	$(COMPILE) $(BUILD) --target native_tests
	CTEST='$(CTEST) $(BUILD)' PYTEST='$(PYTEST)' python scripts/flakes.py --tier $(TIER) --runs $(N) \
	  --tests '$(TESTS)' --busy $(BUSY) $(if $(SEED),--seed $(SEED))

.PHONY: accelerator
accelerator: configured  ## build the test accelerator
	$(COMPILE) $(BUILD) --target accelerators

.PHONY: native-kills
native-kills: configured  ## kill a memory box a hundred times, with native clients
	$(COMPILE) $(BUILD) --target smb_crash_test smb_kill_test
	HBM_STRESS_KILLS=100 $(CTEST) $(BUILD) -R 'smb_(crash|kill)_test'

.PHONY: native-aarch64
native-aarch64: build/aarch64  ## build the portable native tests for AArch64, and run them emulated

.PHONY: fuzz-programs
fuzz-programs: $(PACKAGES)
	@scripts/system_packages.sh $(BUILD_PACKAGES) $(FULL_PACKAGES)
	cmake -S tests/fuzz -B build/fuzz -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_UNITY_BUILD=ON
	$(COMPILE) build/fuzz

.PHONY: fuzz
fuzz: fuzz-programs  ## send random input to the memory box and to a client, for FUZZ_SECONDS each
	for target in $(FUZZERS); do \
	  python tests/fuzz/$${target}_corpus.py build/fuzz/corpus/$$target || exit; \
	done
	printf '%s\n' $(FUZZERS) | xargs -P $(JOBS) -I TARGET sh -c 'build/fuzz/TARGET \
	  -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=build/fuzz/ build/fuzz/corpus/TARGET \
	  > build/fuzz/TARGET.log 2>&1; code=$$?; tail -n 200 build/fuzz/TARGET.log; exit $$code'

# Clang cannot read GCC's precompiled headers, and clang-tidy cannot read unity builds. Clang 14
# cannot read kernels/kernels*.cpp, which use GCC's vectors.
.PHONY: tidy
tidy: $(PACKAGES)  ## check csrc/ with clang-tidy
	@scripts/system_packages.sh $(BUILD_PACKAGES) $(TIDY_PACKAGES)
	cmake -S csrc -B build/tidy -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DCCACHE=OFF \
	  -DCMAKE_CXX_COMPILER_LAUNCHER= -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON \
	  -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DHBM_UNITY=OFF -DHBM_BOX_MODULE=ON \
	  -DPython_EXECUTABLE=$(CURDIR)/$(VENV)/bin/python \
	  -Dpybind11_DIR="$$(python -m pybind11 --cmakedir)" \
	  -DTORCH_RELEASES="$$(python -c 'import torch; print(torch.__version__ + "=" + torch.__path__[0])')"
	run-clang-tidy -quiet -p build/tidy '/csrc/(?!kernels/kernels)'

.PHONY: soak
soak: build  ## search for resources that groups leak, for 40 minutes, as with SOAK="--seed 7"
	$(VENV)/bin/python tests/python/soak.py $(SOAK)

.PHONY: vm
vm: build vm-programs  ## check the placement of memory, in virtual machines that have HBM
	$(PYTEST) -m vm tests/vm

.PHONY: vm-programs
vm-programs: configured $(KERNEL)
	@scripts/system_packages.sh $(VM_PACKAGES)
	$(COMPILE) $(BUILD) --target vm_programs

.PHONY: sanitize
sanitize: export TEST_SECONDS := 1800
sanitize: build/address build/thread  ## run the native tests under ASan, UBSan and TSan

.PHONY: sanitize-accelerator
sanitize-accelerator: build  ## run the quick tests on the accelerator, our C++ under ASan
	@scripts/system_packages.sh $(TEST_PACKAGES)
	scripts/sanitize_accelerator.sh -n $(JOBS) --dist worksteal

.PHONY: bench
bench: configured  ## compile the native programs of the benchmarks (benchmarks/README.md)
	$(COMPILE) $(BUILD) --target bench_programs

.PHONY: report
report: bench  ## repeat small versions of the papers' experiments, in build/report/quick (minutes)
	$(VENV)/bin/python -m papers.report

.PHONY: report-full
report-full: bench vm-programs  ## repeat the papers' experiments at their sizes, in build/report/full (hours)
	$(VENV)/bin/python -m papers.report --full

.PHONY: wheel
wheel: $(PACKAGES)  ## make wheels and the sdist in dist/, as with TORCHES="2.13 2.15"
	@scripts/system_packages.sh $(BUILD_PACKAGES)
	python scripts/wheels.py $(TORCHES)

.PHONY: release
release: $(PACKAGES)  ## do a release's steps here as root, as with TAG=v0.2.0 SUITES="bookworm trixie" TORCHES=2.13
	@scripts/system_packages.sh $(LONG_PACKAGES)
	python scripts/release.py all --tag "$(TAG)" $(if $(SUITES),--in $(SUITES)) \
	  $(if $(TORCHES),--torch $(TORCHES))

.PHONY: sbom
sbom: $(PACKAGES)  ## describe the wheels of dist/ in build/sbom
	python scripts/release.py sbom

.PHONY: figures
figures:  ## compare the records of measured figures with the present code
	$(PYTHON) scripts/figures.py

.PHONY: docs
docs: $(SITE_PACKAGES)  ## build the documentation, with the API reference, in build/site
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

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
clean:  ## remove all build outputs except .venv
	rm -rf build dist *.egg-info torch_hbmcomm/*.so torch_hbmcomm/torch_2_*

$(VENV)/bin/python:
	@scripts/system_packages.sh $(BUILD_PACKAGES)
	$(PYTHON) -m venv $(VENV)

$(PACKAGES): pyproject.toml scripts/dependencies.py scripts/requirements.py \
  scripts/torch_releases.py | $(VENV)/bin/python
	@mkdir -p build
	$(VENV)/bin/python scripts/requirements.py $(EXTRAS) > build/requirements.txt
	$(PIP) install -r build/requirements.txt
	@touch $@

$(SITE_PACKAGES): pyproject.toml scripts/requirements.py | $(VENV)/bin/python
	@mkdir -p build
	$(VENV)/bin/python scripts/requirements.py --extras-only docs > build/site-requirements.txt
	$(PIP) install -r build/site-requirements.txt
	@touch $@

# Makes an environment that extends .venv. DeepSpeed compiles an operator at its first use; doing it
# here keeps it out of the tests.
$(LIBRARY_PACKAGES): tests/libraries/requirements.txt tests/libraries/requirements_no_deps.txt \
  tests/libraries/requirements_torchrl.txt tests/libraries/requirements_ccl.txt \
  tests/libraries/layer.py $(PACKAGES)
	$(VENV)/bin/python -m venv --clear $(LIBRARIES)
	$(VENV)/bin/python tests/libraries/layer.py $(LIBRARIES)
	$(LIBRARIES)/bin/pip --disable-pip-version-check --quiet install -r $<
	$(LIBRARIES)/bin/pip --disable-pip-version-check --quiet install --no-deps -r $(word 2,$^)
	$(VENV)/bin/python -m venv --clear $(LIBRARIES)/torchrl
	$(VENV)/bin/python tests/libraries/layer.py $(LIBRARIES)/torchrl
	$(LIBRARIES)/torchrl/bin/pip --disable-pip-version-check --quiet install -r $(word 3,$^)
	$(VENV)/bin/python -m venv --clear $(LIBRARIES)/ccl
	$(VENV)/bin/python tests/libraries/layer.py $(LIBRARIES)/ccl
	$(LIBRARIES)/ccl/bin/pip --disable-pip-version-check --quiet install -r $(word 4,$^)
	TORCH_EXTENSIONS_DIR=$(CURDIR)/$(LIBRARIES)/torch_extensions $(LIBRARIES)/bin/python -c \
	  'from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as Op; Op().load(verbose=False)'
	@touch $@

$(INSTALLED): $(PACKAGES) setup.py torch_hbmcomm/version.py scripts/native_build.py \
  scripts/native_requirements.py $(NATIVE)
	@scripts/system_packages.sh $(BUILD_PACKAGES)
	$(PIP) install --no-build-isolation --no-deps --editable .
	@mkdir -p $(@D) && touch $@

# Build the native tests alone, with another compiler or other flags, and run them.
.PHONY: build/aarch64 build/address build/thread
build/aarch64: CMAKE_FLAGS := -DHBM_PORTABLE_ONLY=ON -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON \
  -DCMAKE_TOOLCHAIN_FILE="$(CURDIR)/tests/native/aarch64.cmake"
build/address: CMAKE_FLAGS := -DCMAKE_BUILD_TYPE=Debug -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON \
  -DCMAKE_CXX_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all"
build/thread: CMAKE_FLAGS := -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS="-fsanitize=thread -Wno-tsan"  # TSan ignores fences
build/thread: LAUNCHER := $(TSAN_LAUNCHER)
build/aarch64 build/address build/thread: $(PACKAGES)
	@scripts/system_packages.sh $(BUILD_PACKAGES) $(TEST_PACKAGES) $(if $(findstring aarch64,$@),$(AARCH64_PACKAGES))
	cmake -S csrc -B $@ -G Ninja -DHBM_TESTS=ON $(CMAKE_FLAGS) \
	  -DMPI_INCLUDE="$$(python scripts/mpi_include.py)"
	$(COMPILE) $@ --target native_tests
	$(LAUNCHER) $(CTEST) $@

$(KERNEL): tests/vm/guest/kernel.py tests/vm/guest/init.sh | $(VENV)/bin/python
	@scripts/system_packages.sh $(VM_PACKAGES)
	$(VENV)/bin/python tests/vm/guest/kernel.py
	@touch $@

# Everything runs in a virtual environment of its own; nothing here needs a GPU unless its name says so.
PYTHON ?= python3
VENV ?= .venv
MODEL ?= tests/model/tiny-qwen35-mtp-Q4_K_M.gguf
PROMPT ?= Explain itertools.chain.
OUT ?= engines/built/$(basename $(notdir $(MODEL)))
# Of `make engines` and `make export`, for cheaper drafts: DRAFT_HEAD="--draft-head-rows 65536 --draft-head-type q4_k"
DRAFT_HEAD ?=
# On compute capability 9.0 (H100, H200): TENSORRT=tensorrt-rtx-cu13==1.6.1.120
TENSORRT ?= tensorrt-rtx-cu13
# int8: half the memory for the context
KV_CACHE ?= f16
PYTEST_FLAGS ?=
BENCH ?=
ACCURACY ?=
PROFILE ?=
PEER ?=
ARCHITECTURES ?= 80-real;86-real;89-real;90a-real;120-real;120-virtual
NVCC := $(shell command -v nvcc)
CMAKE := $(shell command -v cmake)
GPU := $(shell command -v nvidia-smi)
TENSORRT_STUBS := 10.8.0.43.1 10.13.0.35.1
NVCC_PACKAGES := $(shell grep -o 'nvidia-[a-z-]*==[0-9.]*' pyproject.toml)
BIN := $(VENV)/bin

.PHONY: setup demo serve test plugins engines test-gpu lint format export check bench bench-peer accuracy trunk-peer \
  profile trtexec-cmd audit fuzz soak clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools # Python 3.11 brings one with a known weakness
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test,lint,serve,ray]'
	touch $@

demo: setup  ## Generate with multi-token prediction from the tiny model.
	$(BIN)/python -m runtime.generate $(MODEL) --prompt "$(PROMPT)"

$(VENV)/.installed-serve: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[serve]'
	touch $@

serve: $(VENV)/.installed-serve  ## A server for OpenAI's clients; MODEL: the tiny model unless given.
	$(BIN)/python -m runtime.serve $(MODEL)

test: $(VENV)/.installed-test  ## All tests that need no GPU.
	$(BIN)/python -m pytest -n auto --dist loadfile $(PYTEST_FLAGS)

$(VENV)/.installed-tensorrt: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[tensorrt]' '$(TENSORRT)'
	touch $@

plugins: build/plugins/libnextn_plugins.so

build/plugins/libnextn_plugins.so: $(if $(NVCC),,build/cuda/.installed) $(if $(CMAKE),,$(BIN)/cmake) $(wildcard plugins/CMakeLists.txt plugins/*.cmake plugins/*/*.h plugins/*/*.cuh plugins/*/*.cu plugins/*/*.cpp)
	$(or $(CMAKE),$(BIN)/cmake) -S plugins -B build/plugins -DNEXTN_ARCHITECTURES="$(ARCHITECTURES)" \
	  -DCMAKE_PREFIX_PATH=$(CURDIR)/build/cuda
	$(or $(CMAKE),$(BIN)/cmake) --build build/plugins --parallel 2

# A machine without a CUDA compiler gets the one of the pip packages; one without CMake, likewise.
build/cuda/.installed: | $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --target build/cuda $(NVCC_PACKAGES)
	touch $@

$(BIN)/cmake: | $(VENV)/.installed
	$(BIN)/python -m pip install --quiet cmake

engines: $(VENV)/.installed-tensorrt plugins  ## MODEL=x.gguf -> OUT: TensorRT engines; needs no GPU.
	$(BIN)/python -m engines.build $(MODEL) -o $(OUT) --kv-cache $(KV_CACHE) $(DRAFT_HEAD)

test-gpu: $(VENV)/.installed-test $(VENV)/.installed-tensorrt plugins  ## Kernels and engines; fails without an NVIDIA GPU.
	$(BIN)/python -m pytest -m gpu --require-gpu --never-skip $(PYTEST_FLAGS)

# Types are checked against full TensorRT, the oldest that will do and the newest that has stubs; a file of wrong uses
# shows that wrong uses are found.
lint: $(VENV)/.installed-test $(TENSORRT_STUBS:%=build/stubs/%/.installed)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	set -e; for version in $(TENSORRT_STUBS); do \
	  export MYPYPATH=build/stubs/$$version; $(BIN)/mypy; $(BIN)/mypy tests/plugins/tensorrt_misuse.py; done

# Three slips in the stubs would stop or blind the check: a parameter named as a keyword, one without a default after one
# with, and a constant named bool, which takes the place of the type.
build/stubs/%/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps --target build/stubs/$* tensorrt-stubs==$*
	sed -i -e 's/\bin: list\[/in_: list[/' -e 's/channel_axis: int) ->/channel_axis: int = ...) ->/' -e 's/^bool:/bool_:/' \
	  build/stubs/$*/tensorrt_bindings/tensorrt.pyi
	touch $@

format: $(VENV)/.installed-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

export: setup  ## MODEL=x.gguf -> OUT: ONNX graphs for ONNX Runtime.
	$(BIN)/python -m export $(MODEL) -o $(OUT) $(DRAFT_HEAD)

check: setup  ## Is the text with drafting the text without it, and the build what the model's equations give? How well does the head draft?
	$(BIN)/python -m runtime.check $(MODEL) $(if $(filter %.gguf,$(MODEL)),--against $(MODEL))

bench: setup  ## Plain decoding and every number of drafts on the same prompts; BENCH: more flags.
	$(BIN)/python -m runtime.bench $(MODEL) $(BENCH)

bench-peer: $(VENV)/.installed-test  ## Plain decode against llama.cpp, and drafting against plain, in one run.
	$(BIN)/python -m tests.bench.cpu_vs_llamacpp

trunk-peer: $(VENV)/.installed-test  ## The trunk against llama.cpp, its head loaded and drafting on; PEER: more flags.
	$(BIN)/python -m tests.bench.trunk_vs_llamacpp $(MODEL) $(PEER)

$(VENV)/.installed-accuracy: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[accuracy,bench]'
	touch $@

# On TensorRT where there is a GPU, else by what each op means.
accuracy: $(VENV)/.installed-accuracy $(if $(GPU),$(VENV)/.installed-tensorrt plugins)  ## The TensorRT form against the canonical graph, place by place; ACCURACY: more flags.
	mkdir -p build
	$(BIN)/python -m engines.accuracy $(MODEL) -o build/accuracy-$(basename $(notdir $(MODEL))) $(ACCURACY)

profile: $(VENV)/.installed-accuracy $(VENV)/.installed-tensorrt $(if $(GPU),engines)  ## Where a pass spends its time, on the GPU: build/profile.json and .png too; PROFILE: more flags.
	mkdir -p build
	$(BIN)/python -m runtime.profile $(OUT) --json build/profile.json --chart build/profile.png $(PROFILE)

trtexec-cmd: $(VENV)/.installed-tensorrt plugins  ## Command lines of trtexec or tensorrt_rtx, for engines with their weights inside.
	$(BIN)/python -m engines.build $(MODEL) -o $(OUT)-embedded --embed-weights --kv-cache $(KV_CACHE) $(DRAFT_HEAD)
	$(BIN)/python -m engines.trtexec $(OUT)-embedded

# ADVISORIES: a checkout of pypa/advisory-database, where no database can be reached.
ADVISORIES ?=
audit: $(VENV)/.installed-serve  ## Known weaknesses of the installed dependencies; exit code 2 where no database can be reached.
	$(BIN)/python -m pip install --quiet $(if $(ADVISORIES),packaging pyyaml,pip-audit)
	$(BIN)/python -m tests.audit $(if $(ADVISORIES),--advisories $(ADVISORIES))

FUZZ_SECONDS ?= 600
fuzz: $(VENV)/.installed-test  ## Damaged model files for FUZZ_SECONDS, with bounds on memory and time; goes on from build/fuzz.
	$(BIN)/python -m pip install --quiet atheris
	mkdir -p build/fuzz
	$(BIN)/python -m tests.fuzz.gguf build/fuzz -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=build/

SOAK_SECONDS ?= 180
soak: $(VENV)/.installed-test  ## Mixed load on the server for SOAK_SECONDS: no leak, no stuck sequence, no wrong text.
	$(BIN)/python -m tests.soak --seconds $(SOAK_SECONDS)

clean:
	rm -rf $(VENV) build engines/built *.egg-info

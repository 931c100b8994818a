# Two commands on a fresh machine: `make demo` and `make test`. Both make .venv first; once it is made, no network is needed.
#
#   make venv PYTHON=python3.12          another Python (3.11 or newer; default: the first that is)
#   make test TORCH=2.15.0               another torch, in its own environment (.venv-torch-2.15.0); also '2.10.*'
#   make test TORCH='torch==2.15.0 --index-url https://download.pytorch.org/whl/cpu'
#   make test ARGS='tests/store -k thinned'

SHELL := /bin/sh
REALCODE := .venv-realcode
ZENSICAL := zensical==0.0.73
# .venv, or .venv-torch-VERSION if TORCH names one
VENV := .venv$(patsubst %,-torch-%,$(patsubst %.*,%,$(patsubst torch,newest,$(patsubst torch==%,%,$(firstword $(TORCH))))))
PY := $(VENV)/bin/python
RUFF := $(VENV)/bin/ruff
DISTDIAG := $(VENV)/bin/distdiag
ARGS ?=
STEPS ?= 200
WORKERS ?= 4
export TORCH VENV
# pyright must not look for a newer self, nor keep anything in the person's home
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export PYRIGHT_PYTHON_ENV_DIR := $(CURDIR)/$(VENV)/pyright-node

.DEFAULT_GOAL := help
.PHONY: help venv demo test replay check format wheel-check fuzz survival gpu-check realcode pictures docs bench clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

venv: ## make .venv (TORCH=2.15.0: .venv-torch-2.15.0) with all that tests and benchmarks need
	@python=$(PYTHON); \
	if [ -z "$$python" ]; then \
	  for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	    if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$p; break; fi; \
	  done; \
	fi; \
	if [ -z "$$python" ]; then \
	  echo "make: error: no Python 3.11 or newer was found" >&2; echo "hint: make venv PYTHON=/path/to/python3.11" >&2; exit 2; \
	fi; \
	$$python tools/make_venv.py

demo: venv ## a job that hangs and its verdict, a minute after the environment is made; then a healthy training and its report
	@$(PY) tools/demo.py --max-steps $(STEPS) $(ARGS)

test: venv ## the whole test suite (ARGS='…' goes to pytest)
	@$(PY) -m pytest -q -n $(WORKERS) $(ARGS)

replay: venv ## the verdict on every tape of the fault collection (also part of `make test`)
	@$(PY) -m pytest -q tests/faults/test_replay.py

check: venv ## lint, format, types, layering
	@$(RUFF) check --quiet . && echo "lint: ok"
	@$(RUFF) format --quiet --check . && echo "format: ok"
	@$(VENV)/bin/pyright --pythonpath $(PY) > $(VENV)/pyright.log 2>&1 || { cat $(VENV)/pyright.log; exit 1; }; echo "types: ok"
	@$(VENV)/bin/lint-imports --no-cache > $(VENV)/layers.log 2>&1 || { cat $(VENV)/layers.log; exit 1; }; echo "layers: ok"

format: venv ## put the code into the form that `make check` wants
	@$(RUFF) check --quiet --fix . ; $(RUFF) format --quiet .

wheel-check: venv ## build sdist and wheel, install the wheel elsewhere, run every command there
	@$(PY) tools/check_wheel.py $(ARGS)

gpu-check: ## what needs a GPU; a bare checkout and any Python with torch >= 2.10 will do
	@python=$(PYTHON); \
	for p in $(PY) python3 python; do \
	  if [ -z "$$python" ] && $$p -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then python=$$p; fi; \
	done; \
	for p in $(PY) python3 python; do \
	  if [ -z "$$python" ] && $$p -c 'import torch' 2>/dev/null; then python=$$p; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "make: error: no Python with torch was found" >&2; echo "hint: make venv, or make gpu-check PYTHON=…" >&2; exit 2; \
	fi; \
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $$python benchmarks/gpu_check.py $(ARGS)

fuzz: venv ## damaged and hostile input for every reader (FUZZ_SECONDS=60 FUZZ_SEED=0 FUZZ_KIND= FUZZ_CASES= FUZZ_CASE= FUZZ_DIR=)
	@$(PY) tests/fuzz/fuzz.py

survival: venv ## faults survived, ten times each, into docs/survival.md (ARGS='--times 1 --only monitor')
	@$(PY) benchmarks/survival.py $(ARGS)

bench: venv ## every figure of docs/performance.md, one benchmark after the other; on an idle machine, half an hour
	@for b in $(sort $(filter-out benchmarks/gpu_check.py benchmarks/_%,$(wildcard benchmarks/*.py))); do \
	  echo "== $$b"; $(PY) $$b || exit 1; \
	done
	@echo "== distdiag bench faults"; $(DISTDIAG) bench faults

realcode: venv ## scripts on transformers, accelerate, lightning, timm and open_clip, and their bugs (20 minutes; writes docs/realcode.md)
	@[ -f $(REALCODE)/.installed ] || { $(PY) -m venv $(REALCODE) && \
	  $(PY) -c "import sys, sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
	    > $$(echo $(REALCODE)/lib/python3.*/site-packages)/base.pth && \
	  $(REALCODE)/bin/python -m pip install -q "torch==$$($(PY) -c 'import torch; print(torch.__version__)')" transformers accelerate \
	    lightning torchmetrics 'ray[train]' deepspeed timm open_clip_torch && touch $(REALCODE)/.installed; }
	@$(REALCODE)/bin/python tests/realcode/run.py --write
	@$(REALCODE)/bin/python -m pytest -n 0 -p no:cacheprovider tests/realcode

pictures: venv ## the pictures of README and site, drawn by the app itself
	@$(PY) tools/pictures.py docs/pictures

docs: ## the site of docs/ as site/index.html, by Zensical in .venv-docs; a warning is an error
	@[ -f .venv-docs/.$(ZENSICAL) ] || { rm -rf .venv-docs && $(or $(PYTHON),python3) -m venv .venv-docs && \
	  .venv-docs/bin/python -m pip install -q --disable-pip-version-check $(ZENSICAL) && touch .venv-docs/.$(ZENSICAL); }
	@.venv-docs/bin/zensical build --strict --clean $(ARGS) && echo "docs: site/index.html"

clean: ## remove .venv, .venv-docs, .venv-torch-*, site, caches and build folders; never a run or a report
	@rm -rf .venv .venv-docs .venv-torch-* site .cache build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

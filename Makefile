# Start with `make train`. You may run every target at any time, in any order, and repeatedly.

PYTHON ?= python3
PY := .venv/bin/python
STAMP := .venv/.installed
RUN := make-train
.DEFAULT_GOAL := help

# STAMP keeps the output of WANTED. If this output changes, .venv is stale, because the checkout has
# moved or a file of requirements has changed.
REQUIREMENTS := requirements.txt requirements-dev.txt related-topics/tracking/requirements.txt
WANTED := { pwd -P; cat $(REQUIREMENTS); }
MOVED := [ -e $(STAMP) ] && [ "$$(head -n 1 $(STAMP))" != "$$(pwd -P)" ]
WORKS := $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& $(PY) -m pip install --quiet --no-index pip >/dev/null 2>&1
TESTS := $(PY) -m pytest --dist loadfile --no-loadscope-reorder
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
IMPORTS := $(PY) -c 'import torch, transformers, datasets, wandb, matplotlib, psutil, pytest_timeout, xdist'

define LAYOUT
import torch

gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
processes = gpus or 2
# Use 32 samples, or the next multiple of the number of processes.
batch = -(-32 // processes) * processes
threads = max(1, torch.get_num_threads() // processes)
print(processes, batch, threads, "cuda" if gpus else "cpu")
print(f"one process per GPU ({gpus})" if gpus else "two processes on the CPU, as torch sees no GPU")
endef
export LAYOUT

.PHONY: help
help:  ## list the targets
	@echo "make TARGET, where TARGET is one of:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile
	@echo "PYTHON=... names the Python (3.11 or newer) to make .venv with; now: $(PYTHON)"

.PHONY: install
install:  ## make .venv, or repair it, with the packages for training and tests
	@set -e; \
	if $(WANTED) | cmp -s - $(STAMP) && $(WORKS); then echo "== .venv is up to date"; exit 0; fi; \
	make_venv() { \
		command -v "$(PYTHON)" >/dev/null \
			|| { echo "make: PYTHON=$(PYTHON): no such command; choose a Python, such as" \
				"PYTHON=python3.12" >&2; exit 2; }; \
		"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
			|| { echo "make: PYTHON=$(PYTHON): $$("$(PYTHON)" -V 2>&1) is too old; choose Python 3.11" \
				"or newer, such as PYTHON=python3.12" >&2; exit 2; }; \
		echo "== making .venv with $$("$(PYTHON)" -V)"; \
		rm -rf .venv; "$(PYTHON)" -m venv .venv; \
	}; \
	if $(MOVED) || ! { $(WORKS); }; then make_venv; fi; \
	rm -f $(STAMP); \
	echo "== installing requirements-dev.txt into .venv: torch and other packages; the first time," \
		"this may take minutes"; \
	$(PIP) -r requirements-dev.txt; \
	if ! $(IMPORTS) 2>/dev/null; then \
		echo "== .venv is broken: it has all packages, but not all can be imported"; \
		make_venv; \
		$(PIP) -r requirements-dev.txt; \
		$(IMPORTS); \
	fi; \
	$(WANTED) > $(STAMP); \
	echo "== .venv is ready: $$($(PY) -V), torch $$($(PY) -c 'import torch; print(torch.__version__)')"

# Let glibc keep freed memory. Otherwise, glibc returns the memory to the system and requests it
# again, and a run on a CPU loses a fifth of its speed.
.PHONY: train
train: install  ## train chapter 02 on all GPUs, or on two CPU processes; draw the losses
	@set -e; layout=$$($(PY) -c "$$LAYOUT"); \
	set -- $$layout; \
	export OMP_NUM_THREADS="$${OMP_NUM_THREADS:-$$3}"; \
	export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184; \
	echo "== training: $$(echo "$$layout" | tail -n 1)"; \
	set -- .venv/bin/torchrun --standalone --nproc-per-node $$1 \
		02-ddp/train_llm.py -e $(RUN) --device $$4 --global-batch-size $$2; \
	echo "$$*"; \
	"$$@"; \
	$(PY) tools/plot.py outputs/$(RUN) --output outputs/$(RUN)/loss.png; \
	shift $$(($$# - 2)); \
	echo "== done; next, train the same model on one device, and compare the losses:"; \
	echo "$(PY) 01-single-gpu/train_llm.py $$*"

# Run several tests at the same time, even on a small machine, because many tests wait for Slurm or
# for other ranks.
.PHONY: test
test: install  ## run the core tests
	$(TESTS) -n 2 -m "not slow and not exhaustive"

.PHONY: test-slow
test-slow: install  ## run the slow tests that a change of a chapter can break
	$(TESTS) -n 3 -m "slow and not exhaustive"

.PHONY: test-exhaustive
test-exhaustive: install  ## run the remaining tests: many kills, all faults, tools and benchmarks
	$(TESTS) -n 3 -m "exhaustive and not alone"
	$(PY) -m pytest -m "exhaustive and alone"

.PHONY: extras
extras: install  ## install optional packages for the tests: frameworks, peft and linters
	$(PIP) -r 03-job-launchers/deepspeed/requirements.txt \
		-r alternative-frameworks/accelerate/requirements.txt \
		-r fine-tuning/lora/requirements.txt -r fine-tuning/preferences/requirements.txt \
		-r requirements-lint.txt

.PHONY: test-all
test-all: extras test test-slow test-exhaustive  ## run all tests

.PHONY: cluster
cluster:  ## practice Slurm in a shell on a cluster of two nodes, on this machine (as root)
	@$(PYTHON) tests/cluster/cluster.py shell

.PHONY: lint
lint: install  ## check the style of all Python and shell files, and the English
	$(PIP) -r requirements-lint.txt
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	{ printf '.ci/run\0'; git ls-files -z '*.sh' '*.sbatch'; } | xargs -0 .venv/bin/shellcheck
	$(PY) tools/maintain/english.py

.PHONY: docs
docs: install  ## renew the READMEs' diffs, samples and tables from the files that they show
	$(PY) tools/maintain/docs.py

.PHONY: samples
samples: install  ## run the commands that READMEs show, and keep their output in assets/samples
	$(PY) tools/maintain/samples.py $(ONLY)
	$(PY) tools/maintain/docs.py

.PHONY: pictures
pictures: install  ## measure the numbers in the chapters' pictures, and draw the pictures
	$(PY) tools/maintain/killed.py benchmarks/results/killed.json
	$(PY) benchmarks/where.py --only 02 --steps 10 --trace outputs/traces
	$(PY) tools/maintain/timeline.py outputs/traces benchmarks/results/step.json
	$(PY) tools/maintain/pictures.py

.PHONY: families
families: install  ## train the families of transformers that the table of docs/families.md lacks
	$(PY) -m pytest tests/test_families.py -m slow -k "follows_chapter_01 or family_packs" --record

# If a chapter misses its goal, take the other measurements first, and fail at the end.
.PHONY: bench
bench: install  ## compare the chapters with other trainers; make tables and plots (takes hours)
	$(PIP) -r benchmarks/requirements.txt
	@set -ex; out=benchmarks/results; \
	$(PY) benchmarks/overhead.py chapter --output $$out/overhead.json || missed=$$?; \
	$(PY) benchmarks/overhead.py chapter --compile --output $$out/overhead.json || missed=$$?; \
	$(PY) benchmarks/frameworks.py --output $$out/frameworks.json; \
	$(PY) benchmarks/overhead.py watched --output $$out/watching.json; \
	$(PY) benchmarks/large.py reading saves --output $$out/large.json; \
	$(PY) benchmarks/where.py --output $$out/where.json; \
	$(PY) tools/planner/scale.py; \
	$(PY) benchmarks/bubble.py --output $$out/bubble.json; \
	$(PY) benchmarks/context.py --output $$out/context.json; \
	$(PY) tools/maintain/docs.py; \
	exit $${missed:-0}

.PHONY: gpu-check
gpu-check: install  ## check this machine's GPUs; for some of the checks: ONLY="parity speed-01"
	$(PIP) -r alternative-frameworks/accelerate/requirements.txt \
		|| echo "make: accelerate: cannot install it; gpu-check skips the checks that need it" >&2
	$(PY) benchmarks/gpu_check.py $(if $(ONLY),--only $(ONLY))

.PHONY: site
site: install  ## build the site, with each README beside its diff; open site/index.html
	rm -rf site
	$(PY) tools/maintain/pages.py

A ?= 01
B ?= 02
script_of = $(or $(wildcard $(1)-*/train_llm.py $(1)/train_llm.py */$(1)/train_llm.py),\
	$(error $(1): no such chapter; choose one such as 01 or trainer))
# Accept status 1 of both programs, because it means that the scripts differ.
.PHONY: diff
diff: install  ## show how two chapters differ, such as: make diff A=01 B=02
	@columns=$$(tput cols 2>/dev/null || echo 80); \
	if [ "$$columns" -ge 160 ]; then \
		set -- .venv/bin/icdiff --unified=3 --line-numbers --cols="$$columns"; \
	else set -- diff --unified --show-c-function --color=auto; fi; \
	"$$@" $(call script_of,$(A)) $(call script_of,$(B)) || [ $$? = 1 ]

FROM ?= 01
.PHONY: carry
carry: install  ## merge a change of a chapter into its descendants, such as: make carry FROM=01
	$(PY) tools/maintain/carry.py $(FROM)
	$(PY) tools/maintain/docs.py
	$(PY) -m pytest -q tests/test_diff.py

.PHONY: clean
clean:  ## remove .venv, the caches, site, and outputs with all its runs
	rm -rf .venv outputs site wandb .pytest_cache .ruff_cache
	find . -name .git -prune -o -name __pycache__ -prune -exec rm -rf {} +

# Every target creates the virtual environment first when it is missing or older than what it is made from.
PYTHON ?= python3
# make test-fast TORCH=2.14.1 tests with that version, in an environment of its own.
PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH ?= $(PINNED)
VENV := .venv$(if $(filter-out $(PINNED),$(TORCH)),-torch-$(TORCH))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN := runs/demo
STAGES ?= 2
STEPS ?= 120
# Sessions of pytest at once, each with its own workers. Most tests wait or compute on one core for much of their time.
SESSIONS ?= 3
# One thread per process: several processes share the machine, and results do not depend on the number of cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Each of the sessions, and whatever they start, would compile every file again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo demo-elastic test test-fast test-slurm lint format docs pictures package bench clean

help:
	@echo "make demo    train, save, merge, reload and sample a small GPT-2 over $(STAGES) processes (STAGES=3 STEPS=200)"
	@echo "make demo-elastic  four processes train, two are killed, one joins: what happens, beside a run left alone"
	@echo "make test    all tests; make test-fast leaves out the slow ones; TORCH=2.14.1 tests with another version of torch"
	@echo "make test-slurm  the launch scripts under a SLURM of four virtual nodes (Debian: slurm-wlm and munge, as root)"
	@echo "make lint    ruff and mypy; make format rewrites the files as ruff wants them"
	@echo "make docs    the site of docs/ and the public API, in site/; a dead link is an error"
	@echo "make pictures  draws the pictures of docs/ again, after a change of what they show"
	@echo "make package build wheel and sdist, and run the README's script from the installed wheel"
	@echo "make bench   the side-by-side measurements in benchmarks/"
	@echo "make clean   remove the environment, caches and runs/"

install: $(STAMP)

# constraints.txt holds torch to one version: with a CPU wheel on offer pip takes it, and no CUDA libraries.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[test]' $(PIP_FLAGS)
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py --pipeline-parallel-size 1 --steps $(STEPS) --output $(RUN)/1-stage
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(STAGES) examples/demo.py \
		--pipeline-parallel-size $(STAGES) --steps $(STEPS) --output $(RUN)/$(STAGES)-stage
	$(BIN)/python examples/compare_curves.py $(RUN)/1-stage $(RUN)/$(STAGES)-stage

demo-elastic: $(STAMP)
	$(BIN)/python examples/elastic_demo.py --output runs/elastic

test: $(STAMP)
	$(BIN)/python -m pytest -n $(SESSIONS) --dist loadfile

test-fast: $(STAMP)
	$(BIN)/python -m pytest -n $(SESSIONS) --dist loadfile -m "not slow"

test-slurm: $(STAMP)
	$(BIN)/python -m pytest tests/benchmarks/slurm_launches.py --timeout 600

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Warnings must be counted, so no --quiet.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

pictures: $(STAMP)
	$(BIN)/python draw_pictures.py

package: $(STAMP)
	bash .ci/package

bench: $(STAMP)
	$(BIN)/python benchmarks/studies/pipeline_efficiency.py
	$(BIN)/python benchmarks/studies/heterogeneous.py
	$(BIN)/python benchmarks/studies/tensor_parallel.py

clean:
	rm -rf $(VENV) runs build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

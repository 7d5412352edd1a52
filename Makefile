# Two commands for a newcomer: `make train` and `make test`. Each makes .venv first; nothing else prepares the machine.
# ARGS goes through: make train ARGS="2 video", make test ARGS="-k resume"

VENV := .venv
PYTHON := $(VENV)/bin/python

train: $(VENV)/installed
	PYTHON=$(PYTHON) ./train_multigpu.sh $(ARGS)

# As many workers as cores: one more takes longer on two. Neighbours stay together, because they share fixtures.
WORKERS := -n $(shell echo $$(($$(nproc) < 4 ? $$(nproc) : 4))) --dist worksteal

# The tests start hundreds of processes. Without bytecode each of them compiles the project anew.
unexport PYTHONDONTWRITEBYTECODE

# The gate: every quick test, and the slow ones that tests/gate.txt lists by promise. Six minutes on two cores.
test: $(VENV)/installed-dev
	$(PYTHON) -m pytest $(WORKERS) -m "not slow or gate" $(ARGS)

quick: $(VENV)/installed-dev
	$(PYTHON) -m pytest $(WORKERS) -m "not slow" $(ARGS)

# What needs a GPU, which is hidden from all other tests; one of pytest's workers, because some measure speed.
gpu: $(VENV)/installed-dev
	$(PYTHON) -m pytest -m gpu $(ARGS)

# The rest of `test-all`: what the gate leaves out. CI runs one after the other.
test-rest: $(VENV)/installed-dev
	$(PYTHON) -m pytest $(WORKERS) -m "slow and not gate" $(ARGS)

test-all: $(VENV)/installed-dev
	$(PYTHON) -m pytest $(WORKERS) $(ARGS)

# Heavier than `test-all`: processes that are all started anew, random faults, random networks, long fuzzing.
nightly: $(VENV)/installed-dev
	$(PYTHON) -m pytest $(WORKERS) --real $(ARGS)
	LOCKSTEP_FUZZ=20000 $(PYTHON) -m pytest tests/loader/test_fuzz.py
	BITS=1 $(PYTHON) tests/long/soak.py 5
	MINUTES=5 $(PYTHON) tests/long/grammar.py

# Every process started anew, none forked from a warm parent: see tests/kit/warm.py.
test-real: $(VENV)/installed-dev
	$(PYTHON) -m pytest $(WORKERS) --real $(ARGS)

soak: $(VENV)/installed-dev
	BITS=$(BITS) $(PYTHON) tests/long/soak.py $(or $(MINUTES),10) $(SEED)

# Random networks, trained and killed in random ways. SEED=7 MINUTES=0 tries one.
grammar: $(VENV)/installed-dev
	MINUTES=$(MINUTES) SEED=$(SEED) $(PYTHON) tests/long/grammar.py

# LeRobot itself, in a folder of its own: see tests/peer/README.md.
peer: $(VENV)/installed-dev .peer/installed
	HF_HUB_OFFLINE=1 PYTHONPATH=$(CURDIR)/.peer $(PYTHON) -m pytest $(WORKERS) tests/peer $(ARGS)

.peer/installed: tests/peer/install.py
	$(PYTHON) tests/peer/install.py .peer
	touch $@

# The norm's Triton kernels, in Triton's interpreter: no GPU is needed. Triton takes 0.7 GB, so it has a folder of its own.
kernels: $(VENV)/installed-dev .triton/installed
	TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/.triton $(PYTHON) -m pytest $(WORKERS) tests/gpu/test_norm_kernels.py $(ARGS)

.triton/installed:
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --target .triton triton==3.7.1
	touch $@

lint: $(VENV)/installed-dev
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) dev/layers.py

$(VENV)/installed: requirements.txt
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/installed-dev: requirements-dev.txt requirements.txt
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@ $(VENV)/installed

.PHONY: train test quick gpu test-rest test-all nightly test-real soak grammar peer kernels lint

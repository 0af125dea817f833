# make train                                        a tiny model learns four small games in minutes, on any machine
# make train SEED=1                                 another seed; every run gets a folder of its own in runs/
# make train CONFIG=config/train_config.json        Qwen3-4B in 4 bits; needs a CUDA device
# make train ARGS="--set ppo.learning_rate=1e-3"    more arguments for train_ppo.py
# make train OUT=runs/tiny-seed0 ARGS=--resume      go on with a run that was interrupted
# make test | test-all | lint                       the quick tests | the slow ones too | linter, formatter and types

CONFIG ?= config/presets/tiny.json
SEED ?= 0
ARGS ?=
NAME := $(basename $(notdir $(CONFIG)))-seed$(SEED)
# The first name that is free: runs/tiny-seed0, runs/tiny-seed0-2, ...
OUT ?= $(shell out=runs/$(NAME) n=1; while [ -e $$out ]; do n=$$((n + 1)); out=runs/$(NAME)-$$n; done; echo $$out)
PYTHON := .venv/bin/python
# Two processes of one thread each: with more, threads of the small models wait for each other.
test test-all: export OMP_NUM_THREADS = 1

.PHONY: help train test test-all lint

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

train: .venv/installed models/tiny/recipe.json
	$(PYTHON) train_ppo.py --config $(CONFIG) --seed $(SEED) --output-dir $(OUT) $(ARGS)

test: .venv/installed models/tiny/recipe.json
	$(PYTHON) -m pytest -n 2 $(ARGS)

test-all: .venv/installed models/tiny/recipe.json
	$(PYTHON) -m pytest -n 2 -m "slow or not slow" $(ARGS)

lint: .venv/installed
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy --explicit-package-bases .

.venv/installed: requirements.txt
	@bash scripts/setup.sh

models/tiny/recipe.json: scripts/make_tiny_model.py envs/openspiel.py $(wildcard games/*.py) | .venv/installed
	@$(PYTHON) scripts/make_tiny_model.py models/tiny

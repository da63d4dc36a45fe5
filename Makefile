# make demo   see it work: a private containerd, the daemon, a few pods, a table
# make run    the same, kept open to play with
# make test   all tests that this machine can carry (as root: also those on real containerds)

VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help venv demo run test lint format protos manifests clean

help:
	@sed -n '1,/^$$/s/^# //p' Makefile

venv:
	@.ci/venv $(VENV)

demo: venv
	@$(BIN)/python -m demo

run: venv
	@$(BIN)/python -m demo --stay

test: venv
	$(BIN)/pytest $(PYTEST_ARGS)

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.generate_protos --check
	$(BIN)/python -m tools.generate_manifests --check

format: venv
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Writes protos/**/*_pb2* from the .proto files; the results are committed.
protos: venv
	$(BIN)/python -m tools.generate_protos

# Writes the CRDs and manifests below deploy/ from the types in apis/ and the tables in cluster/.
manifests: venv
	$(BIN)/python -m tools.generate_manifests

# Also removes the programs that the beds unpacked.
clean:
	rm -rf $(VENV) .cache build dist *.egg-info

PYTHON ?= python

.PHONY: check lint types test docs format

check: lint types test docs

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	lint-imports --no-cache
	$(PYTHON) .ci/words

types:
	$(PYTHON) -m pyright --pythonpath "$$($(PYTHON) -c 'import sys; print(sys.executable)')"

test:
	$(PYTHON) -m pytest

docs:
	$(PYTHON) -m mkdocs build --strict

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

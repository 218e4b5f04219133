# The tasks of the project; each makes the virtual environment that it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
MANAGE := $(BIN)/python manage.py
ADDRESS := 127.0.0.1:8000

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo serve test test-all lint package clean servers migrated

help:
	@echo 'make demo      a flash sale: what a shop sells without a lock, and with each'
	@echo 'make serve     the shop and its admin, at http://$(ADDRESS)/'
	@echo 'make test      the tests on SQLite, PostgreSQL and MariaDB; installs what is missing'
	@echo '               (ARGS="sqlite -- -k transaction": engines, then what pytest is told)'
	@echo 'make test-all  the tests on SQLite with every supported Python that is here'
	@echo 'make lint      ruff, mypy, and whether migrations are missing'
	@echo 'make package   build the package, and try it where nothing else is'
	@echo 'make clean     remove what the others have made'

demo: $(VENV)/.demo migrated
	@$(MANAGE) flash_sale $(ARGS)

serve: $(VENV)/.demo migrated
	@$(MANAGE) demo_data
	@echo 'The shop is at http://$(ADDRESS)/ and its admin at http://$(ADDRESS)/admin/ (Ctrl-C ends it).'
	@$(MANAGE) runserver $(ADDRESS)

test: servers $(VENV)/.test
	@$(BIN)/python -m tests.run $(ARGS)

test-all:
	@$(PYTHON) scripts/test_all.py

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	DJANGO_SETTINGS_MODULE=tests.settings $(BIN)/python -m django makemigrations --check --dry-run dlocks
	$(MANAGE) makemigrations --check --dry-run

package: $(VENV)/.lint
	@$(BIN)/python scripts/check_package.py

clean:
	rm -rf .venv .venv-3.* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	rm -f example_project/shop.sqlite3*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

migrated: $(VENV)/.demo
	@$(MANAGE) migrate --verbosity 0

# What apt has to bring before pip can build; quick when it is there.
servers: $(VENV)/.made
	@PYTHON=$(BIN)/python sh scripts/install_servers.sh servers

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo 'dlocks needs Python 3.11 or newer, and "$(PYTHON)" is not. Name another: make PYTHON=python3.12 …' >&2; \
	    exit 1; }
	@PYTHON='$(PYTHON)' sh scripts/install_servers.sh venv
	@echo 'Making $(VENV) …'
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml
	@echo 'Installing what the demo needs …'
	@$(INSTALL) --group demo
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml | servers
	@echo 'Installing what the tests need …'
	@$(INSTALL) --group test
	@touch $@

# The types and the migrations are checked with the settings of the tests, on SQLite.
$(VENV)/.lint: $(VENV)/.made pyproject.toml
	@echo 'Installing what the checks need …'
	@$(INSTALL) --group lint --group test-sqlite
	@touch $@

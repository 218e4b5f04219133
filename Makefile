# The tasks of the project; each makes the virtual environment that it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
MANAGE := $(BIN)/python manage.py
ADDRESS := 127.0.0.1:8000

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo serve test test-servers test-all test-psycopg2 test-backends nemesis lint audit docs images package bench kinds clean
.PHONY: servers mysql backend-servers migrated test-libmysqlclient

help:
	@echo 'make demo      a flash sale: what a shop sells without a lock, and with each'
	@echo 'make serve     the shop and its admin, at http://$(ADDRESS)/'
	@echo 'make test      the tests on SQLite, PostgreSQL, MariaDB and MySQL; installs what is missing'
	@echo '               (25 minutes; ARGS=sqlite: 8; ARGS="sqlite -- -k transaction": engines, then arguments of pytest)'
	@echo 'make test-servers  the tests of storage and of faults on the newest PostgreSQL and MariaDB (5 minutes)'
	@echo 'make test-libmysqlclient  the tests of the driver with Oracle'"'"'s client library instead of libmariadb (3 minutes)'
	@echo 'make test-all  the tests on SQLite with every supported Python that is here'
	@echo 'make test-psycopg2  the tests of locks on PostgreSQL with psycopg 2 in place of psycopg 3 (5 minutes)'
	@echo 'make test-backends  the tests on other servers: Redis, ZooKeeper, quorums, Galera, a standby (15 minutes at most)'
	@echo '               (ARGS="-k redis": what pytest is told)'
	@echo 'make nemesis   processes killed, stopped and cut off under locks, and whether a promise was broken'
	@echo '               (MINUTES=5 ENGINE="postgresql mariadb mysql sqlite" SEED=1; BUGS=1: are the seeded bugs found?'
	@echo '               PEERS=1: other locks under the same faults)'
	@echo 'make lint      ruff, mypy, and whether migrations are missing'
	@echo 'make audit     known vulnerabilities of what is installed; fails when the advisory database cannot be asked'
	@echo 'make docs      the documentation, into site/; a broken link is an error'
	@echo 'make images    the pictures of the documentation, anew, by the tests in Chromium'
	@echo 'make package   build the package, and try it where nothing else is'
	@echo 'make bench     dlocks beside its peers, measured in one run; writes benchmarks/RESULTS.md (20 minutes)'
	@echo '               (ARGS="--quick": 3 minutes; ARGS="--only uncontended --contenders kazoo,redis-py")'
	@echo 'make kinds     locks in databases, Redis and ZooKeeper, with faults; writes benchmarks/KINDS.md (8 minutes)'
	@echo 'make clean     remove what the others have made'

demo: $(VENV)/.demo migrated
	@$(MANAGE) flash_sale $(ARGS)

serve: $(VENV)/.demo migrated
	@$(MANAGE) demo_data
	@echo 'The shop is at http://$(ADDRESS)/ and its admin at http://$(ADDRESS)/admin/ (Ctrl-C ends it).'
	@$(MANAGE) runserver $(ADDRESS)

test: servers mysql $(VENV)/.test
	@$(BIN)/python -m tests.run $(ARGS)

test-servers: servers $(VENV)/.test
	@sh scripts/fetch_server.sh postgresql
	@sh scripts/fetch_server.sh mariadb
	@$(BIN)/python -m tests.run newest

test-libmysqlclient: servers mysql $(VENV)/.test
	@PYTHON=$(BIN)/python sh scripts/test_libmysqlclient.sh $(ARGS)

nemesis: servers mysql $(VENV)/.test $(if $(PEERS),backend-servers $(VENV)/.bench)
	@$(BIN)/python -m tests.nemesis $(if $(MINUTES),--minutes $(MINUTES)) $(if $(ENGINE),--engine $(ENGINE)) \
	    $(if $(SEED),--seed $(SEED)) $(if $(BUSY),--busy) $(if $(BUGS),--bugs) $(if $(PEERS),--peers)

test-all:
	@$(PYTHON) scripts/test_all.py $(ARGS)

# Django prefers psycopg 3, so this environment does not have it.
PSYCOPG2 := .venv-psycopg2

test-psycopg2:
	@$(MAKE) --no-print-directory VENV=$(PSYCOPG2) $(PSYCOPG2)/.test-psycopg2
	@$(PSYCOPG2)/bin/python -m tests.run postgresql -- $(or $(ARGS),tests/test_locks.py tests/test_line.py \
	    tests/test_transactions.py tests/test_races.py)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	DJANGO_SETTINGS_MODULE=tests.settings $(BIN)/python -m django makemigrations --check --dry-run dlocks
	$(MANAGE) makemigrations --check --dry-run

audit: $(VENV)/.audit
	@$(BIN)/python scripts/audit.py

docs: $(VENV)/.docs
	@$(BIN)/mkdocs build --strict
	@echo 'The documentation is in site/index.html'

images: servers $(VENV)/.test
	@DLOCKS_TEST_IMAGES=docs/images $(BIN)/python -m tests.run sqlite -- tests/test_control_room_browser.py \
	    tests/test_shop_browser.py -k 'screenshots or numbers_move'

package: $(VENV)/.lint
	@$(BIN)/python scripts/check_package.py

bench: servers mysql backend-servers $(VENV)/.bench
	@$(BIN)/python -m benchmarks $(ARGS)

kinds: servers backend-servers $(VENV)/.bench
	@$(BIN)/python -m benchmarks.kinds $(ARGS)

clean:
	rm -rf .venv .venv-3.* .venv-psycopg2 .servers build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	rm -rf benchmarks/results nemesis site
	rm -f example_project/shop.sqlite3*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

migrated: $(VENV)/.demo
	@$(MANAGE) migrate --verbosity 0

test-backends: servers mysql backend-servers $(VENV)/.test-backends
	@$(BIN)/python -m tests.run $(if $(ARGS),sqlite -- tests/backends $(ARGS),backends)

backend-servers: $(VENV)/.made
	@PYTHON=$(BIN)/python sh scripts/install_servers.sh backends

# What apt has to bring before pip can build; quick when it is there.
servers: $(VENV)/.made
	@PYTHON=$(BIN)/python sh scripts/install_servers.sh servers

# The tests say what to do where MySQL is asked for and could not be fetched.
mysql:
	@sh scripts/fetch_server.sh mysql || [ $$? -eq 3 ]

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

$(VENV)/.test-backends: $(VENV)/.made pyproject.toml | servers
	@echo 'Installing what the tests of the other backends need …'
	@$(INSTALL) --group test-backends
	@touch $@

$(VENV)/.test-psycopg2: $(VENV)/.made pyproject.toml | servers
	@echo 'Installing what the tests with psycopg 2 need …'
	@$(INSTALL) --group test-psycopg2
	@touch $@

$(VENV)/.bench: $(VENV)/.made pyproject.toml | servers
	@echo 'Installing what the benchmarks need …'
	@$(INSTALL) --group bench
	@touch $@

$(VENV)/.docs: $(VENV)/.made pyproject.toml
	@echo 'Installing what the documentation needs …'
	@$(INSTALL) --group docs
	@touch $@

$(VENV)/.audit: $(VENV)/.made pyproject.toml
	@echo 'Installing what is audited, and pip-audit …'
	@$(INSTALL) --group audit
	@touch $@

# The types and the migrations are checked with the settings of the tests, on SQLite.
$(VENV)/.lint: $(VENV)/.made pyproject.toml
	@echo 'Installing what the checks need …'
	@$(INSTALL) --group lint --group test-sqlite
	@touch $@

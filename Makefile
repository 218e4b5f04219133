# The tasks of the project. Each one creates the virtual environment that it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
MANAGE := $(BIN)/python manage.py
ADDRESS := 127.0.0.1:8000
# Distributes the tests among a number of processes.
XDIST := --dist worksteal --max-worker-restart=0 -n

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo serve test test-pages nightly coverage test-servers test-all test-psycopg2 test-backends nemesis mutations lint audit docs images package bench clean
.PHONY: servers mysql backend-servers migrated test-libmysqlclient

help:
	@echo 'make demo      a flash sale in a shop, without a lock and with each lock'
	@echo 'make serve     run the shop and its admin at http://$(ADDRESS)/'
	@echo 'make test      run the tests on SQLite, PostgreSQL, MariaDB and MySQL, and install what is missing'
	@echo '               (9 minutes; with ARGS=sqlite 3 minutes; ARGS="sqlite -- -k transaction": engines, then arguments of pytest)'
	@echo 'make test-pages  run all tests of pages in a browser, of which "make test" runs two (1 minute)'
	@echo 'make nightly   run what takes long or depends on other packages: the recipes, the flash sale in a browser, all tests'
	@echo '               with a multiple of their random events, campaigns, and the nemesis with its peers (2 hours; VOLUME=3 MINUTES=10)'
	@echo 'make coverage  run "make test" and report the lines that no test executes (ARGS as in "make test")'
	@echo 'make test-servers  run the tests of SQL, faults and guards on the newest PostgreSQL and MariaDB (2 minutes)'
	@echo 'make test-libmysqlclient  run the tests of the driver with Oracle'"'"'s client library instead of libmariadb (3 minutes)'
	@echo 'make test-all  run the tests on SQLite with every supported Python that is installed and every supported Django,'
	@echo '               and those of storage, the admin and the commands on PostgreSQL and MariaDB with the newest of both'
	@echo 'make test-psycopg2  run the tests of locks on PostgreSQL with psycopg 2 instead of psycopg 3 (1 minute)'
	@echo 'make test-backends  run the tests on Redis, ZooKeeper, quorums, Galera and a standby (3 minutes)'
	@echo '               (ARGS="-k redis": arguments of pytest)'
	@echo 'make nemesis   kill, stop and cut off processes that hold locks, and check the promises'
	@echo '               (MINUTES=5 ENGINE="postgresql mariadb mysql sqlite" SEED=1; BUGS=1: check that seeded bugs are found;'
	@echo '               PEERS=1: other locks under the same faults)'
	@echo 'make mutations  make mistakes in the code one by one, and check that a test finds each (18 minutes; ARGS=NAME)'
	@echo 'make lint      run ruff, mypy, Pyright and import-linter, and check for missing migrations'
	@echo 'make audit     check the installed packages for known vulnerabilities; fails if the advisory database is unreachable'
	@echo 'make docs      build the documentation in site/; a broken link is an error'
	@echo 'make images    take the pictures of the documentation again, with the tests in Chromium'
	@echo 'make package   build the package, and try it in a new environment'
	@echo 'make bench     compare dlocks with its peers in one run; writes benchmarks/RESULTS.md (15 minutes)'
	@echo '               (ARGS="--quick": 3 minutes; ARGS="--only uncontended --contenders kazoo,redis-py")'
	@echo 'make clean     remove everything that the other tasks have created'

demo: $(VENV)/.demo migrated
	@$(MANAGE) flash_sale $(ARGS)

serve: $(VENV)/.demo migrated
	@$(MANAGE) demo_data
	@echo 'The shop is at http://$(ADDRESS)/ and its admin at http://$(ADDRESS)/admin/ (Ctrl-C stops it).'
	@$(MANAGE) runserver $(ADDRESS)

test: servers mysql $(VENV)/.test
	@$(BIN)/python -m tests.run $(ARGS)

test-pages: servers $(VENV)/.test
	@$(BIN)/python -m tests.run sqlite -- $(XDIST) 2 -m 'pages and not nightly'

# All of them run, whatever fails.
nightly: export DLOCKS_TEST_VOLUME ?= $(or $(VOLUME),3)
nightly: servers mysql backend-servers $(VENV)/.test-backends $(VENV)/.bench $(VENV)/.docs
	@failed=0; for task in 'run sqlite -- -m nightly' 'run postgresql -- -m nightly tests/project' \
	    'run sqlite postgresql mariadb mysql' 'run backends' \
	    'campaign --minutes $(or $(MINUTES),10)' \
	    'campaign --minutes $(or $(MINUTES),10) --backend sqlite' \
	    'campaign --minutes $(or $(MINUTES),10) --backend postgresql' \
	    'nemesis --minutes $(or $(MINUTES),10)' 'nemesis --minutes $(or $(MINUTES),10) --peers'; do \
	    echo "==> python -m tests.$$task"; \
	    $(BIN)/python -m tests.$$task || { echo "FAILED: python -m tests.$$task"; failed=1; }; \
	done; exit $$failed

# The tests that fail because they are measured do not matter.
coverage: servers mysql $(VENV)/.coverage
	@rm -f .coverage .coverage.*
	-@COVERAGE_FILE=$(CURDIR)/.coverage $(BIN)/coverage run -m tests.run $(ARGS)
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

test-servers: servers $(VENV)/.test
	@sh scripts/fetch_server.sh postgresql
	@sh scripts/fetch_server.sh mariadb
	@$(BIN)/python -m tests.run newest

test-libmysqlclient: servers mysql $(VENV)/.test
	@PYTHON=$(BIN)/python sh scripts/test_libmysqlclient.sh $(ARGS)

nemesis: servers mysql $(VENV)/.test $(if $(PEERS),backend-servers $(VENV)/.bench)
	@$(BIN)/python -m tests.nemesis $(if $(MINUTES),--minutes $(MINUTES)) $(if $(ENGINE),--engine $(ENGINE)) \
	    $(if $(SEED),--seed $(SEED)) $(if $(BUSY),--busy) $(if $(BUGS),--bugs) $(if $(PEERS),--peers)

mutations: servers mysql $(VENV)/.test
	@$(BIN)/python -m tests.mutations $(ARGS)

# Side by side, since the tests wait more than they compute.
test-all: servers $(VENV)/.nox
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh scripts/fetch_server.sh python3.14 || [ $$? -eq 3 ]
	@$(BIN)/nox --session tests --parallel 4 -- $(ARGS)

# Django prefers psycopg 3, so this environment does not have it.
PSYCOPG2 := .venv-psycopg2

test-psycopg2:
	@$(MAKE) --no-print-directory VENV=$(PSYCOPG2) $(PSYCOPG2)/.test-psycopg2
	@$(PSYCOPG2)/bin/python -m tests.run postgresql -- $(or $(ARGS),tests/testing/test_contract.py::TestPessimistic \
	    tests/promises/database/test_transactions.py tests/promises/database/test_queue.py \
	    tests/promises/integrations/test_settings.py::test_a_higher_isolation_level_causes_a_warning \
	    -k 'not (many_waiting or many_new or readers_and_writers_in)')

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-cache --no-logo
	DJANGO_SETTINGS_MODULE=tests.settings $(BIN)/python -m django makemigrations --check --dry-run dlocks
	$(MANAGE) makemigrations --check --dry-run

audit: $(VENV)/.audit
	@$(BIN)/python scripts/audit.py

docs: $(VENV)/.docs
	@$(BIN)/mkdocs build --strict
	@echo 'The documentation is in site/index.html'

images: servers $(VENV)/.test
	@DLOCKS_TEST_IMAGES=docs/images $(BIN)/python -m tests.run sqlite -- tests/promises/admin/test_control_room_browser.py \
	    tests/project/test_shop_browser.py -k 'screenshots or numbers_move'

package: $(VENV)/.nox
	@$(BIN)/nox --session package

bench: servers mysql backend-servers $(VENV)/.bench
	@$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf .venv .nox .venv-psycopg2 .servers build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	rm -rf benchmarks/results nemesis site .coverage .coverage.*
	rm -f example_project/shop.sqlite3*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

migrated: $(VENV)/.demo
	@$(MANAGE) migrate --verbosity 0

test-backends: servers mysql backend-servers $(VENV)/.test-backends
	@$(BIN)/python -m tests.run $(if $(ARGS),sqlite -- tests/promises/backends tests/units/backends $(ARGS),backends)

backend-servers: $(VENV)/.made
	@PYTHON=$(BIN)/python sh scripts/install_servers.sh backends

# Debian packages that pip needs to build the drivers, and the servers. This is quick if they are installed.
servers: $(VENV)/.made
	@PYTHON=$(BIN)/python sh scripts/install_servers.sh servers

# If MySQL cannot be fetched, the tests that need it say what to do.
mysql:
	@sh scripts/fetch_server.sh mysql || [ $$? -eq 3 ]

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo 'dlocks needs Python 3.11 or newer, and "$(PYTHON)" is older. Use another one: make PYTHON=python3.12 …' >&2; \
	    exit 1; }
	@PYTHON='$(PYTHON)' sh scripts/install_servers.sh venv
	@echo 'Creating $(VENV) …'
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml
	@echo 'Installing the packages for the demo …'
	@$(INSTALL) --group demo
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml | servers
	@echo 'Installing the packages for the tests …'
	@$(INSTALL) --group test
	@touch $@

$(VENV)/.coverage: $(VENV)/.made pyproject.toml | servers
	@echo 'Installing the packages for the coverage …'
	@$(INSTALL) --group coverage
	@touch $@

$(VENV)/.test-backends: $(VENV)/.made pyproject.toml | servers
	@echo 'Installing the packages for the tests of the other backends …'
	@$(INSTALL) --group test-backends
	@touch $@

$(VENV)/.test-psycopg2: $(VENV)/.made pyproject.toml | servers
	@echo 'Installing the packages for the tests with psycopg 2 …'
	@$(INSTALL) --group test-psycopg2
	@touch $@

$(VENV)/.bench: $(VENV)/.made pyproject.toml | servers
	@echo 'Installing the packages for the benchmarks …'
	@$(INSTALL) --group bench
	@touch $@

$(VENV)/.docs: $(VENV)/.made pyproject.toml
	@echo 'Installing the packages for the documentation …'
	@$(INSTALL) --group docs
	@touch $@

$(VENV)/.audit: $(VENV)/.made pyproject.toml
	@echo 'Installing the audited packages and pip-audit …'
	@$(INSTALL) --group audit
	@touch $@

$(VENV)/.nox: $(VENV)/.made pyproject.toml
	@echo 'Installing nox …'
	@$(INSTALL) --group nox
	@touch $@

# The types and the migrations are checked with the settings of the tests, on SQLite.
$(VENV)/.lint: $(VENV)/.made pyproject.toml
	@echo 'Installing the packages for the checks …'
	@$(INSTALL) --group lint --group test-sqlite
	@touch $@

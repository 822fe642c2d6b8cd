# `make install` makes .venv, `make demo` shows what the project does, `make test` runs every check.
PYTHON ?= python3
PYTEST_ARGS ?= -q -n auto --dist loadfile
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PUBLIC := mesh_tf_core costmodels layoutopt reports
LINT := $(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/mypy && $(BIN)/lint-imports
PIP := $(BIN)/pip --disable-pip-version-check --no-input
# Tests start hundreds of processes: without files of bytecode each compiles the packages again (about a second).
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install test test-fast test-nightly lint format docs site outputs demo clean

install: $(STAMP)

# Two processes fetch the locked packages, which takes half as long; the second command finds them there and adds what
# another Python needs besides. Bytecode is compiled when a module is first imported, as most never are.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing the pinned packages into $(VENV) (about 5 GB, one to a few minutes)'
	@grep -v '^#' constraints.txt | xargs -n 70 -P 2 $(PIP) install --quiet --no-compile --no-deps
	@$(PIP) install --quiet --no-compile --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

lint: install
	$(LINT)

test-fast: MARK := -m "not slow and not nightly"
# The long hunts for surprises: larger fuzzing than `make test` has time for.
test-nightly: MARK := -m nightly

# Lint runs beside the first tests, and tells at once what is wrong. pytest's summary is the last line of the output.
test test-fast test-nightly: install
	@{ { $(LINT); } > $(VENV)/lint.txt 2>&1 || { cat $(VENV)/lint.txt; false; }; } & lint=$$!; \
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(MARK); tests=$$?; wait $$lint && exit $$tests

format: install
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

# The API reference, made from docstrings: open build/api/index.html.
docs: install
	$(BIN)/pdoc --docformat google --output-directory build/api $(PUBLIC)

# The documentation as a site: open build/site/README.html.
site: install
	$(BIN)/sphinx-build -q -W -b html docs build/site

# The outputs that the tutorials and the notebook show, and README's pictures, made anew on this machine (quiet, chromium on the PATH).
outputs: install
	$(BIN)/python tests/docs/console.py docs/guides/tutorial.md --write
	$(BIN)/python tests/docs/console.py docs/guides/jax_tutorial.md --write
	$(BIN)/python tests/docs/notebooks.py examples/first_steps.ipynb --write
	docs/pictures.sh

demo: install
	examples/demo.sh

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# The commands of the course; each one prepares .venv itself.  Start with `make help`.
# Works with GNU make 3.81, which macOS ships.

BIN = .venv/bin
TOPIC = gpipe

help:
	@echo "make book             build the book, open _build/html/index.html"
	@echo "make test             run every check"
	@echo "make lab TOPIC=gpipe  open a topic's notebook in JupyterLab"
	@echo "make notebooks        rebuild the notebooks from solutions/*.py"
	@echo "make bench            measure on this machine"
	@echo "make clean            remove what was built (not .venv)"
	@echo "PYTHON=/path/to/python chooses the Python (3.10 to 3.13) of .venv."

.venv/installed: requirements.txt pyproject.toml
	@sh tools/setup.sh "$(PYTHON)"

# Needs jupyter-book<2 (requirements.txt).
book: .venv/installed
	@$(BIN)/jupyter-book build . -q -W -n

# Two at a time, but for the tests that look at times.
test: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder -m "not alone" $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m alone $(PYTEST_ARGS)

lab: .venv/installed
	@test -f "labs/$(TOPIC).ipynb" || { \
	    echo "There is no labs/$(TOPIC).ipynb; see labs/ for the topics." >&2; exit 1; }
	$(BIN)/jupyter lab "labs/$(TOPIC).ipynb"

notebooks: .venv/installed
	$(BIN)/python tools/build_notebooks.py

bench: .venv/installed
	$(BIN)/python -m tools.bench

clean:
	rm -rf _build .pytest_cache .ruff_cache .jupyter_cache
	find labs solutions tests tools book -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help book test lab notebooks bench clean

# Every target makes .venv and installs what it needs, unless that is there already.
VENV := .venv
PYTHON ?= python3
INSTALLED := $(VENV)/.installed
RUN := $(VENV)/bin

.PHONY: demo test check bench clean

demo: $(INSTALLED)
	$(RUN)/cacheflow demo

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(RUN)/pytest

check: $(INSTALLED)
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy

bench: $(INSTALLED)
	$(RUN)/python profiling/bench_stores.py
	$(RUN)/python profiling/bench_executor.py

clean:
	rm -rf $(VENV) out

$(INSTALLED): requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet -r requirements.txt
	$(RUN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

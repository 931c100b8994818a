VENV := .venv
PY := $(VENV)/bin/python
.PHONY: venv
venv: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml
	python3 -m venv $(VENV)
	$(PY) -m pip install --quiet torch==2.13.0
	$(PY) -m pip install --quiet -e '.[test,web]'
	touch $@

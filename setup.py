"""The list of packages: everything under distdiag/, and probes/ as `distdiag.probes`. The rest is in pyproject.toml."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["distdiag", "distdiag.*"]), "distdiag.probes"])

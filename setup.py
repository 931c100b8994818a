"""The packages (everything under distdiag/, and probes/ as `distdiag.probes`) and the C hooks. The rest is in pyproject.toml.

The extension is optional: where it does not compile, the recorder's hooks are Python alone, slower and otherwise equal, but garbage
collections are not timed (see recorder/garbage.py).
`DISTDIAG_COMPILED=1` fails instead (release wheels); `DISTDIAG_PURE=1` leaves it out (the pure wheel). A free-threaded Python gets the
pure package: importing an extension that relies on the GIL would switch it on in the user's job.
"""

import os
import sysconfig

from setuptools import Extension, find_packages, setup

PURE = os.environ.get("DISTDIAG_PURE") == "1" or bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
C = "distdiag/recorder/fast/c"
STRIPPED = ["-s"]  # without debug information, most of the library's size
HOOKS = Extension(
    "distdiag.recorder.fast._hot",
    sources=[f"{C}/hooks.c", f"{C}/module.c"],
    depends=[f"{C}/hot.h"],
    extra_link_args=STRIPPED,
    optional=os.environ.get("DISTDIAG_COMPILED") != "1",
)
NATIVE = Extension(  # the main thread's native frames, for the monitor
    "distdiag.recorder.fast._native",
    sources=[f"{C}/native.c"],
    extra_link_args=STRIPPED,
    optional=os.environ.get("DISTDIAG_COMPILED") != "1",
)

setup(
    py_modules=["_distdiag_autoload"],  # outside the package: see its docstring
    packages=[*find_packages(include=["distdiag", "distdiag.*"]), "distdiag.probes"],
    ext_modules=[] if PURE else [HOOKS, NATIVE],
)

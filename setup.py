"""Build of the C++ extension; everything else is in pyproject.toml.

Plain pybind11, no torch headers: one build serves every torch version. ParallelCompile compiles the
files in parallel and skips unchanged ones; with a handful of files ninja would add a dependency and
save nothing. A header is taken to change every file.
"""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, naive_recompile
from setuptools import setup

HEADERS = sorted(glob("csrc/*.hpp"))


def needs_recompile(obj: str, src: str) -> bool:
    return any(naive_recompile(obj, path) for path in (src, *HEADERS))


ParallelCompile("XRPO_BUILD_JOBS", needs_recompile=needs_recompile).install()

setup(
    packages=[
        "xrpo_fast",
        "xrpo_fast.exemplars",
        "xrpo_fast.integrations",
        "xrpo_fast.kernels",
        "xrpo_fast.objectives",
        "xrpo_fast.ops",
        "xrpo_fast.replay",
        "xrpo_fast.report",
        "xrpo_fast.rewards",
        "xrpo_fast.rollouts",
        "xrpo_fast.study",
        "xrpo_fast.tasks",
    ],
    package_data={
        "xrpo_fast": ["py.typed", "*.pyi", "presets/*.toml"],
        "xrpo_fast.tasks": ["policy/*"],
    },
    ext_modules=[
        Pybind11Extension(
            "xrpo_fast._native",
            sorted(glob("csrc/*.cpp")),
            depends=HEADERS,
            cxx_std=17,
            # -ffp-contract=off: a plan must be the same on every machine.
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-ffp-contract=off", "-pthread"],
            extra_link_args=["-pthread"],
        )
    ],
)

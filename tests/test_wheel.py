"""What is installed is what was written: wheel, editable installs and the bare checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEFT_OUT = shutil.ignore_patterns(
    "build", "dist", "runs", "*.so", "*.egg-info", "__pycache__", ".git", ".hypothesis", ".*_cache"
)

IMPORTS = """
import xrpo_fast, xrpo_fast.kernels, xrpo_fast.kernels.reference, xrpo_fast._native as native
import xrpo_fast.ops, sys
from xrpo_fast.config_file import make_config
from xrpo_fast.tasks.policy import POLICY_DIR
assert make_config({"algorithm": "xrpo"}).novelty.enabled
assert (POLICY_DIR / "model.safetensors").exists(), POLICY_DIR
assert "kernels" not in sys.modules, "the kernels have one name, xrpo_fast.kernels"
print(xrpo_fast.__file__, xrpo_fast.kernels.reference.__file__, native.__file__, sep="\\n")
"""

FORGET_OTHERS = """
import os, site, sys
sys.path[:] = [p for p in sys.path if not os.path.exists(os.path.join(p, "xrpo_fast"))]
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "")]
for name in [name for name in sys.modules if "editable" in name]:
    del sys.modules[name]
"""
"""The environment that runs the tests may itself hold an editable install of another checkout."""


def run(*words: str | Path, cwd: Path, **environment: str) -> str:
    """Standard output of a command; its error output where it fails."""
    result = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A clean copy of the checkout, links kept: what a build leaves behind stays out of ours."""
    return Path(
        shutil.copytree(
            ROOT, tmp_path_factory.mktemp("source") / "xrpo", symlinks=True, ignore=LEFT_OUT
        )
    )


@pytest.fixture(scope="module")
def wheel(source, require) -> Path:
    """The built wheel."""
    require("build")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", cwd=source)
    (path,) = (source / "dist").glob("*.whl")
    return path


@pytest.mark.slow
def test_wheel_holds_the_package_whole_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        str(Path("xrpo_fast") / path.relative_to(ROOT / "xrpo_fast"))
        for path in (ROOT / "xrpo_fast").rglob("*.py")
    }
    kernels = {f"xrpo_fast/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")}
    presets = {f"xrpo_fast/presets/{path.name}" for path in (ROOT / "xrpo_fast/presets").iterdir()}
    policy = {
        f"xrpo_fast/tasks/policy/{path.name}"
        for path in (ROOT / "xrpo_fast/tasks/policy").iterdir()
    }
    assert modules | kernels | presets | policy <= names, "packages of setup.py, or package data"
    assert {"xrpo_fast/py.typed", "xrpo_fast/_native.pyi"} <= names
    assert any(name.startswith("xrpo_fast/_native.") and name.endswith(".so") for name in names)
    top_level = {name.split("/")[0] for name in names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"xrpo_fast"}
    assert not any("tests" in Path(name).parts or "/test_" in name for name in names)


@pytest.mark.slow
def test_installed_wheel_is_imported_from_where_it_lies(wheel, tmp_path):
    target = tmp_path / "target"
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet")
    run(*pip, "--target", target, wheel, cwd=tmp_path)
    files = run(sys.executable, "-c", IMPORTS, cwd=tmp_path, PYTHONPATH=str(target)).split()
    assert all(Path(name).is_relative_to(target) for name in files), files
    code = "import importlib.util as u; spec = u.find_spec('kernels'); print(spec and spec.origin)"
    origin = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(target)).strip()
    assert not origin.startswith(str(target)), "the name kernels belongs to another package"


@pytest.fixture(scope="module")
def quick_compiler(tmp_path_factory) -> str:
    """A compiler that does not optimise: these tests look at where files lie, not at speed."""
    script = tmp_path_factory.mktemp("compiler") / "compile"
    script.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')
    script.chmod(0o755)
    return str(script)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lenient", "strict", "compat"])
def test_editable_install_follows_the_source(source, tmp_path, mode, quick_compiler):
    target = tmp_path / "target"
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--quiet")
    options = () if mode == "lenient" else ("--config-settings", f"editable_mode={mode}")
    compiler = {"CC": quick_compiler, "CXX": quick_compiler}
    run(*pip, *options, "--target", target, "--editable", source, cwd=tmp_path, **compiler)
    found_first = f"sys.path.insert(0, {str(target)!r}); site.addsitedir({str(target)!r})\n"
    code = FORGET_OTHERS + found_first + IMPORTS
    files = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH="").split()
    assert all(Path(name).resolve().is_relative_to(source) for name in files[:2]), files


def test_bare_checkout_imports_its_kernels():
    code = (
        "import xrpo_fast.kernels.reference as r, sys; print(r.__file__, 'kernels' in sys.modules)"
    )
    file, has_top_level = run(sys.executable, "-c", code, cwd=ROOT, PYTHONPATH="").split()
    assert Path(file) == ROOT / "xrpo_fast" / "kernels" / "reference.py"
    assert has_top_level == "False"


def test_checkout_on_the_path_does_not_hide_the_other_kernels_package(tmp_path):
    """PyPI has a package `kernels`, which transformers imports; ours has no __init__.py there."""
    other = tmp_path / "site" / "kernels"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    code = "import kernels; print(kernels.__file__)"
    path = f"{ROOT}{os.pathsep}{tmp_path / 'site'}"
    file = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=path).strip()
    assert file == str(other / "__init__.py")

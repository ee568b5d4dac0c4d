"""Nothing is skipped that CI cannot demand."""

from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_what_is_missing_is_skipped_unless_it_is_demanded(
    require: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XRPO_REQUIRE", "other")
    with pytest.raises(pytest.skip.Exception, match="no_such_module cannot be imported"):
        require("no_such_module")
    monkeypatch.setenv("XRPO_REQUIRE", "other,no_such_module")
    with pytest.raises(pytest.fail.Exception, match="XRPO_REQUIRE=no_such_module, but"):
        require("no_such_module")
    require("json")


def test_no_file_skips_a_missing_package_by_itself() -> None:
    paths = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    word = "import" + "orskip"
    assert [path.name for path in paths if word in path.read_text(encoding="utf-8")] == []

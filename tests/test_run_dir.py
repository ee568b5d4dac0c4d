"""What a resumed run may not change."""

import re

import pytest

from xrpo_fast.config import ConfigError
from xrpo_fast.config_file import make_config
from xrpo_fast.run_dir import check_run_dir, hold_run, make_run_dir


@pytest.mark.parametrize(
    ("section", "key", "before", "after"),
    [
        ("data", "eval", {"math": "a.jsonl"}, {"math.v1": "a.jsonl"}),
        ("reward", "options", {}, {"math": {}}),
        ("optim", "warmup_steps", 1, 2),
    ],
    ids=["names-with-dots", "an-empty-table", "a-number"],
)
def test_a_changed_key_is_named(tmp_path, section, key, before, after):
    old, new = (
        make_config({"run": {"name": "r", "output_dir": str(tmp_path)}, section: {key: value}})
        for value in (before, after)
    )
    run = check_run_dir(old, resume=False, overwrite=False)
    with hold_run(run):
        make_run_dir(run, old, overwrite=False)
    check_run_dir(old, resume=True, overwrite=False)
    message = f"{section}.{key}: expected {before!r} as in {tmp_path}/r/config.toml, got {after!r}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_run_dir(new, resume=True, overwrite=False)

"""What a resumed run may not change."""

import re
from types import SimpleNamespace

import pytest
import torch

from xrpo_fast.config import ConfigError
from xrpo_fast.config_file import make_config
from xrpo_fast.run_dir import (
    MAY_CHANGE_ON_RESUME,
    RunDir,
    check_run_dir,
    hold_run,
    make_run_dir,
)
from xrpo_fast.session import Session


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


def test_a_key_that_may_change_is_said(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr("xrpo_fast.run_dir.logger.info", lambda text, *a: lines.append(text % a))
    values = {"run": {"name": "r", "output_dir": str(tmp_path)}}
    old, new = (make_config(values | {"optim": {"learning_rate": rate}}) for rate in (1e-6, 1e-5))
    run = check_run_dir(old, resume=False, overwrite=False)
    with hold_run(run):
        make_run_dir(run, old, overwrite=False)
    check_run_dir(old, resume=True, overwrite=False)
    assert lines == []
    check_run_dir(new, resume=True, overwrite=False)
    assert lines == ["optim.learning_rate: 1e-05 from here on, was 1e-06"]


def test_what_a_cure_says_to_lower_may_change_on_resume(tmp_path):
    session = SimpleNamespace(run_dir=RunDir(tmp_path))
    error = torch.OutOfMemoryError("no memory")
    Session._add_cure(session, error)  # pyright: ignore[reportArgumentType]
    keys = re.findall(r"[a-z]+\.[a-z_]+", error.__notes__[0])
    assert len(keys) == 3
    # A run that stopped at the limit goes on with a higher one.
    assert {*keys, "reward.max_error_frac"} <= MAY_CHANGE_ON_RESUME


def test_rollouts_of_steps_taken_again_are_removed(tmp_path):
    run = RunDir(tmp_path)
    run.drop_rollouts_after(2)
    run.rollouts(1).parent.mkdir()
    for step in (1, 2, 3, 10):
        run.rollouts(step).touch()
    run.drop_rollouts_after(2)
    assert sorted(path.name for path in run.rollouts(1).parent.iterdir()) == [
        "step_1.parquet",
        "step_2.parquet",
    ]

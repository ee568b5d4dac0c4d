import logging

import pytest

from xrpo_fast.policy import ModelError, architecture_path, builtin_seed, model_path
from xrpo_fast.tasks import warmup
from xrpo_fast.tasks.policy import POLICY_DIR
from xrpo_fast.tasks.seeded import cached_policy_dir, policy_dir


@pytest.fixture
def short_warm_up(monkeypatch, tmp_path):
    """Warm-ups of seven steps, kept in a folder of the test."""
    monkeypatch.setattr(warmup, "NUM_STEPS", 7)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_seed_0_is_the_shipped_policy():
    assert policy_dir(0) == POLICY_DIR
    assert model_path("builtin:symbols") == model_path("builtin:symbols?seed=0") == str(POLICY_DIR)


def test_other_seeds_are_warmed_up_once(short_warm_up, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "xrpo_fast")
    monkeypatch.setattr(logging.getLogger("xrpo_fast"), "propagate", True)
    first = model_path("builtin:symbols?seed=3")
    assert "warming up builtin:symbols?seed=3, once" in caplog.text
    weights = cached_policy_dir(3) / "model.safetensors"
    made_at = weights.stat().st_mtime_ns
    caplog.clear()
    assert model_path("builtin:symbols?seed=3") == first == str(cached_policy_dir(3))
    assert weights.stat().st_mtime_ns == made_at
    assert not caplog.text


def test_seeds_give_different_weights(short_warm_up):
    one, two = ((policy_dir(seed) / "model.safetensors").read_bytes() for seed in (1, 2))
    assert one != two


def test_a_broken_off_warm_up_leaves_nothing(short_warm_up):
    def stop(step: int, num_steps: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        policy_dir(5, stop)
    assert not cached_policy_dir(5).exists()


def test_the_architecture_needs_no_warm_up():
    assert architecture_path("builtin:symbols?seed=9") == str(POLICY_DIR)
    assert architecture_path("some/model") == "some/model"


@pytest.mark.parametrize(
    "path", ["builtin:symbol", "builtin:symbols?sed=1", "builtin:symbols?seed=x"]
)
def test_other_builtin_names_are_errors(path):
    with pytest.raises(ModelError, match=r"expected builtin:symbols or builtin:symbols\?seed=N"):
        builtin_seed(path)

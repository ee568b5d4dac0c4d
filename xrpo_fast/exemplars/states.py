"""What becomes of prompts that stay hopeless: seeded, rested, audited, listed; never deleted.

    fresh      at least one success in the last visit, or no seeded visit yet; seeding allowed
    seeded     1 or 2 seeded visits in a row without a success; seeding allowed
    back-off   the 3rd such visit, level k = 0: skipped for the next 2^k epochs, then drawn again
               with seeding; without a success k grows by one, up to MAX_BACKOFF_LEVEL
    audit      a visit beyond the last level without a success: drawn once per epoch, unseeded
    quarantine MAX_FAILED_AUDITS audits without a success: on the list (a wrong label?), still
               audited once per epoch

A visit is a step in which the prompt was drawn. One success, seeded or not, in any state makes the
prompt fresh again. A visit without a scored rollout (the verifier failed) changes nothing, and so
does an unseeded failure of a fresh or seeded prompt, where no exemplar was there to help it, and a
failure of a prompt that rests: it was drawn because too few were awake.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["fresh", "seeded", "back-off", "audit", "quarantine"]
STATES: tuple[State, ...] = ("fresh", "seeded", "back-off", "audit", "quarantine")

MAX_SEEDED_VISITS = 3
MAX_BACKOFF_LEVEL = 3
"""The longest rest is 2^3 = 8 epochs."""
MAX_FAILED_AUDITS = 3


@dataclass(slots=True)
class _Record:
    state: State = "seeded"
    num_failed: int = 0
    """Failed visits in this state; in back-off the level k."""
    wake_epoch: int = 0
    """First epoch in which the prompt is drawn again."""


class PromptStates:
    """State of each prompt of the data set; all are fresh at first. Deterministic."""

    def __init__(self, num_prompts: int) -> None:
        if num_prompts < 0:
            raise ValueError(f"num_prompts: expected >= 0, got {num_prompts}")
        self._num_prompts = num_prompts
        self._records: dict[int, _Record] = {}

    def state(self, prompt_index: int) -> State:
        """State of one prompt."""
        record = self._record(prompt_index)
        return "fresh" if record is None else record.state

    def should_skip(self, prompt_index: int, epoch: int) -> bool:
        """Whether the prompt rests in this epoch; another takes its place in the batch."""
        record = self._record(prompt_index)
        return record is not None and epoch < record.wake_epoch

    def should_seed(self, prompt_index: int, epoch: int) -> bool:
        """Whether the prompt may be seeded, should all its rollouts so far have failed."""
        record = self._record(prompt_index)
        if record is None:
            return True
        return record.state in ("seeded", "back-off") and epoch >= record.wake_epoch

    def observe_step(
        self, prompt_index: int, num_solved: int, num_scored: int, was_seeded: bool, epoch: int
    ) -> None:
        """Takes in what a visit gave; once per prompt and step.

        Raises:
            ValueError: num_solved outside 0..num_scored.
        """
        if not 0 <= num_solved <= num_scored:
            raise ValueError(f"num_solved: expected 0..num_scored = {num_scored}, got {num_solved}")
        record = self._record(prompt_index)
        if num_scored == 0:
            return
        if num_solved > 0:
            self._records.pop(prompt_index, None)
        elif record is not None:
            if epoch >= record.wake_epoch:
                _fail(record, was_seeded, epoch)
        elif was_seeded:
            self._records[prompt_index] = _Record(num_failed=1)

    def quarantine(self) -> list[int]:
        """Prompts that never succeed, ascending; their labels deserve a look."""
        return sorted(i for i, r in self._records.items() if r.state == "quarantine")

    def counts(self) -> dict[str, int]:
        """Prompts in each state."""
        counts: dict[str, int] = dict.fromkeys(STATES, 0)
        counts["fresh"] = self._num_prompts - len(self._records)
        for record in self._records.values():
            counts[record.state] += 1
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain lists, numbers and strings."""
        return {
            "num_prompts": self._num_prompts,
            "records": [
                [index, r.state, r.num_failed, r.wake_epoch]
                for index, r in sorted(self._records.items())
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what state_dict gave.

        Raises:
            ValueError: another number of prompts, or an unknown state.
        """
        if state["num_prompts"] != self._num_prompts:
            raise ValueError(
                f"state: expected {self._num_prompts} prompts, got {state['num_prompts']}; "
                "resume with the data set of the checkpoint"
            )
        records: dict[int, _Record] = {}
        for index, name, num_failed, wake_epoch in state["records"]:
            if name not in STATES[1:]:
                raise ValueError(f"state: expected one of {STATES[1:]}, got {name!r}")
            records[index] = _Record(name, num_failed, wake_epoch)
        self._records = records

    def _record(self, prompt_index: int) -> _Record | None:
        if not 0 <= prompt_index < self._num_prompts:
            raise ValueError(
                f"prompt_index: expected 0..{self._num_prompts - 1}, got {prompt_index}"
            )
        return self._records.get(prompt_index)


def _fail(record: _Record, was_seeded: bool, epoch: int) -> None:
    """Moves a prompt that is not fresh one failed visit on."""
    if record.state == "seeded":
        if not was_seeded:
            return
        record.num_failed += 1
        if record.num_failed == MAX_SEEDED_VISITS:
            record.state, record.num_failed = "back-off", 0
            record.wake_epoch = epoch + 1 + 2**record.num_failed
    elif record.state == "back-off":
        if record.num_failed == MAX_BACKOFF_LEVEL:
            record.state, record.num_failed = "audit", 0
            record.wake_epoch = epoch + 1
        else:
            record.num_failed += 1
            record.wake_epoch = epoch + 1 + 2**record.num_failed
    else:
        record.num_failed += 1
        record.wake_epoch = epoch + 1
        if record.num_failed >= MAX_FAILED_AUDITS:
            record.state = "quarantine"

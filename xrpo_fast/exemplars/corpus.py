"""The corpus: one verified success per problem, newest first to stay, bounded in age and bytes."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True, slots=True, frozen=True)
class Success:
    """A solved, finished and unseeded rollout, put forward for the corpus."""

    prompt_index: int
    response: str
    """The text that the verifier saw."""
    num_tokens: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Entry:
    """What the corpus keeps of a success."""

    prompt_index: int
    response: str
    num_tokens: int
    step: int

    @property
    def num_bytes(self) -> int:
        return len(self.response.encode("utf-8", "surrogatepass"))


class Corpus:
    """Entries by prompt index, oldest step first. Not aware of problems or leakage."""

    def __init__(self, max_age_steps: int, max_bytes: int) -> None:
        for name, value in (("max_age_steps", max_age_steps), ("max_bytes", max_bytes)):
            if value < 1:
                raise ValueError(f"{name}: expected >= 1, got {value}")
        self._max_age_steps = max_age_steps
        self._max_bytes = max_bytes
        self._entries: dict[int, Entry] = {}
        self.num_bytes = 0
        self.removed: Counter[str] = Counter()
        """Entries that left, by reason: replaced, expired, evicted."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, prompt_index: int, step: int) -> Entry | None:
        """The entry of a problem as step `step` may see it: from an earlier step, not too old."""
        entry = self._entries.get(prompt_index)
        if entry is None or not entry.step < step <= entry.step + self._max_age_steps:
            return None
        return entry

    def refusal(self, success: Success) -> str | None:
        """Why a success may not enter, or None."""
        if len(success.response.encode("utf-8", "surrogatepass")) > self._max_bytes:
            return "too_large"
        return None

    def add(self, success: Success, step: int) -> None:
        """Takes an unrefused success of a step in; the entry of the same problem leaves."""
        self._remove(success.prompt_index, "replaced")
        entry = Entry(
            prompt_index=success.prompt_index,
            response=success.response,
            num_tokens=success.num_tokens,
            step=step,
        )
        self._entries[entry.prompt_index] = entry
        self.num_bytes += entry.num_bytes

    def trim(self, step: int) -> None:
        """Removes what is too old for the step after `step`, then the oldest until bytes fit."""
        oldest_first = sorted(self._entries.values(), key=lambda entry: entry.step)
        for entry in oldest_first:
            if step + 1 - entry.step > self._max_age_steps:
                self._remove(entry.prompt_index, "expired")
            elif self.num_bytes > self._max_bytes:
                self._remove(entry.prompt_index, "evicted")
            else:
                break

    def drop(self, prompt_index: int, reason: str) -> None:
        """Removes the entry of a problem, where there is one."""
        self._remove(prompt_index, reason)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain lists, numbers and strings."""
        return {
            "entries": [[e.prompt_index, e.response, e.num_tokens, e.step] for e in self],
            "removed": dict(self.removed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what state_dict gave."""
        self._entries = {
            index: Entry(prompt_index=index, response=response, num_tokens=num_tokens, step=step)
            for index, response, num_tokens, step in state["entries"]
        }
        self.num_bytes = sum(entry.num_bytes for entry in self)
        self.removed = Counter(state["removed"])

    def _remove(self, prompt_index: int, reason: str) -> None:
        entry = self._entries.pop(prompt_index, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes
            self.removed[reason] += 1

"""The order in which a run takes its prompts."""

import random
from collections.abc import Sequence
from typing import Any


class PromptSampler:
    """Which prompts come next: seeded, reshuffled each epoch, every prompt once per epoch.

    A batch that passes the end of an epoch takes the tail and goes on with the next epoch's order,
    without a prompt twice in one batch: one that is already in it waits for the next batch.

    Raises:
        ValueError: num_prompts < 1.
    """

    def __init__(self, num_prompts: int, seed: int) -> None:
        if num_prompts < 1:
            raise ValueError(f"num_prompts: expected >= 1, got {num_prompts}")
        self.num_prompts = num_prompts
        self.seed = seed
        self.epoch = 0
        """Epoch of the next prompt, from 0."""
        self._cursor = 0
        self._postponed: list[tuple[int, int]] = []
        """(index, epoch)."""
        self._epochs: dict[int, int] = {}
        self._order = self._shuffled(0)

    def next_batch(self, k: int) -> list[int]:
        """Indices of the next k prompts, all different.

        Raises:
            ValueError: k is not in 1..num_prompts.
        """
        if not 1 <= k <= self.num_prompts:
            raise ValueError(
                f"k: expected 1..{self.num_prompts}, the number of prompts, got {k}; lower "
                "rollout.prompts_per_step or use more data"
            )
        batch: dict[int, int] = {}
        postponed: list[tuple[int, int]] = []
        for index, epoch in self._postponed:
            if len(batch) < k and index not in batch:
                batch[index] = epoch
            else:
                postponed.append((index, epoch))
        while len(batch) < k:
            if self._cursor == self.num_prompts:
                self.epoch += 1
                self._cursor = 0
                self._order = self._shuffled(self.epoch)
            index = self._order[self._cursor]
            self._cursor += 1
            if index in batch:
                postponed.append((index, self.epoch))
            else:
                batch[index] = self.epoch
        self._postponed = postponed
        self._epochs |= batch
        return list(batch)

    def epoch_of(self, index: int) -> int:
        """Epoch that the last draw of a prompt counts in: a batch may end in a later one than it
        began in."""
        return self._epochs[index]

    def give_back(self, indices: Sequence[int]) -> None:
        """Prompts drawn and not used: they come first in the next batch, in their own epoch."""
        self._postponed = [*((i, self._epochs[i]) for i in indices), *self._postponed]

    def state_dict(self) -> dict[str, Any]:
        """Position in the order, JSON-able."""
        return {
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "epoch": self.epoch,
            "cursor": self._cursor,
            "postponed": [list(pair) for pair in self._postponed],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where state_dict was taken.

        Raises:
            ValueError: the state is of another number of prompts.
        """
        if state["num_prompts"] != self.num_prompts:
            raise ValueError(
                f"state: expected a position in {self.num_prompts} prompts, got one in "
                f"{state['num_prompts']}; resume with the data set of the checkpoint"
            )
        self.seed = state["seed"]
        self.epoch = state["epoch"]
        self._cursor = state["cursor"]
        self._postponed = [(index, epoch) for index, epoch in state["postponed"]]
        self._order = self._shuffled(self.epoch)

    def _shuffled(self, epoch: int) -> list[int]:
        # Only random() is promised to give the same numbers in every Python.
        rng = random.Random(f"order {self.seed} {epoch}")
        keys = [rng.random() for _ in range(self.num_prompts)]
        return sorted(range(self.num_prompts), key=keys.__getitem__)

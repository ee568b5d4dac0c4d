"""How the rollouts of a prompt branch (TreePO): segments, forks, repetition; no engine.

When all segments of a tree's round are in, live paths fork; where none lives and leaves are
missing, finished paths fork again at an earlier boundary.

Source: arXiv 2508.17445. Ours, where it is silent: the number of forks from finished paths is that
of the same rule, and each takes a leaf and a boundary at random.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from xrpo_fast.config import TreeConfig
from xrpo_fast.types import Completion

REPEATED_CHARS = 32
MAX_REPEATS = 8
"""A path ends when a text of REPEATED_CHARS characters, a power of 2, stands in it MAX_REPEATS
times."""

_HASH_BASE = 0x9E3779B97F4A7C15
"""Odd, of the polynomial that tells texts apart: 2^64 over the golden ratio."""


@dataclass(kw_only=True, slots=True)
class Segment:
    """A node of a tree; the root is the prompt itself, a segment of no tokens."""

    parent: int
    depth: int
    """Segments from the root to the end of this one."""
    completion: Completion | None = None
    """None while it is decoded, and at the root."""
    is_last: bool = False
    """The path ends with it."""

    @property
    def num_tokens(self) -> int:
        return len(self.completion.token_ids) if self.completion else 0


class Tree:
    """The segments of one prompt's rollouts, numbered as they were made; 0 is the root.

    Args:
        width: leaves to reach, exactly.
        draw: (purpose, number of the segment) -> 63 random bits, always the same.
    """

    def __init__(self, width: int, config: TreeConfig, draw: Callable[[str, int], int]) -> None:
        self.width = width
        self.segments = [Segment(parent=0, depth=0)]
        self.leaves: list[int] = []
        """Last segments of finished paths, in the order of rounds."""
        self._draw = draw
        self._round: list[int] = []
        self._fanout = config.min_fanout + draw("fan-out", 0) % (
            config.max_fanout - config.min_fanout + 1
        )

    def path(self, last: int) -> list[int]:
        """Segments from the root to this one."""
        path = [last]
        while path[-1]:
            path.append(self.segments[path[-1]].parent)
        return path[::-1]

    def token_ids(self, path: Sequence[int]) -> tuple[int, ...]:
        """The response so far, without the prompt."""
        parts = (self.segments[i].completion for i in path)
        return tuple(itertools.chain.from_iterable(part.token_ids for part in parts if part))

    @property
    def is_round_done(self) -> bool:
        return all(self.segments[i].completion is not None for i in self._round)

    def grow(self) -> list[int]:
        """The next round's segments, to be decoded; none once the tree has its leaves.

        From live paths L and paths F that finished in the round, with w leaves to reach, come
        max(L, min(max(w - finished, 0), 2 L + 2 F)) paths. L never exceeds w - finished, so both
        maxima change nothing, and the leaves are exactly w.
        """
        live = [i for i in self._round if not self.segments[i].is_last]
        num_ended = len(self._round) - len(live)
        self.leaves += [i for i in self._round if self.segments[i].is_last]
        missing = self.width - len(self.leaves)
        if len(self.segments) == 1:
            parents = [0] * min(self._fanout, self.width)
        elif live:
            count = min(missing, 2 * len(live) + 2 * num_ended)
            parents = [live[i % len(live)] for i in range(count)]
        else:
            first = len(self.segments)
            parents = [self._fork_point(first + i) for i in range(min(missing, 2 * num_ended))]
        self._round = []
        for parent in parents:
            self._round.append(len(self.segments))
            self.segments.append(Segment(parent=parent, depth=self.segments[parent].depth + 1))
        return self._round

    def _fork_point(self, index: int) -> int:
        """Where a new segment leaves a finished path: any boundary but its end."""
        bits, which = divmod(self._draw("fork", index), len(self.leaves))
        boundaries = self.path(self.leaves[which])[:-1]
        return boundaries[bits % len(boundaries)]


def is_repetitive(text: str) -> bool:
    """Whether a text of REPEATED_CHARS characters stands in `text` MAX_REPEATS times, without
    overlap: a rule of dashes or an indented block is no repetition."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    if len(codes) < REPEATED_CHARS * MAX_REPEATS:
        return False
    # Each pass makes hashes of windows twice as wide; the arithmetic is modulo 2^64.
    hashes, width = codes.astype(np.uint64), 1
    while width < REPEATED_CHARS:
        factor = np.uint64(pow(_HASH_BASE, width, 2**64))
        hashes = hashes[:-width] * factor + hashes[width:]
        width *= 2
    _, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    # Overlaps are counted here, and few windows are left to count exactly.
    windows = (text[i : i + REPEATED_CHARS] for i in first[counts >= MAX_REPEATS])
    return any(text.count(window) >= MAX_REPEATS for window in windows)

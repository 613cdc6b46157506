"""What is kept between anchors, and how much of it."""
from __future__ import annotations

from dataclasses import dataclass

from ..kernels.residual import Residual
from ..kernels.shapes import KeySelection, QueryGroups
from .context import BranchKey, SiteKey

WINDOW_IDLE_EVALUATIONS = 3  # a context window that was not seen for so many evaluations is over


@dataclass(frozen=True, eq=False)
class AnchorState:
    """One (site, branch) between anchors: taken at `step`, for calls of one shape (rows, H, S, D, dtype, device, token layout,
    precision: the residual makes up for that precision's errors too)."""

    step: int
    shape: tuple
    groups: QueryGroups
    selection: KeySelection
    residual: Residual | None

    @property
    def nbytes(self) -> int:
        """Bytes held; groups of the cell order are one shared tensor and count for each holder."""
        return self.groups.nbytes + self.selection.nbytes + (self.residual.nbytes if self.residual else 0)


class MetaCache:
    """Anchor states by (site, branch), at most `budget_bytes` of them (None = no limit)."""

    def __init__(self, budget_bytes: int | None = None):
        self.budget_bytes = budget_bytes
        self.bytes = self.peak_bytes = 0
        self._states: dict[tuple[SiteKey, BranchKey], AnchorState] = {}
        self._seen: dict[BranchKey, int] = {}

    def get(self, site: SiteKey, branch: BranchKey, evaluation: int) -> AnchorState | None:
        self._seen[branch] = evaluation
        return self._states.get((site, branch))

    def put(self, site: SiteKey, branch: BranchKey, state: AnchorState) -> bool:
        """Keeps the state in place of an older one; False if it does not fit (then neither is held)."""
        self.drop(site, branch)
        if self.budget_bytes is not None and self.bytes + state.nbytes > self.budget_bytes:
            return False
        self._states[site, branch] = state
        self.bytes += state.nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return True

    def drop(self, site: SiteKey, branch: BranchKey):
        state = self._states.pop((site, branch), None)
        if state is not None:
            self.bytes -= state.nbytes

    def evict_idle_windows(self, evaluation: int):
        """Lets go of context windows that moved on."""
        idle = {b for b, seen in self._seen.items() if b.window is not None and evaluation - seen > WINDOW_IDLE_EVALUATIONS}
        for site, branch in [key for key in self._states if key[1] in idle]:
            self.drop(site, branch)
        for branch in idle:
            del self._seen[branch]

    def clear(self):
        self._states.clear()
        self._seen.clear()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._states)

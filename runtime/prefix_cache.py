"""State of earlier sequences, kept by their tokens within a memory budget: a prompt that begins alike goes on there.

Recurrent state cannot be rewound, so a sequence can only be taken up where it was saved. What is saved forms a tree:
a node holds the KV rows of its own tokens, those after its parent's, and the recurrent state at their end. When memory
runs short, what was not used for longest goes first: a leaf whole, an inner node's recurrent state alone, since others
build on its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.engine import DraftEngine, SavedState, SharedDraft, SharedTrunk, TrunkEngine


@dataclass(eq=False)
class _Node:
    """tokens: of this node alone. end: length of the whole prefix. recurrent None: cannot be taken up here."""

    parent: _Node | None
    tokens: tuple[int, ...]
    end: int
    trunk_rows: SavedState | None = None
    draft_rows: SavedState | None = None
    recurrent: SavedState | None = None
    hidden: Any = None
    used: int = 0
    children: list[_Node] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        parts = (self.trunk_rows, self.draft_rows, self.recurrent)
        return sum(part.nbytes for part in parts if part is not None)

    def needs(self) -> int:
        """Bytes that must be held to take a sequence up here."""
        assert self.recurrent is not None
        inner = sum(node.nbytes - (node.recurrent.nbytes if node.recurrent else 0) for node in self.path())
        return inner + self.recurrent.nbytes

    def path(self) -> list[_Node]:
        """From the first tokens to this node, the root left out."""
        nodes: list[_Node] = []
        node: _Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PrefixCache:
    """See `runtime.speculative.PrefixStore`. Holds at most ``budget`` bytes; for one thread.

    Engines must be `SharedTrunk` and `SharedDraft`, and all of one model; with or without a head throughout."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._root = _Node(None, (), 0)
        self._clock = 0
        self.nbytes = 0
        self.num_saved = 0  # prefixes that can be taken up

    def resume(self, trunk: TrunkEngine, draft: DraftEngine | None, prompt: Sequence[int]) -> tuple[int, Any]:
        best = self._root
        for node in self._matches(tuple(prompt)):
            if node.recurrent is not None and best.end < node.end < len(prompt):
                best = node
        if best is self._root:
            return 0, None
        assert isinstance(trunk, SharedTrunk) and best.recurrent is not None
        path = best.path()
        trunk.load([node.trunk_rows for node in path if node.trunk_rows], best.recurrent)
        if draft is not None:
            assert isinstance(draft, SharedDraft)
            draft.load([node.draft_rows for node in path if node.draft_rows])
        self._touch(path)
        return best.end, best.hidden

    def save(self, trunk: TrunkEngine, draft: DraftEngine | None, tokens: Sequence[int], hidden: Any) -> None:
        assert isinstance(trunk, SharedTrunk) and trunk.position == len(tokens)
        assert draft is None or (isinstance(draft, SharedDraft) and draft.position == len(tokens))
        whole = tuple(tokens)
        nearest = max(self._matches(whole), key=lambda node: node.end, default=self._root)
        if nearest.end == len(whole) and nearest is not self._root:
            node = nearest
            if node.recurrent is None:
                self._keep_recurrent(node, trunk, hidden)
        else:
            node = _Node(nearest, whole[nearest.end :], len(whole))
            node.trunk_rows = trunk.save_rows(nearest.end)
            if isinstance(draft, SharedDraft):
                node.draft_rows = draft.save_rows(nearest.end)
            nearest.children.append(node)
            self.nbytes += node.nbytes
            self._keep_recurrent(node, trunk, hidden)
        if node.needs() > self._budget:  # a shorter prefix is better than none
            self._drop(node)
            return
        self._touch(node.path())
        self._shrink()

    def clear(self) -> None:
        """Forget everything."""
        self._root.children.clear()
        self.nbytes = self.num_saved = 0

    def _keep_recurrent(self, node: _Node, trunk: SharedTrunk, hidden: Any) -> None:
        node.recurrent, node.hidden = trunk.save_recurrent(), hidden
        self.nbytes += node.recurrent.nbytes
        self.num_saved += 1

    def _matches(self, tokens: tuple[int, ...]) -> Iterator[_Node]:
        """Every node whose whole prefix ``tokens`` begins with."""
        open_nodes = [self._root]
        while open_nodes:
            for child in open_nodes.pop().children:
                if tokens[child.end - len(child.tokens) : child.end] == child.tokens:
                    yield child
                    open_nodes.append(child)

    def _touch(self, path: list[_Node]) -> None:
        self._clock += 1
        for node in path:
            node.used = self._clock

    def _shrink(self) -> None:
        while self.nbytes > self._budget:
            # Of those used last together, the shorter prefix goes first: the longer one saves more.
            self._drop(min(self._droppable(), key=lambda each: (each.used, each.end)))

    def _droppable(self) -> Iterator[_Node]:
        """Nodes that free memory: leaves, and inner ones with a recurrent state."""
        open_nodes = list(self._root.children)
        while open_nodes:
            node = open_nodes.pop()
            open_nodes += node.children
            if not node.children or node.recurrent is not None:
                yield node

    def _drop(self, node: _Node) -> None:
        """Forget a node's recurrent state, and every node that then leads nowhere."""
        if node.recurrent is not None:
            self.nbytes -= node.recurrent.nbytes
            self.num_saved -= 1
        node.recurrent, node.hidden = None, None
        while node.parent is not None and node.recurrent is None and not node.children:
            self.nbytes -= node.nbytes
            node.parent.children.remove(node)
            node = node.parent

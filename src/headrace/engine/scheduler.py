"""Who takes part in the next step.

First come, first served. A sequence reserves every page it can ever need when it is admitted, so
a running sequence never waits for memory and is never pushed out; the price is that a short answer
with a large `max_tokens` holds pages it does not fill. A step takes one row of every decoding
sequence and at most `chunk` prompt tokens, filled in order of arrival.
"""

from collections import deque
from dataclasses import dataclass

from headrace.engine.pages import PageTable
from headrace.engine.sequence import Sequence, State


@dataclass(frozen=True)
class Part:
    """The rows of one sequence in a step: the `num_tokens` positions from its `num_computed` on."""

    sequence: Sequence
    num_tokens: int


class Scheduler:
    """Waiting and running sequences, and the choice of parts for a step."""

    def __init__(
        self, pages: PageTable, *, max_sequences: int, chunk: int, max_logits_rows: int
    ) -> None:
        self.pages = pages
        self.max_sequences = max_sequences
        self.chunk = chunk
        self.max_logits_rows = max_logits_rows
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands, and give back its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.pages.release(sequence.pages)
        sequence.pages = []

    def plan_step(self) -> list[Part]:
        """Admit what fits and choose the parts of the next step; none if there is nothing to do."""
        self._admit()
        decoding = [s for s in self.running if not s.is_prefilling]
        parts = [Part(sequence, 1) for sequence in decoding]
        left = self.chunk
        for sequence in self.running:
            if left and sequence.is_prefilling:
                count = min(left, sequence.num_prompt - sequence.num_computed)
                if sequence.want_prompt_logprobs:
                    # Every row needs V scores: it gets a small step for itself, in its turn.
                    if left < self.chunk:
                        break
                    count = left = min(count, self.max_logits_rows)
                parts.append(Part(sequence, count))
                left -= count
        return parts

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_sequences:
            sequence = self.waiting[0]
            # One prompt token at least is computed anew: its logits choose the first token.
            most = 0 if sequence.want_prompt_logprobs else sequence.num_prompt - 1
            shared, digests = self.pages.match(sequence.tokens, most)
            needed = self.pages.pages_for(sequence.limit)
            pages = self.pages.reserve(shared, needed - len(shared))
            if pages is None:
                return
            self.waiting.popleft()
            sequence.pages = pages
            sequence.digests = digests
            sequence.num_computed = len(shared) * self.pages.page_tokens
            sequence.usage.cached_tokens = sequence.num_computed
            sequence.state = State.RUNNING
            self.running.append(sequence)

"""The books of KV pages: who uses which page, and which pages hold a prefix that may return.

A page is some tokens (64) of keys and values over all layers. Full pages are filed under the hash
of all tokens up to their end, so that equal prefixes share them; the numeric contract makes the
shared bytes those the sequence would have computed itself. Pages nobody uses stay filed until their
place is needed, oldest first. This module moves no bytes.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


class PageTable:
    """Reference counts, free pages and filed pages of one KV pool.

    Invariant: a page is either free, or used (count > 0), or filed and unused (in `_idle`).
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._counts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._filed: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # filed, unused; oldest first

    @property
    def num_available(self) -> int:
        """Pages that can be taken now: free ones and filed ones nobody uses."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages held by at least one sequence."""
        return self.num_pages - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens)

    def digest(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Name a full page by its tokens and all tokens before it (`parent`: the page before)."""
        return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()

    def match(self, tokens: Sequence[int], most: int) -> tuple[list[int], list[bytes]]:
        """Find the filed pages that hold the longest prefix of `tokens[:most]`; takes none.

        Returns:
            Page numbers and their digests, in order.
        """
        pages: list[int] = []
        digests: list[bytes] = []
        parent = b""
        for start in range(0, most - self.page_tokens + 1, self.page_tokens):
            parent = self.digest(parent, tokens[start : start + self.page_tokens])
            page = self._filed.get(parent)
            if page is None:
                break
            pages.append(page)
            digests.append(parent)
        return pages, digests

    def reserve(self, shared: Sequence[int], num_new: int) -> list[int] | None:
        """Take the `shared` pages once more and `num_new` empty ones, or nothing (None).

        New pages ascend: attention reads pages in order, and neighbours lie side by side.
        """
        idle_shared = sum(self._counts[page] == 0 for page in shared)
        if num_new > self.num_available - idle_shared:
            return None
        for page in shared:
            self._idle.pop(page, None)
            self._counts[page] += 1
        return [*shared, *sorted(self._take() for _ in range(num_new))]

    def file(self, page: int, digest: bytes) -> None:
        """Offer a full, computed page to later sequences; an equal page already filed stays."""
        if digest not in self._filed:
            self._filed[digest] = page
            self._digest_of[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """Give back one use of each page; the end of a prefix is forgotten before its start."""
        for page in reversed(pages):
            assert self._counts[page] > 0, f"page {page} released more often than taken"
            self._counts[page] -= 1
            if self._counts[page] == 0:
                if page in self._digest_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._filed[self._digest_of.pop(page)]
        self._counts[page] = 1
        return page

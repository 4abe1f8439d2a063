from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.pages import PageTable


def fill(table: PageTable, tokens: list[int]) -> Any:
    """Take pages for tokens as a sequence would, and file the full ones."""
    shared, digests = table.match(tokens, len(tokens) - 1)
    pages = table.reserve(shared, table.pages_for(len(tokens)) - len(shared))
    if pages is None:
        return None, 0
    for index in range(len(shared), len(tokens) // table.page_tokens):
        start = index * table.page_tokens
        parent = digests[-1] if digests else b""
        digests.append(table.digest(parent, tokens[start : start + table.page_tokens]))
        table.file(pages[index], digests[-1])
    return pages, len(shared)


def test_equal_pages_after_different_starts_are_not_the_same() -> None:
    table = PageTable(8, 2)
    fill(table, [1, 2, 9, 9, 0])
    assert fill(table, [3, 4, 9, 9, 0])[1] == 0


def test_oldest_unused_prefix_goes_first_and_its_end_before_its_start() -> None:
    table = PageTable(4, 2)
    first, _ = fill(table, [1, 2, 3, 4])
    second, _ = fill(table, [5, 6, 7, 8])
    table.release(first)
    table.release(second)
    assert table.num_available == 4
    taken = table.reserve([], 1)
    assert taken == [first[1]]
    assert len(table.match([1, 2, 3, 4, 0], 4)[0]) == 1
    assert len(table.match([5, 6, 7, 8, 0], 4)[0]) == 2


def test_new_pages_ascend_whoever_had_them_before() -> None:
    table = PageTable(4, 2)
    first, _ = fill(table, [1, 2, 3, 4, 5, 6, 7, 8])
    table.release(first)  # all filed: the end of the prefix is given up first
    assert table.reserve([], 3) == sorted(first[1:])


def test_reserve_takes_all_or_nothing() -> None:
    table = PageTable(3, 2)
    pages, _ = fill(table, [1, 2, 3, 4])
    table.release(pages)
    shared, _ = table.match([1, 2, 3, 4, 5], 4)
    assert table.reserve(shared, 2) is None  # three in all, two of them shared
    assert table.num_available == 3
    assert table.reserve(shared, 1) is not None
    assert table.num_available == 0


def test_releasing_twice_is_our_own_bug() -> None:
    table = PageTable(2, 2)
    pages = table.reserve([], 1)
    table.release(pages)
    with pytest.raises(AssertionError, match="more often"):
        table.release(pages)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.booleans()), max_size=40))
def test_pages_are_never_lost_nor_handed_out_twice(actions: list[tuple[int, int, bool]]) -> None:
    table = PageTable(6, 2)
    held = []
    for kind, length, release_first in actions:
        if release_first and held:
            table.release(held.pop(0))
        pages, num_shared = fill(table, [kind] * length)
        if pages is not None:
            others = [p for other in held for p in other]
            assert not set(pages[num_shared:]) & set(others)
            assert len(set(pages)) == len(pages)
            held.append(pages)
    used = {page for pages in held for page in pages}
    assert table.num_used == len(used)
    for pages in held:
        table.release(pages)
    assert table.num_available == 6

"""The pool of tokens: a plan that reads or writes a wrong page is found, whatever the vector says."""

import dataclasses

import numpy as np
import pytest

from planner_service.client import PlanArrays
from ringplan_cli.conformance.difference import Difference
from ringplan_cli.conformance.token_pool import TokenPool
from tests.ringplan_cli.conformance.hand_arrays import build_arrays, build_row

A, B, C = ("a", "main"), ("b", "main"), ("c", "main")


def _run(pool: TokenPool, *labels: PlanArrays, keep: bool = True) -> Difference | None:
    return pool.run(labels, keep=keep)


def _change(arrays: PlanArrays, name: str, values: list[int]) -> PlanArrays:
    return dataclasses.replace(arrays, **{name: np.array(values, dtype=np.int32)})


def _fill(*, page_size: int = 4, num_pages: int = 8) -> TokenPool:
    """Returns a pool in which a has 5 tokens on pages 1 and 2, and b 8 on pages 3 and 4."""
    pool = TokenPool(page_size, num_pages)
    assert _run(pool, build_row(A, pages=[1, 2], length=5, span=5)) is None
    assert _run(pool, build_row(B, pages=[3, 4], length=8, span=8)) is None
    return pool


def test_design_example_reads_what_its_streams_hold() -> None:
    """The worked example of the arrays (two streams that decode, one padding row) is consistent."""
    arrays = build_arrays(
        "main",
        (A, B, None),
        qo_indptr=[0, 1, 2, 3],
        paged_kv_indptr=[0, 2, 5, 6],
        paged_kv_indices=[1, 2, 3, 4, 5, 0],
        paged_kv_last_page_len=[2, 1, 1],
        kv_lens=[6, 9, 1],
        slot_mapping=[9, 20, 0],
        positions=[5, 8, 0],
    )
    pool = _fill()
    assert _run(pool, arrays) is None
    assert (pool.length(A), pool.length(B)) == (6, 9)


def test_tokens_that_are_not_kept_do_not_stay() -> None:
    """After a step that keeps nothing, the stream is as long as before and its slots may be written again."""
    pool = _fill()
    step = build_row(A, pages=[1, 2], length=6, span=1)
    assert _run(pool, step, keep=False) is None
    assert pool.length(A) == 5
    assert _run(pool, step) is None


def test_page_of_another_stream_is_found_when_it_is_read() -> None:
    """A row whose pages are another's reads the other's tokens: the page and both tokens are named."""
    pool = _fill()
    fault = _run(pool, build_row(A, pages=[3, 2], length=6, span=1))
    assert fault == Difference(
        "paged_kv_indices",
        0,
        "the page with token 0 of a.main",
        "page 3, with token 0 of b.main there",
        "main",
    )


def test_page_that_is_handed_out_twice_is_found_when_its_first_owner_reads() -> None:
    """Writing to a page that another stream holds destroys what is there."""
    pool = _fill()
    assert _run(pool, build_row(C, pages=[4], length=1, span=1)) is None
    fault = _run(pool, build_row(B, pages=[3, 4], length=8, span=0))
    assert fault is not None
    assert fault.index == 1
    assert fault.got == "page 4, with token 0 of c.main there"


def test_two_rows_that_write_one_slot_are_found_in_the_same_step() -> None:
    """All rows write before any reads: the first of two that share a page finds the other's token."""
    pool = TokenPool(4, 8)
    fault = _run(
        pool,
        build_row(A, pages=[1], length=1, span=1, name="main"),
        build_row(("a", "cfg"), pages=[1], length=1, span=1, name="cfg"),
    )
    assert fault is not None
    assert (fault.label, fault.array, fault.index) == ("main", "paged_kv_indices", 0)


def test_fork_with_its_page_copy_reads_its_source() -> None:
    """A target shares full pages and has the partly filled one copied: it reads the source's tokens."""
    pool = _fill()
    pool.fork([(A, C)])
    pool.copy_pages(np.array([[2, 5]], dtype=np.int32))
    assert _run(pool, build_row(C, pages=[1, 5], length=6, span=1)) is None
    assert _run(pool, build_row(A, pages=[1, 2], length=6, span=1)) is None


def test_fork_without_its_page_copy_is_found() -> None:
    """A page that was never written has nothing to read."""
    pool = _fill()
    pool.fork([(A, C)])
    fault = _run(pool, build_row(C, pages=[1, 5], length=6, span=1))
    assert fault is not None
    assert fault.want == "the page with token 4 of a.main"
    assert fault.got == "page 5, with nothing there"


def test_dropped_and_cut_streams_start_anew() -> None:
    """What a stream held before it was dropped or cut to nothing is not expected any more."""
    pool = _fill()
    pool.drop(A)
    pool.truncate(B, 0)
    assert _run(pool, build_row(A, pages=[3], length=1, span=1)) is None
    assert _run(pool, build_row(B, pages=[1], length=1, span=1)) is None


def test_stream_that_is_read_at_another_length_is_found() -> None:
    """A row that reads fewer or more tokens than its stream holds is wrong, even if the tokens are right."""
    pool = _fill()
    fault = _run(pool, build_row(A, pages=[1], length=4, span=0))
    assert fault == Difference("paged_kv_last_page_len", 0, "5 tokens", "4 tokens", "main")


@pytest.mark.parametrize("page", [0, -1, 8, 2**31 - 1])
def test_stream_row_stays_inside_the_pool(page: int) -> None:
    """A stream has neither the sink page nor one that the pool does not have."""
    row = build_row(A, pages=[7], length=1, span=0)
    fault = _run(TokenPool(4, 8), _change(row, "paged_kv_indices", [page]))
    assert fault == Difference("paged_kv_indices", 0, "page 1..7", page, "main")


def test_padding_row_has_the_sink_page_alone() -> None:
    """A padding row that writes to a real page would destroy a stream."""
    padding = build_row(None, pages=[0], length=1, span=1)
    assert _run(TokenPool(4, 8), padding) is None
    fault = _run(TokenPool(4, 8), _change(padding, "paged_kv_indices", [3]))
    assert fault == Difference("paged_kv_indices", 0, "page 0", 3, "main")


def test_slots_lie_in_the_pages_that_the_row_reads() -> None:
    """A token that is written elsewhere than where its row reads it is found by its slot."""
    row = build_row(A, pages=[1, 2], length=5, span=2)
    fault = _run(TokenPool(4, 8), _change(row, "slot_mapping", [7, 12]))
    assert fault == Difference("slot_mapping", 1, 8, 12, "main")


@pytest.mark.parametrize(
    ("name", "values", "index"),
    [
        ("qo_indptr", [1, 2], 0),
        ("qo_indptr", [0, 3], 1),
        ("qo_indptr", [0, -1], 1),
        ("paged_kv_indptr", [0, 1], 1),
        ("paged_kv_indptr", [2, 2], 0),
        ("paged_kv_last_page_len", [0], 0),
        ("paged_kv_last_page_len", [5], 0),
        ("positions", [3, 8], 1),
        ("positions", [-1, 4], 0),
    ],
)
def test_arrays_that_do_not_fit_each_other_are_a_difference_and_no_crash(
    name: str, values: list[int], index: int
) -> None:
    """A planner may send anything: sizes, bounds and positions are looked at before they are used."""
    row = build_row(A, pages=[1, 2], length=5, span=2)
    fault = _run(TokenPool(4, 8), _change(row, name, values))
    assert fault is not None
    assert (fault.array, fault.index) == (name, index)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtrain.layout import Layout, Span, WholeCut, cut_of, even

sizes = st.lists(st.integers(0, 200), max_size=12)
worlds = st.integers(1, 9)
aligns = st.sampled_from([1, 2, 4, 8])


@pytest.mark.smoke
def test_the_docstrings_worked_numbers() -> None:
    layout = even([3, 5, 2], world=2, align=4)
    assert layout.bounds == (0, 8, 16)
    assert layout.offsets == (0, 4, 12)
    assert layout.spans(0) == (Span(0, 3, 0), Span(0, 4, 4), Span(0, 0, 0))
    assert layout.spans(1) == (Span(3, 3, 0), Span(4, 5, 0), Span(0, 2, 4))
    layout = cut_of("whole", world=2)([3, 5, 2], 4)
    assert layout.bounds == (0, 8, 16)
    assert layout.offsets == (8, 0, 12)
    assert layout.spans(0) == (Span(0, 0, 0), Span(0, 5, 0), Span(0, 0, 0))
    assert layout.spans(1) == (Span(0, 3, 0), Span(5, 5, 0), Span(0, 2, 4))


@given(st.sampled_from(["even", "whole"]), sizes, worlds, aligns)
def test_spans_tile_every_parameter_and_lie_where_the_flat_vector_says(
    policy: str, sizes: list[int], world: int, align: int
) -> None:
    """In rank order; the rest is elsewhere; no two parameters overlap."""
    layout = cut_of(policy, world)(sizes, align)
    nobody_s = (-1, -1)
    flat = [nobody_s] * layout.padded
    for index, (at, size) in enumerate(zip(layout.offsets, sizes, strict=True)):
        assert flat[at : at + size] == [nobody_s] * size, "parameters overlap"
        flat[at : at + size] = [(index, element) for element in range(size)]
    tiles: list[list[int]] = [[] for _ in sizes]
    for rank in range(world):
        mine = flat[layout.interval(rank)]
        assert len(mine) == layout.length(rank)
        for index, span in enumerate(layout.spans(rank)):
            own = range(span.start, span.stop)
            assert mine[span.offset : span.offset + span.numel] == [(index, element) for element in own]
            tiles[index] += own
    assert tiles == [list(range(size)) for size in sizes]


@given(st.lists(sizes, max_size=8), worlds, aligns)
def test_whole_parameters_have_one_owner_and_balance_over_all_units(
    units: list[list[int]], world: int, align: int
) -> None:
    cut = WholeCut(world)
    again = WholeCut(world)
    layouts = [cut(sizes, align) for sizes in units]
    assert layouts == [again(sizes, align) for sizes in units], "every rank must find the same"
    owned = [0] * world
    for sizes, layout in zip(units, layouts, strict=True):
        held = [[span.numel for span in layout.spans(rank)] for rank in range(world)]
        for size, of_ranks in zip(sizes, zip(*held, strict=True), strict=True):
            assert sorted(of_ranks) == [0] * (world - 1) + [size]
        for rank in range(world):
            assert layout.length(rank) == sum(-(-size // align) * align for size in held[rank])
            owned[rank] += sum(held[rank])
        assert layout.equal == (len({layout.length(rank) for rank in range(world)}) == 1)
    assert owned == cut.loads
    largest = max((size for sizes in units for size in sizes), default=0)
    assert max(owned) <= sum(owned) / world + largest


@given(st.sampled_from(["even", "whole"]), sizes, worlds, aligns)
def test_all_begins_aligned_and_each_wastes_less_than_one_alignment_unit(
    policy: str, sizes: list[int], world: int, align: int
) -> None:
    layout = cut_of(policy, world)(sizes, align)
    assert layout.world == world
    assert not any(at % align for at in (*layout.offsets, *layout.bounds))
    most = layout.numel + (align - 1) * len(sizes)
    assert layout.end <= most
    for rank in range(world):
        assert layout.length(rank) < most / (world if policy == "even" else 1) + align


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("sizes", "bounds"),
    [((3, -1), (0, 4)), ((3,), (0,)), ((3,), (1, 4)), ((3,), (0, 4, 2)), ((9,), (0, 4, 8))],
)
def test_bad_cuts_are_refused(sizes: tuple[int, ...], bounds: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        Layout(sizes, (0,) * len(sizes), bounds)

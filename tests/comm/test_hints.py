"""Which hint an error of ranks that differ ends with: every pair of movements, in both orders."""

from itertools import combinations_with_replacement, permutations, product

import pytest

from shardtrain.comm import guard, hints
from shardtrain.comm.trace import GRAPH, MOVEMENTS, Movement

TEXTS = {
    "R": hints.CAPTURE,
    "O": hints.OPTIONS,
    "F": hints.FROZEN,
    "B": hints.BACKWARDS,
    "U": hints.UNITS,
    "V": hints.UNITS + hints.BACKWARDS,
    "A": hints.BACKWARDS + hints.UNITS,
    "S": hints.STEPS,
    "C": hints.CALLS,
}

# The upper triangle, by the names of `Movement`: one rank does the row's, another the column's.
EXPECTED = """
            GATHER REDUCE AVERAGE ALL_REDUCE BROADCAST ALL_TO_ALL ENTER LEAVE STEP SHARE TRAIN GRAPH ADD
GATHER      U      V      V       C          C          C          U     U     S    U     F     R      A
REDUCE             U      U       B          B          B          V     V     B    V     F     R      A
AVERAGE                   U       B          B          B          V     V     B    V     F     R      A
ALL_REDUCE                        C          C          C          C     C     C    C     C     R      B
BROADCAST                                    C          C          C     C     C    C     C     R      B
ALL_TO_ALL                                              C          C     C     C    C     C     R      B
ENTER                                                              U     U     S    U     F     R      A
LEAVE                                                                    U     S    U     F     R      A
STEP                                                                           O    S     F     R      B
SHARE                                                                               C     F     R      A
TRAIN                                                                                     F     R      F
GRAPH                                                                                          R      R
ADD                                                                                                    A
"""


def expected_texts() -> dict[frozenset[Movement], str]:
    head, *lines = EXPECTED.strip("\n").splitlines()
    columns = [Movement[name] for name in head.split()]
    texts = {}
    for number, line in enumerate(lines):
        name, *letters = line.split()
        for column, letter in zip(columns[number:], letters, strict=True):
            texts[frozenset({Movement[name], column})] = TEXTS[letter]
    return texts


PAIRS = expected_texts()


def text_of(*movements: Movement) -> str:
    """The error, on rank 0, of ranks that do ``movements``, each under a name of its own."""
    first, *others = [guard.Paths(rank, range(len(movements))) for rank in range(len(movements))]
    first.theirs.clear()
    for rank, movement in enumerate(movements):
        [first, *others][rank].add(movement, f"unit {rank}")
    for other in others:
        first.hear(other.rank, other.latest.pack(0))
    return str(first.diverged(0))


def test_every_pair_is_expected() -> None:
    assert len(PAIRS) == len({frozenset(pair) for pair in product(MOVEMENTS, repeat=2)})


@pytest.mark.parametrize("one", MOVEMENTS, ids=lambda movement: movement.name)
def test_the_hint_of_a_pair_does_not_depend_on_its_order(one: Movement) -> None:
    for other in MOVEMENTS:
        text = PAIRS[frozenset({one, other})]
        assert text_of(one, other).endswith(f"unit 1{text}"), (one, other)
        assert text_of(other, one).endswith(f"unit 1{text}"), (other, one)


def test_three_ranks_have_one_hint_in_any_order() -> None:
    for movements in combinations_with_replacement(MOVEMENTS, 3):
        texts = {text_of(*order).partition("unit 2")[2] for order in permutations(movements)}
        assert len(texts) == 1, movements
        assert (texts == {hints.CAPTURE}) == (GRAPH in movements), movements


def test_each_row_decides_for_some_pair() -> None:
    pairs = [{*pair} for pair in product(MOVEMENTS, repeat=2)]
    deciding = {
        next(number for number, row in enumerate(hints.HINTS) if row.some & pair and pair <= row.among)
        for pair in pairs
    }
    assert deciding == {*range(len(hints.HINTS))}

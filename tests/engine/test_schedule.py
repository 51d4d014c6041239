"""The schedule, proven for all small programs: every forward of up to six calls over up to four units.

A program is a forest of calls, who calls whom, with a unit at each node. Units are interchangeable, so nodes
are labelled by first occurrence. `Recorder` carries out nothing, and checks each verb. Properties:

P1  besides the root, units kept for a backward that nothing announces, and units whose call is under way in
    forward or backward, at most two units are gathered
P2  what is started depends on calls alone, never on which outputs have a gradient on this rank
P3  each trainable unit that ran is reduced once per backward that reduces, others never
P4  nothing is shown ungathered, hidden or released while a call shows it, or reduced twice at once
P5  reductions under way stay within their room
P6  after a backward, and after a failure, everything is released and nothing is under way

    python tests/engine/test_schedule.py 6     all of them for all programs of up to six calls, with times
"""

import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.engine.schedule import Forward, Schedule

Program = list[tuple[bool, int]]  # whether a call begins or ends, and the number of its unit


@dataclass(eq=False)
class Facts:
    """A unit. Equal to itself alone."""

    name: str
    gradient_bytes: int
    keeps: bool


class Token(NamedTuple):
    """A node that made an output of ``unit``: it was made after ``moment``, in ``forward``."""

    moment: int
    forward: Forward
    unit: Facts


class Recorder:
    """An actor that checks each verb (P1, P4, P5) and notes what was started."""

    def __init__(self, units: int = 4, keeps: bool = False, frozen: Iterable[int] = ()) -> None:
        self.units = [Facts("root", 5, False), *(Facts(f"unit {n}", 3 + n, keeps) for n in range(units))]
        self.schedule: Schedule[Any] = Schedule(self.units, self, room=8)
        self.trains = {unit for number, unit in enumerate(self.units) if number - 1 not in frozen}
        self.full: dict[Facts, str] = {}  # units whose full vector exists: gathering, gathered or shown
        self.reducing: list[Facts] = []
        self.started: list[tuple[str, str]] = []
        self.most = 0
        self.passes_gradients = True  # whether outputs of frozen units have a node
        self.tokens: list[Token] = []

    # verbs

    def gather(self, unit: Facts) -> None:
        assert unit not in self.full
        self.full[unit] = "gathering"
        self.started.append(("gather", unit.name))
        self._count()

    def show(self, unit: Facts) -> None:
        assert self.full[unit] in ("gathering", "gathered")
        self.full[unit] = "shown"

    def hide(self, unit: Facts) -> None:
        assert self.full[unit] == "shown"
        assert unit not in self.schedule.calls
        self.full[unit] = "gathered"

    def release(self, unit: Facts) -> None:
        assert self.full.pop(unit) != "shown"
        assert unit not in self.schedule.calls

    def take(self, unit: Facts) -> None:
        assert self.full[unit] == "shown"

    def reduce(self, unit: Facts) -> None:
        assert unit not in self.reducing
        self.reducing.append(unit)
        self.started.append(("reduce", unit.name))
        assert len(self.reducing) == 1 or sum(each.gradient_bytes for each in self.reducing) <= 8

    def finish(self, unit: Facts) -> None:
        assert self.reducing.pop(0) is unit

    def _count(self) -> None:
        schedule = self.schedule
        busy = {self.units[0], *schedule.calls, *schedule.unannounced, *self._under_way_in_backward()}
        self.most = max(self.most, len(set(self.full) - busy))

    def _under_way_in_backward(self) -> set[Facts]:
        """Return units of which backward has passed the end of a call, not its begin, or called alone."""
        backward = self.schedule.backward
        if backward is None:
            return set()
        begins = {edge.call for edge in backward.edges if not edge.is_end}
        ends = {edge.call for edge in backward.edges if edge.is_end}
        alone = self.schedule.opened - {call.unit for call in backward.forward.calls}
        return {call.unit for call in begins - ends} | alone

    # events

    def evaluate(self, program: Program) -> None:
        """Run a forward without gradients."""
        schedule = self.schedule
        schedule.begin_forward(self.trains)
        schedule.enter(self.units[0])
        for begins, label in program:
            unit = self.units[label + 1]
            if begins:
                schedule.enter(unit)
            else:
                schedule.leave(unit, learns=False)
        schedule.leave(self.units[0], learns=False)
        schedule.end_forward(failed=False)
        self.require_rest()

    def forward(self, program: Program, fails_at: int = -1) -> None:
        """Run a forward of the root that calls units as ``program`` says, and fails at one of its events."""
        schedule = self.schedule
        root = self.units[0]
        schedule.begin_forward(self.trains)
        schedule.enter(root)
        stack = [root]
        for number, (begins, label) in enumerate(program):
            if number == fails_at:
                for unit in reversed(stack):
                    schedule.leave(unit, learns=False)
                schedule.end_forward(failed=True)
                return
            if begins:
                stack.append(self.units[label + 1])
                schedule.enter(stack[-1])
            else:
                self._leave(stack.pop())
        self._leave(root)
        schedule.end_forward(failed=False)

    def call(self, program: Program) -> None:
        """Call units by themselves, outside of the root's forward."""
        for begins, label in program:
            unit = self.units[label + 1]
            if begins:
                self.schedule.enter(unit)
            else:
                self._leave(unit)

    def _leave(self, unit: Facts) -> None:
        """End a call of ``unit``, whose output autograd made with a node; of a frozen one perhaps without."""
        schedule = self.schedule
        if unit in self.trains or self.passes_gradients:
            self.tokens.append(Token(schedule.moment, schedule.forward, unit))
            schedule.announce(unit)
        schedule.leave(unit, learns=True)

    def backward(self, tokens: Iterable[Token] | None = None, fails_at: int = -1) -> None:
        """Run autograd: nodes in the reverse of the order in which they were made, of ``tokens`` only."""
        schedule = self.schedule
        chosen = self.tokens if tokens is None else tokens
        for number, token in enumerate(sorted(chosen, key=lambda each: each.moment, reverse=True)):
            if schedule.backward is None:
                schedule.begin_backward(token.forward, self.trains)
            if number == fails_at:
                while self.reducing:
                    self.reducing.pop()
                schedule.drop()
                break
            schedule.reach(token.forward, token.unit, token.moment)
        else:
            schedule.end_backward()
        self.tokens.clear()
        self.require_rest()

    def require_rest(self) -> None:
        """P6."""
        assert not self.full
        assert not self.reducing
        assert not self.schedule.opened
        assert not self.schedule.gathered
        assert not self.schedule.shown

    def take_started(self) -> list[tuple[str, str]]:
        started = self.started
        self.started = []
        return started

    def reductions(self) -> Counter[str]:
        """Return how often each unit was reduced since the last call, and forget it."""
        return Counter(name for verb, name in self.take_started() if verb == "reduce")

    def expected(self, program: Program) -> Counter[str]:
        """P3: one reduction of the root and each unit of ``program`` that trains."""
        ran = {self.units[0], *(self.units[label + 1] for _, label in program)}
        return Counter(unit.name for unit in ran if unit in self.trains)


# programs


def forests(nodes: int) -> Iterator[tuple[Any, ...]]:
    """All ordered forests of so many nodes, as nested tuples."""
    if nodes == 0:
        yield ()
        return
    for inside in range(nodes):
        for children in forests(inside):
            for others in forests(nodes - 1 - inside):
                yield (children, *others)


def labellings(nodes: int) -> Iterator[tuple[int, ...]]:
    """Units of the nodes, by first occurrence: 0; 0 0, 0 1; 0 0 0, 0 0 1, 0 1 0, 0 1 1, 0 1 2; ..."""
    if nodes == 0:
        yield ()
        return
    for before in labellings(nodes - 1):
        for label in range(min(4, max(before, default=-1) + 2)):
            yield (*before, label)


def program_of(forest: tuple[Any, ...], labels: Sequence[int]) -> Program:
    numbers = iter(labels)
    program: Program = []

    def walk(nodes: tuple[Any, ...]) -> None:
        for children in nodes:
            label = next(numbers)
            program.append((True, label))
            walk(children)
            program.append((False, label))

    walk(forest)
    return program


def programs(calls: int) -> Iterator[Program]:
    for forest in forests(calls):
        for labels in labellings(calls):
            yield program_of(forest, labels)


def unit_count(program: Program) -> int:
    return 1 + max(label for _, label in program)


# properties of one program; each checks P1, P4, P5 and P6 on its way


def steps(program: Program) -> None:
    """Two equal steps, as they are and with full vectors kept after forward."""
    for keeps in (False, True):
        recorder = Recorder(unit_count(program), keeps)
        for _ in range(2):
            recorder.forward(program)
            recorder.backward()
            assert recorder.reductions() == recorder.expected(program)
        assert keeps or recorder.most <= 2


def other_order(program: Program) -> None:
    """Steps that call other units in another order than the step before."""
    count = unit_count(program)
    other = [(begins, count - 1 - label) for begins, label in program]
    half = program_of(((),) * count, range(count))
    recorder = Recorder(count)
    for each in (program, other, half, program, program):
        recorder.forward(each)
        recorder.backward()
        assert recorder.reductions() == recorder.expected(each)
    assert recorder.most <= 2


def evaluations(program: Program) -> None:
    """Evaluations between steps, after which training prefetches as before."""
    recorder = Recorder(unit_count(program))
    steady: list[tuple[str, str]] = []
    for number in range(4):
        recorder.forward(program)
        recorder.backward()
        started = recorder.take_started()
        steady = steady or (started if number else [])
        assert number == 0 or started == steady
        recorder.evaluate(program)
        recorder.evaluate([program[0], (False, program[0][1])])  # another order, and too few calls
        recorder.evaluate(program)
        recorder.take_started()
    assert recorder.most <= 2


def frozen(program: Program) -> None:
    """Each set of frozen units: these are not reduced."""
    count = unit_count(program)
    for size in range(1, count + 1):
        for units in itertools.combinations(range(count), size):
            for passes in (False, True):
                recorder = Recorder(count, frozen=units)
                recorder.passes_gradients = passes
                for _ in range(2):
                    recorder.forward(program)
                    recorder.backward()
                    assert recorder.reductions() == recorder.expected(program)
                assert recorder.most <= 2


def absent_gradients(program: Program) -> None:
    """P2: outputs without a gradient here: of up to four calls each set, of more one or all but one."""
    count = unit_count(program)
    calls = len(program) // 2 + 1
    sizes = range(1, calls) if calls <= 5 else (1, calls - 1)
    expected = Recorder(count)
    for _ in range(2):
        expected.forward(program)
        expected.take_started()
        expected.backward()
    for size in sizes:
        for here in itertools.combinations(range(calls), size):
            recorder = Recorder(count)
            for _ in range(2):
                recorder.forward(program)
                recorder.take_started()
                recorder.backward([recorder.tokens[number] for number in here])
            assert recorder.started == expected.started


def failures(program: Program) -> None:
    """An exception at each event of forward and of backward, then a clean step."""
    count = unit_count(program)
    for event in range(len(program)):
        recorder = Recorder(count)
        recorder.forward(program)
        recorder.backward()
        recorder.forward(program, fails_at=event)
        recorder.require_rest()
        recorder.tokens.clear()
        recorder.take_started()
        recorder.forward(program)
        recorder.backward()
        assert recorder.reductions() == recorder.expected(program)
        assert recorder.most <= 2
    for node in range(len(program) // 2 + 1):
        recorder = Recorder(count)
        recorder.forward(program)
        recorder.backward(fails_at=node)
        recorder.take_started()
        recorder.forward(program)
        recorder.backward()
        assert recorder.reductions() == recorder.expected(program)
        assert recorder.most <= 2


def accumulation(program: Program) -> None:
    """Two backwards without reductions, then one of another forward that reduces all."""
    recorder = Recorder(unit_count(program))
    for _ in range(2):
        recorder.schedule.accumulate(recorder.units)
        recorder.forward(program)
        recorder.backward()
        assert not recorder.reductions()
    recorder.schedule.accumulate(())
    recorder.forward([program[0], (False, program[0][1])])
    recorder.backward()
    assert recorder.reductions() == recorder.expected(program)
    assert recorder.most <= 2


def two_forwards(program: Program) -> None:
    """One backward of two forwards; then one backward of each, in both orders."""
    recorder = Recorder(unit_count(program))
    recorder.forward(program)
    recorder.forward(program)
    recorder.backward()
    assert recorder.reductions() == recorder.expected(program)
    for first_is_last in (False, True):
        recorder.forward(program)
        recorder.forward(program)
        half = len(recorder.tokens) // 2
        parts = [recorder.tokens[:half], recorder.tokens[half:]]
        for tokens in reversed(parts) if first_is_last else parts:
            recorder.backward(tokens)
            assert recorder.reductions() == recorder.expected(program)


def called_alone(program: Program) -> None:
    """Units called by themselves, alone, before and after a forward of the root."""
    recorder = Recorder(unit_count(program))
    ran = recorder.expected(program)
    for _ in range(2):
        recorder.call(program)
        recorder.backward()
        assert recorder.reductions() == Counter({name: 1 for name in ran if name != "root"})
        recorder.forward(program)
        recorder.call(program)
        recorder.backward()
        assert recorder.reductions() == ran
        recorder.call(program)
        recorder.forward(program)
        recorder.backward()
        assert recorder.reductions() == ran


PROPERTIES = (
    steps,
    other_order,
    evaluations,
    frozen,
    absent_gradients,
    failures,
    accumulation,
    two_forwards,
    called_alone,
)


@pytest.mark.parametrize("check", PROPERTIES)
def test_programs_of_up_to_four_calls(check: Callable[[Program], None]) -> None:
    for calls in range(1, 5):
        for program in programs(calls):
            check(program)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", PROPERTIES)
def test_programs_of_five_calls(check: Callable[[Program], None]) -> None:
    for program in programs(5):
        check(program)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", [steps, accumulation])
def test_programs_of_six_calls(check: Callable[[Program], None]) -> None:
    for program in programs(6):
        check(program)


@st.composite
def larger_programs(draw: st.DrawFn) -> Program:
    """Programs of seven to thirty calls over up to four units."""
    calls = draw(st.integers(7, 30))
    labels = draw(st.lists(st.integers(0, 3), min_size=calls, max_size=calls))
    dice = random.Random(draw(st.integers(0, 1 << 30)))

    def forest(nodes: int) -> tuple[Any, ...]:
        if nodes == 0:
            return ()
        inside = dice.randrange(nodes)
        return (forest(inside), *forest(nodes - 1 - inside))

    return program_of(forest(calls), labels)


@settings(max_examples=50, deadline=None)
@given(larger_programs())
def test_larger_programs(program: Program) -> None:
    for check in PROPERTIES:
        check(program)


def main(most: int) -> None:
    for check in PROPERTIES:
        start = time.perf_counter()
        count = 0
        for calls in range(1, most + 1):
            for program in programs(calls):
                check(program)
                count += 1
        print(f"{check.__name__}: {count:,} programs in {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))

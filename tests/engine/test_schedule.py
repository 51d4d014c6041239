"""The schedule, proven for all small programs: every forward of up to six calls over up to four units.

A program is a forest of calls, who calls whom, with a unit at each node. Units are interchangeable, so nodes
are labelled by first occurrence. `Recorder` carries out nothing. It is autograd, too: calls make nodes, and
backward runs them, the last one first. Between two events the innermost call makes a node. Autograd tells of
`marked` ones only: outputs, and outputs of modules inside. Properties:

P0  a call is under way, and a node runs, only while its unit is shown, or was hidden after it was gathered
P1  besides the root, units that are shown for a backward that nothing announces, units that backward computes
    again, units that keep their full vectors, and units whose call is under way in forward or backward, at
    most two units are gathered
P2  what is started depends on calls alone, never on which outputs have a gradient on this rank
P3  each trainable unit that ran is reduced once per backward that reduces, others never
P4  nothing is shown ungathered, hidden or released while a call shows it, or reduced twice at once
P5  reductions under way stay within their room, and none is awaited before the room or the end requires it
P6  after a backward, and after a failure, everything is released and nothing is under way
P7  a unit's gradients are taken when no node of the forward that backward descends through will bring one
P8  from the second equal step on, each gather is started before the unit before it is shown, and is used;
    P1 comes first where frozen units without nodes are called after the last two that backward needs
P9  when a node runs, each unit all of whose calls began after it has been reduced, unless it accumulates

P2 holds within one forward of the root, or one call from outside of it. It does not hold for frozen units:
where their outputs have a node on some ranks only, ranks gather different units, which the guard refuses.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from shardtrain.engine.schedule import Forward, Schedule

Started = tuple[str, str]  # a verb and its unit
Program = list[tuple[bool, int]]  # whether a call begins or ends, and the number of its unit
ROOM = 8


@dataclass(eq=False)
class Facts:
    """A unit. Equal to itself alone."""

    name: str
    gradient_bytes: int
    keeps: bool


@dataclass(eq=False)
class Frame:
    """A call of a unit, inside of another; ``hides``: its output is an object, which announces nothing."""

    unit: Facts
    outer: "Frame | None" = None
    hides: bool = False

    def __post_init__(self) -> None:
        # This call and those around it.
        self.around: list[Frame] = [self, *(self.outer.around if self.outer else ())]


@dataclass(eq=False)
class Node:
    """A node that ``frame`` made after ``moment``, in ``forward``. ``marked``: autograd tells when it runs.

    ``again``: calls that it makes, and whose nodes it runs: a reentrant checkpoint. ``passed``: marks of
    later calls, which returned what it has made.
    """

    moment: int
    forward: Forward
    frame: Frame
    marked: bool
    again: "Sequence[tuple[bool, Facts]]" = ()
    passed: "list[tuple[Forward, int]]" = field(default_factory=list)

    @property
    def unit(self) -> Facts:
        return self.frame.unit


class Recorder:
    """An actor that checks each verb (P1, P4, P5, P7), and the events of a model's calls and of autograd.

    ``frozen``: numbers of units, -1 is the root. ``hiding``: units whose calls return objects. ``marks``:
    whether modules inside units mark their outputs, too.
    """

    def __init__(
        self,
        units: int = 4,
        keeps: bool = False,
        frozen: Iterable[int] = (),
        hiding: Iterable[int] = (),
        marks: bool = False,
    ) -> None:
        self.units = [Facts("root", 5, False), *(Facts(f"unit {n}", 3 + n, keeps) for n in range(units))]
        self.schedule: Schedule[Any] = Schedule(self.units, self)
        self.trains = {unit for number, unit in enumerate(self.units, -1) if number not in frozen}
        self.hiding = {self.units[number + 1] for number in hiding}
        self.marks = marks
        self.full: dict[Facts, str] = {}  # units whose full vector exists: gathering, gathered or shown
        self.reducing: list[Facts] = []
        self.waited_for: list[tuple[Facts, int]] = []  # since the last reduction began, with bytes under way
        self.started: list[Started] = []  # gathers and reductions
        self.log: list[Started] = []  # gathers, shows and releases
        self.untaken: set[Facts] = set()  # units with gradients that have not been taken
        self.ran: set[Frame] = set()  # calls of which backward has run a node
        self.again: set[Facts] = set()  # units that this backward computes again
        self.passes = "always"  # gradients, through frozen units; or "never", or "after" a trainable one
        self.silent: set[Facts] = set()  # trainable units whose outputs other nodes made, on this rank
        self.passing: set[Facts] = set()  # units that return the output of a call before
        self.nodes: list[Node] = []
        self.to_run: list[Node] = []  # nodes of this backward that have not ended
        self.stack: list[Frame] = []
        self.began: dict[Facts, int] = {}  # when the first call of each unit began whose backward is to come
        self.learns = True  # whether calls make nodes
        self.lent: set[Facts] = set()  # units whose waiting gradients autograd adds to
        self.reaching = False  # whether backward descends to a node

    # verbs

    def gather(self, unit: Facts) -> None:
        assert unit not in self.full
        for other in self.schedule.calls:
            assert other is unit or other in self.full, f"P8: {unit.name} is gathered before {other.name}"
        self.full[unit] = "gathering"
        self._note("gather", unit)
        self._count()

    def show(self, unit: Facts) -> None:
        assert self.full[unit] in ("gathering", "gathered")
        if self.reaching:
            later = [*self.full][[*self.full].index(unit) :]
            assert all(state != "gathering" or other in later for other, state in self.full.items()), "P8"
        self.full[unit] = "shown"
        self.log.append(("show", unit.name))

    def hide(self, unit: Facts) -> None:
        assert self.full[unit] == "shown"
        assert unit not in self.schedule.calls
        self.full[unit] = "gathered"

    def release(self, unit: Facts) -> None:
        assert self.full.pop(unit) != "shown"
        assert unit not in self.schedule.calls
        self.log.append(("release", unit.name))

    def lend(self, unit: Facts) -> None:
        assert self.full[unit] == "shown"
        self.lent.add(unit)

    def take(self, unit: Facts) -> None:
        assert self.full[unit] == "shown"
        backward = self.schedule.backward
        assert backward is not None
        self.untaken.discard(unit)
        assert (unit in self.lent) == (unit in self.schedule.unreduced), "waiting gradients are added to"
        self.lent.discard(unit)
        late = [n for n in self.to_run if n.unit is unit and n.forward is backward.forward]
        assert not late, f"P7: {unit.name} is taken before {late}"
        has_earlier = self.began.get(unit, 0) < backward.first.get(unit, 0)
        if unit in self.trains - backward.accumulates and not has_earlier:
            assert not self.reducing or self._bytes_under_way() + unit.gradient_bytes <= ROOM, "P5"

    def reduce(self, unit: Facts) -> None:
        assert unit not in self.reducing
        assert unit not in self.untaken
        for other, size in self.waited_for:  # P5
            assert other is unit or size + unit.gradient_bytes > ROOM, "P5"
        self.waited_for.clear()
        self.reducing.append(unit)
        self._note("reduce", unit)
        assert len(self.reducing) == 1 or self._bytes_under_way() <= ROOM

    def finish(self, unit: Facts) -> None:
        self.waited_for.append((unit, self._bytes_under_way()))
        assert self.reducing.pop(0) is unit

    def _bytes_under_way(self) -> int:
        return sum(each.gradient_bytes for each in self.reducing)

    def _note(self, verb: str, unit: Facts) -> None:
        started = (verb, unit.name)
        self.started.append(started)
        self.log.append(started)

    def _count(self) -> None:
        """P1."""
        root = self.units[0]
        if len(self.full) - (root in self.full) <= 2:
            return
        schedule = self.schedule
        busy = {root, *schedule.calls, *schedule.unannounced, *schedule.keeps, *self.again}
        assert len(set(self.full) - busy - self._under_way_in_backward()) <= 2

    def _under_way_in_backward(self) -> set[Facts]:
        """Return units of which backward has passed the end of a call, not its begin."""
        backward = self.schedule.backward
        if backward is None:
            return set()
        begins = {edge.call for edge in backward.edges if not edge.is_end}
        ends = {edge.call for edge in backward.edges if edge.is_end}
        return {call.unit for call in begins - ends}

    # calls

    def enter(self, unit: Facts) -> None:
        """Begin a call, as `Driver.begin_call` does."""
        schedule = self.schedule
        if unit not in schedule.calls and not (schedule.backward or schedule.in_forward):
            schedule.reshard_alone(unit, self.trains)
            assert unit not in self.full  # its values may be from before an update
        schedule.enter(unit)
        self._note_computing(unit)
        outer = self.stack[-1] if self.stack else None
        self.stack.append(Frame(unit, outer, unit in self.hiding))
        self._make(self.marks)

    def leave(self, failed: bool = False) -> None:
        """End the innermost call, as `Driver.end_call` does."""
        schedule = self.schedule
        frame = self.stack[-1]
        unit = frame.unit
        learns = self.learns and not (failed or schedule.backward)
        if learns:
            made = next((node for node in reversed(self.nodes) if node.marked), None)
            if unit in self.passing and made is not None:
                made.passed.append((schedule.recording, schedule.moment))
                schedule.announce(unit)
            elif not frame.hides and unit not in self.silent:
                self._make(True)
            if unit in self.trains or schedule.calls[unit].announced:
                self.began.setdefault(unit, schedule.calls[unit].began)
        schedule.leave(unit, learns, learns and frame.hides)
        self._count()
        self.stack.pop()
        if not failed:
            self._make(self.marks)

    def _note_computing(self, unit: Facts) -> None:
        """Note for P8 that ``unit`` begins to compute, if it is shown since before."""
        if self.log[-1] != ("show", unit.name):
            self.log.append(("goes on", unit.name))

    def _make(self, marked: bool) -> None:
        """Let the innermost call make a node."""
        for frame in self.stack:
            assert self.full[frame.unit] == "shown", f"P0: {frame.unit.name} computes"
        schedule = self.schedule
        if not self.stack or schedule.backward or not self.learns:
            return
        frame = self.stack[-1]
        makes_none = self.passes == "never" or (self.passes == "after" and not self.nodes)
        if frame.unit not in self.trains and makes_none:
            return
        if marked:
            schedule.announce(frame.unit)
        self.nodes.append(Node(schedule.moment, schedule.recording, frame, marked))

    def use(self, unit: Facts) -> None:
        """Use a parameter of ``unit`` outside of its calls, as a loss does with the root's."""
        schedule = self.schedule
        self.began.setdefault(unit, schedule.moment)
        self.nodes.append(Node(schedule.moment, schedule.forward, Frame(unit, hides=True), False))

    def replay(self, events: Iterable[tuple[bool, Facts]]) -> None:
        for begins, unit in events:
            if begins:
                self.enter(unit)
            else:
                self.leave()

    def events(self, program: Program) -> list[tuple[bool, Facts]]:
        return [(begins, self.units[label + 1]) for begins, label in program]

    # forward

    def forward(
        self,
        program: Program,
        fails_at: int = -1,
        abruptly: bool = False,
        learns: bool = True,
        reentrant: Collection[int] = (),
        backward_at: int = -1,
    ) -> None:
        """Run a forward of the root that calls units as ``program`` says, and fails at one of its events.

        ``abruptly``: in hooks, so that calls under way do not end.
        ``reentrant``: numbers of the root's own calls that run without gradients, and again in backward.
        ``backward_at``: the event after which a backward runs inside.
        """
        schedule = self.schedule
        before = len(self.nodes)
        self.learns = learns
        schedule.begin_forward(self.trains)
        assert not self.full  # values may be from before an update
        self.enter(self.units[0])
        events = self.events(program)
        if 0 <= fails_at < len(events):
            self.replay(events[:fails_at])
            while self.stack and not abruptly:
                self.leave(failed=True)
            self.stack.clear()
            schedule.end_forward(failed=True)
            del self.nodes[before:]
            self.began.clear()
            return
        if backward_at >= 0:
            self.replay(events[:backward_at])
            self.backward()
            self.replay(events[backward_at:])
            events = []
        for number, call in enumerate(self.own_calls(events)):
            if number in reentrant:
                self.learns = False
                self.replay(call)
                self.learns = learns
                self.nodes.append(Node(schedule.moment, schedule.recording, self.stack[-1], False, call))
                self._make(self.marks)
            else:
                self.replay(call)
        self.leave()
        schedule.end_forward(failed=False)
        assert all(self.full[unit] == "shown" for unit in schedule.unannounced)  # a loss may use them
        self._require_nothing_recorded()

    def own_calls(self, events: Sequence[tuple[bool, Facts]]) -> Iterator[Sequence[tuple[bool, Facts]]]:
        """Cut ``events`` into those of each outermost call."""
        depth = 0
        start = 0
        for number, (begins, _) in enumerate(events, 1):
            depth += 1 if begins else -1
            if depth == 0:
                yield events[start:number]
                start = number

    def evaluate(self, program: Program) -> None:
        """Run a forward without gradients."""
        self.forward(program, learns=False)
        self.require_rest()

    def call(self, program: Program, backward_at: int = 0) -> None:
        """Call units by themselves, outside of the root's forward. ``backward_at``: as in `forward`."""
        self.learns = True
        of_root = len(self.schedule.forward.calls)
        events = self.events(program)
        self.replay(events[:backward_at])
        if backward_at:
            self.backward()
        self.replay(events[backward_at:])
        assert "gathering" not in self.full.values()
        assert len(self.schedule.forward.calls) == of_root
        self._require_nothing_recorded()

    # backward

    def backward(self, outputs: Collection[Node] | None = None, fails_at: int = -1) -> None:
        """Run autograd: the nodes that ``outputs`` (all marked ones) need, and those of hidden outputs."""
        schedule = self.schedule
        marked = {node for node in self.nodes if node.marked}
        self.to_run = [*self._needed(marked if outputs is None else set(outputs))]
        began = False
        for number in itertools.count():
            if not self.to_run or (number == fails_at and began):
                break
            node = self.to_run[0]
            self._run(node)
            self.to_run.pop(0)
            began = schedule.backward is not None
        if self.to_run:
            self.reducing.clear()
            schedule.drop()
            self.to_run = []
            self.untaken.clear()
            self.lent.clear()
        elif began:
            schedule.end_backward()
        # Calls under way go on with what they have computed.
        self.nodes = [node for node in self.nodes if node.frame in self.stack and not node.marked]
        self.again.clear()
        self.waited_for.clear()
        if not self.stack:
            self.began.clear()
        if began and not self.stack:
            self.require_rest()
            assert not schedule.forward.calls

    def backward_reduces(self, expected: Counter[str]) -> None:
        """P3: run autograd, which reduces each unit as often as ``expected``."""
        self.backward()
        assert self.reductions() == expected

    def _needed(self, outputs: Collection[Node]) -> Iterator[Node]:
        """Return what autograd runs, the last node first: ``outputs``, and what their calls need for them."""
        needing = set[Frame]()  # calls of which a later output, or one of a call inside, is among them
        for node in reversed(self.nodes):
            if node in outputs:
                needing.update(node.frame.around)
            elif node.marked or not (node.frame in needing or node.frame.hides or node.again):
                continue
            yield node

    def _run(self, node: Node) -> None:
        schedule = self.schedule
        unit = node.unit
        if node.marked:
            self._require_begun(node.forward)
            self.reaching = True
            for forward, moment in ((node.forward, node.moment), *node.passed):
                schedule.reach(forward, moment)
            self.reaching = False
            self._require_reduced(node)
        if self.log and node.frame not in self.ran:
            self.ran.add(node.frame)
            self._note_computing(unit)
        assert self.full.get(unit) in ("gathered", "shown"), f"P0: a node of {unit.name} runs"
        if node.again:
            self._require_begun(node.forward)
            self.again.update(other for _, other in node.again)
            self.replay(node.again)
            for begins, other in reversed(node.again):
                if not begins and other not in self.silent:
                    self._bring_gradient(other)
        else:
            self._bring_gradient(unit)

    def _require_begun(self, forward: Forward) -> None:
        if self.schedule.backward is None:
            self.log.append(("backward", ""))
            self.schedule.begin_backward(forward, self.trains, ROOM)

    def _bring_gradient(self, unit: Facts) -> None:
        """Do as the hook of a parameter of ``unit``."""
        schedule = self.schedule
        if unit not in self.trains:
            return
        if unit not in schedule.opened:
            assert self.full[unit] == "shown" or unit in schedule.unannounced
            self._require_begun(schedule.forward)
            schedule.arrive(unit)
        assert self.full[unit] == "shown", f"P0: {unit.name} gets a gradient"
        self.untaken.add(unit)

    def _require_reduced(self, node: Node) -> None:
        """P9."""
        backward = self.schedule.backward
        assert backward is not None
        for unit, began in self.began.items():
            if began > node.moment and unit in self.trains - backward.reduced.keys() - backward.accumulates:
                assert all(call.unit is not unit for call in node.forward.calls), f"P9: {unit.name}"

    def require_rest(self) -> None:
        """P6."""
        assert not self.full
        assert not self.reducing
        assert not self.schedule.opened
        assert not self.schedule.gathered
        assert not self.schedule.shown
        assert not self.schedule.unannounced
        assert not self.untaken
        self._require_nothing_recorded()

    def _require_nothing_recorded(self) -> None:
        """P6: calls are forgotten with their graph, unless they are of the root's last forward."""
        assert self.schedule.recording is self.schedule.forward

    # what was started

    def take_started(self) -> list[Started]:
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

    def require_overlap(self) -> Counter[str]:
        """P8 of what was done since the log was cleared. Return how often each unit was gathered."""
        gathers = Counter[str]()
        gathered = dict[str, int]()
        first = len(self.log)  # of forward, and of backward: no show precedes it
        shown = first
        for number, (verb, unit) in enumerate(self.log):
            if verb == "gather":
                gathers[unit] += 1
                gathered[unit] = number
            elif verb in ("show", "goes on"):
                assert gathered.pop(unit, 0) <= shown, f"P8: {unit} in {self.log[: number + 1]}"
                shown = number
            elif verb == "backward":
                shown = first
            elif verb == "release":
                assert unit not in gathered, f"P8: {unit} is gathered for nothing: {self.log[: number + 1]}"
        return gathers


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


# properties of one program; each checks P0, P1, P4, P5, P6, P7 and P9 on its way


def subsets(count: int) -> Iterator[tuple[int, ...]]:
    """All sets of the numbers below ``count`` but the empty one."""
    for size in range(1, count + 1):
        yield from itertools.combinations(range(count), size)


def step(recorder: Recorder, program: Program) -> None:
    """P3 of a forward and a backward."""
    recorder.forward(program)
    recorder.backward_reduces(recorder.expected(program))


def step_alone(recorder: Recorder, program: Program) -> None:
    """P3 of units that are called by themselves, and make their own outputs."""
    outermost = {call[0][1] for call in recorder.own_calls(recorder.events(program))}
    recorder.silent -= outermost
    recorder.call(program)
    recorder.backward_reduces(recorder.expected(program) - Counter(["root"]))


def last_two(events: list[tuple[bool, Facts]]) -> list[Facts]:
    """Return the units of the last two calls that are not inside another one of their own unit."""
    depths = Counter[Facts]()
    ends = list[Facts]()
    for begins, unit in events:
        depths[unit] += 1 if begins else -1
        if not depths[unit]:
            ends.append(unit)
    return ends[-2:]


def first_call(program: Program) -> Program:
    return [program[0], (False, program[0][1])]


def steps(program: Program) -> None:
    """P8: equal steps, as they are and with full vectors kept after forward."""
    for keeps, marks in itertools.product((False, True), (False, True)):
        recorder = Recorder(unit_count(program), keeps, marks=marks)
        step(recorder, program)
        for _ in range(2):
            recorder.log.clear()
            recorder.forward(program)
            if not keeps:  # backward begins with the last two calls
                assert {*recorder.full} == {recorder.units[0], *last_two(recorder.events(program))}
            recorder.backward_reduces(recorder.expected(program))
            gathers = recorder.require_overlap()
            if keeps:
                assert gathers == recorder.expected(program)
                assert {verb for verb, _ in recorder.log[: len(gathers)]} == {"gather"}  # all at once


def neighbours(program: Program) -> None:
    """A unit called several times in a row is gathered once in forward, and at most once in backward."""
    labels = [label for begins, label in program if begins]
    runs = Counter(f"unit {label}" for label, _ in itertools.groupby(labels))
    leaf = ()
    for calls_of_unit, times in (((leaf, leaf), 2), (((leaf,), leaf), 3)):  # the second one calls itself
        calls = program_of(calls_of_unit * len(labels), [label for label in labels for _ in range(times)])
        recorder = Recorder(unit_count(program))
        step(recorder, calls)
        recorder.log.clear()
        step(recorder, calls)
        recorder.log = [entry for entry in recorder.log if entry[0] != "goes on"]
        gathers = recorder.require_overlap()
        in_backward = runs.copy()
        in_backward[f"unit {labels[-1]}"] -= 1  # backward begins with it
        assert gathers == runs + in_backward + Counter(["root"])


def evaluations(program: Program) -> None:
    """Evaluations between steps, after which training prefetches as before."""
    for keeps in (False, True):
        recorder = Recorder(unit_count(program), keeps)
        for number in range(3):
            recorder.log.clear()
            step(recorder, program)
            if number:
                recorder.require_overlap()
            recorder.evaluate(program)
            recorder.evaluate(first_call(program))
            recorder.evaluate(program)
            recorder.take_started()


def frozen(program: Program) -> None:
    """Each set of frozen units, perhaps the root, too: these are not reduced until they train again.

    Then other nodes make their outputs on this rank (P2).
    """
    count = unit_count(program)
    trained = Recorder(count)
    step(trained, program)
    trained.log.clear()
    step(trained, program)
    for numbers in subsets(count + 1):
        for passes in ("always", "never", "after"):
            recorder = Recorder(count, frozen=[number - 1 for number in numbers])
            recorder.passes = passes
            step(recorder, program)
            recorder.log.clear()
            step(recorder, program)
            if passes == "always":
                recorder.require_overlap()
            if numbers == (0,):  # the root stays gathered from forward to backward, so this changes nothing
                gathers = [entry for entry in recorder.log if entry[0] == "gather"]
                assert gathers == [entry for entry in trained.log if entry[0] == "gather"]
            frozen_ones = {recorder.units[number] for number in numbers}
            for step_again in (step, step_alone):
                recorder.trains = {*recorder.units} - frozen_ones
                step(recorder, program)
                recorder.trains = {*recorder.units}
                recorder.silent = frozen_ones - {recorder.units[0]}
                step_again(recorder, program)
                recorder.silent.clear()
            recorder.forward(program)
            recorder.trains = {*recorder.units} - frozen_ones  # between forward and backward
            recorder.backward_reduces(recorder.expected(program))


def absent_gradients(program: Program) -> None:
    """P2: outputs without a gradient here: of up to four calls each set, of more one or all but one.

    So are outputs that other nodes made: a unit may return its input, on this rank alone.
    """
    count = unit_count(program)

    def second_forward(marks: bool = False, silent: Iterable[int] = ()) -> Recorder:
        recorder = Recorder(count, marks=marks)
        step(recorder, program)
        recorder.silent = {recorder.units[number + 1] for number in silent}
        recorder.forward(program)
        recorder.take_started()
        return recorder

    expected = second_forward()
    expected.backward()
    for marks in (False, True):
        nodes = second_forward(marks).nodes
        numbers = [number for number, node in enumerate(nodes) if node.marked]
        sizes = range(1, len(numbers)) if len(numbers) <= 5 else (1, len(numbers) - 1)
        for here in itertools.chain(*(itertools.combinations(numbers, size) for size in sizes)):
            recorder = second_forward(marks)
            recorder.backward([recorder.nodes[number] for number in here])
            assert recorder.started == expected.started
    for silent in subsets(count):
        recorder = second_forward(silent=silent)
        recorder.backward()
        assert recorder.started == expected.started


def objects(program: Program) -> None:
    """Each set of units, perhaps the root, too, returns objects; users may look at shards before backward."""
    count = unit_count(program)
    for hiding in subsets(count + 1):
        for frozen_too, looks in itertools.product((False, True), (False, True)):
            numbers = [number - 1 for number in hiding]
            recorder = Recorder(count, hiding=numbers, frozen=numbers if frozen_too else ())
            for _ in range(2):
                recorder.forward(program)
                if looks:
                    recorder.schedule.hide_unannounced()
                    assert "shown" not in recorder.full.values()
                if any(node.marked for node in recorder.nodes):
                    recorder.backward_reduces(recorder.expected(program))
            recorder.forward(program)
            recorder.forward(first_call(program))
            if any(node.marked for node in recorder.nodes):
                recorder.backward_reduces(recorder.expected(program))


def failures(program: Program) -> None:
    """An exception at each event of forward and of backward, then a clean step."""
    count = unit_count(program)
    events = range(len(program))
    for event, abruptly in (*zip(events, itertools.repeat(False)), (events[-1], True)):
        recorder = Recorder(count)
        step(recorder, program)
        recorder.forward(program, fails_at=event, abruptly=abruptly)
        recorder.require_rest()
        recorder.log.clear()
        step(recorder, program)
        recorder.require_overlap()
    for node in events:
        recorder = Recorder(count)
        if node == 1:  # gradients that wait are dropped, too
            recorder.schedule.accumulate(recorder.units)
            recorder.forward(program)
            recorder.backward()
            recorder.schedule.accumulate(())
        recorder.forward(program)
        recorder.backward(fails_at=node)
        recorder.take_started()
        if node == 1:
            step(recorder, first_call(program))
        step(recorder, program)


def failures_between(program: Program) -> None:
    """A forward whose units return objects, one that fails, and the backward of the first."""
    count = unit_count(program)
    for hiding in subsets(count):
        recorder = Recorder(count, hiding=hiding)
        for _ in range(2):
            recorder.forward(program)
            recorder.forward(program, fails_at=len(program) - 1)
            recorder.backward_reduces(recorder.expected(program))


def accumulation(program: Program) -> None:
    """Two backwards that reduce no units, or some, then one of another forward that reduces all."""
    count = unit_count(program)
    for numbers in subsets(count + 1):
        recorder = Recorder(count)
        units = [recorder.units[number] for number in numbers]
        for _ in range(2):
            recorder.schedule.accumulate(units)
            recorder.forward(program)
            recorder.backward()
            reduced = recorder.expected(program) - Counter(unit.name for unit in units)
            assert recorder.reductions() == reduced
        recorder.schedule.accumulate(())
        recorder.forward(first_call(program))
        recorder.backward()
        waited = Counter(unit.name for unit in units)
        assert recorder.reductions() == recorder.expected(first_call(program)) | waited


def two_forwards(program: Program) -> None:
    """One backward of two forwards; then one backward of each, in both orders.

    On this rank a unit may return what a call before it has returned (P2), one of the other forward.
    """
    recorder = Recorder(unit_count(program))
    expected = list[Started]()
    for unit in (recorder.units[0], *recorder.units):
        recorder.passing = {unit} - {recorder.units[0]}
        recorder.forward(program)
        recorder.forward(program)
        recorder.backward()
        if recorder.passing:
            assert recorder.started == expected
        expected = [*recorder.started]
        assert recorder.reductions() == recorder.expected(program)
    recorder.passing.clear()
    for first_is_last in (False, True):
        recorder.forward(program)
        recorder.forward(program)
        half = len(recorder.nodes) // 2
        parts = [recorder.nodes[:half], recorder.nodes[half:]]
        for nodes in reversed(parts) if first_is_last else parts:
            recorder.nodes = nodes
            recorder.backward_reduces(recorder.expected(program))


def called_alone(program: Program) -> None:
    """Units called by themselves, alone, before and after a forward of the root, each by itself."""
    for marks in (False, True):
        recorder = Recorder(unit_count(program), marks=marks)
        ran = recorder.expected(program)
        forward = recorder.forward
        call = recorder.call
        for runs in ((call,), (forward, call), (call, forward), (call, call, forward, forward)) * 2:
            for run in runs:
                run(program)
            recorder.backward_reduces(ran if forward in runs else ran - Counter(["root"]))
        recorder.call(program)
        recorder.backward()
        recorder.take_started()
        recorder.log.clear()
        recorder.forward(program)  # as the last forward of the root
        assert {*recorder.full} == {recorder.units[0], *last_two(recorder.events(program))}
        recorder.backward()
        recorder.require_overlap()
        assert recorder.reductions() == ran
        step(recorder, first_call(program))
        recorder.call(program)
        recorder.backward()


def used_directly(program: Program) -> None:
    """A loss uses the root's parameters; each unit is unsharded, and used before the forward, or after it."""
    count = unit_count(program)
    for number in range(count + 1):
        for before, after in ((True, False), (False, True), (True, True)):
            recorder = Recorder(count)
            unit = recorder.units[number]
            for _ in range(2):
                if before:
                    recorder.schedule.show_unannounced(unit)
                    recorder.use(unit)
                recorder.forward(program)
                if after and number:
                    recorder.schedule.show_unannounced(unit)
                if after:
                    recorder.use(unit)
                recorder.backward_reduces(recorder.expected(program))
            if unit is recorder.units[0]:
                recorder.forward(program)
                recorder.use(unit)
                recorder.backward([])  # on this rank no output has a gradient
                assert recorder.reductions() == recorder.expected(program)
            recorder.schedule.show_unannounced(unit)
            recorder.schedule.reshard_unannounced(unit)
            recorder.require_rest()


def reentrant(program: Program) -> None:
    """Some of the root's calls run in reentrant checkpoints: without gradients, and again in backward.

    A unit that is also called otherwise, later only, is reduced there, and a second time when backward ends.
    """
    names = Recorder(unit_count(program))
    calls = [{unit.name for _, unit in call} for call in names.own_calls(names.events(program))]
    for chosen in subsets(len(calls)) if len(calls) <= 5 else itertools.combinations(range(len(calls)), 1):
        recorder = Recorder(unit_count(program), marks=True)
        expected = recorder.expected(program)
        for name in expected:
            others = [number for number, names in enumerate(calls) if name in names and number not in chosen]
            if others and any(name in calls[number] for number in chosen if number < others[0]):
                expected[name] += 1
        for _ in range(2):
            recorder.forward(program, reentrant=chosen)
            recorder.backward_reduces(expected)
        recorder.silent = {*recorder.units[1:]}  # what is computed again has no gradient on this rank (P2)
        recorder.forward(program, reentrant=chosen)
        recorder.backward_reduces(expected)


def backward_inside(program: Program) -> None:
    """A backward after each event of a forward, then the rest of the forward, and a backward."""
    for event in range(1, len(program)):
        recorder = Recorder(unit_count(program))
        for _ in range(2):
            recorder.forward(program, backward_at=event)
            recorder.take_started()
            recorder.backward_reduces(recorder.expected(program))
        recorder.call(program, backward_at=event)
        recorder.backward()
        assert recorder.reductions().keys() == recorder.expected(program).keys() - {"root"}


# They go through all subsets of a program's units or nodes: of up to four calls with `--long`.
OF_SUBSETS = (absent_gradients, frozen, objects)
# Some planted faults show first in programs of four calls, in these only.
OF_FOUR = (steps, two_forwards, called_alone, reentrant)
OTHERS = (neighbours, evaluations, failures, failures_between, accumulation, used_directly, backward_inside)


@pytest.mark.parametrize("check", [*OF_FOUR, *OF_SUBSETS, *OTHERS])
def test_programs_of_up_to_four_calls(check: Callable[[Program], None]) -> None:
    for calls in range(1, 5 if check in OF_FOUR else 4):
        for program in programs(calls):
            check(program)


LARGER = [(4, check) for check in (*OF_SUBSETS, *OTHERS)]
LARGER += [(5, check) for check in (*OF_FOUR, *OTHERS)]
LARGER += [(6, steps)]


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("calls", "check"), LARGER)
def test_programs_of_more_calls(calls: int, check: Callable[[Program], None]) -> None:
    for program in programs(calls):
        check(program)

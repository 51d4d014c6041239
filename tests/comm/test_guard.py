"""Ranks that stray, stop early, stand still or die: the others say who, in which unit and step, at once."""

import functools
import itertools
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardtrain
from shardtrain import comm, introspect
from shardtrain.comm import Vector, activity, backends, guard, messages, process_group, reports
from shardtrain.comm.reports import Reports
from shardtrain.comm.trace import ENTER, GATHER, LEAVE
from shardtrain.layout import even

from pool import Pool, Ranks, each_rank
from small import Block, OddNet, classify, mesh, raised_soon, sgd, shard, train, until


class TwoPaths(nn.Module):
    """Equal layers, run in an order of the caller's, or one of them not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 9)
        self.second = nn.Linear(9, 9)

    def forward(self, x: torch.Tensor, order: str) -> torch.Tensor:
        for name in order.split():
            x = getattr(self, name)(x)
        return x

    def take(self, *orders: str) -> None:
        """Do a forward and a backward in each order."""
        for order in orders:
            self(torch.randn(2, 9), order).sum().backward()


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def trained(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after two steps."""
    torch.manual_seed(0)
    model = shard(OddNet(), units=[Block], **options)
    optimizer = sgd(model)
    train(model, optimizer, 2)
    return model, optimizer


@pytest.mark.parametrize(
    ("order", "usual_steps"),
    [pytest.param("second first", 1, marks=pytest.mark.smoke), ("second", 0), ("first", 1)],
)
@each_rank(2, transport="each")
def test_a_rank_that_takes_another_path_is_named_with_its_unit(order: str, usual_steps: int) -> None:
    """Equal units swapped, or one skipped, in the first step or a later one."""
    model = shard(TwoPaths(), units=[nn.Linear])
    usual = "first second"
    model.take(*[usual] * usual_steps)
    text = raised_soon(comm.Diverged, lambda: model.take(order if is_last() else usual, usual))
    head, body = text.split(": rank 0 is ")
    assert head == f"forward {usual_steps + 1}: ranks 0 and 1 take different paths"
    first, second = re.fullmatch(r"(.*), rank 1 is (.*)", body.partition(". ")[0]).groups()
    assert first != second
    assert {"first", "second"} & {first.split()[-1], second.split()[-1]}


@each_rank(3, transport="each")
def test_a_rank_that_stops_a_step_early_and_goes_on_is_named() -> None:
    """The last rank goes on to another collective of the engine."""
    model, optimizer = trained()
    elsewhere = functools.partial(shardtrain.full_state_dict, model)
    usual = functools.partial(train, model, optimizer, 1, start=2)
    text = raised_soon(comm.Diverged, elsewhere if is_last() else usual)
    assert "rank 2 takes another path than ranks 0 and 1: ranks 0 and 1 are " in text


@each_rank(4, transport="each")
def test_a_replica_on_another_path_is_named(tmp_path: Path) -> None:
    """Some ranks take another path when rank 1 already waits for rank 0."""
    model = shard(TwoPaths(), mesh=mesh(2, 2), units=[nn.Linear])
    rank = dist.get_rank()
    usual = "first second"
    waits = tmp_path / "rank 1 waits"
    model.take(usual)
    waiting = Reports.waiting
    begun = list[bool]()

    def wait_and_tell(of: Reports, position: int) -> Any:
        if begun and rank == 1:
            waits.touch()
        return waiting(of, position)

    def come_late(_: torch.Tensor) -> None:
        begun.append(True)
        if rank != 1:
            until(waits.exists)

    model.first.register_forward_hook(lambda *a: a[2].register_hook(come_late) and None)
    with patch.object(Reports, "waiting", wait_and_tell):
        text = raised_soon(comm.Diverged, lambda: model.take("second" if rank > 1 else usual, usual))
    assert text.startswith("forward 2: "), text
    assert "ranks 0, 1, 2 and 3 take different paths: ranks 0 and 1 are" in text, text


@each_rank(2, 3, transport="each")
def test_a_rank_that_ends_early_is_named() -> None:
    model, optimizer = trained()
    if dist.get_rank() == 1:
        return
    text = raised_soon(comm.PeerLost, lambda: train(model, optimizer, 1))
    # It may notice while it starts the gather of the next unit, before it waits for that of the root.
    at = f"rank {dist.get_rank()} was at forward 3, (entering the model|gathering (the root|blocks\\.0))"
    assert re.match(f"rank 1 has ended: {at}", text), text
    assert "make different numbers (generate() to other lengths) belong into shardtrain.unsharded" in text


def on_a_plateau(optimizer: torch.optim.Optimizer) -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for _ in range(3):
        plateau.step(1.0 if is_last() else -plateau.last_epoch)  # of each rank's own loss


def in_the_second_group(optimizer: torch.optim.Optimizer) -> None:
    if is_last():
        optimizer.param_groups[1]["betas"] = (0.9, 0.9)


def a_number_of_its_own(optimizer: torch.optim.Optimizer) -> None:
    """Such as D-Adaptation's d, which sums over what a rank holds."""
    optimizer.param_groups[0]["d"] = np.float32(1 + dist.get_rank())


DIFFERENCES: dict[str, tuple[Any, Any, str, str]] = {
    "plateau": (torch.optim.AdamW, on_a_plateau, "AdamW, other options", "AdamW with lr=0.025, 0.0025"),
    "group": (torch.optim.Adam, in_the_second_group, "Adam, other", "Adam with betas=(0.9, 0.999), (0.9,"),
    "d": (torch.optim.SGD, a_number_of_its_own, "SGD with d=1.0, None", "SGD with d=2.0, None"),
}


def with_groups(model: nn.Module, kind: Any) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    return kind([{"params": [first]}, {"params": rest, "lr": 0.01}], lr=0.1)


@pytest.mark.parametrize("name", DIFFERENCES)
@each_rank(2, transport="auto")
def test_options_that_differ_between_ranks_are_named(name: str) -> None:
    kind, change, first, second = DIFFERENCES[name]
    model = shard(OddNet(), units=[Block])
    optimizer = with_groups(model, kind)
    train(model, optimizer, 2)
    change(optimizer)
    text = raised_soon(comm.Diverged, lambda: train(model, optimizer, 3, start=2))
    assert text.startswith("forward 3: ranks 0 and 1 take different paths: rank 0 is stepping "), text
    assert f"rank 0 is stepping {first}" in text, text
    assert f"rank 1 is stepping {second}" in text, text
    assert "with optimizers alike in class and options: run what" in text


FROZEN: dict[str, tuple[Callable[[Any], object], str]] = {
    "a weight": (
        lambda model: model.blocks[0].conv.weight.requires_grad_(False),
        r"all but blocks\.0\.conv\.weight",
    ),
    "a unit": (
        lambda model: model.blocks[0].requires_grad_(False),
        r"all but blocks\.0\.[\w.]+ and \d more \(\w{8}\)",
    ),
    "set free": (lambda model: model.fc.requires_grad_(True), "all parameters"),
}


@pytest.mark.parametrize(
    ("name", "when"),
    [("a weight", "between steps"), ("a unit", "before backward"), ("set free", "between steps")],
)
@each_rank(2)
def test_a_rank_that_freezes_other_parameters_is_named(name: str, when: str) -> None:
    change, text = FROZEN[name]
    torch.manual_seed(0)
    net = OddNet()
    net.fc.requires_grad_(name != "set free")
    model = shard(net, units=[Block])
    optimizer = sgd(model)
    train(model, optimizer, 2)

    def go_on() -> None:
        loss = classify(model, 2) if when == "before backward" else None
        if is_last():
            change(model)
        loss = loss or classify(model, 2)
        loss.backward()
        optimizer.step()
        train(model, optimizer, 2, start=3)

    told = raised_soon(comm.Diverged, go_on)
    assert re.match(
        f"forward [234]: ranks 0 and 1 take different paths: .*rank 1 is training {text}", told
    ), told
    assert told.endswith("at the same point: call requires_grad_() on every rank"), told


@each_rank(2)
def test_optimizers_that_differ_between_ranks_are_named() -> None:
    kinds = torch.optim.Adam, torch.optim.RMSprop
    model = shard(OddNet(), units=[Block])
    optimizer = kinds[dist.get_rank()](model.parameters(), lr=0.1)
    text = raised_soon(comm.Diverged, lambda: train(model, optimizer, 2))
    assert "rank 0 is stepping Adam with lr=0.1, rank 1 is stepping RMSprop with lr=0.1" in text, text


@each_rank(2)
def test_options_of_many_groups_are_compared_whole() -> None:
    """Where a line is shortened, its digest tells."""
    model = shard(OddNet(), units=[Block])
    groups = [{"params": [param], "lr": 0.1 + number} for number, param in enumerate(model.parameters())]
    groups[-1]["weight_decay"] = 0.5 + is_last()
    optimizer = torch.optim.SGD(groups, lr=0.1)
    text = raised_soon(comm.Diverged, lambda: train(model, optimizer, 2))
    assert re.search(
        r"rank 0 is stepping [0-9a-f]{8} SGD with weight_decay=0, 0, .* \.\.\., rank 1 is", text
    ), text


def is_killed(sizes: tuple[int, int] | None, where: str) -> None:
    """The last rank ends in the third step; others name it, or with replicas one that left for it."""
    model, optimizer = trained(**({"mesh": mesh(*sizes)} if sizes else {}))
    if is_last():
        kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        if where == "forward":
            model.blocks[1].register_forward_hook(kill)
        else:
            model.fc.register_full_backward_hook(kill)
    text = raised_soon(comm.PeerLost, lambda: train(model, optimizer, 2, start=2))
    named = r"(rank [123] has|ranks \d and \d have)" if sizes else "rank 2 has"
    assert re.match(rf"{named} ended: rank {dist.get_rank()} was at forward 3, ", text), text


def all_to_all(**options: bool) -> comm.Work | None:
    three = torch.zeros(3, 1)
    return comm.all_to_all([*three], [*three], **options)


def leave_untagged() -> None:
    ranks = comm.plain_transport()
    ranks.guard.paths.untagged = True
    ranks.fence(LEAVE)


WITHOUT_MODELS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: comm.all_reduce(torch.ones(1)),
    "all_to_all": all_to_all,
    "asynchronous": lambda: all_to_all(async_op=True).wait(),
    "barrier": comm.barrier,
    "gather": lambda: comm.gather(torch.ones(1), dst=2),
    "shard": lambda: shard(nn.Linear(2, 2)),
    "fence": leave_untagged,
}


@pytest.mark.parametrize(
    ("name", "known"),
    [("all_reduce", False), ("all_to_all", False), *((name, True) for name in WITHOUT_MODELS)],
)
@each_rank(3, transport="auto")
def test_a_rank_that_ends_outside_of_models_is_named(name: str, known: bool) -> None:
    """Before a collective or while ranks wait in it: its connection may be ``known`` to be closed."""
    comm.guard_world()
    assert comm.all_reduce(torch.ones(1)).item() == 3
    if is_last():
        dist.destroy_process_group()
        return
    if known:
        until(lambda: process_group._guards[dist.group.WORLD]._ended)
    told = raised_soon(comm.PeerLost, WITHOUT_MODELS[name])
    who = "rank(s [01] and)? 2 ha(s|ve)" if name == "shard" else "rank 2 has"  # one has left for it
    where = "at a point outside of forwards, all-reducing"
    assert re.match(f"{who} ended: rank {dist.get_rank()} was {where}", told), told


@each_rank(2, transport="auto")
def test_a_replica_that_has_ended_before_averages_start_is_named() -> None:
    """Its connection is known to be closed."""
    model = shard(nn.Linear(9, 9), mesh=mesh(2, 1))
    loss = model(torch.ones(2, 9)).sum()
    if is_last():
        dist.destroy_process_group()
        return
    guard = introspect(model)._engine.channel.across.guard
    until(lambda: guard._ended)
    text = raised_soon(comm.PeerLost, loss.backward)
    assert text.startswith("rank 1 has ended: rank 0 was at forward 1, averaging "), text


@each_rank(2, transport="auto")
def test_a_wait_that_ends_leaves_the_others_watched() -> None:
    """One that lies in another one, and those of two threads, which end in any order."""
    guard = Reports(dist.group.WORLD)
    for first, second in ((1, 2), (2, 1)):
        waits = {position: guard.waiting(position) for position in (1, 2)}
        for wait in waits.values():
            wait.__enter__()
        waits[first].__exit__(None, None, None)
        assert [wait.position for wait in guard._open] == [second]
        waits[second].__exit__(None, None, None)
        assert not guard._open


@pytest.mark.long
@pytest.mark.parametrize(("sizes", "where"), [((2, 2), "backward"), (None, "forward")])
def test_survivors_of_a_killed_rank_leave_at_once(ranks: Ranks, sizes: Any, where: str) -> None:
    world = sizes[0] * sizes[1] if sizes else 3
    with pytest.raises(AssertionError, match=rf"^ranks \[{world - 1}\] died or did not answer in \S+ s$"):
        ranks(world, is_killed, sizes, where)


@pytest.mark.long
@each_rank(2, 3)
def test_a_rank_that_is_busy_alone_is_waited_for(tmp_path: Path) -> None:
    """It is busy until each of the others has said so, and then has checked several times."""
    model, optimizer = trained()
    comm.set_time_out(timedelta(seconds=3))
    check = reports.Reports.check
    said = list[str]()
    last = dist.get_world_size() - 1
    checked: list[list[str]] = []  # at each check after it was said, all that was said so far

    def check_and_tell(of: reports.Reports) -> None:
        check(of)
        if said:
            checked.append([*said])
        if len(checked) == 4:
            (tmp_path / f"{dist.get_rank()}").touch()

    warning = patch.object(
        logging.getLogger("shardtrain"), "warning", lambda text, *facts: said.append(text % facts)
    )
    with warning, patch.object(reports.Reports, "check", check_and_tell):
        if is_last():
            until(lambda: sum(range(100_000)) and len([*tmp_path.iterdir()]) == last)
            assert said == []
        train(model, optimizer, 1)
    if not is_last():
        where = "forward 3, (entering|gathering) the [a-z]+"
        by = rf"rank {dist.get_rank()} has waited \d+ s at {where} for (rank|ranks [01] and) {last}"
        assert len(checked[3]) == 1
        assert re.match(f"{by}, still at work: it keeps waiting", said[0]), said


def read_for_ever(pipe: Path) -> None:
    with pipe.open("rb") as file:
        file.read()


def do_nothing_on_the_last_rank(tmp_path: Path) -> None:
    model, optimizer = trained()
    pipe = tmp_path / "pipe"
    last = dist.get_world_size() - 1
    if is_last():
        os.mkfifo(pipe)
    comm.set_time_out(timedelta(seconds=3))
    dist.barrier()
    if is_last():
        read_for_ever(pipe)
        with pytest.raises(RuntimeError):
            train(model, optimizer, 1)
        return
    text = raised_soon(comm.PeerLost, lambda: train(model, optimizer, 1))
    (tmp_path / f"{dist.get_rank()}").touch()
    if dist.get_rank() == 0:
        until(lambda: len([*tmp_path.glob("[0-9]")]) == last)
        pipe.write_bytes(b"")
    where = r"at forward 3, (entering|gathering) the \w+"
    waited = rf"rank {last} does nothing: rank \d (has waited \d+ s|was) {where}"
    assert re.fullmatch(waited, text), text


@pytest.mark.parametrize(
    "transport", ["shared_memory", pytest.param("process_group", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 3])
def test_a_rank_that_does_nothing_is_named(world: int, transport: str, tmp_path: Path) -> None:
    """In processes of their own: a thread that an earlier test left behind would be at work."""
    Pool(fresh=True).run(transport, world, do_nothing_on_the_last_rank, tmp_path)


@each_rank(2, transport="each")
def test_a_rank_at_work_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    """Ten times the time-out; here once."""
    model, optimizer = trained()
    comm.set_time_out(timedelta(seconds=3))
    with patch.object(reports, "MOST", 1):
        if is_last():
            until(lambda: sum(range(100_000)) and (tmp_path / "failed").exists())
        text = raised_soon(comm.PeerLost, lambda: train(model, optimizer, 1))
        (tmp_path / "failed").touch()
    if not is_last():
        assert re.match(r"rank 1 is still at work: rank 0 has waited \d+ s at forward 3, ", text), text


def test_work_shows_in_processor_time_and_bytes(tmp_path: Path) -> None:
    """Of this process, but for the bytes of a thread that looks, and of those that it started."""
    looked = list[Any]()

    def works(do: Callable[[], object]) -> bool:
        looked.clear()
        for call in (do, lambda: None):
            thread = threading.Thread(target=lambda: looked.append(activity._spent()))
            thread.start()
            thread.join()
            call()
        return activity._has_worked(*looked, elapsed=10)

    assert not works(lambda: time.sleep(0.1))
    assert works(lambda: [sum(range(10**7)) for _ in range(4)])
    assert works(lambda: (tmp_path / "file").write_bytes(b"1"))
    name = tmp_path / "\xe9".encode("latin-1").decode(errors="surrogateescape")  # no UTF-8
    name.symlink_to(shutil.which("cat") or "")
    with subprocess.Popen([name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"1\n")  # it has started once it answers, and then waits
        assert child.stdout.readline() == b"1\n"
        until(lambda: Path(f"/proc/{child.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"S")
        assert not works(lambda: time.sleep(0.1))
        assert works(lambda: (child.kill(), child.wait()))  # what this process writes would count


@each_rank(2, transport="each")
def test_a_forked_child_leaves_the_reports_alone() -> None:
    """gloo's threads are not its own, so that it would wait for them when it ends."""
    model, optimizer = trained()
    links = introspect(model).transport.all_ranks.guard._links
    child = os.fork()
    if child == 0:
        pulse = Mock()
        refused = False
        try:
            links._pulses = [pulse]
            links.end()
            links.leave()
            model(torch.ones(2, 3, 5, 5))
        except RuntimeError as error:
            refused = "was forked from rank" in str(error)
        finally:
            os._exit(pulse.wait.call_count + 2 * (not refused))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    train(model, optimizer, 1)


@pytest.mark.long
@each_rank(2)
def test_ranks_that_wait_for_one_another_give_up_at_the_time_out() -> None:
    """Two models, of which each rank calls another one first."""
    models = [trained()[0] for _ in range(2)]
    comm.set_time_out(timedelta(seconds=3))
    text = raised_soon(comm.PeerLost, lambda: models[dist.get_rank()](torch.ones(2, 3, 5, 5)))
    told = r"rank \d (waits elsewhere|has ended): rank \d (has waited \d+ s|was) at forward 3, "
    assert re.match(told, text), text


@contextmanager
def without_tags() -> Iterator[tuple[Any, Vector]]:
    """Over gloo's own collectives, which deliver equal sizes whatever they are; checks every 4th time."""
    with patch.object(backends, "has_gloo", lambda _: False), patch.object(guard, "EVERY", 4):
        transport = comm.open_transport()
        layout = even([6], transport.world, 1)
        yield transport, Vector(torch.zeros(layout.padded), torch.ones(layout.length(transport.rank)), layout)


@pytest.mark.parametrize(("at_forward", "told"), [(1, "forward 1"), (2, "forward 2"), (3, "forwards 3 to 4")])
@each_rank(3, transport="auto")
def test_without_tags_a_sum_is_compared_now_and_then(at_forward: int, told: str) -> None:
    with without_tags() as (transport, flat):

        def forwards(first: int, last: int, name: str) -> None:
            for _ in range(first, last):
                transport.fence(ENTER)
                transport.gather(name, [flat]).wait()
                transport.fence(LEAVE)

        forwards(1, at_forward, "first")
        text = raised_soon(comm.Diverged, lambda: forwards(at_forward, 9, "second" if is_last() else "first"))
    assert text.startswith(f"{told}: rank 2 takes another path than ranks 0 and 1: not the same gathers")


@each_rank(2, transport="auto")
def test_without_gloo_no_memory_is_shared() -> None:
    with (
        without_tags() as (transport, _),
        pytest.raises(ValueError, match="not possible: sharing memory needs gloo"),
    ):
        comm.open_transport("shared_memory")
    assert type(transport.transport) is comm.BackendTransport


@each_rank(2, transport="auto")
def test_a_backward_is_told_by_its_forward() -> None:
    with without_tags() as (transport, flat):
        transport.broadcast(torch.zeros(1))  # as a model's initial values are
        transport.fence(ENTER)
        transport.gather("first", [flat]).wait()
        transport.fence(LEAVE)
        transport.gather("second" if is_last() else "first", [flat]).wait()
        text = raised_soon(comm.Diverged, lambda: transport.fence(LEAVE))
    assert text.startswith("forward 1: ranks 0 and 1 take different paths")


@each_rank(2, transport="each")
def test_ranks_that_fail_together_receive_each_other_s_last_reports() -> None:
    """Neither waits until the time for that is over, which is longer than a test may take."""
    with patch.object(reports, "GRACE_S", 1000.0):
        model = shard(TwoPaths(), units=[nn.Linear])
        raised_soon(comm.Diverged, lambda: model.take("second" if is_last() else "first"))


def test_tags_of_different_kinds_never_meet() -> None:
    kinds = [
        {1},
        {messages.collective_tag(position, hash, 5) for position in range(200) for hash in (-6, -1 << 60)},
        {messages.report_tag(number) + part for number in (0, 1, (1 << 24) - 1) for part in range(3)},
        {messages.ROW},
        {messages.call_tag(clock) for clock in (0, (1 << 28) - 1, 1 << 28, (7 << 28) - 1, 7 << 28)},
        {1 << 31},
    ]
    assert all(max(low) < min(high) for low, high in itertools.pairwise(kinds))
    assert [len(kind) for kind in kinds] == [1, 2 * 127, 3 * 3, 1, 4, 1]


def test_names_that_end_alike_differ() -> None:
    """Reports have the last 64 characters of a name."""
    ours = guard.Paths(0, [1])
    theirs = guard.Paths(1, [0])
    for paths, first in ((ours, "a"), (theirs, "b")):
        paths.add(GATHER, first + "x" * 64)
    assert ours.digest != theirs.digest
    ours.hear(1, theirs.own[0].pack(0))
    assert ours.difference == 0


def test_who_is_odd_is_told_from_most_of_the_ranks() -> None:
    """Two, three and two pairs of ranks: above, and in `test_transports.py`."""
    told = guard.odd_ones_out({0: "a", 1: "b", 2: "a", 3: "c"})
    assert told == "ranks 1 and 3 take another path than ranks 0 and 2"


LATE = """
import threading, time
from shardtrain.comm import reports

def work() -> None:
    threading.main_thread().join()
    time.sleep(0.5)  # a program that does not wait for this thread has ended by then
    print("released its receives")

threading.Thread(target=work, name=reports.GUARD, daemon=True).start()
"""


@pytest.mark.long
def test_a_program_ends_after_the_threads_of_its_guards() -> None:
    """One that still released its receives aborted the program."""
    output = subprocess.run(
        [sys.executable, "-c", LATE], stdout=subprocess.PIPE, check=True, text=True
    ).stdout
    assert output == "released its receives\n"


@pytest.mark.parametrize("left_out", ["zero_grad", "update"])
@each_rank(2)
def test_a_rank_that_keeps_gradients_or_averages_alone_is_named(left_out: str) -> None:
    model = shard(OddNet())
    optimizer = sgd(model)
    ema = shardtrain.optim.Ema(model, 0.5)

    def steps() -> None:
        for step in range(5):
            leaves_out = dist.get_rank() == 1 and step == 2
            if not (left_out == "zero_grad" and leaves_out):
                optimizer.zero_grad()
            classify(model, step).backward()
            optimizer.step()
            if not (left_out == "update" and leaves_out):
                ema.update(step + 1)

    text = raised_soon(comm.Diverged, steps)
    if left_out == "zero_grad":
        assert "rank 1 is adding to the gradients of an earlier backward" in text, text
        assert "call zero_grad(), backward() and no_sync() on every rank" in text, text
    else:
        assert "rank 0 is stepping SGD and Ema, " in text, text

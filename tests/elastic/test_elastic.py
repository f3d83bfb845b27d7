"""Training goes on in the same processes when others are lost, join or leave, and computes what it would have."""

from __future__ import annotations

import json
import signal
import threading
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch

from penstock import (
    Booster,
    CheckpointError,
    Elastic,
    HeterogeneousParallelPlugin,
    PipelineFailure,
    PipelineTemplate,
    load_checkpoint,
    save_checkpoint,
)
from penstock.checkpoint.contents import find_checkpoints
from penstock.checkpoint.training_checkpoints import Checkpoint
from penstock.config.plugin_settings import PluginSettings
from penstock.elastic import membership as membership_module
from penstock.elastic.generations import Generations, agree, leave_world
from penstock.elastic.layout_planner import LayoutPlanner
from penstock.elastic.meeting import FolderMeeting
from penstock.elastic.membership import MemberRecord, Membership, Pulse
from penstock.elastic.protocol import Generation, MemberReport, View
from penstock.runtime import formation
from penstock.runtime.migration import Migration
from tests.support import elastic_runs
from tests.support.families import FAMILIES
from tests.support.pool import Pool

pytestmark = pytest.mark.slow

STEPS = 12
EXACT = 1e-9


@cache
def expected(**environment: str) -> dict[int, float]:
    return elastic_runs.undisturbed(STEPS, **environment)


def assert_as_undisturbed(run: elastic_runs.Run, survivors: list[elastic_runs.Member], **environment: str) -> None:
    """All that trained saw the undisturbed run's losses; nobody lost a sample or trained on one twice, or unpickled
    anything: whoever reaches the store may join, and what it says would be code that every member runs."""
    for member in run.members:
        assert [note["unpickled"] for note in member.notes if "unpickled" in note] == []
        for step, loss in member.losses.items():
            assert abs(loss - expected(**environment)[step]) < EXACT, f"step {step}\n{run.printed()}"
    for member in survivors:
        assert member.status == 0, run.printed()
        assert max(member.losses) == run.steps - 1
    elastic_runs.assert_whole_epochs(run.samples(), run.steps)


def test_a_run_survives_processes_killed_in_a_forward_in_a_recovery_in_the_update_and_after_it(tmp_path: Path) -> None:
    """The second is lost when the others have what they need of it."""
    run = elastic_runs.Run(tmp_path, STEPS, 6)
    orders = "kill@2/forward", "kill@any/moved in 1", "kill@5/update", "kill@7/updated"
    killed = [run.start(order) for order in orders]
    survivors = [run.start(), run.start()]
    run.wait()
    assert [member.status for member in killed] == [-9] * 4, run.printed()
    assert_as_undisturbed(run, survivors)
    for member in survivors:
        assert member.losses.keys() == set(range(STEPS))
        steps = [change["step"] for change in member.end["changes"] for _ in change["lost"]]
        # With the vote on an update one may go on, to the next step's forward, before another hears of its end.
        assert len(steps) == 4 and set(steps[:2]) <= {1, 2} and steps[2] in (5, 6) and steps[3] in (7, 8), steps


def test_processes_leave_join_and_are_lost_also_while_one_is_taken_in(tmp_path: Path) -> None:
    """The embedding is tied to the head, and frozen with the second block; the loss scale doubles every other step. A
    process is killed in the first step with the one that was taken in."""
    settings = {
        "FROZEN": "transformer.wte,transformer.h.1.",
        "PLUGIN": json.dumps({"precision": "fp16", "initial_scale": 256.0, "growth_interval": 2}),
    }
    run = elastic_runs.Run(tmp_path, STEPS, 4, CHECKPOINTS=str(tmp_path / "checkpoints"), **settings)
    orders = "await@5/loop", "kill@any/forward in 3", "kill@any/forming 2", "leave@2/loop"
    stays, killed, killed_before, leaver = [run.start(order) for order in orders]
    run.begin()
    joiner = run.start()
    run.wait()
    assert (killed.status, killed_before.status, leaver.status) == (-9, -9, 0), run.printed()
    assert_as_undisturbed(run, [stays, joiner], **settings)
    assert stays.losses.keys() == set(range(STEPS))
    # It left at the end of a step, which all of them made.
    assert max(leaver.losses) in (2, 3)
    # It was taken in at the end of a step, and its scheduler goes on where that of the others was, and its loss scale.
    begins = joiner.notes[next(i for i, note in enumerate(joiner.notes) if "begins" in note)]["begins"]
    assert min(joiner.losses) == begins and begins in (5, 6, 7)
    assert all(joiner.rates[step] == stays.rates[step] for step in joiner.rates)
    assert stays.scales == {step: 256.0 * 2 ** ((step + 1) // 2) for step in range(STEPS)}
    assert joiner.scales.items() <= stays.scales.items()
    changes = stays.end["changes"]
    assert [sum(len(change[how]) for change in changes) for how in ("left", "lost")] == [1, 2], changes
    number = next(note["member"] for note in joiner.notes if "member" in note)
    # The generation that took it in may be lost before it has formed on all members. The next one then tells of it.
    ((generation, joined),) = [(change["generation"], change["joined"]) for change in changes if change["joined"]]
    assert generation in (3, 4) and joined == [number]
    assert f"generation {generation} at step {begins}: " in run.printed()


def test_the_last_to_leave_save_what_they_have_say_so_and_are_started_again(tmp_path: Path) -> None:
    """A scheduler takes all machines away. It must not book that as a success."""
    run = elastic_runs.Run(tmp_path, STEPS, 2, CHECKPOINTS=str(tmp_path / "checkpoints"))
    members = [run.start("leave@4/loop"), run.start("leave@4/loop")]
    run.wait()
    assert [member.status for member in members] == [75, 75], run.printed()
    (found, *_) = find_checkpoints(tmp_path / "checkpoints")
    for member in members:
        assert found.step == 5 == max(member.losses) + 1
        assert f"the run ends unfinished at step 5: all its members were told to leave it; saved in {found.path}" in (
            member.printed()
        )
    again = elastic_runs.Run(tmp_path, STEPS, 1, CHECKPOINTS=str(tmp_path / "checkpoints"))
    goes_on = again.start()
    again.wait()
    assert goes_on.losses.keys() == set(range(5, STEPS)), again.printed()
    again.members += members
    assert_as_undisturbed(again, [goes_on])


def test_who_joins_gets_all_that_the_only_member_has_before_it_leaves(tmp_path: Path) -> None:
    """Also what it alone owns of the optimizer's state. The last one has nothing to save with, and says so."""
    run = elastic_runs.Run(tmp_path, STEPS, 1, DEPTHS="1", PLUGIN='{"sharded_optimizer": true}')
    leaver = run.start("await@2/loop", "leave@2/loop")
    run.begin()
    joiner = run.start("leave@6/loop")
    run.wait()
    assert (leaver.status, joiner.status) == (0, 75), run.printed()
    assert (leaver.losses.keys(), joiner.losses.keys()) == ({0, 1, 2}, {3, 4, 5, 6})
    for member in (leaver, joiner):
        for step, loss in member.losses.items():
            assert abs(loss - expected()[step]) < EXACT, f"step {step}\n{run.printed()}"
    changes = [note["change"] for note in joiner.notes if "change" in note]
    assert [change["left"] for change in changes] == [[0]]
    assert "the run ends unfinished at step 7: all its members were told to leave it; this step is not saved" in (
        joiner.printed()
    )


def test_a_part_of_the_model_that_nobody_holds_any_more_is_named(tmp_path: Path) -> None:
    run = elastic_runs.Run(tmp_path, STEPS, 2, DEPTHS="2", COPIES="1")
    # After a step in which the other one took part, so that it has made the update before.
    members = [run.start("kill@2/between"), run.start("kill@99/loop")]
    run.wait()
    survivor = members[1]
    assert survivor.status == 1
    assert "no device that is left has the values of transformer." in survivor.printed()
    assert survivor.losses.keys() == {0, 1}


@pytest.mark.parametrize("place", ["update", "loading"])
def test_what_nobody_has_any_more_comes_from_the_last_checkpoint(tmp_path: Path, place: str) -> None:
    """One pipeline without a copy: with each process a part of the model and of the optimizer's state is lost. The loss
    scale of fp16 comes from there, too."""
    scaled = {"PLUGIN": json.dumps({"precision": "fp16", "initial_scale": 256.0, "growth_interval": 2})}
    settings = scaled if place == "update" else {}
    first = "forward" if place == "loading" else place
    more = ["kill@3/loading"] if place == "loading" else []  # then they load once more
    number = 4 + len(more)
    folder, depths = str(tmp_path / "checkpoints"), ",".join(map(str, range(3, number + 1)))
    run = elastic_runs.Run(tmp_path, 8, number, DEPTHS=depths, COPIES="1", CHECKPOINTS=folder, **settings)
    killed, others = run.start(f"kill@5/{first}"), [run.start(*more), *(run.start() for _ in range(number - 2))]
    run.wait()
    survivors = others[len(more) :]
    assert all(member.status == -9 for member in (killed, *others[: len(more)])), run.printed()
    assert_as_undisturbed(run, survivors, **settings)
    for survivor in survivors:
        assert survivor.losses.keys() == set(range(run.steps))
        assert not settings or survivor.scales[run.steps - 1] == 256.0 * 2 ** (run.steps // 2)
        (change,) = survivor.end["changes"]
        assert change["restored"].endswith("step-00000003") and len(change["lost"]) == 1 + len(more)
        again = {note["step"] for note in survivor.notes if "samples" in note and note["generation"]}
        assert again == set(range(3, run.steps))


def test_who_comes_as_the_run_goes_back_to_a_checkpoint_is_taken_in_afterwards(tmp_path: Path) -> None:
    """The only one with a part of the model is lost as the generation with the new process forms."""
    run = elastic_runs.Run(tmp_path, STEPS, 3, DEPTHS="2,3", COPIES="1", CHECKPOINTS=str(tmp_path / "checkpoints"))
    killed, *others = run.start("await@4/loop", "kill@any/forming 1"), run.start(), run.start()
    run.begin()
    joiner = run.start()
    run.wait()
    assert killed.status == -9, run.printed()
    assert_as_undisturbed(run, [*others, joiner])
    for member in others:
        assert member.losses.keys() == set(range(STEPS))
        lost, came = member.end["changes"]
        assert lost["restored"].endswith("step-00000003") and (len(lost["lost"]), lost["joined"]) == (1, [])
        number = next(note["member"] for note in joiner.notes if "member" in note)
        assert (came["restored"], came["lost"], came["joined"]) == ("", [], [number])


@pytest.mark.parametrize(("copies_left", "waits"), [(True, False), (False, True)])
def test_who_comes_waits_if_and_only_if_values_are_lost_and_is_not_refused(copies_left: bool, waits: bool) -> None:
    """Of pipelines of two devices, two members and three that come are left: also without the last of them."""
    model = FAMILIES["gpt2"].build()
    template = PipelineTemplate.balanced(model, 2)
    elastic = Elastic("file:///nowhere", copies=1, templates=[template])
    planner = LayoutPlanner(model, PluginSettings(elastic=elastic, global_batch_size=8, microbatch_size=2), "1f1b")
    first, second = template.modules_per_stage
    held = [tuple(first), tuple(second if copies_left else first)]
    members = tuple(range(8))
    reports = {number: MemberReport(number, 5, held=units) for number, units in enumerate(held)}
    reports |= {number: MemberReport(number, 5, new=True) for number in (4, 5, 6)}
    before = Generation(3, members, joining=(4, 5, 6, 7), step=5)
    membership = Mock()
    membership.num_requests.return_value = 4
    membership.pulse.record = lambda number: MemberRecord(number, str(number), 0, "", "host", "", 1)
    view = View(0, members, reports, lost={2, 3, 7})
    following = planner.following(view, before, membership, lambda: (3, "checkpoint"))
    assert (following.restore, following.step) == (("checkpoint", 3) if waits else ("", 5))
    assert (following.joining, following.lost) == (((), (2, 3, 7)) if waits else ((4, 5), (2, 3, 6, 7)))
    assert [call.args[0] for call in membership.refuse.call_args_list] == ([] if waits else [6])


def test_a_run_that_resumes_survives_a_loss_in_the_load(tmp_path: Path) -> None:
    """All load again what they had half loaded."""
    folder = str(tmp_path / "checkpoints")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first = elastic_runs.Run(tmp_path / "first", 4, 3, DEPTHS="2,3", COPIES="1", CHECKPOINTS=folder)
    begun = [first.start() for _ in range(3)]
    first.wait()
    assert [member.status for member in begun] == [0, 0, 0], first.printed()
    run = elastic_runs.Run(tmp_path / "second", STEPS, 3, DEPTHS="2,3", COPIES="1", CHECKPOINTS=folder)
    killed, *others = run.start("kill@any/loading"), run.start(), run.start()
    run.wait()
    assert killed.status == -9, run.printed()
    for member in others:
        assert member.status == 0, run.printed()
        assert member.losses.keys() == set(range(3, STEPS))
        for step, loss in member.losses.items():
            assert abs(loss - expected()[step]) < EXACT, f"step {step}\n{run.printed()}"


def test_where_two_ranks_own_each_weight_one_after_the_other_may_be_lost(tmp_path: Path) -> None:
    """There is no checkpoint to go back to. In the end two pipelines are left, and all own all."""
    run = elastic_runs.Run(tmp_path, STEPS, 6, DEPTHS="1,2", COPIES="3", PLUGIN='{"sharded_optimizer": 2}')
    orders = "kill@3/update", "kill@any/moved in 1", "kill@5/sending", "kill@7/before sending"
    killed = [run.start(order) for order in orders]
    leaver, stays = run.start("leave@10/loop"), run.start("await@9/loop")
    run.begin()
    joiner = run.start()
    run.wait()
    assert [member.status for member in (*killed, leaver)] == [-9] * 4 + [0], run.printed()
    assert_as_undisturbed(run, [stays, joiner])
    assert {change["restored"] for change in stays.end["changes"]} == {""}
    kept = Counter(name for member in (stays, joiner) for name in member.end["states"])
    assert kept == Counter(2 * list(stays.end["parameters"]))


@pytest.mark.parametrize("folder", ["checkpoints", ""])
def test_where_one_rank_owns_each_weight_its_state_is_lost_with_it(tmp_path: Path, folder: str) -> None:
    """All ranks have all weights. The run goes back to its checkpoint, if it has one. Who leaves hands over."""
    more = {"CHECKPOINTS": str(tmp_path / folder)} if folder else {}
    run = elastic_runs.Run(tmp_path, 6, 4, DEPTHS="1", PLUGIN='{"sharded_optimizer": true}', **more)
    leaver, killed = run.start("leave@1/loop"), run.start("kill@5/sending" if folder else "kill@5/between")
    others = [run.start(), run.start()]
    run.wait()
    assert (leaver.status, killed.status) == (0, -9), run.printed()
    assert "a lost rank sends the run back to its checkpoint" in run.printed()
    if folder:
        assert_as_undisturbed(run, others)
    for survivor in others:
        if folder:
            left, lost = survivor.end["changes"]
            assert not left["restored"] and lost["restored"].endswith("step-00000003")
        else:
            assert survivor.status == 1 and survivor.losses.keys() == set(range(5)), run.printed()
            assert "no device that is left has the optimizer's state of transformer." in survivor.printed()


def test_too_few_devices_are_told_with_how_to_go_on(tmp_path: Path) -> None:
    """Pipelines of three stages only, and two devices: not even the last checkpoint helps before a third comes."""
    folder = str(tmp_path / "checkpoints")
    run = elastic_runs.Run(tmp_path, STEPS, 3, DEPTHS="3", COPIES="1", CHECKPOINTS=folder)
    members = [run.start("kill@5/between"), run.start(), run.start()]
    run.wait()
    for survivor in members[1:]:
        assert survivor.status == 1 and survivor.losses.keys() == set(range(5)), run.printed()
        assert "the run cannot go on: no pipelines use 2 devices: a pipeline takes 3 devices" in survivor.printed()
        assert f"penstock.load_checkpoint('{folder}'" in survivor.printed()


def test_a_process_that_comes_as_the_run_has_ended_is_told(tmp_path: Path) -> None:
    """It was started to join, and would wait for others to begin a new run."""
    run = elastic_runs.Run(tmp_path, 2, 2)
    late, *members = run.start("late@any/coming"), run.start(), run.start()
    run.wait(but=[late])
    assert [member.status for member in members] == [0, 0], run.printed()
    (tmp_path / "come").touch()
    run.wait(30)
    assert late.status == 1 and "the run that this process was to join has ended" in late.printed()


def test_a_process_with_other_settings_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    run = elastic_runs.Run(tmp_path, 6, 2)
    members = [run.start("await@3/loop"), run.start()]
    run.begin()
    run.environment["PLUGIN"] = '{"max_norm": 0.25}'
    other = run.start()
    run.wait()
    assert_as_undisturbed(run, members)
    assert other.status == 1 and not other.losses, run.printed()
    assert "was given another model or other settings than the run" in other.printed()
    assert all(not change["joined"] and not change["lost"] for change in members[0].end["changes"])


def save_where_it_is_refused(store: str, folder: str) -> tuple[list[str], int]:
    """A process of its own trains a step: what saves in the middle of it say, and the step of the one after it."""
    model = FAMILIES["gpt2"].build()
    templates = [PipelineTemplate.balanced(model, 1)]
    elastic = Elastic(store, start=1, copies=1, templates=templates, leave_on_sigterm=False)
    plugin = HeterogeneousParallelPlugin(elastic=elastic, global_batch_size=4, microbatch_size=2)
    booster = Booster(plugin=plugin)
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(3, 51).view(8, 6)]
    loader = plugin.prepare_dataloader(rows)
    given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}
    model, given["optimizer"], _, loader, _ = booster.boost(model, given["optimizer"], None, loader, None)
    refused = []
    booster.execute_pipeline(iter(loader), model, None, given["optimizer"])
    for options in ({}, {"asynchronous": True}, {"step": 7}):
        if options:
            given["optimizer"].step()
        with pytest.raises(ValueError, match="with elastic=") as caught:
            save_checkpoint(folder, model=model, **given, **options)
        refused.append(str(caught.value))
        assert not Path(folder).exists()
    save_checkpoint(folder, model=model, **given)
    found = load_checkpoint(folder, model=model, **given)
    batches = iter(loader)
    booster.execute_pipeline(batches, model, None, given["optimizer"])
    with pytest.raises(ValueError, match="with elastic= load between steps"):
        load_checkpoint(folder, model=model, **given)
    given["optimizer"].step()
    assert booster.step == 3
    assert load_checkpoint(folder, model=model, **given).step == booster.step == 2
    with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
        load_checkpoint(folder, 3, model=model, **given)
    no_memory = mock.patch.object(Checkpoint, "__init__", side_effect=MemoryError("no memory is left"))
    with no_memory, pytest.raises(MemoryError, match="no memory is left"):
        load_checkpoint(folder, model=model, **given)
    assert booster.step == 2 and plugin.run._make_report((), True, False, Migration.of(plugin.run.engine)).held
    plugin.run.close()
    leave_world()
    return refused, found.step


def test_a_load_sets_an_elastic_run_back_and_what_it_could_not_repeat_is_refused(pool: Pool, tmp_path: Path) -> None:
    store, folder = tmp_path.joinpath("store").as_uri(), str(tmp_path / "run")
    (((accumulating, asynchronous, numbered), step),) = pool.run(
        1, save_where_it_is_refused, store, folder, init=False, timeout=60
    )
    assert "call save_checkpoint after optimizer.step(), not in the middle of an accumulation" in accumulating
    assert "asynchronous=True is not possible" in asynchronous
    assert "the step is booster.step, which is 2, got 7" in numbered
    assert step == 2


def configure_after_a_failure(store: str, where: str) -> str:
    """A process fails as it `meets` the others or as it `forms` the engine, and begins the run again.

    Returns what it is told if it tries with the same plugin.
    """

    def configure(plugin: HeterogeneousParallelPlugin) -> None:
        model = FAMILIES["gpt2"].build()
        plugin.configure(model, torch.optim.SGD(model.parameters(), lr=0.1))

    templates = [PipelineTemplate.balanced(FAMILIES["gpt2"].build(), 1)]
    elastic = Elastic(store, start=1, copies=1, templates=templates)
    failed, another = (HeterogeneousParallelPlugin(elastic=elastic, global_batch_size=4) for _ in range(2))
    owner, name = {"meets": (Generations, "meet"), "forms": (formation, "Engine")}[where]
    before, on_sigterm = set(threading.enumerate()), signal.getsignal(signal.SIGTERM)
    with (
        mock.patch.object(owner, name, side_effect=MemoryError("no memory is left")),
        pytest.raises(MemoryError, match="no memory is left"),
    ):
        configure(failed)
    for thread in set(threading.enumerate()) - before:
        if thread.name == "penstock-member":
            thread.join(10)
            assert not thread.is_alive()
    assert signal.getsignal(signal.SIGTERM) == on_sigterm
    with pytest.raises(ValueError) as caught:
        configure(failed)
    leave_world()
    configure(another)
    assert another.run is not None and not another.run.joined
    assert signal.getsignal(signal.SIGTERM) != on_sigterm
    another.run.close()
    assert signal.getsignal(signal.SIGTERM) == on_sigterm
    leave_world()
    return str(caught.value)


@pytest.mark.parametrize("where", ["meets", "forms"])
def test_a_process_that_fails_to_begin_is_no_member_and_its_plugin_is_used_up(
    pool: Pool, tmp_path: Path, where: str
) -> None:
    store = tmp_path.joinpath("store").as_uri()
    (refused,) = pool.run(1, configure_after_a_failure, store, where, init=False, timeout=60)
    assert refused.startswith("with elastic= a plugin configures one whole model, once: make a new plugin")


def test_a_process_killed_in_a_save_leaves_the_others_a_whole_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run = elastic_runs.Run(tmp_path, STEPS, 4, CHECKPOINTS=str(folder))
    members = [run.start("kill@6/saving in 0") for _ in range(4)]  # whoever is the one that writes
    run.wait()
    survivors = [member for member in members if member.status != -9]
    assert len(survivors) == 3, run.printed()
    assert_as_undisturbed(run, survivors)
    assert [(one.step, one.fault) for one in find_checkpoints(folder)] == [(12, None), (9, None)]


def test_shards_of_a_stage_are_lost_together(tmp_path: Path) -> None:
    """Three devices of two tensor-parallel ranks each: with one rank its device is lost."""
    model = {"FAMILY": "llama", "MODEL": '{"vocab_size": 98}'}
    run = elastic_runs.Run(tmp_path, 6, 6, PLUGIN='{"tp_size": 2}', DEPTHS="1,2,3", TORCHELASTIC_RUN_ID="node", **model)
    members = []
    for local in range(6):
        run.environment["LOCAL_RANK"] = str(local)
        members.append(run.start(*["kill@4/forward"] * (local == 3)))
    run.wait()
    assert members[3].status == -9, run.printed()
    assert members[2].status == 1 and "the others went on without it" in members[2].printed()
    survivors = [members[local] for local in (0, 1, 4, 5)]
    assert_as_undisturbed(run, survivors, **model)
    for survivor in survivors:
        assert survivor.losses.keys() == set(range(run.steps))
        assert [len(change["lost"]) for change in survivor.end["changes"]] == [2]


@pytest.mark.parametrize("order", ["kill-store", "stop-store"])
def test_training_goes_on_without_the_store_until_somebody_is_lost(tmp_path: Path, order: str) -> None:
    with elastic_runs.served_store(tmp_path) as (address, process):
        run = elastic_runs.Run(tmp_path, STEPS, 2, store=address, STORE_PROCESS=str(process), ANSWER="3")
        members = [run.start(f"{order}@3/loop", "kill@6/between"), run.start()]
        run.wait()
    assert members[1].status == 1
    assert members[1].losses.keys() == set(range(6))
    assert f"the store at {address} does not answer" in members[1].printed()


def test_a_process_that_is_only_slow_stays(tmp_path: Path) -> None:
    """The others wait for it for longer than they would to meet it."""
    run = elastic_runs.Run(tmp_path, 6, 2, HANG="3", FORMING="4")
    members = [run.start("sleep@2/forward"), run.start()]
    run.wait()
    assert_as_undisturbed(run, members)
    assert all(member.end["changes"] == [] for member in members)


def test_a_process_that_stands_still_is_left_out_and_ends_when_it_wakes(tmp_path: Path) -> None:
    run = elastic_runs.Run(tmp_path, 6, 3, HANG="5")
    stopped = run.start("stop@3/loop")
    others = [run.start(), run.start()]
    run.wait(but=[stopped])
    assert_as_undisturbed(run, others)
    stopped.process.send_signal(signal.SIGCONT)
    run.wait()
    assert stopped.status != 0
    assert stopped.losses.keys() == {0, 1, 2}  # it made no step by itself


class CountedMeeting:
    """A store in this process that counts how often each key is read. `on_look` is told before each look at the news
    how many there were."""

    address = "memory"

    def __init__(self, on_look: Callable[[int], None]) -> None:
        self.values: dict[str, str] = {}
        self.reads: Counter[str] = Counter()
        self._on_look, self._num_looks = on_look, 0

    def put(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> str | None:
        if key == "news":
            self._on_look(self._num_looks)
            self._num_looks += 1
        self.reads[key] += 1
        return self.values.get(key)

    def create(self, key: str, value: str) -> str:
        return self.values.setdefault(key, value)


def reads_while_it_waits(num_members: int, num_looks: int) -> int:
    """All but the first have reported, and the second looks so often until that one has decided."""
    members = tuple(range(num_members))
    reads: Counter[str] = Counter()

    def on_look(number: int) -> None:
        if number == 2:  # in the first it reported, which was news in the second
            meeting.reads.clear()
        elif number == 2 + num_looks:
            reads.update(meeting.reads)
            meeting.create("generation/1", Generation(1, members).to_json())
            pulse._look_again = 0.0

    meeting: Any = CountedMeeting(on_look)
    pulse = Pulse(meeting)
    for member in members:
        meeting.put(f"member/{member}", MemberRecord(member, str(member), 0, "", "host", "elsewhere", 1).to_json())
        if member > 1:
            meeting.put(f"report/0/{member}", MemberReport(member, 3).to_json())
    membership: Any = SimpleNamespace(id=1, meeting=meeting, pulse=pulse, hang_timeout=60.0)
    with mock.patch.object(membership_module, "LOOK_AGAIN", 1e9):
        following = agree(membership, Generation(0, members), MemberReport(1, 3), Mock(), announce=True)
    assert following.number == 1  # found though nobody told of it
    return reads.total()


def test_a_member_that_waits_for_the_others_reads_as_much_among_many_as_among_few() -> None:
    few, many = (reads_while_it_waits(number, 20) for number in (4, 64))
    assert few == many < 20 * 6


def test_who_was_silent_in_one_generation_and_lives_is_no_suspect_in_the_next(tmp_path: Path) -> None:
    meeting, failed = FolderMeeting(tmp_path), threading.Event()
    membership = Membership(meeting, 60.0, "0", 0, "")
    meeting.put("member/1", MemberRecord(1, "1", 0, "", "host", "elsewhere", 1).to_json())
    try:
        for generation in range(2):
            failed.clear()
            membership.watch(generation, (0, 1), lambda why, members: failed.set(), hang_timeout=60.0)
            assert membership.silent == set()
            membership.watch(generation, (0, 1), lambda why, members: failed.set(), hang_timeout=0.1)
            assert failed.wait(60)
            assert membership.silent == {1}
            membership.unwatch()
    finally:
        membership.close()


def test_a_store_that_is_gone_when_members_meet_is_a_failure_that_they_can_go_on_from() -> None:
    membership = Mock(**{"meeting.clone.side_effect": ConnectionError("no store answers")})
    with pytest.raises(PipelineFailure, match="the members of generation 1 did not meet: no store answers"):
        Generations.meet(Mock(now=Generation(1, (0, 1)), member=0, membership=membership))


def test_what_a_run_needs_is_said_before_anything_is_formed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="store must be tcp://host:port or file:///folder, got 'head:29400'"):
        Elastic("head:29400")
    with pytest.raises(ValueError, match="copies must be at least 1, got 0"):
        Elastic("tcp://head:29400", copies=0)
    run = Elastic((tmp_path / "store").as_uri())
    with pytest.raises(TypeError, match="elastic= needs global_batch_size"):
        HeterogeneousParallelPlugin(elastic=run)
    with pytest.raises(ValueError, match=r"a multiple of microbatch_size \(4\), got 6"):
        HeterogeneousParallelPlugin(microbatch_size=4, elastic=run, global_batch_size=6)
    with pytest.raises(ValueError, match="global_batch_size goes with elastic="):
        HeterogeneousParallelPlugin(global_batch_size=8)
    plugin = HeterogeneousParallelPlugin(elastic=run, global_batch_size=8)
    with pytest.raises(RuntimeError, match="leave set_pipelines out"):
        plugin.set_pipelines([], [])

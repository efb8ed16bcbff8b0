"""Causes of losses: the report of Ray decides where it explains the loss, else the traces on the worker's machine."""

from __future__ import annotations

import itertools

from modelpool.actors.control.losses import EXPLAINED, Death, Loss, MachineReport, loss_of
from modelpool.actors.worker.crash_trace import CrashEvidence
from modelpool.scheduler.model.messages import LossCause

FOUND = CrashEvidence(found=True)
MACHINES = [
    MachineReport(answers, draining, evidence)
    for answers, draining, evidence in itertools.product(
        (None, True, False),
        (True, False),
        (
            None,
            CrashEvidence(),
            FOUND,
            CrashEvidence(True, "Segmentation fault", "sample.py, line 3"),
            CrashEvidence(True, exited=True),
            CrashEvidence(True, oom_kills=1),
        ),
    )
]


def test_every_death_on_every_machine_has_a_cause_and_a_sentence() -> None:
    for death, machine in itertools.product(Death, MACHINES):
        loss = loss_of(death, "Ray's message", machine)
        assert loss.reason
        assert loss.cause is not LossCause.NO_NODE


def test_the_machine_cannot_overrule_an_explained_death() -> None:
    for death in EXPLAINED:
        assert len({loss_of(death, "message", machine) for machine in MACHINES}) == 1


def test_a_crash_counts_only_if_something_crashed_or_nothing_is_known() -> None:
    up = MachineReport(answers=True)
    cases = {
        CrashEvidence(True, "Segmentation fault", "sample.py, line 3"): Loss(
            "its process crashed: Segmentation fault in sample.py, line 3", LossCause.CRASH
        ),
        CrashEvidence(True, "Aborted"): Loss("its process crashed: Aborted", LossCause.CRASH),
        CrashEvidence(True, exited=True): Loss("its process ended itself: a library called exit", LossCause.CRASH),
        CrashEvidence(True, oom_kills=2): Loss(
            "its machine ran out of host memory, and the kernel killed it", LossCause.OUT_OF_MEMORY
        ),
        FOUND: Loss("another process killed it (SIGKILL; it left no trace of a crash)", LossCause.KILLED),
    }
    for evidence, loss in cases.items():
        assert loss_of(Death.PROCESS_ENDED, "m", MachineReport(up.answers, evidence=evidence)) == loss
    for nothing in (None, CrashEvidence()):
        assert loss_of(Death.PROCESS_ENDED, "m", MachineReport(True, evidence=nothing)).cause is LossCause.CRASH


def test_a_crash_on_a_draining_node_is_a_crash_and_a_kill_there_is_a_preemption() -> None:
    crashed = CrashEvidence(True, "Aborted")
    assert loss_of(Death.PROCESS_ENDED, "m", MachineReport(True, True, crashed)).cause is LossCause.CRASH
    assert loss_of(Death.PROCESS_ENDED, "m", MachineReport(True, True, FOUND)).cause is LossCause.PREEMPTED


def test_a_node_that_does_not_answer_is_lost_or_preempted() -> None:
    for death in (Death.PROCESS_ENDED, Death.NODE_DIED, Death.NODE_SHUT_DOWN):
        assert loss_of(death, "m", MachineReport(False)).cause is LossCause.NODE_LOST
        assert loss_of(death, "m", MachineReport(False, draining=True)).cause is LossCause.PREEMPTED


def test_the_memory_monitor_of_ray_says_how_much_was_used() -> None:
    recorded = (
        "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1, ID: dde344) "
        "was 2.51GB used / 23.54GB limit (0.106680) OOM kill reason: Memory usage 2696499200B exceeded threshold"
    )
    loss = loss_of(Death.MEMORY_MONITOR, recorded)
    assert loss.cause is LossCause.OUT_OF_MEMORY
    assert loss.reason == "its node ran out of host memory (2.51GB used / 23.54GB limit), and Ray ended it"

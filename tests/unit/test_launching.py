"""Decisions of the launch scripts: how a run fits the nodes, which nodes are wrong, what an end means."""

from __future__ import annotations

import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from egmla_megatron.config import load as load_module
from egmla_megatron.config.load import load_config
from egmla_megatron.errors import UserError
from egmla_megatron.launching import commands as commands_module
from egmla_megatron.launching import facts as facts_module
from egmla_megatron.launching import meeting as meeting_module
from egmla_megatron.launching.compare import find_problems, find_warnings
from egmla_megatron.launching.facts import gather_facts, node_name
from egmla_megatron.launching.fit import fit_to_nodes
from egmla_megatron.launching.last_words import last_words
from egmla_megatron.launching.ledger import Launch, RunTail, read_launches, record_end, record_start
from egmla_megatron.launching.links import rounds_of_pairs, slow_nodes
from egmla_megatron.launching.meeting import Host, attend
from egmla_megatron.launching.verdict import AGAIN, close_launch, judge
from tests.tiny import PLAIN, tiny_model, tiny_run


def test_a_run_fits_the_nodes_with_the_same_global_batch() -> None:
    cfg = load_config("pretrain_1b2", ["parallel.gate_group=8"], gpu=True)
    four, three, one = (fit_to_nodes(cfg, nodes, 8) for nodes in (4, 3, 1))
    assert four.overrides == ("train.micro_batch_size=6",)  # 384 = 32 x 2 x 6
    assert "2 x 6 on each of 32 replicas" in four.notes[0]
    assert three.overrides == () and three.layout.num_microbatches == 2  # 384 = 24 x 2 x 8
    assert one.layout.num_microbatches == 6
    assert all(fit.cfg.train.global_batch_size == 384 for fit in (four, three, one))
    narrow = fit_to_nodes(cfg, 3, 1)  # 512 columns do not divide over three ranks
    assert narrow.overrides == ("parallel.gate_group=1",)
    assert "the 3 ranks of a stage and model.kv_emb_dim = 512; a rank holds 512 columns" in narrow.notes[0]
    plain = fit_to_nodes(tiny_run(tiny_model(**PLAIN), parallel={"gate_group": 8}), 1, 2)
    assert plain.overrides == ("parallel.gate_group=1",) and "has no gating tables" in plain.notes[0]


def test_nodes_that_cannot_be_used_come_with_the_nearest_that_can() -> None:
    cfg = load_config("pretrain_1b2", ["parallel.gate_group=8"], gpu=False)
    with pytest.raises(UserError, match=r"got 5 with 8 ranks each.*384 does not divide over 40.*: 4 or 6; .*--nodes=6"):
        fit_to_nodes(cfg, 5, 8)
    tensor = replace(cfg, parallel=replace(cfg.parallel, tensor=16))
    with pytest.raises(UserError, match=r"got 1 with 8 ranks.*no multiple of tensor x pipeline x context = 16.*: 2;"):
        fit_to_nodes(tensor, 1, 8)
    with pytest.raises(UserError, match=r"train\.global_batch_size is no multiple of .* 1 x 5: got 384"):
        fit_to_nodes(cfg, 1, 5)
    with pytest.raises(UserError, match=r"parallel\.tensor does not divide"):  # no number of nodes mends that
        fit_to_nodes(replace(cfg, parallel=replace(cfg.parallel, tensor=3)), 3, 1)


def launch(outcome: str, reached: int, from_step: int = 0, **changes: Any) -> Launch:
    base = Launch("7", 0, ("a", "b"), 2, 100.0, from_step, 0, 200.0, 1, outcome, reached, "RuntimeError: boom")
    return replace(base, **changes)


def tail(**kinds: Any) -> RunTail:
    empty: dict[str, Any] = {name: [] for name in ("starts", "steps", "evals", "checkpoints", "ends")}
    return RunTail(**{**empty, **kinds})


@pytest.mark.parametrize(
    ("code", "caught", "stopped_by", "checks", "outcome", "verdict"),
    [
        (0, 0, 0, False, "done", 0),
        (138, 0, signal.SIGUSR1, False, "saved", AGAIN),
        (1, 0, signal.SIGTERM, False, "saved", AGAIN),  # another node's launcher saw the first one go
        (130, 0, signal.SIGINT, False, "stopped", 130),
        (138, signal.SIGUSR1, 0, False, "interrupted", AGAIN),
        (143, 0, 0, False, "interrupted", AGAIN),
        (129, 0, 0, False, "interrupted", AGAIN),  # SIGHUP
        (129, signal.SIGHUP, signal.SIGUSR1, False, "saved", AGAIN),  # to the script, which passes USR1 on
        (1, signal.SIGTERM, 0, False, "crash", AGAIN),  # Slurm ends a job that has lost a node
        (2, 0, 0, False, "mistake", 2),
        (2, 0, 0, True, "crash", AGAIN),  # a node failed its check on a restart
        (1, 0, 0, False, "crash", AGAIN),
        (137, 0, 0, False, "crash", AGAIN),
    ],
)
def test_what_an_end_means(code: int, caught: int, stopped_by: int, checks: bool, outcome: str, verdict: int) -> None:
    ends = [{"step": 9, "unix_time_s": 150.0, "signal": stopped_by}] if stopped_by else []
    steps = [{"step": 8, "unix_time_s": 90.0}, {"step": 9, "unix_time_s": 149.0}]
    opened = launch("", 0, from_step=4, ended_unix_s=0.0)
    closed = close_launch(opened, code, caught, tail(steps=steps, ends=ends), "said", checks=checks)
    assert (closed.outcome, closed.reached, closed.is_open) == (outcome, 9, False)
    assert closed.said == ("" if outcome in ("saved", "stopped") else "said")
    assert judge([closed]).code == verdict


def test_a_launch_that_passed_over_a_damaged_checkpoint_began_at_the_one_before() -> None:
    done = {"step": 3, "unix_time_s": 150.0}
    of_run = tail(starts=[{"step": 2, "unix_time_s": 110.0}], steps=[done], ends=[done | {"signal": signal.SIGTERM}])
    saved = close_launch(launch("", 0, from_step=4, ended_unix_s=0.0), 143, 0, of_run, "")
    assert (saved.from_step, saved.reached) == (2, 3) and "and saved" in judge([saved]).sentence


def test_three_crashes_at_the_same_step_stop_and_others_do_not() -> None:
    same = [launch("crash", 17, 10)] * 3
    verdict = judge(same)
    assert verdict.code == 1 and verdict.sentence.startswith("3 crashes in a row at step 17, not started again")
    assert "RuntimeError: boom" in verdict.sentence and "always on a, b" in verdict.sentence
    assert judge([*same, launch("crash", 17, 10, job="8")]).code == AGAIN  # somebody has submitted it again
    assert judge([*same, *[launch("crash", 17, 10, job="8")] * 3]).code == 1
    moved = [launch("crash", 17, 10, nodes=nodes) for nodes in (("a", "b"), ("c", "d"), ("e", "f"))]
    assert "suspect the data or numbers of that step" in judge(moved).sentence
    suspect = [launch("lost", 17, 10, nodes=nodes) for nodes in (("a", "b"), ("a", "d"), ("a", "f"))]
    assert "try sbatch --exclude=a" in judge(suspect).sentence
    assert judge([launch("crash", 17), launch("crash", 18), launch("crash", 18)]).code == AGAIN
    assert judge([*same[:2], launch("saved", 17), launch("crash", 17)]).code == AGAIN
    wandering = [launch("crash" if step % 2 else "interrupted", step, 10) for step in range(11, 17)]
    assert judge(wandering[:5]).code == AGAIN
    assert "6 ends in a row without a checkpoint after step 10" in judge(wandering).sentence
    short = [launch("saved", 10, 10)] * 6  # the signal before the limit came before the first step
    assert judge(short[:5]).code == AGAIN and judge(short).code not in (0, AGAIN)
    assert judge([launch("saved", 11, 10)] * 9).code == AGAIN


def test_preemptions_of_a_start_are_no_crashes_and_have_a_limit_of_their_own() -> None:
    opened = launch("", 0, from_step=10, ended_unix_s=0.0)
    preempted = close_launch(opened, 143, signal.SIGTERM, tail(), "")
    assert (preempted.outcome, preempted.signal) == ("interrupted", signal.SIGTERM)
    before_a_step = launch("saved", 10, 10, signal=signal.SIGTERM)
    assert judge([preempted, before_a_step] * 14 + [preempted]).code == AGAIN
    assert judge([*[launch("crash", step, 10) for step in range(11, 16)], *[preempted] * 20]).code == AGAIN
    verdict = judge([preempted] * 30)
    assert verdict.code == 143 and "30 ends in a row" in verdict.sentence
    assert "(30 of them preempted, of which 30 are allowed), not started again" in verdict.sentence
    submitted_again = replace(preempted, job="8")
    assert judge([*[preempted] * 30, submitted_again]).code == AGAIN
    short = close_launch(opened, 138, signal.SIGUSR1, tail(), "")  # the limit of time is too short for any step
    assert judge([short] * 5).code == AGAIN and "6 ends in a row" in judge([short] * 6).sentence


def test_the_ledger_survives_torn_lines_and_knows_lost_launches(tmp_path: Path) -> None:
    first = launch("", 0, started_unix_s=1.0, ended_unix_s=0.0)
    record_start(tmp_path, first)
    with (tmp_path / "launches.jsonl").open("a") as file:
        file.write('{"kind": "sta')  # the power went
    second = replace(first, started_unix_s=2.0, restart=1)
    record_start(tmp_path, second)
    assert [(one.outcome, one.is_open) for one in read_launches(tmp_path)] == [("lost", False), ("", True)]
    record_end(tmp_path, replace(second, outcome="done", ended_unix_s=3.0))
    assert [one.outcome for one in read_launches(tmp_path)] == ["lost", "done"]


def test_last_words_prefer_our_own_and_exceptions(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("error: of an earlier start\n")
    since = log.stat().st_size
    with log.open("a") as file:
        file.write("Traceback\n  x\nValueError: bad\nerror: rank 1 died\nerror: rank 0 too\nsrun: error: node2\n")
    assert last_words(str(log), since) == "rank 1 died; ValueError: bad"
    log.write_text("hello\nsrun: error: node2: task 1: Killed\n")
    assert last_words(str(log)) == "srun: error: node2: task 1: Killed"
    assert last_words(str(tmp_path / "none")) == ""


def fact(**changes: Any) -> dict[str, Any]:
    base = {"problems": [], "warnings": [], "versions": {"python": "3.12.1", "torch": "2.11"}, "free_mib": 1000}
    return {**base, "data": {"d": "10 tokens in 2 sequences"}, "skew_s": 0.01, **changes}


def test_nodes_are_compared_with_what_most_of_them_have() -> None:
    names = ["n1", "n2", "n3"]
    assert find_problems(names, {name: fact() for name in names}, 500.0) == []
    odd = {"n1": fact(versions={"python": "3.12.1", "torch": "2.10"}), "n2": fact(), "n3": fact()}
    (problem,) = find_problems(names, odd, 500.0)
    assert problem.startswith("n1: torch 2.10, elsewhere 2.11; ")
    (problem,) = find_problems(names, {"n1": fact(), "n2": fact()}, 500.0)
    assert problem.startswith("n3: gave no answer")
    bad = {"n1": fact(), "n2": fact(skew_s=-90.0, free_mib=10), "n3": fact(problems=["GPUs: gone"], data={})}
    found = find_problems(names, bad, 500.0)
    assert [problem.partition(":")[0] for problem in found] == ["n2", "n2", "n3", "n3"]
    assert "-90.0 s off" in found[0] and "10 MiB free, a checkpoint needs about 500 MiB" in found[1]
    assert find_warnings({"n1": fact(skew_s=2.0)}) == ["n1: its clock is +2.0 s off"]


def test_a_question_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setitem(facts_module._QUESTIONS, "data", lambda *_: release.wait(30))
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "999")
    found = gather_facts(tiny_run(), token="", limit_s=5.0)
    release.set()
    assert found["problems"][0].startswith("GPUs: Slurm gave 999, the driver shows ")
    assert found["problems"][1:] == ["data: no answer within 5 s"]
    assert found["versions"]["python"] and found["gpus"] >= 0 and found["free_mib"] > 0


def test_gpus_that_no_rank_uses_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "gpu_count", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    found: dict[str, Any] = {"warnings": [], "problems": []}
    facts_module._gpus(tiny_run(), found, "")
    assert found["warnings"] == ["8 GPUs are there, 1 are used (sbatch --gpus-per-node, EGMLA_NPROC)"]


def test_a_driver_that_may_hang_is_asked_by_no_step_that_can_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(load_module, "gpu_count", lambda: asked.append("driver") or 8)
    monkeypatch.setattr(commands_module, "check_nodes", lambda cfg, *_: int(cfg.train.cuda_graph))
    words = ["--nodes", "n1", "--ranks", "1", "pretrain_base", f"run.dir={tmp_path / 'run'}"]
    assert commands_module.main(["nodes", *words]) == 0 and not asked
    assert commands_module.main(["begin", *words]) == 0 and len(asked) == 1
    assert "  cuda_graph: true\n" in (tmp_path / "run" / "config.yaml").read_text()  # that of the run, not of this step
    assert commands_module.main(["end", *words]) == 0 and len(asked) == 1
    assert commands_module.main(["begin", *words]) == 0 and len(asked) == 1
    assert capsys.readouterr().err.startswith("launcher: ")


def test_a_node_without_slurms_name_is_found_by_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    for own, nodes, name in (
        ("n1.cluster.org", ["n2", "n1"], "n1"),
        ("n1", ["n1.cluster.org", "n2.cluster.org"], "n1.cluster.org"),
        ("n1.a.org", ["n1.b.org"], "n1.a.org"),  # another machine
        ("n1", ["n1.a.org", "n1.b.org"], "n1"),
        ("n1", [], "n1"),
    ):
        monkeypatch.setattr(facts_module.platform, "node", lambda own=own: own)
        assert node_name(nodes) == name
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert node_name(["n1"]) == "n7"


def test_nodes_meet_and_strangers_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_module, "_PATIENCE_S", 1.0)
    meeting = Host(0, "token", 10.0)
    port = meeting.listener.getsockname()[1]
    silent = socket.create_connection(("127.0.0.1", port))
    codes: dict[str, int | None] = {}

    def report(name: str, token: str, address: str = "127.0.0.1") -> None:
        codes[name + token] = attend(address, port, token, {"node": name}, 10.0)

    both = "::1" if socket.has_dualstack_ipv6() else "127.0.0.1"
    callers = (("n2", "wrong"), ("n2", "token"), ("n3", "token", both))
    threads = [threading.Thread(target=report, args=words) for words in callers]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    heard = meeting.hear(["n2", "n3"])
    meeting.dismiss(2)
    silent.close()
    for thread in threads:
        thread.join()
    assert sorted(heard) == ["n2", "n3"] and abs(heard["n2"]["skew_s"]) < 1.0
    assert codes == {"n2wrong": None, "n2token": 2, "n3token": 2}
    lonely = Host(0, "token", 0.2)
    assert lonely.hear(["n2"]) == {}
    lonely.dismiss(2)


def test_links_are_measured_in_pairs_and_the_slow_node_is_named() -> None:
    for nodes in (2, 3, 4, 5, 8):
        rounds = rounds_of_pairs(nodes)
        pairs = [pair for pairs in rounds for pair in pairs]
        assert len(set(pairs)) == len(pairs) == (1 if nodes == 2 else nodes)
        for one in rounds:
            used = [node for pair in one for node in pair]
            assert len(set(used)) == len(used)
    rates = {(0, 1): 1.0, (1, 2): 0.1, (2, 3): 0.1, (3, 0): 1.0}
    assert slow_nodes(rates, 4) == {2: (0.1, 1.0)}
    assert slow_nodes({(0, 1): 0.1}, 2) == {} and slow_nodes(dict.fromkeys(rates, 1.0), 4) == {}

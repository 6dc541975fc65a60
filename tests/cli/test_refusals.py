"""Wrong command lines: one sentence with what was given and what is allowed, and the right code."""

import os

import pytest

from hyperpodrun.cli.options import OPTIONS

SECRET_HINT = "--job-secret-file"
WRONG = [
    # (words, parts of the sentence)
    (["--max-restart-count", "3", "train.py"], ["'--max-restart-count'", "--max-restarts?"]),
    (["--max_restart_count=3", "train.py"], ["'--max_restart_count'", "--max-restarts?"]),
    (["--nproc", "2", "train.py"], ["'--nproc'", "--nproc-per-node?"]),
    (["-nnodes=1", "train.py"], ["'-nnodes'", "--nnodes?"]),
    (["-q", "train.py"], ["'-q'", "--help"]),
    (["--zzzzzz", "train.py"], ["'--zzzzzz'", "--help"]),
    (["--standalone=1", "train.py"], ["--standalone", "no value"]),
    (["--log-dir"], ["--log-dir", "needs a value"]),
    (["--log-dir", "--standalone", "train.py"], ["--log-dir", "'--standalone'", "another option"]),
    ([], ["no script"]),
    (["--nproc-per-node", "2"], ["no script"]),
    (["-m"], ["no script"]),
    (["no_dir/train.py"], ["'no_dir/train.py'", "No such file or directory"]),
    ([""], ["''", "No such file or directory"]),
    (["."], ["'.'", "__main__.py"]),
    (["train.py/x"], ["'train.py/x'", "Not a directory"]),
    (["--no-python", "no-such-program"], ["'no-such-program'", "PATH"]),
    (["--no-python", "program"], ["'program'", "./program"]),
    (["--no-python", "./train.py"], ["'./train.py'", "not executable"]),
    (["--no-python", "./none"], ["'./none'", "no such file"]),
    (["--no-python", "-m", "pkg"], ["--no-python", "--module", "exclude"]),
    (["--run-path", "-m", "pkg"], ["--run-path", "--module", "exclude"]),
    (["-r", "0:1,2:2", "--nproc-per-node=2", "train.py"], ["--redirects", "'0:1,2:2'", "local rank 2", "0 to 1"]),
    (["-t", "1:3", "train.py"], ["--tee", "local rank 1", "allowed: 0"]),
    (["-t", "0:3,0:1", "train.py"], ["--tee", "local rank 0", "twice"]),
    (["--local-ranks-filter", "0,5", "--nproc-per-node=2", "train.py"], ["--local-ranks-filter", "local rank 5"]),
    (["--node-rank", "1", "train.py"], ["--node-rank", "rank 1"]),
    (["--pre-train-args", "x", "train.py"], ["--pre-train-args", "--pre-train-script"]),
    (["--pre-train-script", ".", "train.py"], ["--pre-train-script", "it is a directory"]),
    (["--post-train-args", "x", "train.py"], ["--post-train-args", "--post-train-script"]),
    (["--server-host", "0.0.0.0", "train.py"], ["--server-host", "'0.0.0.0'", SECRET_HINT]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "parts"), WRONG, ids=[" ".join(words) or "nothing" for words, _ in WRONG])
def test_wrong_command_lines_say_what_is_wrong(launcher, words, parts):
    sentence = launcher.refusal(*words)
    assert not [part for part in parts if part not in sentence], sentence


BAD_VALUES = {
    "nproc-per-node": ["0", "-1", "4(x2)", "1.5", "1_0", "٣", "tpu", "", "99999999999999999999"],
    "nnodes": ["0", "2:1", "1:2:3", "1:", ":2", "a", "-1:2"],
    "max-restarts": ["-1", "many", "1e3", ""],
    "restart-window": ["0", "-1", "nan", "inf", "1_0", "soon", "", "1e99"],
    "max-node-failures": ["-1"],
    "max-rank-faults": ["0", "-1", "x"],
    "exit-skew-timeout": ["0"],
    "shutdown-timeout": ["-1", "nan", "30s"],
    "shutdown-signal": ["SIGINT", "sigterm", "15"],
    "signals-to-handle": ["SIGKILL", "SIGSTOP", "SIGCHLD", "SIGWINCH", "SIGRTMIN", "SIGNONE", "", "SIGTERM,", "SIG_IGN"],
    "master-port": ["-1", "65536", "http"],
    "mesh-port": ["-1", "65536"],
    "data-port": ["-1", "65536"],
    "server-port": ["-2", "65536"],
    "node-rank": ["-1", "x"],
    "redirects": ["4", "x", "0:4", "0:", "-1:1", "0:1,", "1:1:1", ""],
    "tee": ["4", "0:9"],
    "local-ranks-filter": ["x", "-1", "1,,2", "0:1"],
    "start-method": ["thread", ""],
    "numa-binding": ["numa"],
    "preload": ["a b", "torch,", "torch.", "1a", ""],
    "job-id": ["", "a\nb", "x" * 201],
    "role": [""],
    "log-dir": [""],
    "master-addr": ["", "a b", "a/b", "[::1", "host:80"],
    "rdzv-endpoint": ["host:port", "host:70000", "[::1]29400", "[::1]:", ":29400"],
    "rdzv-conf": ["a", "a=", "=b", "join_timeout=x", "join_timeout=0", "a=1,,b=2"],
    "peers": ["", "a,", "a:0", "a:x", "@/no/such/file", "@", "@.", "slurm:", "slurm:x", "dns:name", "dns::80", "dns:a:0", "a b"],
    "job-secret-file": ["/no/such/file", "train.py", "."],
    "spares": ["-1", "x"],
    "elastic-join": ["later"],
    "failure-detector": ["slow"],
    "on-quorum-loss": ["die", "continue", "continue:", "continue:0", "hold:1"],
    "inprocess-timeout": ["0"],
    "abort-timeout": ["0"],
    "health-interval": ["-1"],
    "hang-timeout": ["0"],
    "pre-train-script": ["", "none.sh", "."],
    "pre-train-args": ["'open"],
    "post-train-script": ["none.sh"],
    "server-host": ["", "a b"],
    "monitor-interval": ["-1", "x"],
    "event-log-handler": [""],
    "rdzv-backend": [""],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BAD_VALUES.items() for text in texts])
def test_bad_values_are_repeated_and_blamed_on_their_source(launcher, name, text):
    shown = text.replace("\n", "\\n")[:190]
    if text or name not in ("rdzv-endpoint", "rdzv-conf", "local-ranks-filter"):
        sentence = launcher.refusal(f"--{name}={text}", "train.py")
        assert f"--{name}: '{shown}" in sentence and "allowed: " in sentence
    for variable in (f"PET_{name.upper().replace('-', '_')}", f"HYPERPODRUN_{name.upper().replace('-', '_')}"):
        if text:
            sentence = launcher.refusal("train.py", **{variable: text})
            assert f"{variable}: '{shown}" in sentence and "allowed: " in sentence
        else:
            launcher.job("train.py", **{variable: text})


def test_every_option_with_a_restricted_value_has_bad_values_here():
    free = {"duplicate-stdout-filters", "duplicate-stderr-filters", "rdzv-id", "post-train-args", "local-addr", "logs-specs"}
    assert {option.name for option in OPTIONS if not option.is_switch} == set(BAD_VALUES) | free


def test_bad_switch_variables_are_blamed(launcher):
    assert "PET_STANDALONE: 'perhaps'" in launcher.refusal("train.py", PET_STANDALONE="perhaps")
    assert "HPCT_USE_ROOTLESS: 'x'" in launcher.refusal("train.py", HPCT_USE_ROOTLESS="x")
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT: 'x'" in launcher.refusal("train.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="x")


def test_several_nodes_need_contact_points(launcher):
    for words in (["--nnodes=2"], ["--nnodes", "1:3"], ["--nnodes", "2", "--rdzv-endpoint=localhost:0"]):
        sentence = launcher.refusal(*words, "train.py")
        assert "--nnodes: " in sentence and "--peers" in sentence and "--rdzv-endpoint" in sentence
    assert "PET_NNODES: " in launcher.refusal("train.py", PET_NNODES="2")
    assert "--spares: " in launcher.refusal("--spares=1", "train.py")


def test_contact_points_on_other_hosts_need_a_secret(launcher, tmp_path):
    words = ("--nnodes=2", "train.py")
    for contact in ("--peers=127.0.0.1,10.0.0.1", "--peers=dns:pods:1", "--rdzv-endpoint=10.0.0.1:29500", "--master-addr=node7"):
        sentence = launcher.refusal(contact, *words, code=78)
        assert SECRET_HINT in sentence and "--insecure-mesh" in sentence, contact
    assert SECRET_HINT in launcher.refusal(*words, code=78, SLURM_JOB_NODELIST="n[1-2]")
    assert SECRET_HINT in launcher.refusal("--peers=10.0.0.1", *words, code=78, HYPERPODRUN_JOB_SECRET="")
    for contact in ("127.0.0.1,localhost,[::1]:5", "127.1.2.3:4"):
        launcher.job(f"--peers={contact}", *words)
    launcher.job("--peers=10.0.0.1", "--insecure-mesh", *words)
    launcher.job("--peers=10.0.0.1", *words, HYPERPODRUN_JOB_SECRET="x" * 32)
    assert "31 bytes" in launcher.refusal("--peers=10.0.0.1", *words, code=78, HYPERPODRUN_JOB_SECRET="x" * 31)
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 32)
    secret.chmod(0o600)
    launcher.job("--peers=10.0.0.1", f"--job-secret-file={secret}", *words)


def test_node_ranks_go_up_to_the_last_spare(launcher):
    words = ("--nnodes=2", "--spares=1", "--peers=127.0.0.1:1", "train.py")
    assert launcher.job("--node-rank=2", *words).node_rank == 2
    assert "0 to 2" in launcher.refusal("--node-rank=3", *words)


def test_standalone_and_further_nodes_exclude_each_other(launcher):
    for name in ("--nnodes=2", "--nnodes=2:4", "--spares=1"):
        sentence = launcher.refusal("--standalone", name, "--peers=127.0.0.1:1", "train.py")
        assert "--standalone" in sentence and name.partition("=")[0] in sentence and "exclude" in sentence


def test_times_for_finding_each_other_are_times(launcher):
    words = ("--nnodes=2", "--peers=127.0.0.1:1", "train.py")
    for pair in ("last_call_timeout=soon", "join_timeout=-1", "last_call_timeout=nan"):
        assert pair.partition("=")[2] in launcher.refusal(f"--rdzv-conf={pair}", *words)


def test_an_unusable_log_folder_is_the_machines_fault(launcher, tmp_path):
    for path, reason in (
        ("train.py", "not a directory"),
        ("train.py/logs", "Not a directory"),
        ("/proc/none/logs", "No such"),
        ("/proc", "No such"),
    ):
        sentence = launcher.refusal("--log-dir", path, "train.py", code=78)
        assert f"--log-dir: log files cannot be written under '{path}'" in sentence and reason in sentence
    assert "PET_LOG_DIR" in launcher.refusal("train.py", PET_LOG_DIR="train.py", code=78)
    launcher.job("--log-dir", str(tmp_path / "new" / "logs"), "train.py")
    assert os.listdir(tmp_path / "new" / "logs") == []


def test_an_address_that_leads_nowhere_is_refused_before_ranks_wait_for_it(launcher):
    sentence = launcher.refusal("--master-addr=node7.invalid", "train.py", code=78)
    assert "--master-addr: the host 'node7.invalid' cannot be resolved (Name or service not known)" in sentence
    assert "PET_LOCAL_ADDR: " in launcher.refusal("train.py", code=78, PET_LOCAL_ADDR="node7.invalid")
    assert launcher.job("--master-addr=here", "--local-addr=node7.invalid", "train.py").master_addr == "here"


def test_a_missing_interpreter_is_the_machines_fault(launcher):
    assert "PYTHON_EXEC: the program 'no-python-here'" in launcher.refusal("train.py", PYTHON_EXEC="no-python-here", code=78)


def test_secrets_that_others_can_read_or_that_are_short_are_refused(launcher, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 31)
    secret.chmod(0o600)
    assert "31 bytes" in launcher.refusal("--job-secret-file", str(secret), "train.py")
    secret.write_bytes(b"x" * 32)
    assert launcher.job("--job-secret-file", str(secret), "--server-host", "0.0.0.0", "train.py").notes
    assert "exclude" in launcher.refusal("--job-secret-file", str(secret), "--insecure-mesh", "train.py")
    secret.chmod(0o604)
    assert "every user" in launcher.refusal("--job-secret-file", str(secret), "train.py")


def test_pipes_and_devices_are_no_secrets(launcher, tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (str(tmp_path / "pipe"), "/dev/zero"):
        assert "no regular file" in launcher.refusal("--job-secret-file", path, "train.py")


def test_numbers_beyond_all_bounds_are_just_bad_values(launcher):
    for name in (
        "max-restarts",
        "nnodes",
        "nproc-per-node",
        "master-port",
        "local-ranks-filter",
        "redirects",
        "shutdown-timeout",
    ):
        launcher.refusal(f"--{name}={'9' * 5000}", "train.py")
    launcher.refusal(f"--redirects={'9' * 5000}:1", "train.py")


def test_a_script_that_may_not_be_read_is_refused(launcher, monkeypatch):
    def refuse(path, *more):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "open", refuse)
    assert "'train.py' cannot be opened: Permission denied" in launcher.refusal("train.py")


def test_the_file_of_contact_points_is_read(launcher, tmp_path):
    peers = tmp_path / "peers"
    peers.write_text("# the nodes\nnode1:29400\n\n node2 # second\n[::1]:1,\n")
    launcher.job("--peers", f"@{peers}", "train.py")
    peers.write_text("node1:29400\nnode2:0\n")
    assert "'0'" in launcher.refusal("--peers", f"@{peers}", "train.py")
    peers.write_text("# none\n")
    assert "no host" in launcher.refusal("--peers", f"@{peers}", "train.py")
    launcher.job("--peers", "slurm:", "train.py", SLURM_JOB_NODELIST="n[1-2]")


def test_undecodable_and_long_texts_are_shown_safely(launcher):
    assert "'no\\xff\\x1b[1m.py'" in launcher.refusal(os.fsdecode(b"no\xff\x1b[1m.py"))
    assert len(launcher.refusal("--role", "\a" * 5000, "train.py")) < 600


@pytest.mark.parametrize(
    ("orders", "part"),
    [
        ("boom@rank=1", "'boom'"),
        ("exception@bogus=2", "'bogus=2'"),
        ("exception@step=x", "'exception@step=x'"),
        ("@none.txt", "cannot be read"),
    ],
)
def test_wrong_orders_for_planted_faults_are_refused(launcher, orders: str, part: str) -> None:
    sentence = launcher.refusal("train.py", HYPERPODRUN_INJECT=orders)
    assert "HYPERPODRUN_INJECT" in sentence and part in sentence

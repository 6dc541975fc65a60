"""Help, dry run and docs/OPTIONS.md: made from the table, readable anywhere."""

import io

import pytest

from hyperpodrun.cli import options_doc
from hyperpodrun.cli.help import default_of, help_text, names_of
from hyperpodrun.cli.options import BY_NAME, GROUPS, OPTIONS


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_names_groups_and_defaults_of_the_table_are_sound():
    forms = [form for option in OPTIONS for form in (option.name, option.short) if form]
    assert len(forms) == len(set(forms))
    assert {option.group for option in OPTIONS} == set(GROUPS)
    assert not [option.name for option in OPTIONS if "_" in option.name or option.name != option.name.lower()]
    for option in OPTIONS:
        assert option.help.endswith("."), option.name
        assert not (option.note or "").endswith("."), option.name
        assert option.is_switch or option.default is None or option.kind.parse(option.default) is not None


def test_help_shows_every_option_and_group(launcher):
    text = launcher("--help").out
    assert not [group for group in GROUPS if f"\n{group}\n" not in text]
    assert not [option.name for option in OPTIONS if f"  {names_of(option)}" not in text]


def test_help_is_plain_and_fits_80_columns_when_piped(launcher):
    outcome = launcher("--help", FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b" not in outcome.out and outcome.out.isascii()
    assert max(len(line) for line in outcome.out.split("\n")) <= 80
    assert not [line for line in outcome.out.split("\n") if line != line.rstrip()]


def test_help_uses_the_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    narrow = help_text(Terminal())
    assert "\x1b[1m" in narrow
    assert "\x1b" not in help_text(io.StringIO())
    assert max(len(line) for line in help_text(io.StringIO()).split("\n")) <= 60


@pytest.mark.parametrize("columns", ["0", "1", "99999", "x", "-5"])
def test_odd_terminal_widths_do_no_harm(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert "--max-restarts N" in help_text(io.StringIO())


def test_the_document_is_what_the_table_says():
    assert options_doc.PATH.read_text(encoding="utf-8") == options_doc.document(), (
        "docs/OPTIONS.md is out of date: python -m hyperpodrun.cli.options_doc --write"
    )


def test_the_document_has_every_option_with_default_and_note():
    text = options_doc.document()
    for option in OPTIONS:
        section = text.partition(f"### `{names_of(option)}`\n")[2].partition("\n##")[0]
        assert option.help in section and default_of(option) in section and (option.note or "") in section, option.name


# --- dry run


def test_a_dry_run_starts_nothing_and_tells_where_values_come_from(launcher, tmp_path):
    logs = tmp_path / "logs"
    outcome = launcher(
        "--dry-run", "--nproc-per-node=2", "-t", "0:3", "-r", "2", "--log-dir", str(logs), "--health-interval=1", "--rdzv-id=my-job",
        "train.py", "two words", "--x", PET_MAX_RESTARTS="4", PET_ROLE="cook",
        HYPERPODRUN_STATUS_FILE="/x", RANK="0",
    )  # fmt: skip
    assert (outcome.code, outcome.job, outcome.err) == (0, None, "")
    assert not logs.exists()
    rows = [" ".join(line.split()) for line in outcome.out.split("\n")]
    for wanted in (
        "max-restarts 4 from PET_MAX_RESTARTS",
        "nproc-per-node 2 from --nproc-per-node",
        "role cook from PET_ROLE",
        "job-id my-job from --rdzv-id",
        "rank 0 (local rank 0): stdout to the console and a file, stderr to the console and a file",
        "rank 1 (local rank 1): stdout to the console, stderr to a file",
        "WORLD_SIZE=2",
        "OMP_NUM_THREADS=1",
        "MASTER_PORT=(a free port)",
        "MASTER_ADDR=127.0.0.1",
        "rank 1: RANK=1 LOCAL_RANK=1 ROLE_RANK=1",
        "HYPERPODRUN_STATUS_FILE is unset",
        f"{logs}/my-job_(random)/attempt_0/0/stdout.log",
        f"{logs}/my-job_(random)/attempt_0/1/stderr.log",
    ):
        assert wanted in rows, outcome.out
    assert "train.py 'two words' --x\n" in outcome.out
    assert "--health-interval: " in outcome.out
    assert "Nodes" not in outcome.out
    assert f"{logs}/my-job_(random)/attempt_0/1/stdout.log" not in rows


def test_a_dry_run_shows_how_the_nodes_find_each_other(launcher, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 32)
    secret.chmod(0o600)
    words = ["--dry-run", "--nnodes=2:3", "--spares=1", "--peers=127.0.0.1:7001,127.0.0.1:7002", "--nproc-per-node=2", "train.py"]

    def rows(*more, **variables):
        outcome = launcher(*more, *words, **variables)
        assert (outcome.code, outcome.err) == (0, ""), outcome.err
        return [" ".join(line.split()) for line in outcome.out.split("\n")]

    alone = rows("--mesh-port=7002", "--rdzv-endpoint=localhost:7009", "--elastic-join=restart")
    for wanted in (
        "2 to 3 nodes train, 1 more stand by; the first world is waited for up to 600 s",
        "this node: called 127.0.0.1:7002, mesh port 7002",
        "contact points: 127.0.0.1:7001, 127.0.0.1:7002, localhost:7009",
        "mesh: not encrypted, within this host only (no job secret was given)",
        "nodes that come later are taken in at the next restart",
        "WORLD_SIZE=6",
        "GROUP_WORLD_SIZE=3",
        "MASTER_ADDR=127.0.0.1",
        "HYPERPODRUN_RANK0_ADDR=(rank 0's node)",
        "--rdzv-endpoint: taken as one more contact point, nothing is hosted there",
    ):
        assert wanted in alone, "\n".join(alone)
    assert any(row.startswith("job-id mesh-") and row.endswith("from the contact points") for row in alone)
    encrypted = "mesh: encrypted, only for agents with the job secret (from {})"
    assert encrypted.format(secret) in rows(f"--job-secret-file={secret}")
    assert encrypted.format("HYPERPODRUN_JOB_SECRET") in rows(HYPERPODRUN_JOB_SECRET="x" * 32)
    assert "mesh: not encrypted, open to whoever reaches the port (--insecure-mesh)" in rows("--insecure-mesh")
    slurm = rows("--peers=slurm:", "--insecure-mesh", SLURM_JOB_NODELIST="n[1-2]")
    assert "contact points: 127.0.0.1:7001, 127.0.0.1:7002" in slurm, "the last --peers counts"
    text = launcher("--dry-run", "--nnodes=2", "--insecure-mesh", "train.py", SLURM_JOB_NODELIST="n[1-2]").out
    assert "contact points: slurm:\n" in text and "this node: mesh port 29400; its name is its contact point's\n" in text


def test_a_dry_run_names_the_source_of_a_job_id_that_nobody_gave(launcher):
    assert "from SLURM_JOB_ID" in launcher("--dry-run", "train.py", SLURM_JOB_ID="7").out
    assert "from chance" in launcher("--dry-run", "train.py").out


def test_a_dry_run_refuses_what_a_run_would_refuse(launcher, tmp_path):
    assert "train.py" in launcher.refusal("--dry-run", "--log-dir", "train.py/logs", "train.py", code=78)
    assert "none.py" in launcher.refusal("--dry-run", "none.py")
    assert launcher("train.py", HYPERPODRUN_DRY_RUN="1").out


def test_a_dry_run_shows_each_ranks_device(launcher):
    words = ("--dry-run", "--virtual-local-rank", "--nproc-per-node=2", "train.py")
    text = launcher(*words, CUDA_VISIBLE_DEVICES="3,1").out
    assert "  rank 0: CUDA_VISIBLE_DEVICES=3 RANK=0 ROLE_RANK=0\n  rank 1: CUDA_VISIBLE_DEVICES=1 RANK=1 ROLE_RANK=1\n" in text
    assert "CUDA_VISIBLE_DEVICES=3" in launcher.refusal(*words, code=78, CUDA_VISIBLE_DEVICES="3")


def test_every_torchrun_option_is_there():
    """The list of `torchrun --help`, release 2.13."""
    torchrun = {
        "help", "nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "standalone", "max-restarts",
        "monitor-interval", "start-method", "event-log-handler", "role", "module", "no-python", "run-path", "log-dir",
        "redirects", "tee", "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters", "node-rank",
        "master-addr",
        "master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle", "shutdown-timeout", "virtual-local-rank",
    }  # fmt: skip
    assert {option.name for option in OPTIONS if option.origin == "torchrun"} == torchrun
    assert [(name, BY_NAME[name].short) for name in ("module", "redirects", "tee", "help")] == [
        ("module", "-m"), ("redirects", "-r"), ("tee", "-t"), ("help", "-h")
    ]  # fmt: skip


@pytest.mark.torch
def test_torchruns_own_parser_has_no_other_options():
    run = pytest.importorskip("torch.distributed.run")
    strings = {name for action in run.get_args_parser()._actions for name in action.option_strings}
    ours = {form for option in OPTIONS for form in (option.flag, option.short)}
    assert {name.replace("_", "-") for name in strings} <= ours

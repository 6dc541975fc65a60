"""The environment of a rank: torchrun's variables, our own, and nothing of an outer job's."""

import pytest

from hyperpodrun.agent.config import JobConfig, MeshConfig
from hyperpodrun.agent.wire import names
from hyperpodrun.agent.wire.launch import Program
from hyperpodrun.agent.workers import environment


def config(**more):
    fields = {
        "program": Program("script", "a.py", ("--r=${local_rank}", "x${local_rank}y${local_rank}", "$local_rank")),
        "job_id": "job",
    }
    return JobConfig(**{**fields, "nproc_per_node": 2, "max_restarts": 3, "role": "cook", **more})


def rank_env(config, base=None, **more):
    place = {
        "local_rank": 1, "rank": 5, "world_size": 8, "group_rank": 2, "group_world_size": 4, "restart_count": 1,
        "generation": 7, "node": "n2", "master_addr": "h", "master_port": 1234, "error_file": "/e", "family": "f",
        "use_agent_store": False, "rank0_addr": "r0", "link": "", "visible_device": None,
    }  # fmt: skip
    pairs = environment.worker_env(config, base or {}, **{**place, **more})
    assert len(dict(pairs)) == len(pairs)
    return {name.decode(): value.decode(errors="surrogateescape") for name, value in pairs}


def test_torchruns_variables():
    env = rank_env(config())
    wanted = dict(  # noqa: C408
        RANK="5", LOCAL_RANK="1", WORLD_SIZE="8", LOCAL_WORLD_SIZE="2", GROUP_RANK="2", GROUP_WORLD_SIZE="4",
        ROLE_RANK="5", ROLE_WORLD_SIZE="8",
        ROLE_NAME="cook", MASTER_ADDR="h", MASTER_PORT="1234", TORCHELASTIC_RESTART_COUNT="1", TORCHELASTIC_MAX_RESTARTS="3",
        TORCHELASTIC_RUN_ID="job",
        TORCHELASTIC_USE_AGENT_STORE="False", TORCHELASTIC_ERROR_FILE="/e",
        TORCH_NCCL_ASYNC_ERROR_HANDLING="1", OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert {name: env.get(name) for name in wanted} == wanted


def test_own_variables():
    env = rank_env(config())
    wanted = {
        names.JOB_ID: "job", names.GENERATION: "7", names.NODE: "n2", names.FAMILY: "f", names.JOB_RESTART_COUNT: "1",
        names.SPARE: "0", names.RANK0_ADDR: "r0", names.STATE_OWNER: "f",
    }  # fmt: skip
    assert {name: env.get(name) for name in wanted} == wanted


def test_several_agents_of_a_job_on_one_host_share_what_it_keeps_there():
    """Each has a mark of its own."""
    assert rank_env(config(mesh=MeshConfig()))[names.STATE_OWNER] == ""


def test_agents_own_store_has_its_address_in_a_variable():
    own = rank_env(config(), use_agent_store=True, master_addr="::1", master_port=77)
    assert own[names.STORE] == "tcp://[::1]:77" and names.STORE not in rank_env(config())


def test_link_is_where_the_agent_listens():
    assert rank_env(config(), link="unix:/r/link")[names.LINK] == "unix:/r/link"
    assert names.LINK not in rank_env(config(), {b"HYPERPODRUN_LINK": b"unix:/of/an/outer/job"})


def test_stale_variables_are_replaced_and_secrets_dropped():
    base = {name.encode(): b"stale" for name in names.PER_RANK | names.NEVER_IN_WORKERS} | {b"MINE": b"\xff"}
    env = rank_env(config(), base)
    assert "stale" not in env.values()
    assert env["MINE"] == "\udcff"
    assert not names.NEVER_IN_WORKERS & env.keys()
    common = environment.common_env(config(), base)
    assert {name for name, value in common.items() if value == b"stale"} == {names.FAMILY.encode()}


@pytest.mark.parametrize("processes, given, wanted", [(1, None, None), (2, None, "1"), (2, "5", "5"), (1, "5", "5"), (2, "", "")])
def test_threads_of_openmp(processes, given, wanted):
    base = {} if given is None else {b"OMP_NUM_THREADS": given.encode()}
    assert rank_env(config(nproc_per_node=processes), base).get("OMP_NUM_THREADS") == wanted


@pytest.mark.parametrize(
    "rootless, base, wanted",
    [
        (True, {}, ("1", "1")),
        (True, {b"TORCH_SKIP_TCPSTORE": b"0"}, ("1", "0")),
        (False, {}, ("0", None)),
        (False, {b"HPCT_USE_ROOTLESS": b"no", b"TORCH_SKIP_TCPSTORE": b"1"}, ("no", "1")),
    ],
)
def test_store_variables_are_defaults(rootless, base, wanted):
    env = rank_env(config(rootless=rootless), base)
    assert (env.get(names.USE_ROOTLESS), env.get(names.SKIP_TCPSTORE)) == wanted


def test_virtual_local_rank():
    env = rank_env(config(virtual_local_rank=True), {b"CUDA_VISIBLE_DEVICES": b"3,4"}, visible_device="4")
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", "4")


def test_devices_are_inherited_otherwise():
    assert rank_env(config(), {b"CUDA_VISIBLE_DEVICES": b"3,4"})["CUDA_VISIBLE_DEVICES"] == "3,4"


def test_local_rank_in_arguments():
    assert environment.worker_argv(config(), 1) == [b"--r=1", b"x1y1", b"$local_rank"]
    assert environment.worker_argv(config(program=Program("script", "a", ("\udce4",))), 0) == [b"\xe4"]


def test_large_worlds_meet_in_other_ways_than_small_ones():
    for size in (2, 64):
        assert not environment.FOR_MANY_RANKS.keys() & rank_env(config(), world_size=size).keys()
    assert environment.FOR_MANY_RANKS.items() <= rank_env(config(), world_size=65).items()
    assert environment.FOR_MANY_RANKS.items() <= rank_env(config(), world_size=3, many_ranks=2).items()
    lazy = "TORCH_GLOO_LAZY_INIT"
    assert rank_env(config(), {lazy.encode(): b"0"}, world_size=65)[lazy] == "0"

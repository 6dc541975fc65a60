"""Door 1 with the TCPStore clients of other versions of torch than the one installed beside the launcher.

HYPERPODRUN_TORCHES names their interpreters, `:` between them (`/venvs/torch-2.4/bin/python:/venvs/torch-2.9/bin/python`).
"""

import json
import os
import subprocess

import pytest

INTERPRETERS = [path for path in os.environ.get("HYPERPODRUN_TORCHES", "").split(os.pathsep) if path]
LIMIT_S = 300  # the interpreter may be an emulated one

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.timeout(2 * LIMIT_S),
    pytest.mark.skipif(not INTERPRETERS, reason="HYPERPODRUN_TORCHES names no interpreter with another torch"),
]

OPERATIONS = """
import datetime, json, os, sys
import torch, torch.distributed as dist
def seconds(number):
    return datetime.timedelta(seconds=number)
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timeout=seconds(120), wait_for_workers=False)
did = {"torch": torch.__version__}
def check(name, got, wanted):
    assert got == wanted, f"{name}: {got!r} instead of {wanted!r}"
    did[name] = True
for where, one in (("direct", store), ("prefix", dist.PrefixStore("deep", store))):
    one.set("k", b"\\0v\\xff")
    check(where + " get", one.get("k"), b"\\0v\\xff")
    check(where + " add", [one.add("n", 5), one.add("n", -7), one.get("n")], [5, -2, b"-2"])
    check(where + " compare_set", [one.compare_set("c", "", "a"), one.compare_set("c", "x", "b")], [b"a", b"a"])
    check(where + " check", [one.check(["k", "n"]), one.check(["k", "missing"])], [True, False])
    one.wait(["k", "n"])
    try:
        one.wait(["missing"], seconds(0.3))
        check(where + " patience", "no end", "an error")
    except RuntimeError:
        check(where + " patience", one.get("c"), b"a")
    check(where + " delete", [one.delete_key("c"), one.delete_key("c")], [True, False])
    check(where + " num_keys", one.num_keys() >= 2, True)
    if hasattr(one, "append"):
        one.append("k", "more")
        one.multi_set(["m1", "m2"], ["1", "2"])
        check(where + " multi_get", one.multi_get(["m2", "m1", "k"]), [b"2", b"1", b"\\0v\\xffmore"])
    if hasattr(one, "queue_push") and where == "direct":
        one.queue_push("q", "item")
        check("queue", [one.queue_len("q"), one.queue_pop("q"), one.queue_len("q")], [1, b"item", 0])
    if hasattr(one, "list_keys") and where == "direct":
        check("list_keys", {"k", "n"} <= set(one.list_keys()), True)
copy = store.clone() if hasattr(store, "clone") else store
check("clone", copy.get("n"), b"-2")
print(json.dumps(did), flush=True)
os._exit(0)  # no word at the end: the connections just close
"""

GROUPS = """
import json, os, sys
import torch, torch.distributed as dist
sums = []
for turn in range(2):
    dist.init_process_group("gloo")
    value = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(value)
    half = dist.new_group([0, 1])
    dist.barrier(half)
    sums.append(value.item())
    dist.destroy_process_group()
print(json.dumps({"sums": sums}), flush=True)
os._exit(0)
"""


def started(interpreter, code, *args, env=None):
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return subprocess.Popen(
        [interpreter, "-W", "ignore", "-c", code, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean | {"OMP_NUM_THREADS": "1"} | (env or {}),
    )


def answer(process):
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, f"{out}\n{err}"
    return json.loads(out.splitlines()[-1])  # gloo prints too


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_its_client_is_served(served, interpreter):
    did = answer(started(interpreter, OPERATIONS, str(served.port)))
    print(did)
    assert all(did.values()) and len(did) >= 16
    assert not served.said


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_its_process_groups_form_twice(served, interpreter):
    env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(served.port),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [started(interpreter, GROUPS, env=env | {"RANK": str(rank)}) for rank in range(2)]
    assert [answer(rank) for rank in ranks] == [{"sums": [3.0, 3.0]}] * 2
    assert not served.said

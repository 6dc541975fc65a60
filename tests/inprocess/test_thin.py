from hyperpodrun.agent.wire import link

SCRIPT = """
from hyperpodrun.inprocess.wrap import HPWrapper
import time
@HPWrapper
def main(x, caller=None):
    print("enter", caller.generation, caller.rank, caller.restart_mode, flush=True)
    if caller.generation == 0:
        time.sleep(1000)
    if caller.generation == 1:
        raise ValueError("boo")
    return x + 1
print("value", main(41), flush=True)
"""


def test_thin(agent):
    agent.start(SCRIPT)
    agent.await_message(link.AtBarrier)
    agent.enter()
    agent.await_line("enter 0")
    agent.interrupt()
    assert agent.await_message(link.AtBarrier, count=2).generation == 0
    agent.enter("inplace")
    fault = agent.await_message(link.Fault)
    assert fault.kind == "ValueError" and fault.headline == "ValueError: boo" and "raise ValueError" in fault.text
    assert agent.await_message(link.AtBarrier, count=3).generation == 1
    agent.enter("inplace")
    agent.await_message(link.Returned)
    agent.release()
    assert agent.code() == 0
    assert agent.lines()[-1] == "value 42"


GLOO = """
import os, time, faulthandler, torch, torch.distributed as dist
from hyperpodrun.inprocess.wrap import HPWrapper
@HPWrapper
def main(caller=None):
    g, r = caller.generation, caller.rank
    faulthandler.dump_traceback_later(2)
    dist.init_process_group("gloo")
    faulthandler.cancel_dump_traceback_later()
    x = torch.ones(1)
    dist.all_reduce(x)
    print("up", g, time.monotonic(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), flush=True)
    if g == 0 and r == 1:
        raise ValueError("boo")
    if g == 1 and r == 2:
        os._exit(7)
    if g == 2 and r == 0:
        dist.recv(x, 1, tag=99)
    if g == 3 and r == 0:
        time.sleep(0.05)
        raise ValueError
    if g < 9 :
        if r == g % 3: raise ValueError
    if g < 9: dist.all_reduce(x)
    dist.barrier()
    dist.destroy_process_group()
    return g
print("value", main(), flush=True)
"""


def test_gloo(agent_of):
    agent = agent_of(3, store=True)
    agent.start(GLOO)
    agent.play(until_generation=2)
    agent.playing = True
    agent.await_line("up 2", rank=0)
    agent.end_generation("hang")
    agent.play()
    for r in range(3):
        print(agent.output(r))
    for a, b in zip(agent.times, agent.times[1:]):
        print(b[0], b[1], b[2] - a[2])
    assert all("value" in agent.lines(r)[-1] for r in range(3))

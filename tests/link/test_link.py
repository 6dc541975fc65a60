"""The worker's end of the link: threads, forks, signals, exits, and an agent that is stopped or killed."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from hyperpodrun.agent.wire import link as wire
from hyperpodrun.agent.wire import names
from hyperpodrun.link import Inbox, Link, LinkLost, LinkStuck, NoLauncher
from hyperpodrun.link import link as module

HEAD = """
import os, signal, sys, threading, time
from hyperpodrun.agent.wire import link as wire
from hyperpodrun.link import Inbox, Link, LinkLost
"""


@pytest.fixture
def own(monkeypatch):
    """`own(address)`: the link of this process to there."""

    def connect(where):
        monkeypatch.setenv(names.LINK, where)
        return Link.current()

    yield connect
    link = module._current.pop(os.getpid(), None)
    if link is not None:
        link._close()
        link._close_descriptors()


def test_outside_hyperpodrun_there_is_no_link(monkeypatch):
    for value in ("", "tcp://127.0.0.1:1"):
        monkeypatch.setenv(names.LINK, value)
        with pytest.raises(NoLauncher, match="start the program with hyperpodrun"):
            Link.current()


def test_agent_answers_and_the_object_is_one_a_process(agent, own):
    link = own(agent.door.address)
    assert Link.current() is link
    inbox = Inbox(link)
    link.send(wire.Hello(0, 3))
    assert inbox.get(60) == wire.Welcome(inplace=True, abort_timeout_s=1.0)
    assert agent.messages == [wire.Hello(0, 3)]
    with pytest.raises(TimeoutError):
        inbox.get(0.01)


def test_what_came_before_anybody_listened_is_given_to_the_first(agent, own):
    link = own(agent.door.address)
    link.send(wire.Hello(0, 0))
    link.send(wire.Returned(1))
    while len(link._kept) < 2:
        time.sleep(0.001)
    inbox = Inbox(link)
    assert [type(inbox.get(60)) for _ in range(2)] == [wire.Welcome, wire.Released]


def test_messages_of_many_threads_arrive_whole_and_in_each_threads_order(agent, own):
    link = own(agent.door.address)

    def tell(number):
        for n in range(1000):
            link.send(wire.Fault(n, f"{number}", "x" * n))

    threads = [threading.Thread(target=tell, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    agent.wait(lambda: len(agent.heard) == 8000)
    for number in range(8):
        mine = [m for m in agent.messages if m.kind == f"{number}"]
        assert [m.generation for m in mine] == list(range(1000))
        assert all(len(m.headline) == m.generation for m in mine)


def test_too_long_a_message_is_refused_and_the_link_stays(agent, own):
    link = own(agent.door.address)
    with pytest.raises(ValueError, match="too long"):
        link.send(wire.Fault(0, "", "", "x" * wire.PACKET_BYTES))
    link.send(wire.Fault(0, "", "", "x" * (wire.PACKET_BYTES - 128)))
    agent.wait(lambda: len(agent.heard) == 1)


def test_signal_handler_that_raises_leaves_the_link_whole(agent, worker):
    process = worker(agent.door.address, HEAD + """
class Leave(BaseException):
    pass

def handler(*_):
    raise Leave

sent, torn = [], 0
number = 0
signal.signal(signal.SIGALRM, handler)
while torn < 300:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.00005 + (number % 40) * 0.00001)
        link = Link.current()
        while True:
            number += 1
            link.send(wire.AtBarrier(number))
            sent.append(number)
    except Leave:
        torn += 1
while True:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        break
    except Leave:
        pass
Link.current().send(wire.Returned(0))
print(*sent)
""")  # fmt: skip
    out, err, code = process.end()
    assert (err, code) == ("", 0)
    agent.wait(lambda: agent.heard and agent.messages[-1] == wire.Returned(0))
    arrived = [m.generation for m in agent.messages[:-1]]
    assert arrived == sorted(set(arrived))
    assert set(map(int, out.split())) <= set(arrived)


def test_threads_that_ask_at_once_get_one_link(agent, worker):
    process = worker(agent.door.address, HEAD + """
start = threading.Barrier(16)
found = []

def ask():
    start.wait()
    found.append(Link.current())
    found[-1].send(wire.Hello(0, 0))

threads = [threading.Thread(target=ask) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
inbox = Inbox(found[0])
for _ in range(16):
    inbox.get(60)
names = [thread.name for thread in threading.enumerate()]
held = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
print(len(set(found)), names.count("hyperpodrun-link"), sum("/socket:" in name or "/anon_inode:" in name for name in held))
""")  # fmt: skip
    assert process.end() == ("1 1 2\n", "", 0)
    assert len({connection for connection, _ in agent.heard}) == 1


def test_signals_are_for_the_other_threads(agent, worker):
    process = worker(agent.door.address, HEAD + """
link = Link.current()
inbox = Inbox(link)
link.send(wire.Hello(0, 0))
inbox.get(60)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.kill(os.getpid(), signal.SIGUSR1)
print(signal.sigwait([signal.SIGUSR1]).name)
""")  # fmt: skip
    assert process.end() == ("SIGUSR1\n", "", 0)


def test_beats_carry_what_the_main_thread_counts(agent, worker):
    process = worker(agent.door.address, HEAD + """
class Counts:
    steps = 0
link = Link.current()
link.beat_with(lambda: wire.Beat(1, "function", steps=Counts.steps))
inbox = Inbox(link)
while True:
    Counts.steps += 1
""")  # fmt: skip
    agent.wait(lambda: len(agent.heard) >= 2)
    first, second = agent.messages[:2]
    assert 0 < first.steps < second.steps
    process.kill()
    agent.wait(lambda: agent.closed)


def test_listener_that_raises_is_shown_and_the_link_goes_on(agent, worker):
    process = worker(agent.door.address, HEAD + """
link = Link.current()
link.subscribe(lambda message: 1 / 0, print)
inbox = Inbox(link)
link.send(wire.Hello(0, 0))
link.send(wire.Returned(0))
inbox.get(60), inbox.get(60)
""")  # fmt: skip
    out, err, code = process.end()
    assert (out, code) == ("", 0) and err.count("ZeroDivisionError") == 2


# --- forks


def test_forked_child_has_no_copy_and_a_link_of_its_own(agent, worker):
    process = worker(agent.door.address, HEAD + """
link = Link.current()
link.send(wire.Hello(0, 0))
inbox = Inbox(link)
inbox.get(60)
mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in (link._socket.fileno(),)}
child = os.fork()
if child == 0:
    held = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            held.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    assert not mine & held
    for wrong in (lambda: link.send(wire.Returned(9)), lambda: inbox.get(60)):
        try:
            wrong()
            os._exit(1)
        except RuntimeError:
            pass
    Link.current().send(wire.Returned(1))
    Inbox(Link.current()).get(60)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
link.send(wire.Returned(2))
assert inbox.get(60) == wire.Released(2)
print(child)
""")  # fmt: skip
    out, err, code = process.end()
    assert (err, code) == ("", 0)
    pids = {type(m).__name__ + str(m.generation): c.pid for c, m in agent.heard}
    assert pids == {"Hello0": process.pid, "Returned2": process.pid, "Returned1": int(out)}


def test_forks_in_the_midst_of_other_threads_messages(agent, worker):
    process = worker(agent.door.address, HEAD + """
link = Link.current()
stop = False
counts = [0, 0]

def tell(number):
    while not stop:
        link.send(wire.Fault(counts[number], f"{number}", ""))
        counts[number] += 1

threads = [threading.Thread(target=tell, args=(number,)) for number in range(2)]
for thread in threads:
    thread.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        Link.current().send(wire.Hello(0, 0))
        Inbox(Link.current()).get(60)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
stop = True
for thread in threads:
    thread.join()
link.send(wire.Returned(0))
print(*counts)
""")  # fmt: skip
    out, err, code = process.end()
    assert (err, code) == ("", 0)
    agent.wait(lambda: any(isinstance(m, wire.Returned) for m in agent.messages))
    for number, count in enumerate(out.split()):
        mine = [m.generation for m in agent.messages if isinstance(m, wire.Fault) and m.kind == f"{number}"]
        assert mine == list(range(int(count)))


def test_end_of_a_worker_is_known_though_its_children_live(agent, worker):
    process = worker(agent.door.address, HEAD + """
Link.current().send(wire.Hello(0, 0))
Inbox(Link.current()).get(60)
child = os.fork()
if child == 0:
    while True:
        signal.pause()
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""")  # fmt: skip
    child = int(process.line())
    try:
        agent.wait(lambda: agent.closed)
        assert agent.closed[0].pid == process.pid
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_speak_for_themselves(agent, worker, tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(HEAD + f"""
import multiprocessing

def child():
    link = Link.current()
    link.send(wire.Hello(0, os.getpid()))
    Inbox(link).get(60)

if __name__ == "__main__":
    link = Link.current()
    inbox = Inbox(link)
    link.send(wire.Hello(0, os.getpid()))
    inbox.get(60)
    children = [multiprocessing.get_context("{method}").Process(target=child) for _ in range(2)]
    for process in children:
        process.start()
    for process in children:
        process.join()
        assert process.exitcode == 0
    link.send(wire.Returned(0))
    inbox.get(60)
""")  # fmt: skip
    process = worker(agent.door.address, script)
    out, err, code = process.end()
    assert (out, err, code) == ("", "", 0)
    hellos = [(c.pid, m.generation) for c, m in agent.heard if isinstance(m, wire.Hello)]
    assert len(hellos) == 3 and all(pid == said for pid, said in hellos)


def test_programs_that_a_worker_runs_inherit_no_descriptor(agent, own):
    link = own(agent.door.address)
    inbox = Inbox(link)
    link.send(wire.Hello(0, 0))
    inbox.get(60)
    held = [os.readlink(f"/proc/self/fd/{link._socket.fileno()}"), "anon_inode:[eventfd]"]
    shown = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True).stdout
    assert "/proc" in shown and not [name for name in held if name in shown]


# --- exits


@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "threading.Thread(target=time.sleep, args=(0.05,)).start()"])
def test_last_words_are_sent_and_the_interpreter_ends_in_peace(agent, worker, ending):
    process = worker(agent.door.address, HEAD + f"""
link = Link.current()
inbox = Inbox(link)
threading.Thread(target=inbox.get, daemon=True).start()
for n in range(200):
    link.send(wire.Fault(n, "", "x" * 1000))
{ending}
""")  # fmt: skip
    assert process.end() == ("", "", 0)
    agent.wait(lambda: len(agent.heard) == 200)


def test_exit_does_not_wait_for_an_agent_that_is_stopped(lone_agent, worker):
    process = worker(lone_agent.address, HEAD + """
link = Link.current()
inbox = Inbox(link)
link.send(wire.Hello(0, 0))
inbox.get(60)
print("up", flush=True)
input()
for n in range(200):
    link.send(wire.Fault(n, "", "", "x" * 10000))
""")  # fmt: skip
    assert process.line() == "up"
    lone_agent.process.send_signal(signal.SIGSTOP)
    out, err, code = process.communicate("\n", timeout=60), None, process.returncode
    assert (out, err, code) == (("", ""), None, 0)


# --- the agent ends


def test_everybody_is_told_when_the_agent_is_killed(lone_agent, own):
    link = own(lone_agent.address)
    link.send(wire.Hello(0, 0))
    inbox = Inbox(link)
    assert isinstance(inbox.get(60), wire.Welcome)
    ends, told = [], threading.Event()
    link.subscribe(ends.append, lambda lost: (ends.append(lost), told.set()))

    def wait():
        try:
            inbox.get()
        except LinkLost as lost:
            ends.append(lost)

    waiting = [threading.Thread(target=wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    lone_agent.process.kill()
    for thread in waiting:
        thread.join(60)
        assert not thread.is_alive()
    assert told.wait(60)
    assert len(ends) == 4 and all(isinstance(end, LinkLost) and "has ended" in str(end) for end in ends)
    with pytest.raises(LinkLost, match="has ended"):
        link.send(wire.Returned(0))
    late = []
    link.subscribe(late.append, late.append)
    assert [type(lost) for lost in late] == [LinkLost]


def test_agent_that_is_gone_before_the_first_word_is_told(own, tmp_path):
    link = own(f"unix:{tmp_path}/link")
    with pytest.raises(LinkLost, match="cannot be reached"):
        Inbox(link).get(60)


def test_agent_of_another_version_is_told(own, tmp_path):
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(f"{tmp_path}/link")
        listening.listen(1)
        link = own(f"unix:{tmp_path}/link")
        opened, _ = listening.accept()
        with opened:
            opened.send(b"\x81\xa4type\xa5alien")
            with pytest.raises(LinkLost, match="another version"):
                Inbox(link).get(60)


def test_stopped_agent_takes_nothing_and_the_sender_is_told_within_bounds(lone_agent, own, monkeypatch):
    monkeypatch.setattr(module, "SEND_S", 0.2)
    link = own(lone_agent.address)
    inbox = Inbox(link)
    link.send(wire.Hello(0, 0))
    inbox.get(60)
    lone_agent.process.send_signal(signal.SIGSTOP)
    with pytest.raises(LinkStuck, match="takes no messages"):
        for n in range(100000):
            link.send(wire.Fault(n, "", "x" * 1000))
    lone_agent.process.send_signal(signal.SIGCONT)
    monkeypatch.setattr(module, "SEND_S", 60)
    link.send(wire.Returned(5))
    assert inbox.get(60) == wire.Released(5)


def test_import_is_small():
    code = "import sys, hyperpodrun.link; print(*sorted({n.split('.')[0] for n in sys.modules}))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"zmq", "torch", "asyncio", "subprocess", "logging"} & set(shown)

"""The process that imports torch once and becomes every worker of its node.

Run by path, never imported: `python FLAGS -u forkserver.py AGENT_PID RUN_AS PRELOADS FLAGS_COUNT TARGET ARGS...`, with the line
to the agent at descriptor 3 (messages: wire/launch.py). Its command line must be longer than any worker's (title.py).

States: *loading* (imports; nothing of the user's own code runs), *serving* (blocked on the line), *ended* (line closed, Unfit
told, or agent dead). For each `Fork` it forks one intermediate, which forks the workers and ends; so they become children of
the nearest subreaper, the agent, before `Forked` is sent. A worker waits at the gate until the agent lets it go; if the gate
closes instead, it ends having run nothing.

Invariants: the serving process runs no thread and none of the script; a worker is told apart from a fresh `python -u` only by
modules that are already imported. Shared by all workers of one forkserver: the hash seed, and whatever modules named by
--preload drew at import. The random states of `random` (by Python), numpy and torch (here) are drawn anew in each: in plain
python they differ between ranks.
Source: prctl(2) PR_SET_CHILD_SUBREAPER, gc.freeze (copy-on-write), faulthandler.register.
"""

# ruff: noqa: E402 - the import path is put right before anything is imported by it

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # this file's folder: the interpreter put it there
_BARE = frozenset(sys.modules)

import gc
import os
import signal
import socket

import msgspec

from hyperpodrun.agent.wire import launch
from hyperpodrun.worker import preload, prelude, run_main, title

LINE_FD = 3


def main() -> None:
    """Load, serve, and in each worker run the program."""
    agent_pid, run_as, preloads, flags_count, *words = sys.argv[1:]
    flags, (target, *args) = words[: int(flags_count)], words[int(flags_count) :]
    program = launch.Program(run_as=msgspec.convert(run_as, launch.RunAs), target=target, args=tuple(args))
    os.set_inheritable(LINE_FD, False)
    prelude.close_all_but({0, 1, 2, LINE_FD})
    os.setsid()
    prelude.die_with(int(agent_pid))
    line = socket.socket(fileno=LINE_FD)
    gc.disable()
    ready = _load(program, flags, [name for name in preloads.split(",") if name])
    line.send(msgspec.msgpack.encode(ready))
    if isinstance(ready, launch.Unfit):
        os._exit(0)
    worker = _serve(line, int(agent_pid))
    # From here on: a worker.
    program = launch.Program(program.run_as, program.target, tuple(os.fsdecode(word) for word in worker.argv))
    run_main.set_arguments(program, flags)
    title.show([os.fsencode(word) for word in sys.orig_argv])
    run_main.run(program)


_EARLY = frozenset({"torch", "msgspec"})
"""What stands behind the imports that are made early, by its first name."""


def _load(program: launch.Program, flags: list[str], asked: list[str]) -> launch.Ready | launch.Unfit:
    ours = frozenset(sys.modules) - _BARE
    try:
        run_main.prepare(program, flags)
    except OSError as error:
        return launch.Unfit(f"the working folder cannot be found ({error.strerror})")
    if path := preload.shadowed(sys.path[0] if sys.path else "", ours):
        return launch.Unfit(f"{path} has the name of a module that is already imported")
    named = preload.named_in(preload.source_of(program))
    skipped = named.obstacle
    if named.imports and (path := preload.shadowed(sys.path[0] if sys.path else "", _EARLY)):
        skipped = f"{path} is imported in its place"  # the user's own code: only ranks may run it
    try:
        with preload.environment(named.settings):
            preload.load([] if skipped else named.imports)
            for module in asked:
                __import__(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a module may raise anything while it is imported
        return launch.Unfit(f"importing {_blamed(error)} failed ({type(error).__name__}: {error})")
    if reason := preload.unfit_because():
        return launch.Unfit(reason)
    gc.collect()
    return launch.Ready(skipped)


def _serve(line: socket.socket, agent_pid: int) -> launch.Worker:
    """Fork workers for the agent. Returns in the workers only."""
    while True:
        order = launch.receive_fork(line)
        if order is None:
            os._exit(0)
        fork, fds = order
        gc.freeze()
        read, write = os.pipe()
        intermediate = _fork()
        if intermediate == 0:
            os.close(read)
            place = _fork_all(fork.workers, write)
            worker = fork.workers[place]
            line.close()
            os.close(write)
            _become(worker, fds[2 * place], fds[2 * place + 1], fds, agent_pid)
            return worker
        os.close(write)
        for fd in fds:
            os.close(fd)
        _, status = os.waitpid(intermediate, 0)
        answer = b"" if status else os.read(read, 1 << 16)
        os.close(read)
        line.send(answer or msgspec.msgpack.encode(launch.Failed(f"the process that forks them died (wait status {status})")))


def _fork() -> int:
    if sys.version_info < (3, 12):
        return os.fork()
    import warnings

    with warnings.catch_warnings():
        # Python cannot know that OpenBLAS's threads do not mind.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _fork_all(workers: list[launch.Worker], write: int) -> int:
    """In the intermediate: fork each worker, leave the answer in the pipe, end. In a worker: return its place."""
    pids: list[tuple[int, int]] = []
    answer: launch.Forked | launch.Failed
    try:
        for place, worker in enumerate(workers):
            pid = _fork()
            if pid == 0:
                return place
            pids.append((worker.local_rank, pid))
        answer = launch.Forked(pids)
    except OSError as error:
        for _, pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        answer = launch.Failed(f"fork: {error.strerror}; look at `ulimit -u` and the cgroup's pids.max")
    os.write(write, msgspec.msgpack.encode(answer))
    os._exit(0)


def _become(worker: launch.Worker, out: int, err: int, fds: list[int], agent_pid: int) -> None:
    """Turn this fork into what a fresh interpreter of that worker would be."""
    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    for fd in fds[:-1]:
        os.close(fd)
    prelude.pass_gate(fds[-1])
    prelude.die_with(agent_pid)
    if worker.cpus:
        prelude.bind(worker.cpus)
    os.environb.clear()
    os.environb.update(worker.env)
    gc.enable()
    _draw_seeds()
    _answer_stack_dumps()


def _draw_seeds() -> None:
    """What a process draws from the system when it starts must not be the same in all ranks."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # GPUs draw theirs when they are first used
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process.current_process().authkey = os.urandom(32)


def _answer_stack_dumps() -> None:
    import faulthandler

    faulthandler.register(signal.SIGRTMAX - launch.STACK_DUMP_SIGNAL_OFFSET, file=2, all_threads=True, chain=False)


def _blamed(error: BaseException) -> str:
    """The module whose import failed, as far as the traceback tells; else "the preloads"."""
    trace, name = error.__traceback__, ""
    while trace is not None:
        where = trace.tb_frame.f_globals.get("__name__", "")
        if not where.startswith(("hyperpodrun.", "importlib", "__main__")) and where:
            name = name or where
        trace = trace.tb_next
    return name or getattr(error, "name", None) or "the preloads"


if __name__ == "__main__":
    run_main.hide_frames_of(__file__)
    main()

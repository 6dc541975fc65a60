"""Run as a process: imports torch once and forks the workers of the tests, as the launcher's forkserver does.

stdin: one JSON object a line, {"script", "env", "out"}; stdout: {"pid"} at once and {"pid", "code"} when it has ended (code: as
subprocess has it). stdin's end kills what still runs.
"""

import atexit
import json
import os
import select
import signal
import sys
import traceback


def main() -> None:
    import torch
    import torch.distributed
    import torch.utils.data  # noqa: F401

    alive: set[int] = set()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    print(json.dumps({"ready": True}), flush=True)
    buffered = b""
    while True:
        readable, _, _ = select.select([0, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
            for pid in list(alive):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    alive.discard(pid)
                    print(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}), flush=True)
        if 0 in readable:
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.close(wake_read)
                    os.close(wake_write)
                    become(order)
                alive.add(pid)
                print(json.dumps({"pid": pid}), flush=True)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


def become(order: dict) -> None:
    out = os.open(order["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    os.close(null)
    os.environ.update(order["env"])
    with open(order["script"]) as file:
        text = file.read()
    code = 0
    try:
        exec(compile(text, order["script"], "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 130
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

"""The program that workers run: what the words say, and whether it is there.

Checked before anything starts, because a wrong path is the most common mistake. What `python` itself accepts as a script is
accepted: files of any kind, directories and archives with a __main__.py. Modules are not looked for: that would import their
packages.
"""

import os
import stat
from collections.abc import Mapping

from hyperpodrun.agent.wire.launch import Program, RunAs
from hyperpodrun.agent.workers.command import NotExecutable, find_program
from hyperpodrun.cli.parse import USAGE, Settings
from hyperpodrun.cli.refusal import Refusal, printable, quoted


def program(settings: Settings, script: tuple[str, ...], environment: Mapping[str, str]) -> Program:
    """The program as the options and the script's words say; raises Refusal when it cannot be run."""
    run_as = _run_as(settings)
    if not script:
        raise Refusal(f"no script given; usage: {USAGE}")
    target = script[0]
    if run_as == "module":
        _check_module(target)
    elif run_as == "program":
        _check_executable(target, environment)
    else:
        _check_script(target)
    return Program(run_as, target, script[1:])


def _run_as(settings: Settings) -> RunAs:
    if settings.on("module"):
        for other in ("no-python", "run-path"):
            if settings.on(other):
                raise Refusal(f"{settings.source('module')} and {settings.source(other)} exclude each other; give one of them")
        return "module"
    if settings.on("run-path"):
        return "run-path"
    return "program" if settings.on("no-python") else "script"


def _check_module(name: str) -> None:
    if not name or "\0" in name:
        raise Refusal(f"{quoted(name)} is no module name; usage: hyperpodrun [options] -m package.module [args]")


def _check_script(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            os.stat(f"{path}/__main__.py")
        elif stat.S_ISREG(mode):
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except ValueError:
        raise Refusal(f"script {quoted(path)} is no path of this system") from None
    except OSError as error:
        if os.path.isdir(path):
            raise Refusal(f"script {quoted(path)} is a directory without a __main__.py; name the file to run") from None
        looks_like_option = "; options go before the script" if path.startswith("-") else ""
        raise Refusal(f"script {quoted(path)} cannot be opened: {error.strerror}{looks_like_option}") from None


def _check_executable(name: str, environment: Mapping[str, str]) -> None:
    try:
        find_executable(name, environment)
    except NotExecutable as error:
        here = f"; ./{printable(name)} is there, is that meant?" if "/" not in name and os.path.isfile(name) else ""
        raise Refusal(f"{error}{here}") from None


def find_executable(name: str, environment: Mapping[str, str]) -> str:
    """The file that execvp(3) would run. Raises NotExecutable."""
    return os.fsdecode(find_program(os.fsencode(name), {b"PATH": os.fsencode(environment.get("PATH", ""))}))

"""Run the user's program in this interpreter exactly as `python script.py`, `python -m module` or `runpy.run_path` would.

What CPython does for these in C (pymain_run_file, pymain_run_module, sys.path[0]) is done here in its order: a new `__main__`,
the import path, sys.argv, then the code. An exception leaves through the interpreter's own door, so that SystemExit,
KeyboardInterrupt (death by SIGINT), exit hooks, threads and user-made excepthooks act as ever; only the frames of this program
are taken off the traceback before it is printed. What cannot be hidden: three frames lie beneath the script's, so
`sys._getframe()` can walk further than the script, and a warning with a `stacklevel` beyond the script's own top names this
file instead of "sys".
Source: CPython Modules/main.c, Python/pathconfig.c (_PyPathConfig_ComputeSysPathArgv0), Lib/runpy.py.
"""

import builtins
import os
import sys
import types
from typing import NoReturn

from hyperpodrun.agent.wire.launch import Program

_OURS = {__file__}
"""Files whose frames are ours, not the user's."""


def hide_frames_of(path: str) -> None:
    """Take the frames of this file, too, off the outer end of tracebacks."""
    _OURS.add(path)


def absolute(path: str) -> str:
    """The name under which the interpreter knows a script (not normalised: that is what `__file__` shows)."""
    return path if os.path.isabs(path) else f"{os.getcwd()}/{path}"


def is_import_path(path: str) -> bool:
    """True for folders and archives that hold a `__main__.py` to run instead of being a script."""
    for hook in sys.path_hooks:
        try:
            hook(path)
        except ImportError:
            continue
        return True
    return False


def first_on_path(program: Program) -> str:
    """What stands at sys.path[0] while the program runs."""
    if program.run_as == "module":
        return os.getcwd()
    if program.run_as == "run-path":
        return ""
    path = absolute(program.target)
    return path if is_import_path(path) else os.path.dirname(os.path.realpath(path))


def prepare(program: Program, flags: list[str]) -> None:
    """Set sys.path, sys.argv and sys.orig_argv. `flags` are the interpreter's options in front of the program."""
    if not sys.flags.safe_path or (program.run_as == "script" and is_import_path(absolute(program.target))):
        sys.path.insert(0, first_on_path(program))
    set_arguments(program, flags)


def set_arguments(program: Program, flags: list[str]) -> None:
    """Set sys.argv and sys.orig_argv as the interpreter does before it looks at the program."""
    sys.argv = ["-m" if program.run_as == "module" else program.target, *program.args]
    sys.orig_argv = command(program, flags)


def command(program: Program, flags: list[str]) -> list[str]:
    """The command line of which this process is the equivalent."""
    where = ["-m"] if program.run_as == "module" else []
    return [sys.executable, *flags, *where, program.target, *program.args]


def run(program: Program) -> None:
    """Run the program. Whatever it raises is raised, prepared for being printed by the interpreter."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    try:
        if program.run_as == "module":
            import runpy

            # The very function behind `python -m`.
            runpy._run_module_as_main(program.target, True)  # type: ignore[attr-defined]
        elif program.run_as == "run-path":
            import runpy

            runpy.run_path(program.target, run_name="__main__")
        elif is_import_path(absolute(program.target)):
            import runpy

            runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        else:
            exec(_load(main, program.target), main.__dict__)
    except BaseException:
        _hide_our_frames()
        raise


def _load(main: types.ModuleType, target: str) -> types.CodeType:
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader

    path = absolute(target)
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        _refuse(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}")
    loader: SourceFileLoader | SourcelessFileLoader
    if path.endswith(".pyc"):
        loader = SourcelessFileLoader("__main__", path)
    else:
        loader = SourceFileLoader("__main__", path)
    main.__file__ = path
    main.__dict__["__cached__"] = None
    main.__loader__ = loader
    if isinstance(loader, SourcelessFileLoader):
        code = loader.get_code("__main__")
        if code is None:
            _refuse(f"{sys.executable}: {path!r} holds no code")
        return code
    return compile(text, path, "exec", dont_inherit=True)


def _refuse(sentence: str) -> NoReturn:
    sys.stderr.write(sentence + "\n")
    raise SystemExit(2)


def _hide_our_frames() -> None:
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        sys.excepthook = shown
        while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
            trace = trace.tb_next
        error.__traceback__ = trace
        sys.last_traceback = trace
        shown(kind, error, trace)

    sys.excepthook = hook

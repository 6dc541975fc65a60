"""A worker cannot tell that it was launched: each probe's output is compared with that of `python -u` itself, for both start
methods."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import zipfile

import pytest

pytestmark = pytest.mark.processes

PROBE = '''
    """What a program can see of itself."""
    import atexit, json, locale, os, signal, sys
    status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
    main = sys.modules["__main__"]
    signals = {n: str(signal.getsignal(n)) for n in signal.valid_signals() if n not in (signal.SIGKILL, signal.SIGSTOP)}
    signals = {n: s.split(" at ")[0] for n, s in signals.items()}
    print(json.dumps(dict(
        name=__name__, file=__file__, doc=__doc__, package=__package__, spec=repr(__spec__).split(" object at ")[0],
        spec_says=[getattr(__spec__, k, None) for k in ("name", "origin", "parent")],
        loader=repr(type(__loader__)),
        loader_says=[getattr(__loader__, k, None) for k in ("name", "path")],
        annotations=__annotations__, builtins=repr(__builtins__), names=sorted(globals().keys() - {"status", "signals", "main"}),
        main=main.__dict__ is globals(), argv=sys.argv, orig_argv=sys.orig_argv, path=sys.path, flags=repr(sys.flags),
        warnoptions=sys.warnoptions, xoptions=sys._xoptions, executable=sys.executable, prefix=sys.prefix,
        encodings=[s.encoding for s in (sys.stdin, sys.stdout, sys.stderr)],
        more_encodings=[sys.getfilesystemencoding(), locale.getpreferredencoding()],
        errors=[sys.stdin.errors, sys.stdout.errors, sys.stderr.errors],
        buffers=[repr(type(s.buffer)) for s in (sys.stdin, sys.stdout, sys.stderr)], write_through=sys.stdout.write_through,
        line_buffering=[sys.stdout.line_buffering, sys.stderr.line_buffering],
        locale=locale.setlocale(locale.LC_ALL), cwd=os.getcwd(), umask=status["Umask"],
        ignored=status["SigIgn"], blocked=status["SigBlk"], signals=signals, cpus=sorted(os.sched_getaffinity(0)),
        fds=sorted(os.listdir("/proc/self/fd")), leader=os.getsid(0) == os.getpid() == os.getpgid(0), stdin=sys.stdin.read(),
        recursion=sys.getrecursionlimit(), gc=__import__("gc").isenabled(), switch=sys.getswitchinterval(),
        traced=[repr(sys.gettrace()), repr(sys.getprofile())], hook=sys.excepthook is sys.__excepthook__,
        bytecode=sys.dont_write_bytecode,
        comm=open("/proc/self/comm").read(), env=sorted(k for k in os.environ if k.startswith(("PYTHON", "PROBE"))),
        value=repr(os.environb.get(b"PROBE_VALUE")), threads=len(os.listdir("/proc/self/task")),
    ), sort_keys=True))
'''

CASES: list[tuple[str, tuple[str, ...], dict[str, str]]] = [
    ("plain", (), {}),
    ("relative-dot", (), {"target": "./probe.py"}),
    ("folder-below", (), {"target": "below/probe.py"}),
    ("symlink", (), {"target": "link.py"}),
    ("absolute", (), {"target": "ABSOLUTE"}),
    ("folder", (), {"target": "folder"}),
    ("zip", (), {"target": "archive.zip"}),
    ("module", (), {"run_as": "module", "target": "pack.inner"}),
    ("package", (), {"run_as": "module", "target": "pack"}),
    ("top-module", (), {"run_as": "module", "target": "probe"}),
    ("dev", ("-X", "dev"), {}),
    ("optimised", ("-OO", "-B"), {}),
    ("warnings", ("-W", "error::FutureWarning", "-Wignore::ImportWarning"), {"PYTHONWARNINGS": "default"}),
    ("utf8", ("-Xutf8=0",), {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}),
    ("io", (), {"PYTHONIOENCODING": "latin-1:replace"}),
    ("safe-path", (), {"PYTHONSAFEPATH": "1"}),
    ("safe-path-folder", (), {"PYTHONSAFEPATH": "1", "target": "folder"}),
]


@pytest.fixture
def probes(work):
    text = textwrap.dedent(PROBE)
    for name in ("probe.py", "below/probe.py", "folder/__main__.py", "pack/inner.py", "pack/__main__.py"):
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_text(text)
    (work / "pack" / "__init__.py").write_text("")
    (work / "link.py").symlink_to("below/probe.py")
    with zipfile.ZipFile(work / "archive.zip", "w") as file:
        file.writestr("__main__.py", text)
    return work


def rows(text: str) -> dict[str, object]:
    return json.loads(text)


def environ(more: dict[str, str]) -> dict[str, str]:
    # A value and arguments that are no UTF-8.
    return {**os.environ, "PROBE_VALUE": "\udcff=x", **{k: v for k, v in more.items() if k not in ("target", "run_as")}}


@pytest.mark.parametrize("flags, more", [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_a_program_sees_of_itself(probes, launch, plain, method, flags, more):
    target = more.get("target", "probe.py").replace("ABSOLUTE", str(probes / "probe.py"))
    run_as = more.get("run_as", "script")
    args = ["--a", "", "b c", "-", "--", "\udce4"]
    given = b"line\n\xc3\xa4"
    (probes / "given").write_bytes(given)
    where = ["-m", target] if run_as == "module" else [target]
    inherited = {"umask": 0o027, "env": environ(more), "preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    with open(probes / "given") as stdin:
        expected = plain(*flags, "-u", *where, *args, stdin=stdin, **inherited)
    with open(probes / "given") as stdin, open(os.devnull) as other:
        popen = {"stdin": stdin, "pass_fds": [other.fileno()], **inherited}
        seen = launch(target, *args, run_as=run_as, python=flags, popen=popen, config=method)
    assert not seen.said
    assert expected.returncode == 0, expected.stderr
    assert seen.text("0.err") == expected.stderr
    want, got = rows(expected.stdout), rows(seen.text("0.out"))
    # glibc's posix_spawn leaves its two internal signals ignored; no program can see or use them.
    got["ignored"], want["ignored"] = (int(str(row["ignored"]), 16) & ~(3 << 31) for row in (got, want))
    # The interpreter's options may be spelled otherwise (-X dev, -Xdev).
    assert "".join(got.pop("orig_argv")).replace("-O-O", "-OO") == "".join(want.pop("orig_argv"))
    assert got == want
    assert seen.code() == 0


ENDS = {
    "exception": "def f(x):\n    return 1 / x\n\nf(0)\n",
    "chained": "try:\n    {}['a']\nexcept KeyError:\n    raise RuntimeError('second')\n",
    "group": "raise ExceptionGroup('many', [ValueError(1), TypeError(2)])\n",
    "syntax": "a = 1\nb = = 2\n",
    "exit-number": "import sys; sys.exit(7)\n",
    "exit-none": "import sys; sys.exit()\n",
    "exit-text": "import sys; print('out'); sys.exit('leaving')\n",
    "exit-big": "import sys; sys.exit(300)\n",
    "exit-object": "import sys; sys.exit([1])\n",
    "os-exit": "import os; print('said', end=''); os._exit(5)\n",
    "interrupt": "raise KeyboardInterrupt\n",
    "interrupted": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)\n",
    "killed": "import os; print('half a line', end=''); os.kill(os.getpid(), 9)\n",
    "terminated": "import os, time; os.kill(os.getpid(), 15); time.sleep(9)\n",
    "hook": "import sys, traceback\n"
    "def h(k, e, t):\n    print(e, traceback.extract_tb(t), e.__traceback__ is t, sys.last_traceback is t)\n"
    "sys.excepthook = h\n1/0\n",
    "atexit": "import atexit, sys\natexit.register(print, 'first')\natexit.register(print, 'second')\nsys.exit(3)\n",
    "atexit-after-error": "import atexit\natexit.register(print, 'bye')\n1/0\n",
    "threads": "import threading, time\nt = threading.Thread(target=lambda: (time.sleep(.1), print('t')))\n"
    "t.start()\nprint('m')\n",
    "thread-error": "import threading\nt = threading.Thread(target=lambda: 1/0, name='t')\nt.start(); t.join()\n",
    "destructor": "class A:\n    def __del__(self): print('gone', __name__)\na = A()\n",
    "warning": "import warnings\nwarnings.warn('careful')\nwarnings.warn('old', DeprecationWarning)\n",
    "cookie": "# -*- coding: latin-1 -*-\nprint('ä')\n1/0\n",
    "recursion": "def f(): f()\ntry:\n    f()\nexcept RecursionError: print('deep')\n",
    "generator": "def g():\n    yield 1\n    raise ValueError('in g')\nlist(g())\n",
    "notes": "e = ValueError('x'); e.add_note('a note'); raise e\n",
    "future": "from __future__ import annotations\nx: Undefined = 1\nprint(__annotations__)\n",
    "frames": "import sys, traceback\nprint(sys._getframe().f_code.co_filename)\n",
}


@pytest.mark.parametrize("name", ENDS)
def test_ends_as_under_python(work, launch, plain, method, name):
    (work / "end.py").write_text(ENDS[name], encoding="latin-1" if name == "cookie" else "utf-8")
    expected = plain("-u", "end.py")
    seen = launch("end.py", config=method)
    assert seen.text("0.err") == expected.stderr
    assert seen.text("0.out") == expected.stdout
    assert seen.code() == expected.returncode
    assert not seen.said


@pytest.mark.parametrize("name", ["exception", "syntax", "interrupt", "exit-text"])
def test_modules_end_as_under_python(work, launch, plain, method, name):
    (work / "pkg").mkdir()
    (work / "pkg" / "__init__.py").write_text("")
    (work / "pkg" / "end.py").write_text(ENDS[name])
    expected = plain("-u", "-m", "pkg.end")
    seen = launch("pkg.end", run_as="module", config=method)
    assert (seen.text("0.err"), seen.text("0.out"), seen.code()) == (expected.stderr, expected.stdout, expected.returncode)


@pytest.mark.parametrize(
    "run_as, target",
    [
        ("script", "missing.py"),
        ("script", "no/such/folder.py"),
        ("module", "missing"),
        ("module", "os.missing"),
        ("script", "empty"),
    ],
)
def test_missing_programs_are_told_as_by_python(work, launch, plain, method, run_as, target):
    (work / "empty").mkdir()
    expected = plain("-u", *(["-m"] if run_as == "module" else []), target)
    seen = launch(target, run_as=run_as, config=method)
    assert (seen.text("0.err"), seen.code()) == (expected.stderr, expected.returncode)


def test_compiled_script(work, launch, plain, method):
    (work / "a.py").write_text("print(__name__, __file__, type(__loader__).__name__)\n1/0\n")
    subprocess.run([sys.executable, "-c", "import py_compile; py_compile.compile('a.py', 'a.pyc')"], cwd=work, check=True)
    expected = plain("-u", "a.pyc")
    seen = launch("a.pyc", config=method)
    assert (seen.text("0.err"), seen.text("0.out"), seen.code()) == (expected.stderr, expected.stdout, expected.returncode)


def test_multiprocessing_from_inside_a_script(work, launch, method):
    (work / "mp.py").write_text(
        textwrap.dedent("""
        import multiprocessing, pickle, sys
        class Here:
            def __init__(self, x): self.x = x
        def double(h): return h.x * 2
        if __name__ == "__main__":
            assert pickle.loads(pickle.dumps(Here(3))).x == 3
            for way in ("fork", "spawn", "forkserver"):
                with multiprocessing.get_context(way).Pool(1) as pool:
                    print(way, pool.map(double, [Here(4)]))
                    pool.close(); pool.join()
        """)
    )
    seen = launch("mp.py", config=method)
    assert (seen.text("0.err"), seen.code()) == ("", 0)
    assert seen.text("0.out") == "fork [8]\nspawn [8]\nforkserver [8]\n"


def test_run_path(work, launch, method):
    (work / "below").mkdir()
    (work / "below" / "a.py").write_text("import sys\nprint(__name__, __file__, sys.argv, sys.path[0] == '')\n")
    seen = launch("below/a.py", "x", run_as="run-path", config=method)
    assert (seen.text("0.err"), seen.code()) == ("", 0)
    assert seen.text("0.out") == "__main__ below/a.py ['below/a.py', 'x'] True\n"

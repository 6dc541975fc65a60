"""Workers' output, from their pipes to the console, the log files and the failure report.

Theory. Every stream of every worker is a pipe that ends here, also one that goes to a file only: a full log disk or a console
that is gone stops nothing but itself. The reading end never waits, neither does any writing end.

    worker's stdout, stderr ── pipe ── Stream ──┬── Held ── Console (Screen)      what people see
                                                ├── LogFile                       byte for byte
                                                ├── Matching ── LogFile           duplicate filters
                                                └── LastLines                     the failure report

States: *new*, *prepared* (the log folder stands), *in an attempt*, *finished*.
Invariants: `on_drained` comes at most `GRANDCHILD_S` after a worker's end, and nothing of that worker is read after it; a
callback given here is called from the loop, never from within the call that took it.

A console that cannot keep up slows workers down as any pipe would, but only as long as it drains fast (see `stream.Brake`);
after that the backlog's oldest pieces are dropped and counted.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from hyperpodrun.agent.config import JobConfig, Streams
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.workers.console import Console
from hyperpodrun.agent.workers.lines import Matching, Tail, Voice, to_bytes
from hyperpodrun.agent.workers.logfiles import LogFile, make_run_folder, make_temporary_folder
from hyperpodrun.agent.workers.stream import Brake, Stream

GRANDCHILD_S = 0.3
_COLOURS = (36, 33, 35, 32, 34, 31, 96, 93, 95, 92, 94, 91)

StreamName = Literal["stdout", "stderr"]
_STREAMS: tuple[StreamName, StreamName] = ("stdout", "stderr")


class Output:
    """All output of one launcher. `run_dir` is the launcher's own folder; `stdout_fd` and `stderr_fd` stay the caller's."""

    def __init__(self, reactor: Reactor, config: JobConfig, run_dir: str, stdout_fd: int = 1, stderr_fd: int = 2) -> None:
        self._reactor = reactor
        self._config = config
        self._run_dir = run_dir
        self._folder: str | None = None  # of this run's logs
        self._attempt_folder = run_dir
        self._attempts: Counter[int] = Counter()
        self._ranks: tuple[int, ...] = ()
        self._streams: dict[tuple[int, StreamName], Stream] = {}
        self._helpers: dict[str, list[Stream]] = {}
        self._files: list[LogFile] = []
        self._with_files = False
        self._filtered: dict[StreamName, LogFile] = {}
        self._troubles: set[str] = set()
        self._incomplete: dict[str, int] = {}
        self._told_of_drops = False
        self._launcher = Voice(vital=True)
        self._stderr = Brake(reactor, Console(reactor, stderr_fd, on_drop=self._dropping))
        self._stdout = self._stderr
        if not _same_file(stdout_fd, stderr_fd):
            self._stdout = Brake(reactor, Console(reactor, stdout_fd, on_drop=self._dropping))
        self._consoles = [brake.console for brake in dict.fromkeys((self._stdout, self._stderr))]
        self._exact = (
            config.nproc_per_node == 1
            and config.max_nodes == 1
            and config.log_line_prefix_template is None
            and not any(tee.stdout or tee.stderr for tee in config.tee)
        )

    # Folders and files

    def prepare(self) -> None:
        """Make this run's log folder, if there is to be one. Raises OSError that names the path."""
        config = self._config
        wanted = any(streams.stdout or streams.stderr for streams in (*config.redirects, *config.tee))
        wanted = wanted or bool(config.duplicate_stdout_filters or config.duplicate_stderr_filters)
        if config.log_dir == os.devnull or not (config.log_dir or wanted):
            return
        if config.log_dir:
            self._folder = make_run_folder(config.log_dir, config.job_id)
        else:
            self._folder = make_run_folder(make_temporary_folder(), config.job_id)
            self.say(f"logs are kept in {self._folder} (--log-dir chooses another place)")

    def begin_attempt(self, attempt: int, ranks: Sequence[int]) -> None:
        """Start over with a new folder. `ranks`: the global rank of each local rank.

        `attempt` is the restart count; worlds that share one (a node came or left, which costs no restart) get folders of their own.

        What is left of the attempt before is closed, its `on_drained` not called any more. A log folder that cannot be
        written costs this attempt its files, and that is said. Raises OSError when `run_dir` cannot be written either.
        """
        config = self._config
        self._close_attempt()
        self._ranks = tuple(ranks)
        with_files = self._folder is not None
        again = self._attempts[attempt]
        self._attempts[attempt] += 1
        name = f"attempt_{attempt}_{again}" if again else f"attempt_{attempt}"
        self._attempt_folder = f"{self._folder or self._run_dir}/{name}"
        try:
            self._make_rank_folders()
        except OSError as error:
            if not with_files:
                raise
            self._trouble(self._attempt_folder, os.strerror(error.errno or 0))
            with_files = False
            self._attempt_folder = f"{self._run_dir}/{name}"
            self._make_rank_folders()
        self._streams = {}
        self._files = []
        self._with_files = with_files
        self._filtered = {}
        for stream in _STREAMS:
            filters = config.duplicate_stdout_filters if stream == "stdout" else config.duplicate_stderr_filters
            if with_files and filters:
                self._filtered[stream] = self._open_file(f"{self._attempt_folder}/filtered_{stream}.log")
            for local_rank in range(len(self._ranks)):
                self._streams[local_rank, stream] = self._worker_stream(local_rank, stream)

    def begin_generation(self, ranks: Sequence[int], fresh: Sequence[int]) -> None:
        """The attempt goes on with a new world. Processes that live keep their pipes and files; local ranks in `fresh` get new
        processes, which write on in the files of those before them.
        """
        self._ranks = tuple(ranks)
        for local_rank in range(len(self._ranks)):
            try:
                os.unlink(self.error_file(local_rank))
            except OSError:
                pass  # mostly there is none
            for stream in _STREAMS:
                if local_rank in fresh:
                    self._streams[local_rank, stream].close()
                    self._streams[local_rank, stream] = self._worker_stream(local_rank, stream, anew=False)
                elif not self._exact:
                    self._streams[local_rank, stream].voice.prefix = self._shown_prefix(local_rank, stream)

    def error_file(self, local_rank: int) -> str:
        """Where this attempt's worker may leave its error (torch.distributed.elastic's `record` does); the folder exists."""
        return f"{self._attempt_folder}/{local_rank}/error.json"

    def log_path(self, local_rank: int, stream: StreamName) -> str | None:
        """This attempt's log file of one stream; None when it has none."""
        file = self._streams[local_rank, stream].file
        return file.path if file is not None else None

    # Processes

    def open_worker(self, local_rank: int) -> tuple[int, int]:
        """Pipes for one worker of this attempt: the write ends of stdout and stderr, close-on-exec, the caller's to close.

        Raises OSError when no descriptors are left.
        """
        return _open_pair(self._pair(local_rank))

    def open_helper(self, name: str) -> tuple[int, int]:
        """The same for a helper process; its lines are shown with the prefix "[name]:"."""
        self.helper_ended(name)
        prefix = to_bytes(f"[{name}]:")
        pair = [Stream(self._reactor, brake, Voice(prefix)) for brake in (self._stdout, self._stderr)]
        ends = _open_pair(pair)
        self._helpers[name] = pair
        return ends

    def worker_ended(self, local_rank: int, on_drained: Callable[[], None]) -> None:
        """The worker's main process is gone: read what it left.

        `on_drained` is called once both pipes are at their end, or after 0.4 s although a grandchild still holds them.
        """
        self._end(self._pair(local_rank), on_drained)

    def helper_ended(self, name: str) -> None:
        """The helper process is gone: show what it left."""
        if (pair := self._helpers.pop(name, None)) is not None:
            self._end(pair, lambda: None)

    def tail(self, local_rank: int) -> Tail:
        """The last lines of this attempt's worker, during it and after it."""
        stdout, stderr = self._pair(local_rank)
        return Tail(stdout=stdout.last.lines(), stderr=stderr.last.lines())

    # The launcher itself

    def say(self, text: str) -> None:
        """Show a message of the launcher (one or more whole lines) on stderr, in order with the workers' lines there."""
        self._stderr.console.show(self._launcher, to_bytes(f"hyperpodrun: {text.rstrip()}\n"))

    def finish(self, on_flushed: Callable[[], None]) -> None:
        """All workers are over: close what is still open, flush. `on_flushed` is called once the consoles have taken everything.

        A console is given up after 5 s without any progress, or 30 s in all.
        """
        for pair in self._helpers.values():
            for stream in pair:
                stream.drain()
                stream.close()
        self._helpers = {}
        self._close_attempt()
        if self._incomplete:
            path, missing_bytes = next(iter(self._incomplete.items()))
            others = f" (incomplete log files in all: {len(self._incomplete)})" if len(self._incomplete) > 1 else ""
            self.say(f"{missing_bytes} bytes are missing in {path}{others}")
        if dropped_bytes := sum(console.dropped_bytes for console in self._consoles if not console.closed):
            self.say(f"{dropped_bytes} bytes of output were not shown: the console was too slow. {self._advice()}")
        self._flush_all(list(self._consoles), on_flushed)

    def close(self) -> None:
        """Let go of all descriptors, at once; what was not flushed is lost."""
        self._close_attempt()
        for pair in self._helpers.values():
            for stream in pair:
                stream.close()
        for console in self._consoles:
            console.close()

    def _flush_all(self, waiting: list[Console], on_flushed: Callable[[], None]) -> None:
        def flushed(console: Console) -> None:
            if console.backlog_bytes:  # something was said in between
                flush(console)
                return
            waiting.remove(console)
            if console.given_up_bytes and not self._stderr.console.closed:
                self.say(
                    f"{console.given_up_bytes} bytes of output were not shown: "
                    f"stdout took nothing more ({console.trouble or 'its reader is stopped or too slow'}). {self._advice()}"
                )
                if self._stderr.console not in waiting:
                    waiting.append(self._stderr.console)
                    flush(self._stderr.console)
            if not waiting:
                on_flushed()

        def flush(console: Console) -> None:
            console.flush(lambda: flushed(console))

        for console in tuple(waiting):
            flush(console)

    # Inside

    def _make_rank_folders(self) -> None:
        for local_rank in range(len(self._ranks)):
            os.makedirs(f"{self._attempt_folder}/{local_rank}", exist_ok=True)

    def _pair(self, local_rank: int) -> list[Stream]:
        return [self._streams[local_rank, "stdout"], self._streams[local_rank, "stderr"]]

    def _shown_prefix(self, local_rank: int, name: StreamName) -> bytes:
        brake = self._stdout if name == "stdout" else self._stderr
        prefix = self._prefix(local_rank)
        return _coloured(prefix, self._ranks[local_rank]) if _has_colour(brake.console) else prefix

    def _worker_stream(self, local_rank: int, name: StreamName, anew: bool = True) -> Stream:
        config = self._config
        filters = config.duplicate_stdout_filters if name == "stdout" else config.duplicate_stderr_filters
        filtered = self._filtered.get(name)
        redirected, teed = _applies(config.redirects, local_rank, name), _applies(config.tee, local_rank, name)
        hidden = config.local_ranks_filter is not None and local_rank not in config.local_ranks_filter
        brake = self._stdout if name == "stdout" else self._stderr
        voice = Voice(self._shown_prefix(local_rank, name), redraws=brake.console.is_terminal)
        if self._exact:
            shares = name == "stderr" and self._stdout is self._stderr
            voice = self._streams[local_rank, "stdout"].voice if shares else Voice(exact=True)
        stream = Stream(self._reactor, None if hidden or (redirected and not teed) else brake, voice)
        if self._with_files and (redirected or teed):
            path = f"{self._attempt_folder}/{local_rank}/{name}.log"
            if not anew:
                self._close_file(path)
            stream.file = self._open_file(path, anew)
        # torchrun filters what is teed and shown. Where nothing is teed, an empty file would help nobody: all ranks are meant.
        meant = teed or not any(_applies(config.tee, rank, name) for rank in range(len(self._ranks)))
        if filtered is not None and meant and not hidden:
            stream.matching = (Matching(filters, self._prefix(local_rank)), filtered)
        return stream

    def _prefix(self, local_rank: int) -> bytes:
        template = self._config.log_line_prefix_template
        if template is None:
            return to_bytes(f"[{self._config.role}{self._ranks[local_rank]}]:")
        from string import Template

        values = {"role_name": self._config.role, "rank": self._ranks[local_rank], "local_rank": local_rank}
        return to_bytes(Template(template).safe_substitute(values))

    def _open_file(self, path: str, anew: bool = True) -> LogFile:
        file = LogFile(path, self._reactor.now_s, self._trouble, anew)
        self._files.append(file)
        return file

    def _close_file(self, path: str) -> None:
        for file in [file for file in self._files if file.path == path]:
            self._files.remove(file)
            self._close(file)

    def _close(self, file: LogFile) -> None:
        file.close()
        if file.missing_bytes:
            self._incomplete[file.path] = self._incomplete.get(file.path, 0) + file.missing_bytes

    def _end(self, pair: list[Stream], on_drained: Callable[[], None]) -> None:
        held_open = [stream for stream in pair if stream.drain()]
        if not held_open:
            self._reactor.call_later(0.0, on_drained)
            return

        def give_up() -> None:
            for stream in pair:
                stream.drain()
                stream.close()

        timer = self._reactor.call_later(GRANDCHILD_S, give_up)

        def one_closed() -> None:
            held_open.pop()
            if not held_open:
                timer.cancel()
                self._reactor.call_later(0.0, on_drained)

        for stream in held_open:
            stream.on_closed = one_closed

    def _close_attempt(self) -> None:
        for stream in self._streams.values():
            stream.on_closed = None
            stream.drain()
            stream.close()
        for file in self._files:
            self._close(file)
        self._files = []

    def _trouble(self, path: str, reason: str) -> None:
        if reason not in self._troubles:  # a full disk is one event, however many files lie on it
            self._troubles.add(reason)
            self.say(f"cannot write {path}: {reason}; the job and the console go on")

    def _dropping(self) -> None:
        if not self._told_of_drops:
            self._told_of_drops = True
            self.say(f"the console is too slow: the oldest output that waits for it is dropped. {self._advice()}")

    def _advice(self) -> str:
        if self._folder is not None:
            return f"The log files are in {self._folder}"
        return "To keep all of it, use --log-dir DIR -t 3"


def _open_pair(pair: list[Stream]) -> tuple[int, int]:
    first = pair[0].open()
    try:
        return first, pair[1].open()
    except OSError:
        os.close(first)
        pair[0].close()
        raise


def _applies(settings: tuple[Streams, ...], local_rank: int, name: StreamName) -> bool:
    if local_rank >= len(settings):
        return False
    return settings[local_rank].stdout if name == "stdout" else settings[local_rank].stderr


def _same_file(one_fd: int, other_fd: int) -> bool:
    try:
        one, other = os.fstat(one_fd), os.fstat(other_fd)
    except OSError:  # one of them is closed
        return False
    return one.st_dev == other.st_dev and one.st_ino == other.st_ino


def _has_colour(console: Console) -> bool:
    return console.is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _coloured(prefix: bytes, rank: int) -> bytes:
    return b"\x1b[%dm%b\x1b[0m" % (_COLOURS[rank % len(_COLOURS)], prefix) if prefix else prefix

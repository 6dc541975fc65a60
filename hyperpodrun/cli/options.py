"""The one table of options. The parser, the variables, help, docs/OPTIONS.md and --dry-run are made from it.

Every option can be given as `--name` (dashes and underscores are the same), as the variable HYPERPODRUN_<NAME> and as PET_<NAME>;
the first of these that is there and not empty counts. `note` is said once, at the start, when the user gave the option and this
release does less with it than its name promises, or it gives up what the others rest on; no option is taken in silence and then
forgotten. `quiet` holds texts that ask for nothing (`--spares 0`), where the note would only be noise.
"""

from typing import Literal

import msgspec

from hyperpodrun.agent.wire import names
from hyperpodrun.cli import kinds, places
from hyperpodrun.cli.kinds import Kind

Origin = Literal["torchrun", "own"]
GROUPS = (
    "Job",
    "Workers",
    "Restarts and ending",
    "Output",
    "Nodes and mesh",
    "In-process restart",
    "Health",
    "torchrun compatibility",
)
JOB, WORKERS, RESTARTS, OUTPUT, MESH, INPROCESS, HEALTH, COMPATIBILITY = GROUPS


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One option. `default` is a text of `kind` (None: unset), `unset` says what happens then."""

    name: str
    short: str = ""
    origin: Origin
    group: str
    kind: Kind
    default: str | None = None
    unset: str = ""
    help: str
    note: str | None = None
    note_alone: str | None = None
    """Like `note`, for jobs of one node only."""
    note_several: str | None = None
    """Like `note`, for jobs of several nodes only."""
    quiet: tuple[str, ...] = ()
    further_variables: tuple[str, ...] = ()
    merges: bool = False
    """Given several times, the values add up; else the last one counts."""
    empty_is_unset: bool = False
    """`--name ""` means as much as not giving it, because torchrun's default is the empty text."""
    has_variable: bool = True

    @property
    def flag(self) -> str:
        """The long form, as shown to people."""
        return f"--{self.name}"

    @property
    def is_switch(self) -> bool:
        """True for options without a value."""
        return self.kind is kinds.FLAG

    @property
    def variables(self) -> tuple[str, ...]:
        """Variables that set it, the strongest first."""
        if not self.has_variable:
            return ()
        upper = self.name.upper().replace("-", "_")
        return (f"HYPERPODRUN_{upper}", f"PET_{upper}", *self.further_variables)


def _not_yet(effect: str) -> str:
    return f"checked, but not active in this release: {effect}"


_ALONE = "this job has one node, so no other agent is contacted"
_UNSAFE = (
    "UNSAFE: should most nodes fall silent for so long, this one takes them for dead and trains on without them; "
    "if they are only cut off, two worlds of this job train at once"
)
_HEALTH = _not_yet("nothing watches the GPUs during the run")
_SERVER = _not_yet("no HTTP server is started")

OPTIONS: tuple[Option, ...] = (
    # Job
    Option(
        name="job-id", origin="own", group=JOB, kind=kinds.NAME, unset="--rdzv-id, else the scheduler's job id, else random",
        help="Name of the job; two jobs never mix.",
    ),
    Option(
        name="standalone", origin="torchrun", group=JOB, kind=kinds.FLAG,
        help="This node alone, whatever scheduler it runs under; a given job id is kept.",
    ),
    Option(
        name="role", origin="torchrun", group=JOB, kind=kinds.TEXT, default="default",
        help="Role of the workers, for logs and ROLE_NAME.",
    ),
    Option(
        name="module", short="-m", origin="torchrun", group=JOB, kind=kinds.FLAG,
        help="The script is a module's name, to be run as by python -m.",
    ),
    Option(
        name="no-python", origin="torchrun", group=JOB, kind=kinds.FLAG,
        help="The script is a program of any kind, to be run without Python.",
    ),
    Option(
        name="run-path", origin="torchrun", group=JOB, kind=kinds.FLAG,
        help="Run the script by runpy.run_path; beats --no-python.",
    ),
    Option(
        name="dry-run", origin="own", group=JOB, kind=kinds.FLAG,
        help="Print what would be started, and where each value came from, and end.",
    ),
    Option(
        name="version", origin="own", group=JOB, kind=kinds.FLAG,
        help="Print the version and end.", has_variable=False,
    ),
    Option(
        name="help", short="-h", origin="torchrun", group=JOB, kind=kinds.FLAG,
        help="Print this help and end.", has_variable=False,
    ),
    # Workers
    Option(
        name="nproc-per-node", origin="torchrun", group=WORKERS, kind=kinds.WORKERS, default="1",
        help="Workers on each node: a number, gpu (one for each visible GPU), cpu (one for each usable processor) or auto "
        "(gpu where there are GPUs, else cpu).",
    ),
    Option(
        name="start-method", origin="torchrun", group=WORKERS, kind=kinds.words("forkserver", "spawn", "fork"),
        unset="forkserver for Python, spawn for programs",
        help="forkserver: workers are forked from a process that has imported torch already. spawn: each is a fresh interpreter.",
    ),
    Option(
        name="preload", origin="own", group=WORKERS, kind=kinds.MODULES, unset="torch, when the script imports it",
        help="Further modules that the forkserver imports before it forks workers.",
    ),
    Option(
        name="numa-binding", origin="torchrun", group=WORKERS, kind=kinds.words("node", "socket", "exclusive", "core-complex"),
        unset="no binding", help="Bind each worker to processors near its GPU.",
    ),
    Option(
        name="virtual-local-rank", origin="torchrun", group=WORKERS, kind=kinds.FLAG,
        help="Each worker sees LOCAL_RANK 0 and, through CUDA_VISIBLE_DEVICES, only its own GPU.",
    ),
    Option(
        name="pre-train-script", origin="own", group=WORKERS, kind=places.FILE,
        help="Run once a node before each start and restart of the workers.",
    ),
    Option(
        name="pre-train-args", origin="own", group=WORKERS, kind=kinds.ARGUMENTS,
        help="Arguments of --pre-train-script, quoted as one word.",
    ),
    Option(
        name="post-train-script", origin="own", group=WORKERS, kind=places.FILE,
        help="Run once a node after success.",
    ),
    Option(
        name="post-train-args", origin="own", group=WORKERS, kind=kinds.ARGUMENTS,
        help="Arguments of --post-train-script, quoted as one word.",
    ),
    # Restarts and ending
    Option(
        name="max-restarts", origin="torchrun", group=RESTARTS, kind=kinds.whole(0), default="0",
        help="Restarts of the job before it is given up. With --inprocess-restart, where this is not given: 32 within "
        "--restart-window.",
    ),
    Option(
        name="restart-window", origin="own", group=RESTARTS, kind=kinds.seconds(), default="3600",
        help="Time over which faults are counted: for --max-node-failures, --max-rank-faults, and restarts in place without "
        "--max-restarts.",
    ),
    Option(
        name="max-node-failures", origin="own", group=RESTARTS, kind=kinds.whole(0), unset="unlimited",
        help="Node failures within the restart window before the job is given up.",
    ),
    Option(
        name="max-rank-faults", origin="own", group=RESTARTS, kind=kinds.whole(1), default="16",
        help="Faults of one rank within the restart window that are healed the same way before more is replaced: its process, "
        "its node's processes, all processes, its node.",
    ),
    Option(
        name="exit-skew-timeout", origin="own", group=RESTARTS, kind=kinds.seconds(), default="300",
        help="Longest wait for the other ranks after the first one has ended well.",
    ),
    Option(
        name="shutdown-signal", origin="own", group=RESTARTS, kind=kinds.choice({"SIGTERM": 15, "SIGKILL": 9}), default="SIGTERM",
        help="First signal to workers that have to stop.",
    ),
    Option(
        name="shutdown-timeout", origin="torchrun", group=RESTARTS, kind=kinds.seconds(zero="kill at once"), default="30",
        help="From the first signal to SIGKILL.", further_variables=(names.SHUTDOWN_TIMEOUT,),
    ),
    Option(
        name="signals-to-handle", origin="torchrun", group=RESTARTS, kind=kinds.SIGNALS, default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        help="Signals that stop the job when the launcher gets them. SIGUSR1 and SIGUSR2 then reach the ranks in place of "
        "--shutdown-signal; unlisted they reach them and stop nothing.",
    ),
    # Output
    Option(
        name="log-dir", origin="torchrun", group=OUTPUT, kind=kinds.PATH, unset="a temporary folder when files are asked for",
        help="Base folder of log files; each run gets a folder of its own in it.",
    ),
    Option(
        name="redirects", short="-r", origin="torchrun", group=OUTPUT, kind=kinds.STREAM_CHOICE, default="0",
        help="Streams that go to files instead of the console: 1 stdout, 2 stderr, 3 both; 0:1,1:2 for single local ranks.",
    ),
    Option(
        name="tee", short="-t", origin="torchrun", group=OUTPUT, kind=kinds.STREAM_CHOICE, default="0",
        help="Streams that go to files and to the console, written as for --redirects.",
    ),
    Option(
        name="local-ranks-filter", origin="torchrun", group=OUTPUT, kind=kinds.LOCAL_RANKS, unset="all", empty_is_unset=True,
        help="Show only these local ranks on the console and in filtered copies; the ranks' own files are not affected.",
    ),
    Option(
        name="duplicate-stdout-filters", origin="torchrun", group=OUTPUT, kind=kinds.FILTERS, default="",
        help="Copy the lines of stdout that hold one of these texts to one more file.",
    ),
    Option(
        name="duplicate-stderr-filters", origin="torchrun", group=OUTPUT, kind=kinds.FILTERS, default="",
        help="Copy the lines of stderr that hold one of these texts to one more file.",
    ),
    # Nodes and mesh
    Option(
        name="nnodes", origin="torchrun", group=MESH, kind=kinds.NODES, default="1",
        help="Number of nodes, or the range MIN:MAX of an elastic job.",
    ),
    Option(
        name="node-rank", origin="torchrun", group=MESH, kind=kinds.whole(0), unset="given out",
        help="Preferred rank of this node.",
    ),
    Option(
        name="peers", origin="own", group=MESH, kind=places.PEERS, note_alone=_ALONE,
        help="Contact points: hosts, @FILE with one a line, slurm: (the job's node list) or dns:NAME:PORT (a headless service).",
    ),
    Option(
        name="mesh-port", origin="own", group=MESH, kind=kinds.whole(0, 65535), default="29400", note_alone=_ALONE,
        help="First port of this node's range; 0 picks free ones.",
    ),
    Option(
        name="data-port", origin="own", group=MESH, kind=kinds.whole(1024, 65000), default="18000",
        help="From here on a free range of ports is planned, one a rank, for data between ranks (rootless.data_address).",
    ),
    Option(
        name="spares", origin="own", group=MESH, kind=kinds.whole(0), default="0",
        help="Nodes beyond --nnodes that join as hot spares.",
    ),
    Option(
        name="elastic-join", origin="own", group=MESH, kind=kinds.words("now", "restart"), default="now",
        note_alone=_ALONE, help="When a node that comes later is taken in: at once, or at the next restart.",
    ),
    Option(
        name="job-secret-file", origin="own", group=MESH, kind=places.SECRET_FILE, note_alone=_ALONE,
        help="File with 32 or more random bytes; with it the mesh is encrypted and authenticated.",
    ),
    Option(
        name="insecure-mesh", origin="own", group=MESH, kind=kinds.FLAG, note_alone=_ALONE,
        help="Accept a mesh across hosts without a job secret.",
    ),
    Option(
        name="failure-detector", origin="own", group=MESH, kind=kinds.words("fast", "default", "lax"), default="default",
        note_alone=_ALONE,
        help="How soon a silent node counts as lost; a false alarm costs a restart.",
    ),
    Option(
        name="on-quorum-loss", origin="own", group=MESH, kind=kinds.ON_QUORUM_LOSS, default="hold",
        note_alone=_ALONE, note_several=_UNSAFE, quiet=("hold",),
        help="Without a majority of the nodes: wait until they return or a person certifies their loss (hold), or take for dead "
        "whoever has been silent for S seconds (continue:S). UNSAFE: nodes that are only cut off train on as well, and two worlds "
        "of one job write over each other's checkpoints. Only where another system makes sure that silent nodes are off.",
    ),
    # In-process restart
    Option(
        name="inprocess-restart", origin="own", group=INPROCESS, kind=kinds.FLAG,
        help="Restart workers wrapped by HPWrapper inside their processes.",
    ),
    Option(
        name="inprocess-timeout", origin="own", group=INPROCESS, kind=kinds.seconds(), default="120",
        help="All local ranks must be back at the restart barrier within this time, else processes are restarted.",
    ),
    Option(
        name="abort-timeout", origin="own", group=INPROCESS, kind=kinds.seconds(), default="60",
        help="Longest time an in-process abort may take before the process is killed.",
    ),
    # Health
    Option(
        name="health-interval", origin="own", group=HEALTH, kind=kinds.seconds(zero="off"), default="10",
        note=_HEALTH, quiet=("0",),
        help="Time between two looks at the GPUs.",
    ),
    Option(
        name="hang-timeout", origin="own", group=HEALTH, kind=kinds.seconds(), unset="off",
        help="Longest time without progress (step, ping() or collective) before it counts as a fault; needs @HPWrapper.",
    ),
    Option(
        name="server-host", origin="own", group=HEALTH, kind=places.HOST, default="127.0.0.1", note=_SERVER,
        help="Address of the HTTP status and metrics server; beyond this host it needs --job-secret-file.",
    ),
    Option(
        name="server-port", origin="own", group=HEALTH,
        kind=kinds.whole(-1, 65535, "a port, 0 (any free one) or -1 (off)"), default="8080", note=_SERVER, quiet=("-1",),
        help="Port of that server; 0 picks a free one, -1 turns it off.",
    ),
    # torchrun compatibility
    Option(
        name="master-addr", origin="torchrun", group=COMPATIBILITY, kind=places.HOST, unset="found out",
        note_several="taken as one more contact point; MASTER_ADDR is always where rank 0 runs",
        help="MASTER_ADDR of the workers' classic store; with several nodes one more contact point beside --peers.",
    ),
    Option(
        name="master-port", origin="torchrun", group=COMPATIBILITY,
        kind=kinds.whole(0, 65535, "a port from 1 to 65535, or 0 (any free one)"), unset="a free one",
        help="MASTER_PORT of the workers' classic store.",
    ),
    Option(
        name="local-addr", origin="torchrun", group=COMPATIBILITY, kind=places.HOST, unset="found out",
        help="Address of this node as the others should see it.",
    ),
    Option(
        name="rdzv-id", origin="torchrun", group=COMPATIBILITY, kind=kinds.NAME, empty_is_unset=True,
        help="The job id, where --job-id is not given.",
    ),
    Option(
        name="rdzv-backend", origin="torchrun", group=COMPATIBILITY, kind=kinds.TEXT,
        note="accepted and not needed: there is no rendezvous server, agents find each other directly",
        help="Taken, but there is no rendezvous server.",
    ),
    Option(
        name="rdzv-endpoint", origin="torchrun", group=COMPATIBILITY, kind=places.ENDPOINT, empty_is_unset=True,
        note_alone=_ALONE, note_several="taken as one more contact point, nothing is hosted there",
        quiet=("localhost:0", "127.0.0.1:0"), help="One more contact point beside --peers.",
    ),
    Option(
        name="rdzv-conf", origin="torchrun", group=COMPATIBILITY, kind=kinds.PAIRS, merges=True, empty_is_unset=True,
        note_alone="this job has one node and waits for no other",
        help="KEY=VALUE pairs; join_timeout=S is the longest wait for other nodes. Several of them add up.",
    ),
    Option(
        name="monitor-interval", origin="torchrun", group=COMPATIBILITY, kind=kinds.seconds(zero="without a pause"),
        note="accepted and not needed: the agent is told of a worker's end at once and polls nothing",
        help="Taken, but nothing is polled: a worker's end is seen at once.",
    ),
    Option(
        name="event-log-handler", origin="torchrun", group=COMPATIBILITY, kind=kinds.TEXT,
        note="accepted, but torch's event handlers live in torch, which the launcher does not load; events are in its own output",
        quiet=("null",), help="Taken, but torch's event handlers are not loaded.",
    ),
    Option(
        name="logs-specs", origin="torchrun", group=COMPATIBILITY, kind=kinds.TEXT, empty_is_unset=True,
        note="accepted, but such plug-ins live in torch, which the launcher does not load; the built-in log files are used",
        help="Taken, but log plug-ins of torch are not loaded; the built-in ones are used.",
    ),
)  # fmt: skip

BY_NAME = {option.name: option for option in OPTIONS}

"""Names of the environment variables that the agent and its workers share.

`PER_RANK` are the variables that describe a rank: whatever an outer job or a shell left there is replaced.
"""

# torchrun's, read by torch and by training scripts.
RANK = "RANK"
LOCAL_RANK = "LOCAL_RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
GROUP_RANK = "GROUP_RANK"
GROUP_WORLD_SIZE = "GROUP_WORLD_SIZE"
ROLE_RANK = "ROLE_RANK"
ROLE_WORLD_SIZE = "ROLE_WORLD_SIZE"
ROLE_NAME = "ROLE_NAME"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
RUN_ID = "TORCHELASTIC_RUN_ID"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
NCCL_ASYNC_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
OMP_NUM_THREADS = "OMP_NUM_THREADS"
LOG_LINE_PREFIX_TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
PYTHON_EXEC = "PYTHON_EXEC"
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

# The system's own.
JOB_RESTART_COUNT = "JOB_RESTART_COUNT"
SPARE = "SPARE"
JOB_ID = "HYPERPODRUN_JOB_ID"
GENERATION = "HYPERPODRUN_GENERATION"
NODE = "HYPERPODRUN_NODE"
# Where this node's agent listens for its workers, unix:PATH (wire/link.py).
LINK = "HYPERPODRUN_LINK"
# The agents' own store, tcp://host:port.
STORE = "HYPERPODRUN_STORE"
# Where rank 0 runs, whatever MASTER_ADDR says: with the agents' own store that is always this host.
RANK0_ADDR = "HYPERPODRUN_RANK0_ADDR"
USE_ROOTLESS = "HPCT_USE_ROOTLESS"
SKIP_TCPSTORE = "TORCH_SKIP_TCPSTORE"
# Marks every process of one launcher, however deep and however re-parented, so that none is left behind.
FAMILY = "HYPERPODRUN_FAMILY"
# Whose the job's state in the node's shared memory is, where one launcher is the whole job; else any agent's of the job.
STATE_OWNER = "HYPERPODRUN_STATE_OWNER"
# Asked of the launcher: a file in which it keeps its pid, ports and state folder (JSON).
STATUS_FILE = "HYPERPODRUN_STATUS_FILE"
JOB_SECRET = "HYPERPODRUN_JOB_SECRET"
# Faults to plant, for rehearsals: hyperpodrun/inprocess/inject.py.
INJECT = "HYPERPODRUN_INJECT"
INJECT_DIR = "HYPERPODRUN_INJECT_DIR"

PER_RANK = frozenset({
    RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, ROLE_RANK, ROLE_WORLD_SIZE, ROLE_NAME,
    MASTER_ADDR, MASTER_PORT, RESTART_COUNT, MAX_RESTARTS, RUN_ID, ERROR_FILE, USE_AGENT_STORE, JOB_RESTART_COUNT, SPARE,
    JOB_ID, GENERATION, NODE, LINK, STORE, RANK0_ADDR, FAMILY, STATE_OWNER,
})  # fmt: skip
NEVER_IN_WORKERS = frozenset({JOB_SECRET, STATUS_FILE})

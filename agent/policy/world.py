"""One training world as one node sees it: what every worker's environment is made from."""

import msgspec


class World(msgspec.Struct, frozen=True, kw_only=True):
    """`generation` numbers the worlds of a job, `restart_count` is what ranks see as TORCHELASTIC_RESTART_COUNT.

    The ranks of one node are consecutive: `first_rank`, `first_rank + 1`, …; `group_rank` is the node's place. `nodes` are the
    active nodes by place; empty: this one alone. `master_addr` and `master_port` are where rank 0 opens the classic TCPStore.
    """

    generation: int
    restart_count: int
    first_rank: int
    world_size: int
    group_rank: int
    group_world_size: int
    master_addr: str
    master_port: int
    nodes: tuple[str, ...] = ()

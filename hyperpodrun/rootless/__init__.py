"""Process groups whose store is the launcher itself, said explicitly (an unmodified script gets the same through MASTER_ADDR).

hyperpodrun.rootless.init_process_group("gloo")     # rank and world size are the launcher's
hyperpodrun.rootless.MeshStore.current()             # a torch.distributed.Store, one a generation
hyperpodrun.rootless.new_store("mine")               # the same, keys of its own
"""

from hyperpodrun.rootless.init import init_process_group, new_store
from hyperpodrun.rootless.store import MeshStore, NoLauncher

__all__ = ["MeshStore", "NoLauncher", "init_process_group", "new_store"]

"""Process groups whose store is the launcher itself, said explicitly (an unmodified script gets the same through MASTER_ADDR).

hyperpodrun.rootless.init_process_group("gloo")     # rank and world size are the launcher's
hyperpodrun.rootless.MeshStore.current()             # a torch.distributed.Store, one a generation
hyperpodrun.rootless.new_store("mine")               # the same, keys of its own
hyperpodrun.rootless.job_facts()["step"] = 7         # outlives the world
hyperpodrun.rootless.data_address(3)                 # (host, port) planned for rank 3's data
"""

from hyperpodrun.rootless.init import init_process_group, new_store
from hyperpodrun.rootless.job import JobFacts, data_address, job_facts
from hyperpodrun.rootless.store import MeshStore, NoLauncher

__all__ = ["JobFacts", "MeshStore", "NoLauncher", "data_address", "init_process_group", "job_facts", "new_store"]

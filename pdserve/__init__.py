"""pdserve: disaggregated LLM serving. The Python client; everything else is the `pdserve` command."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC prints ordinary ends of connections; read when it is imported

from pdserve.client import AsyncClient, Client
from pdserve.results import Choice, Delta, Finished, Generation, Ledger, Logprob, Model, Options, Started, Usage

__version__ = "0.1.0"
__all__ = [
    "AsyncClient",
    "Choice",
    "Client",
    "Delta",
    "Finished",
    "Generation",
    "Ledger",
    "Logprob",
    "Model",
    "Options",
    "Started",
    "Usage",
]

"""pdserve: disaggregated LLM serving. The Python client; everything else is the `pdserve` command."""

import os

from runtime.grpc_environment import SETTINGS

os.environ |= SETTINGS | os.environ  # before gRPC is imported, which the rest does

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

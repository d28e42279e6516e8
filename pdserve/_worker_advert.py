"""What a worker says of itself: its registry record and its Describe answer, from one state."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from importlib import metadata

from protos.v1 import common_pb2, registry_pb2
from runtime.config import Config
from runtime.ids import new_epoch, new_worker_id
from runtime.metrics import Metrics
from runtime.modelfiles import ModelFiles
from runtime.registry.agent import RegistryAgent
from runtime.streamhub import PROTOCOL_MAX, PROTOCOL_MIN

ROLES: dict[str, common_pb2.Role.ValueType] = {
    "prefill": common_pb2.ROLE_PREFILL,
    "decode": common_pb2.ROLE_DECODE,
    "both": common_pb2.ROLE_BOTH,
}


@dataclass(frozen=True, slots=True)
class Identity:
    """worker_id may live through restarts; every start is a new epoch."""

    worker_id: str
    epoch: int
    pid: int
    node: str

    @staticmethod
    def make(config: Config) -> Identity:
        return Identity(
            worker_id=config.worker_id or new_worker_id(config.role),
            epoch=new_epoch(),
            pid=os.getpid(),
            node=socket.gethostname(),
        )


def advertised(config: Config, bound: str) -> str:
    """The address others reach this worker at: `advertise` (host or host:port, port 0 = the bound one), or `bound`."""
    if not config.advertise:
        return bound
    host, colon, port = config.advertise.rpartition(":")
    if not colon or not port.isdigit():
        host, port = config.advertise, ""
    return f"{host}:{port if port not in ('', '0') else bound.rpartition(':')[2]}"


class Advert:
    """Every change goes to the registry at once; a report of load once a second. Event loop thread only."""

    def __init__(self, config: Config, identity: Identity, files: ModelFiles, address: str, metrics: Metrics) -> None:
        self.record = registry_pb2.WorkerRecord(
            worker_id=identity.worker_id,
            epoch=identity.epoch,
            role=ROLES[config.role],
            address=address,
            model=config.served_model_name or files.name,
            model_fingerprint=files.fingerprint(),
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            pid=identity.pid,
            node=identity.node,
            version=metadata.version("pdserve"),
            page_tokens=0,
            tokenizer_digest=files.tokenizer_digest,
            progress="starting",
            metrics_address=metrics.serve(config.metrics_listen) if config.metrics_listen else "",
        )
        self.agent = RegistryAgent(config, self.record, metrics) if config.registry else None

    def start(self) -> None:
        if self.agent is not None:
            self.agent.start()

    async def stop(self) -> None:
        """Say goodbye."""
        if self.agent is not None:
            await self.agent.stop()

    @property
    def registered(self) -> bool:
        """A worker without a registry is known to whoever was told its address."""
        return self.agent is None or self.agent.registered.is_set()

    def push(self) -> None:
        """Send the record as it is now."""
        if self.agent is not None:
            self.agent.update(self.record)

    def progress(self, text: str) -> None:
        if self.record.progress != text:
            self.record.progress = text
            self.push()

"""What `pdserve up` refuses before it starts anything: all that its processes would refuse and that can be known here,
without torch, from the configuration and the files it names. The words are those of the processes, from the same code.
"""

from __future__ import annotations

import asyncio

from deploy.actors import answers
from engine.loop import EngineSpec
from engine.models.families import check_together, family_of
from engine.models.footprint import least_spec
from engine.models.oracle import OracleRunner
from engine.runner_api import ModelSpec
from engine.tiers.build import host_items
from router.admission.tenants import Keys
from runtime import rpc
from runtime.config import Config
from runtime.errors import InvalidRequest, RegistryUnavailable
from runtime.metrics import Metrics
from runtime.modelfiles import ModelFiles
from runtime.registry import is_redis, open_redis


def check(config: Config) -> None:
    """Raises InvalidRequest, Unsupported or NotFound."""
    if config.address and not answers(config.address):
        raise InvalidRequest(f"no Ray answers at {config.address}", field="address")
    _check_registry(config)
    rpc.check_files(config)
    Keys.load(config)
    files = ModelFiles.open(config.model)
    if config.sim:
        from bench.sim.live import refuse_overridden
        from bench.sim.profile import Profile

        refuse_overridden(config, Profile.load(config.sim))
    else:
        _check_pools(config, _model(config, files))


def _check_registry(config: Config) -> None:
    """A router that runs goes on while its Redis is away; a cluster that starts would wait for it without a word."""
    if not is_redis(config.registry):
        return

    async def ask() -> None:
        store = open_redis(config, Metrics())
        try:
            await store.snapshot()
        finally:
            await store.close()

    try:
        asyncio.run(ask())
    except RegistryUnavailable as error:
        why = error.__cause__ or error
        raise InvalidRequest(f"Redis does not answer as it should: {why}", field="registry") from error
    except ValueError as error:
        raise InvalidRequest(f"this is no address of a Redis: {error}", field="registry") from error


def _model(config: Config, files: ModelFiles) -> ModelSpec:
    if files.kind == "oracle":
        return OracleRunner().spec()
    check_together(
        family_of(files.config),
        compiled=config.compile,
        replayed=config.replay_ssm,
        deterministic=config.deterministic,
    )
    return least_spec(files.config, config)


def _check_pools(config: Config, model: ModelSpec) -> None:
    """Refused here is refused by the worker, too: a model takes no less than its `least_spec`."""
    spec = EngineSpec.of(model, config)
    host_items(config, model, max(0, spec.slots - 1))

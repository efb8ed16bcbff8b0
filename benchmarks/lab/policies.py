"""All policies that can be compared, including the default: name, origin, and factory.

A policy is a core and the memory of its workers. Creating one twice with equal arguments gives equal behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from types import MappingProxyType

from modelpool.benchmarks.lab.affinity import Affinity
from modelpool.benchmarks.lab.clairvoyant import Clairvoyant
from modelpool.benchmarks.lab.pressure import Pressure
from modelpool.benchmarks.lab.queueing import EncodesShared, FirstIdle
from modelpool.benchmarks.lab.spreading import ByChance, LeastLoaded, RoundRobin
from modelpool.benchmarks.lab.sticky import MOST_LORA_IDS, MOST_MODELS, Sticky, with_loras
from modelpool.benchmarks.lab.storage_aware import StorageAware
from modelpool.scheduler.simulator.eviction_policies import (
    KnownFuture,
    NothingLoads,
    WholeComponents,
    WholeModels,
)
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.policy import OUR_POLICY, CoreAndMemory, Policy


def _clairvoyant(gpus: Sequence[SimulatedGpu], rng: Random) -> CoreAndMemory:
    memory = KnownFuture()
    return Clairvoyant(gpus, memory), memory


_ALL = (
    OUR_POLICY,
    Policy("random", "random worker", lambda gpus, rng: (ByChance(gpus, rng), WholeComponents())),
    Policy("round_robin", "workers in rotation", lambda gpus, rng: (RoundRobin(gpus), WholeComponents())),
    Policy(
        "least_loaded",
        "fewest jobs in flight, as llm-d routes diffusion models",
        lambda gpus, rng: (LeastLoaded(gpus), WholeComponents()),
    ),
    Policy(
        "sticky",
        f"replicas that have the model, {MOST_MODELS} models each, as Ray Serve multiplexes",
        lambda gpus, rng: (Sticky(gpus, rng), WholeModels(MOST_MODELS)),
    ),
    Policy(
        "sticky_by_lora",
        f"as sticky, but by model and LoRAs, {MOST_LORA_IDS} of them each, as Ray Serve LLM multiplexes",
        lambda gpus, rng: (Sticky(gpus, rng, MOST_LORA_IDS, with_loras), WholeComponents()),
    ),
    Policy(
        "pressure",
        "current model first, then 10 x requests + seconds waited, as SwarmUI",
        lambda gpus, rng: (Pressure(gpus), WholeComponents()),
    ),
    Policy(
        "affinity",
        "in order, looking 32 ahead for what is warm, as InvokeAI",
        lambda gpus, rng: (Affinity(gpus), WholeComponents()),
    ),
    Policy(
        "storage_aware",
        "earliest start over storage tiers, as ServerlessLLM",
        lambda gpus, rng: (StorageAware(gpus), WholeComponents()),
    ),
    Policy(
        "lru",
        "in order to the first idle worker, each with an LRU cache",
        lambda gpus, rng: (FirstIdle(gpus), WholeComponents()),
    ),
    Policy(
        "infinite_cache",
        "ideal: nothing is ever loaded, and jobs go in order to the fastest idle GPU",
        lambda gpus, rng: (EncodesShared(gpus), NothingLoads()),
        is_ideal=True,
    ),
    Policy("clairvoyant", "ideal: a plan of the complete batch with everything known", _clairvoyant, is_ideal=True),
)

POLICIES: Mapping[str, Policy] = MappingProxyType({policy.name: policy for policy in _ALL})

"""Metrics of one simulation: a pure function of the records of the cluster.

Knows no policy and no clock: seconds are in virtual time. GPU-seconds add up: running, loading and idle of all GPUs
together are the GPUs times the makespan.

Fairness under contention compares the service that users received with max-min fair shares: the fair share of a user in
a slice of time is the part of the actual GPU-seconds that an ideal scheduler would have given, by weight, but no more
than the user's jobs could use, one GPU per job. If every user got all they could use, there was nothing to share.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from modelpool.pool.values.specs.spec import UserId, WorkerId
from modelpool.scheduler.model.messages import Outcome
from modelpool.scheduler.simulator.cluster import Core, VirtualCluster
from modelpool.scheduler.simulator.hosts import StorageReads
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.records import SimulatedRun

#: slices of the total time. Order within a slice does not count: GPUs are not divided during a run
SLICES = 1000
#: fraction of the usable seconds above which a user counts as fully served
ENOUGH = 0.999
#: seconds below which a difference is rounding
LEAST_SECONDS = 1e-9


@dataclass(frozen=True, slots=True)
class ServiceSpan:
    """A time span of one user. `part` is the fraction of a GPU."""

    user: UserId
    begin: float
    end: float
    part: float = 1.0


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 if all are equal, 1/n if one has everything. 1 for no values and for zeros."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares > 0 else 1.0


def fair_shares(most: Sequence[float], weights: Sequence[float], total: float) -> list[float]:
    """Divide `total` by weight, limited to what each user can use: the rest of one goes to the others.

    What no user can use is left over.
    """
    shares = [0.0] * len(most)
    rest, weight = total, sum(weights)
    for place in sorted(range(len(most)), key=lambda place: most[place] / weights[place]):
        shares[place] = min(most[place], rest * weights[place] / weight)
        rest, weight = rest - shares[place], weight - weights[place]
    return shares


def service_ratios(
    unfinished: Iterable[ServiceSpan],
    served: Iterable[ServiceSpan],
    weights: Mapping[UserId, float],
    slices: int = SLICES,
) -> dict[UserId, float]:
    """GPU-seconds received over GPU-seconds due, for each user under contention: 1 is ideal.

    unfinished  one span per job: from its submission to its end
    served      one span per run, of the user it was run for
    weights     1 for users that are missing
    """
    jobs, runs = list(unfinished), list(served)
    begin = min((span.begin for span in jobs), default=0.0)
    width = (max((span.end for span in jobs), default=0.0) - begin) / slices
    if width <= 0:
        return {}
    usable, served_seconds = _sliced(jobs, begin, width, slices), _sliced(runs, begin, width, slices)
    nothing = [0.0] * slices
    received: defaultdict[UserId, float] = defaultdict(float)
    due: defaultdict[UserId, float] = defaultdict(float)
    for place in range(slices):
        here = [user for user, seconds in usable.items() if seconds[place] > LEAST_SECONDS]
        most = [usable[user][place] for user in here]
        # two tasks of one job may run at once, and count as one
        got = [min(served_seconds.get(user, nothing)[place], top) for user, top in zip(here, most, strict=True)]
        if len(here) < 2 or sum(got) >= ENOUGH * sum(most):
            continue
        shares = fair_shares(most, [weights.get(user, 1.0) for user in here], sum(got))
        for user, share, seconds in zip(here, shares, got, strict=True):
            due[user] += share
            received[user] += seconds
    return {user: received[user] / seconds for user, seconds in sorted(due.items()) if seconds > LEAST_SECONDS}


@dataclass(slots=True)
class _Sum:
    """Seconds in each slice: partial ones in `parts`, full slices as steps up and down."""

    parts: list[float]
    steps: list[float]


def _sliced(spans: Iterable[ServiceSpan], begin: float, width: float, slices: int) -> dict[UserId, list[float]]:
    """For each user the seconds of its spans in each slice. The time per span does not depend on its length."""
    sums: dict[UserId, _Sum] = {}
    for span in spans:
        one = sums.get(span.user)
        if one is None:
            one = sums[span.user] = _Sum([0.0] * slices, [0.0] * (slices + 1))
        start, end = max(span.begin - begin, 0.0) / width, min((span.end - begin) / width, float(slices))
        if end <= start:
            continue
        first, last = min(int(start), slices - 1), min(int(end), slices - 1)
        if first == last:
            one.parts[first] += (end - start) * span.part
            continue
        one.parts[first] += (first + 1 - start) * span.part
        one.parts[last] += (end - last) * span.part
        one.steps[first + 1] += span.part
        one.steps[last] -= span.part
    return {
        user: [(part + whole) * width for part, whole in zip(one.parts, accumulate(one.steps[:slices]), strict=True)]
        for user, one in sums.items()
    }


#: of GPU-seconds: rounding of sums may make idle time negative by up to this fraction
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds from submission to the end of the jobs that succeeded; all 0 if none did. A percentile is the latency of
    an actual job: the least that this share of the jobs did not exceed."""

    mean_seconds: float
    p50_seconds: float
    p90_seconds: float
    p99_seconds: float
    longest_seconds: float


@dataclass(frozen=True, slots=True)
class GpuTime:
    """The use of one GPU's time. Waiting for its worker to start, or to be replaced, is idle."""

    worker_id: WorkerId
    kind: str
    runs: int
    running_seconds: float
    loading_seconds: float
    idle_seconds: float


@dataclass(frozen=True, slots=True)
class UserFigures:
    """The service that one user received. `service_ratio` is GPU-seconds received over fair shares under contention;
    None without contention."""

    user: UserId
    jobs: int
    gpu_seconds: float
    p50_seconds: float
    p99_seconds: float
    service_ratio: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """One simulation.

    makespan_seconds  from the first submission to the end of the last job and run
    resident_share    fraction of runs with every component fully resident with the right patches
    adapters_needed   LoRAs that runs needed, each counted once per run
    adapters_loaded   how often a LoRA's file was read from storage, for a run or by prefetch
    storage_bytes     read from storage, including prefetches
    ahead_bytes       of these, the prefetched ones
    preloaded_bytes   of the uploaded ones, those preloaded during other runs
    fairness          Jain index over users of service received relative to fair shares; 1 is even
    """

    jobs: int
    succeeded: int
    failed: int
    cancelled: int
    makespan_seconds: float
    last_arrival_seconds: float
    latency: Latency
    runs: int
    runs_failed: int
    resident_share: float
    adapters_needed: int
    adapters_loaded: int
    patch_switches: int
    uploaded_bytes: int
    streamed_bytes: int
    storage_bytes: int
    ahead_bytes: int
    gpus: tuple[GpuTime, ...]
    users: tuple[UserFigures, ...]
    fairness: float
    preloaded_bytes: int = 0

    @property
    def jobs_per_minute(self) -> float:
        """Jobs that succeeded, over the makespan."""
        return 60.0 * self.succeeded / self.makespan_seconds if self.makespan_seconds > 0 else 0.0

    @property
    def running_seconds(self) -> float:
        """GPU-seconds of computing, including streaming of weights."""
        return sum(gpu.running_seconds for gpu in self.gpus)

    @property
    def loading_seconds(self) -> float:
        """GPU-seconds of loading weights before runs."""
        return sum(gpu.loading_seconds for gpu in self.gpus)

    @property
    def idle_seconds(self) -> float:
        """GPU-seconds of neither."""
        return sum(gpu.idle_seconds for gpu in self.gpus)

    @property
    def loading_share(self) -> float:
        """Loading as a fraction of running and loading."""
        busy = self.running_seconds + self.loading_seconds
        return self.loading_seconds / busy if busy > 0 else 0.0

    @property
    def busy_share(self) -> float:
        """Running and loading as a fraction of all GPU-seconds."""
        whole = self.makespan_seconds * len(self.gpus)
        return (self.running_seconds + self.loading_seconds) / whole if whole > 0 else 0.0

    @property
    def lora_loads_per_job(self) -> float:
        """LoRAs read from storage, per submitted job."""
        return self.adapters_loaded / self.jobs if self.jobs else 0.0

    def cost(self, hour_prices: Mapping[str, float]) -> float:
        """GPU-hours of the makespan, including idle ones, times the price of each kind. Raises KeyError for a kind
        without one."""
        return sum(hour_prices[gpu.kind] for gpu in self.gpus) * self.makespan_seconds / 3600.0


def figures(cluster: VirtualCluster[Core], weights: Mapping[UserId, float] | None = None) -> Figures:
    """Compute the figures of a finished cluster. `weights` are the users' shares, by default 1."""
    submitted, runs = cluster.submitted, cluster.runs
    begin = min((one.at for one in submitted.values()), default=0.0)
    ends = [submitted[job].at + seconds for job, seconds in cluster.latency_seconds.items()]
    end = max([*ends, *(run.ended_at for run in runs)], default=begin)
    outcomes = Counter(cluster.outcomes.values())
    users = user_figures(cluster, weights or {})
    storage = cluster.storage
    ratios = [one.service_ratio for one in users if one.service_ratio is not None]
    return Figures(
        jobs=len(submitted),
        succeeded=outcomes[Outcome.SUCCEEDED],
        failed=outcomes[Outcome.FAILED],
        cancelled=outcomes[Outcome.CANCELLED],
        makespan_seconds=end - begin,
        last_arrival_seconds=max((one.at for one in submitted.values()), default=begin) - begin,
        latency=latency(succeeded_seconds(cluster)),
        runs=len(runs),
        runs_failed=sum(not run.ended_well for run in runs),
        resident_share=sum(run.resident for run in runs) / len(runs) if runs else 0.0,
        adapters_needed=sum(len(run.adapters) for run in runs),
        adapters_loaded=_adapter_loads(cluster, storage),
        patch_switches=sum(run.patch_switches for run in runs),
        uploaded_bytes=sum(run.uploaded_bytes for run in runs)
        + cluster.totals.preloaded_bytes
        + cluster.totals.pinned_bytes,
        streamed_bytes=sum(run.streamed_bytes for run in runs),
        storage_bytes=storage.bytes,
        ahead_bytes=storage.ahead_bytes,
        gpus=gpu_times(runs, cluster.gpus, end - begin),
        users=users,
        fairness=jain(ratios),
        preloaded_bytes=cluster.totals.preloaded_bytes,
    )


def _adapter_loads(cluster: VirtualCluster[Core], storage: StorageReads) -> int:
    """The number of reads of files that are an adapter of some task."""
    named = {
        key for one in cluster.submitted.values() for task in one.job.tasks for use in task.uses for key in use.adapters
    }
    return sum(count for key, count in storage.loads.items() if key in named)


def succeeded_seconds(cluster: VirtualCluster[Core]) -> list[float]:
    """Latencies of the jobs that succeeded, ascending."""
    outcomes = cluster.outcomes
    return sorted(s for job, s in cluster.latency_seconds.items() if outcomes.get(job) is Outcome.SUCCEEDED)


def percentile(ascending: Sequence[float], share: float) -> float:
    """The least value that `share` of them do not exceed; 0 for none. Always one of the values, without
    interpolation."""
    if not ascending:
        return 0.0
    return ascending[max(math.ceil(share * len(ascending) - ROUNDING), 1) - 1]


def latency(ascending: Sequence[float]) -> Latency:
    """Mean and percentiles of latencies."""
    return Latency(
        mean_seconds=math.fsum(ascending) / len(ascending) if ascending else 0.0,
        p50_seconds=percentile(ascending, 0.5),
        p90_seconds=percentile(ascending, 0.9),
        p99_seconds=percentile(ascending, 0.99),
        longest_seconds=percentile(ascending, 1.0),
    )


def gpu_times(
    runs: Iterable[SimulatedRun], gpus: Iterable[SimulatedGpu], makespan_seconds: float
) -> tuple[GpuTime, ...]:
    """The use of the makespan by each GPU, in the order of `gpus`."""
    running: defaultdict[WorkerId, list[float]] = defaultdict(list)
    loading: defaultdict[WorkerId, list[float]] = defaultdict(list)
    for run in runs:
        running[run.worker_id].append(run.run_seconds)
        loading[run.worker_id].append(run.load_seconds)
    times = []
    for gpu in gpus:
        ran, loaded = math.fsum(running[gpu.worker_id]), math.fsum(loading[gpu.worker_id])
        idle = makespan_seconds - ran - loaded
        most_rounding = ROUNDING * max(makespan_seconds, 1.0)
        assert idle >= -most_rounding, f"{gpu.worker_id} was busy for {ran + loaded} s of {makespan_seconds} s"
        times.append(GpuTime(gpu.worker_id, gpu.kind, len(running[gpu.worker_id]), ran, loaded, max(idle, 0.0)))
    return tuple(times)


def _part(run: SimulatedRun) -> float:
    """The fraction of its GPU during the run: less than 1 in a batch, an average if a mate left before it."""
    seconds = run.ended_at - run.started_at
    return (run.load_seconds + run.run_seconds) / seconds if seconds > 0 else 1.0


def user_figures(cluster: VirtualCluster[Core], weights: Mapping[UserId, float]) -> tuple[UserFigures, ...]:
    """The figures of each user, by name."""
    owners = {job: one.job.user for job, one in cluster.submitted.items()}
    unfinished = [
        ServiceSpan(owners[job], one.at, one.at + cluster.latency_seconds[job])
        for job, one in cluster.submitted.items()
        if job in cluster.latency_seconds
    ]
    served = [ServiceSpan(owners[run.job_id], run.started_at, run.ended_at, _part(run)) for run in cluster.runs]
    ratios = service_ratios(unfinished, served, weights)
    jobs = Counter(owners.values())
    latencies: defaultdict[UserId, list[float]] = defaultdict(list)
    for job, seconds in cluster.latency_seconds.items():
        if cluster.outcomes.get(job) is Outcome.SUCCEEDED:
            latencies[owners[job]].append(seconds)
    gpu_seconds: defaultdict[UserId, float] = defaultdict(float)
    for run in cluster.runs:
        gpu_seconds[owners[run.job_id]] += run.load_seconds + run.run_seconds
    found = []
    for user in sorted(jobs):
        ascending = sorted(latencies[user])
        p50, p99 = percentile(ascending, 0.5), percentile(ascending, 0.99)
        found.append(UserFigures(user, jobs[user], gpu_seconds[user], p50, p99, ratios.get(user)))
    return tuple(found)

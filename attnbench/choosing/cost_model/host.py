"""The host's part of calls: where it was measured, and which calls it limited where it was not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import NormalDist
from typing import TYPE_CHECKING

from ...problem.spec import AttentionSpec
from ...tables.entry import Entry

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    _Array = npt.NDArray[np.float64]

__all__ = ["HostFloor", "MeasuredHost", "longer"]

# The first three were found on 1934 rows of three sweeps of an H200 that also have the device's own time and the
# host's.  Held-out regret changed by at most 0.3 per cent where any one of all was halved or doubled.
_DEVIATION = 0.35  # of the logarithm of one plan's host time, from one spec and sweep to another
_WAITING = (0.07, 1.0)  # median and deviation of the logarithm of how calls scatter that waited for the host
_STEADY = (0.012, 1.3)  # the same of calls that waited for the device alone
_STEADIEST = 0.002  # what scatters less was rounded
_STRANGE, _ANYWHERE = 0.1, 2.0  # the share of specs at which a kernel leaves its law, and by how much
_BELOW = 2.0  # where nothing waited for it, by how much a host's logarithm is taken to be shorter than every call
_PRIOR_WEIGHT = 0.2  # for how many calls that counts
_LEAST_DEVIATION = 0.1  # of the logarithm of one plan's host time where it was measured
_OTHER_CODE = (0.01, 0.03, 0.3, 0.3, 0.5)  # the weight of a host that ran other code: batch, group, mask, softcap, head
_LONGEST = 3.0  # ms; about what the host took in those rows for the plan with the most launches
_SILENT = 100.0  # the variance at which a time says nothing


class HostFloor:
    """The host's time for a call of one plan, and the probability that each measured call was limited by it.

    A call takes ``max(host, device)``.  The host's time is modelled as log-normal about one ``level`` for all specs.
    Three facts decide whether a call waited for it: how far its time lies above what the other specs predict for the
    device, how near to the level it is, and how much it scatters (a device repeats itself, a host does not).

    ``times`` are logarithms of ms, (n,); ``scatter`` is half the interquartile range over the median, NaN if unknown;
    ``of_device`` (n,) says which are known to be times of the device.
    ``waited`` (n,) is the probability that each call waited for the host.
    """

    def __init__(self, times: _Array, scatter: _Array, of_device: npt.NDArray[np.bool_]) -> None:
        import numpy as np  # imported here: attention() does not need it

        self._times, self._of_device = times, of_device
        scatter = np.log(np.maximum(scatter, _STEADIEST))
        waiting, steady = (_log_density(scatter, math.log(median), width) for median, width in (_WAITING, _STEADY))
        self._odds = np.nan_to_num(waiting - steady)
        self.level = min(float(times.min()), math.log(_LONGEST))

    def weigh(self, means: _Array, variances: _Array, noise: _Array) -> None:
        """One EM step: update ``waited`` and ``level`` from the other specs' predictions of the device times
        (logarithms).

        Calls that did not wait leave the level as it is: they only show that the host was shorter.
        """
        import numpy as np

        apart, expected = self._times - means, np.sqrt(variances + noise)
        shorter = _below((self._times - self.level) / _DEVIATION)
        lawful = np.logaddexp(
            _log_density(apart, 0.0, expected), math.log(_STRANGE) + _log_density(apart, 0, _ANYWHERE)
        )
        device = lawful + np.log(shorter)
        host = _log_density(self._times, self.level, _DEVIATION) + np.log(_below(apart / expected)) + self._odds
        self.waited: _Array = np.where(self._of_device, 0.0, 1 / (1 + np.exp(np.clip(device - host, -50, 50))))
        known = (self.waited * self._times).sum() + _PRIOR_WEIGHT * (self._times.min() - _BELOW)
        self.level = min(float(known / (self.waited.sum() + _PRIOR_WEIGHT)), math.log(_LONGEST))

    def sites(self, means: _Array, variances: _Array, noise: _Array) -> tuple[_Array, _Array]:
        """(times, variances) for the device that replace the measured ones, given what the other specs predict.

        A call that waited for the device keeps its time and ``noise``; one that waited for the host has no weight; one
        in doubt keeps the mean and variance of both cases (expectation propagation, Rasmussen and Williams, chapter
        3.6).
        """
        import numpy as np

        heard, gain = 1 - self.waited, variances / (variances + noise)
        moved = gain * (self._times - means)
        mean, variance = means + heard * moved, variances * (1 - heard * gain) + heard * self.waited * moved**2
        precision = 1 / variance - 1 / variances
        informative = precision > 1 / _SILENT
        precision = np.where(informative, precision, 1 / _SILENT)
        times: _Array = np.where(informative, (mean / variance - means / variances) / precision, self._times)
        return times, 1 / precision

    @property
    def host(self) -> tuple[float, float]:
        """Mean and deviation of the logarithm of the host's time."""
        return self.level, _DEVIATION


class MeasuredHost:
    """The host's time of one plan where it was measured: the weighted median of the specs that know it.

    Which code runs depends most on the kind of batch and on whether heads are grouped, less on mask, softcap and head
    dimension.  The nearest code that was measured says how surely the time is known: weights are inverse variances.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        known = sorted((entry.host_ms, _code(entry.spec)) for entry in entries if entry.host_ms is not None)
        self._times = [math.log(host_ms) for host_ms, _ in known]
        self._codes = [code for _, code in known]
        self._found: dict[tuple[object, ...], tuple[float, float]] = {}

    def at(self, spec: AttentionSpec) -> tuple[float, float] | None:
        """Mean and deviation of the logarithm of the host's time; None if it was never measured."""
        if not self._times:
            return None
        code = _code(spec)
        if code not in self._found:
            self._found[code] = self._weighted(code)
        return self._found[code]

    def _weighted(self, code: tuple[object, ...]) -> tuple[float, float]:
        import numpy as np

        weights = [
            math.prod(factor for factor, one, other in zip(_OTHER_CODE, code, each, strict=True) if one != other)
            for each in self._codes
        ]
        shares = (np.cumsum(weights) - np.array(weights) / 2) / sum(weights)
        quarter, level, three = (float(np.interp(share, shares, self._times)) for share in (0.25, 0.5, 0.75))
        return level, math.hypot((three - quarter) / 1.35, _LEAST_DEVIATION / math.sqrt(max(weights)))


def _code(spec: AttentionSpec) -> tuple[object, ...]:
    """What decides which code of a kernel's host runs, in the order of ``_OTHER_CODE``."""
    batch = "" if spec.lengths is None else spec.lengths.batch
    return batch, spec.group > 1, spec.mask.kind, spec.softcap > 0, spec.head_dim


def longer(host: tuple[float, float], device: tuple[float, float], share: float) -> float:
    """The logarithm of a time that a call stays below in this share of cases: the longer of host and device, of each of
    which mean and deviation of the logarithm are given.
    """
    first, second = NormalDist(*host), NormalDist(*device)
    low, high = (max(each.inv_cdf(part) for each in (first, second)) for part in (share, math.sqrt(share)))
    for _ in range(24):
        middle = (low + high) / 2
        if first.cdf(middle) * second.cdf(middle) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _log_density(values: _Array, mean: float, deviation: _Array | float) -> _Array:
    """The logarithm of a normal density, but for a constant."""
    import numpy as np

    density: _Array = -0.5 * ((values - mean) / deviation) ** 2 - np.log(deviation)
    return density


def _below(values: _Array) -> _Array:
    """The normal distribution function, bounded away from 0."""
    import numpy as np

    return np.array([max(0.5 * math.erfc(-value / math.sqrt(2)), 1e-300) for value in values])

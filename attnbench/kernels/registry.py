"""Every installed backend and kernel by name, ours and third parties'."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterable, Iterator
from functools import cache, partial
from importlib.metadata import entry_points

from ..errors import AttnbenchError, UnknownBackendError
from ..problem.spec import AttentionSpec
from ..text.failure import in_one_line
from ..text.printable import brief
from .capabilities import Device
from .contract import Availability, Backend, BackwardKernel, ForwardKernel
from .plan import Plan, backend_of, precision_of

__all__ = ["ENTRY_POINTS", "Registry", "registry"]

_LONGEST_NAME = 200  # characters compared with known names, which takes the square of the length

ENTRY_POINTS = "attnbench.backends"


class Registry:
    """Backends and kernels by name, and the plans they make.  Raises AttnbenchError for two backends of one name."""

    def __init__(self, backends: Iterable[Backend]) -> None:
        self.backends: dict[str, Backend] = {}
        self._forwards: dict[str, ForwardKernel] = {}
        self._backwards: dict[str, BackwardKernel] = {}
        self._availability: dict[str, Availability] = {}
        self._lock = threading.RLock()  # a check may ask for another backend
        self._names: set[str] = set()
        for backend in backends:
            if backend.name in self.backends:
                raise AttnbenchError(f"two installed packages provide a backend named {backend.name!r}; remove one")
            self.backends[backend.name] = backend
            for kernel in backend.kernels:
                self._add(backend, kernel)
                self._names.add(kernel.name)

    def _add(self, backend: Backend, kernel: ForwardKernel | BackwardKernel) -> None:
        if backend_of(kernel.name) != backend.name:
            raise AttnbenchError(f"the backend {backend.name!r} must not provide a kernel named {kernel.name!r}")
        if isinstance(kernel, ForwardKernel):
            self._forwards[kernel.name] = kernel
        else:
            self._backwards[kernel.name] = kernel

    @property
    def forwards(self) -> dict[str, ForwardKernel]:
        """Every listed forward kernel by name."""
        return {name: self._forwards[name] for name in self._listed(self._forwards)}

    @property
    def backwards(self) -> dict[str, BackwardKernel]:
        """Every listed backward kernel by name."""
        return {name: self._backwards[name] for name in self._listed(self._backwards)}

    def availability(self, backend: str) -> Availability:
        """The backend's answer for this machine, cached.  A check that raises is a reason, not a crash."""
        with self._lock:
            if backend not in self._availability:
                try:
                    found = self.backend(backend).availability()
                except UnknownBackendError:
                    raise
                except Exception as error:  # a third party's check may raise anything; it must cost that backend alone
                    found = Availability(reason=f"its availability check raised {in_one_line(error)}")
                self._availability[backend] = found
            return self._availability[backend]

    def backend(self, name: str) -> Backend:
        """The backend of that name.  Raises UnknownBackendError with the nearest names."""
        try:
            return self.backends[name]
        except KeyError:
            raise self._unknown("backend", name, self.backends) from None

    def forward(self, name: str) -> ForwardKernel:
        """The forward kernel of that name, made on the spot where its backend can.  Raises UnknownBackendError."""
        self._resolve(name)
        try:
            return self._forwards[name]
        except KeyError:
            raise self._unknown("forward kernel", name, self._forwards) from None

    def backward(self, name: str) -> BackwardKernel:
        """The backward kernel of that name, made on the spot where its backend can.  Raises UnknownBackendError."""
        self._resolve(name)
        try:
            return self._backwards[name]
        except KeyError:
            raise self._unknown("backward kernel", name, self._backwards) from None

    def check(self, asked: str) -> None:
        """Raise UnknownBackendError unless ``asked`` names a backend, a forward kernel or a plan that exists."""
        if ">" in asked or ":" in asked:
            plan = Plan.parse(asked)
            self.forward(plan.forward)
            if plan.backward is not None:
                self.backward(plan.backward)
        else:
            self.backend(asked)

    def _resolve(self, name: str) -> None:
        if name in self._forwards or name in self._backwards:
            return
        backend = self.backend(backend_of(name))
        if backend.resolve is not None:
            for kernel in backend.resolve(precision_of(name)):
                self._add(backend, kernel)

    def _unknown(self, what: str, name: str, known: Iterable[str]) -> UnknownBackendError:
        names = sorted(known)
        near = difflib.get_close_matches(name[:_LONGEST_NAME], names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"
        return UnknownBackendError(f"no {what} is named {brief(name)}; {hint}")

    def plans(self, spec: AttentionSpec) -> list[Plan]:
        """Every plan worth considering, so that each listed kernel of the direction is in at least one.

        Training pairs a forward with the backwards of its own backend that share its name, list it in ``follows``, or
        follow any forward in the gradients' precision.  An 8-bit forward with ``mixes``, and a forward without such a
        backward, is also paired with other backends' backwards of that precision.  ``reasons`` says why a pair cannot
        work together.
        """
        plans = [plan for name in self._listed(self._forwards) for plan in self.plans_with(name, spec)]
        if not spec.training:
            return plans
        paired = {plan.backward for plan in plans}
        alone = [name for name in self._listed(self._backwards) if name not in paired]
        return plans + [Plan(self.leader(name), name) for name in alone]

    def plans_with(self, forward: str, spec: AttentionSpec) -> list[Plan]:
        """The plans of ``plans`` that start with this forward, which may be one made from its name."""
        self.forward(forward)
        return [Plan(forward, partner) for partner in (self._partners(forward, spec) if spec.training else [None])]

    def emulated(self, plan: Plan, device_type: str) -> bool:
        """Whether other arithmetic stands in for one of the plan's kernels on such a device, so that no time counts."""
        kernels = [self.forward(plan.forward), *([self.backward(plan.backward)] if plan.backward else [])]
        return any(kernel.rows[device_type].emulated for kernel in kernels if device_type in kernel.rows)

    def _listed(self, names: Iterable[str]) -> list[str]:
        """The names that a backend lists; kernels made from their names are only for callers that name them."""
        return [name for name in names if name in self._names]

    def _partners(self, forward: str, spec: AttentionSpec) -> list[str | None]:
        narrow = Plan(forward).fp8
        wanted = spec.dtype if narrow else precision_of(forward)
        own: list[str | None] = [forward] if forward in self._backwards else []  # made on the spot, it is not listed
        others: list[str | None] = []
        for name, kernel in self.backwards.items():
            if name == forward:
                continue
            kin = backend_of(name) == backend_of(forward)
            if kin and kernel.follows is not None and kernel.accepts(self._forwards[forward]):
                own.append(name)
            elif kernel.follows is None and precision_of(name) == wanted:
                (own if kin else others).append(name)
        if own and not (narrow and self._forwards[forward].mixes):
            return own
        return [*own, *others] or [None]

    def leader(self, backward: str) -> str:
        """A forward for a backward that no plan has: one that it names, one that it accepts, or any."""
        kernel = self.backward(backward)
        named = [each for each in kernel.follows or () if ":" in each]
        accepted = [name for name, forward in self.forwards.items() if kernel.accepts(forward)]
        return [*named, *accepted, *self.forwards][0]

    def reasons(self, plan: Plan, spec: AttentionSpec, device: Device) -> tuple[str, list[str]]:
        """(status, sentences): ``ok``, or ``unavailable`` or ``refused`` and why.  Raises UnknownBackendError."""
        forward = self.forward(plan.forward)
        backward = None if plan.backward is None else self.backward(plan.backward)
        missing = []
        for backend in dict.fromkeys(backend_of(kernel) for kernel in plan.kernels):
            reason = self.availability(backend).reason
            if reason is not None:
                missing.append(f"{backend}: {reason}")
        if missing:
            return "unavailable", missing
        reasons = list(forward.refusals(spec, device))
        if spec.training and backward is None:
            reasons.append("the plan has no backward")
        elif backward is not None:
            refused = [f"{backward.name} (backward): {reason}" for reason in backward.refusals(spec, device)]
            cannot = None if refused or reasons else backward.cannot_follow(forward, device)
            reasons += refused + ([cannot] if cannot else [])
        return ("refused" if reasons else "ok"), reasons

    def error_growth(self, plan: Plan) -> float | None:
        """The factor by which the plan's error grows when the keys double: 1 without 8-bit kernels, None if unknown."""
        growths: list[float | None] = [1.0]
        try:
            if Plan(plan.forward).fp8:
                growths.append(self.forward(plan.forward).error_growth)
            if plan.backward is not None and Plan(plan.backward).fp8:
                growths.append(self.backward(plan.backward).error_growth)
        except UnknownBackendError:
            return None
        known = [each for each in growths if each is not None]
        return max(known) if len(known) == len(growths) else None

    def declared_error(self, plan: Plan, spec: AttentionSpec, device: Device) -> float:
        """The largest error that a kernel of the plan declares for the spec.  Raises UnknownBackendError."""
        forward = self.forward(plan.forward).error_on(spec, device)
        return forward if plan.backward is None else max(forward, self.backward(plan.backward).error_on(spec, device))


def _load() -> Iterator[Backend]:
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda each: each.name):
        try:
            backend = point.load()
            if not isinstance(backend, Backend):
                raise TypeError(f"{point.value} is no attnbench.kernels.contract.Backend")
        except Exception as error:  # a broken plug-in must cost its own rows, never the others'
            reason = f"its plug-in {point.value} could not be loaded: {in_one_line(error)}"
            broken = partial(Availability, reason=reason)
            backend = Backend(point.name, "a plug-in that could not be loaded", broken, ())
        yield backend


@cache
def registry() -> Registry:
    """The registry of everything installed under the entry-point group ``attnbench.backends``."""
    return Registry(_load())

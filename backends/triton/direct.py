"""Start a compiled kernel by the C function of Triton's launcher itself, with addresses for tensors.

``CompiledKernel[grid]`` looks up the device and the stream, prepares for hooks that nobody has set, asks the driver
about every pointer and encodes every tensor map in Python, which takes five times as long as the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton

__all__ = ["Start", "starter"]

Start = Callable[[Sequence[Any]], bool]
_MAPS = 256  # kept of one kernel's argument; an allocator hands out the same addresses again and again


class _Map(NamedTuple):
    """All of a descriptor but its address: what encodes it, before and behind the address, and its kernel arguments."""

    encode: Callable[..., Any]
    how: tuple[Any, ...]
    sizes: tuple[int, ...]
    known: dict[int, tuple[Any, ...]]

    def at(self, address: int) -> tuple[Any, ...]:
        """The kernel's arguments; Triton's map is never changed, and so may be launched with again."""
        found = self.known.get(address)
        if found is None:
            if len(self.known) >= _MAPS:
                self.known.clear()
            found = self.known[address] = (self.encode(address, *self.how), *self.sizes)
        return found


def starter(
    compiled: Any, grid: tuple[int, int, int], first: Sequence[Any], constants: tuple[Any, ...]
) -> Start | None:
    """Starts what ``compiled`` is for these first arguments and constants, on the current stream of the current device.

    It takes the first arguments once more, with addresses, multiples of 16, for tensors and descriptors, and returns
    whether it started the kernel: not where a profiler has set hooks, which want the tensors.  None where this release
    of Triton launches in another way than those known here, or the kernel needs memory that its launcher allocates.
    """
    make = _RELEASES.get(tuple(triton.__version__.split(".")[:2]))
    try:
        return None if make is None else make(compiled, grid, first, constants)
    except (AttributeError, ImportError, KeyError, TypeError, ValueError):  # a build that differs from its release
        return None


def _of_3_6(
    compiled: Any, grid: tuple[int, int, int], first: Sequence[Any], constants: tuple[Any, ...]
) -> Start | None:
    """For ``triton/backends/nvidia/driver.py`` (``CudaLauncher``, ``wrap_handle_tensordesc``) of Triton 3.6."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST, CudaLauncher
    from triton.runtime.driver import driver

    launcher = compiled.run
    if type(launcher) is not CudaLauncher or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    launch, encode, maps = launcher.launch, driver.active.utils.fill_tma_descriptor, []
    descriptors = [each for each in first if hasattr(each, "block_shape")]
    if descriptors:
        wrapped = dict(
            zip(launch.__code__.co_freevars, (cell.cell_contents for cell in launch.__closure__), strict=True)
        )
        launch, metas = wrapped["launcher"], wrapped["tensordesc_meta"]
        if set(wrapped["tensordesc_indices"]) != set(range(len(descriptors))):
            return None
        for each, meta in zip(descriptors, metas, strict=True):
            if meta is None or meta["fp4_padded"] or each.strides[-1] != 1:
                return None
            how = (
                meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"],
                list(each.shape), list(each.strides), int(each.padding == "nan"),
            )  # fmt: skip
            maps.append(_Map(encode, how, (*each.shape, *each.strides), {}))
    number = driver.active.get_current_device()
    stream, function, packed = driver.active.get_current_stream, compiled.function, compiled.packed_metadata
    asked = (
        launcher.launch_cooperative_grid,
        launcher.launch_pdl,
        None,
        None,
        packed,
        None,
        None,
        None,
    )  # no scratch memory, and neither metadata for hooks nor hooks
    runtime, count = triton.knobs.runtime, len(maps)

    def start(addresses: Sequence[Any]) -> bool:
        if not (_silent(runtime.launch_enter_hook) and _silent(runtime.launch_exit_hook)):
            return False
        if count:
            described: list[Any] = []
            for each, address in zip(maps, addresses, strict=False):
                described += each.at(address)
            launch(*grid, stream(number), function, *asked, *described, *addresses[count:], *constants)
        else:
            launch(*grid, stream(number), function, *asked, *addresses, *constants)
        return True

    return start


def _silent(hook: Any) -> bool:
    """Whether nobody has set a launch hook: Triton 3.6 has an empty chain of hooks then."""
    return hook is None or getattr(hook, "calls", True) == []


_RELEASES: dict[tuple[str, ...], Callable[..., Start | None]] = {("3", "6"): _of_3_6}
